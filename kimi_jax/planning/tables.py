"""Rows of cells as plain text and as HTML, for what prints itself in a terminal and in a notebook. Knows no content."""

from collections.abc import Sequence
from html import escape

Row = Sequence[str]


def text(header: Row, rows: Sequence[Row]) -> str:
    """Columns two spaces apart; those whose cells begin with a digit or a sign stand at the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [_is_numbers([row[i] for row in rows]) for i in range(len(header))]

    def one(line: Row) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([one(header), "  ".join("-" * width for width in widths), *map(one, rows)])


def html(title: str, header: Row, rows: Sequence[Row]) -> str:
    """The same as one HTML table."""
    right = [_is_numbers([row[i] for row in rows]) for i in range(len(header))]

    def line(tag: str, cells: Row) -> str:
        sides = ("right" if r else "left" for r in right)
        inner = (f'<{tag} style="text-align:{s}">{escape(c)}</{tag}>' for c, s in zip(cells, sides, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"


def _is_numbers(cells: Row) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(cell[0].isdigit() or cell[0] in "+-" for cell in filled)
