"""Rows of cells as plain text and as HTML, for what prints itself in a terminal and in a notebook. Knows no content."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

BAR = 20  # characters of a full bar
# Okabe and Ito's colours, which colour-blind readers can tell apart, and grey, as red, green, blue.
COLOURS = (
    (0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0), (240, 228, 66),
    (127, 127, 127),
)  # fmt: skip
TINT = 0.35  # opacity: words on it stay legible on a light page and on a dark one


class Bar(NamedTuple):
    """A cell that shows a part of a whole, 0 to 1."""

    part: float

    def __str__(self) -> str:
        eighths = round(min(max(self.part, 0.0), 1.0) * BAR * 8)
        return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


class Tinted(NamedTuple):
    """A cell of words on a colour: equal numbers get equal colours, which repeat after len(COLOURS)."""

    words: str
    number: int

    def __str__(self) -> str:
        return self.words


Cell = str | Bar | Tinted
Row = Sequence[Cell]


def text(header: Row, rows: Sequence[Row]) -> str:
    """Columns two spaces apart; those whose cells begin with a digit or a sign stand at the right."""
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [_is_numbers([row[i] for row in rows]) for i in range(len(header))]

    def one(line: Sequence[str]) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([one(lines[0]), "  ".join("-" * width for width in widths), *map(one, lines[1:])])


def html(title: str, header: Row, rows: Sequence[Row]) -> str:
    """The same as one HTML table."""
    right = [_is_numbers([row[i] for row in rows]) for i in range(len(header))]

    def line(tag: str, cells: Row) -> str:
        sides = ("right" if r else "left" for r in right)
        return f"<tr>{''.join(_html_cell(tag, c, s) for c, s in zip(cells, sides, strict=True))}</tr>"

    body = "".join(line("td", row) for row in rows)
    caption = f'<caption style="text-align:left;white-space:nowrap">{escape(title)}</caption>' if title else ""
    return f"<table>{caption}<thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"


def paragraph(words: str) -> str:
    """Words as HTML, their line breaks and spaces kept."""
    return f'<p style="white-space:pre-wrap">{escape(words)}</p>'


def human(nbytes: int) -> str:
    """A number of bytes to read: "1.50 GiB"."""
    count: int | float = nbytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _html_cell(tag: str, cell: Cell, side: str) -> str:
    style, inner = f"text-align:{side};white-space:pre", escape(str(cell))
    if isinstance(cell, Bar):
        shape = f"width:{8 * min(max(cell.part, 0.0), 1.0):.2f}em;height:0.8em;background:rgb{COLOURS[0]}"
        inner = f'<div style="{shape}" title="{cell.part:.1%}"></div>'
    elif isinstance(cell, Tinted):
        style += f";background:rgba{(*COLOURS[cell.number % len(COLOURS)], TINT)}"
    return f'<{tag} style="{style}">{inner}</{tag}>'


def _is_numbers(cells: Row) -> bool:
    filled = [cell for cell in map(str, cells) if cell]
    return bool(filled) and all(cell[0].isdigit() or cell[0] in "+-" for cell in filled)
