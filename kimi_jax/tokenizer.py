"""Text to token ids and back: tokenizer.json through `tokenizers`, or the hub's tiktoken.model through tiktoken.

Text also grows here, piece by piece, without ever splitting a UTF-8 character, and stop strings are found in it. Must
not know: the model, arrays, which token ends a text.
"""

import base64
import binascii
import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

# The hub tokenizer's words (kimi_arch.md section 11), in this order. `&&[^\p{Han}]` takes Han letters out of a class.
_CASELESS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASELESS}]*[\p{{Ll}}{_CASELESS}]+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASELESS}]+[\p{{Ll}}{_CASELESS}]*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
RESERVED = 256  # ids kept for special tokens, from the first one after the ranks
LONGEST_TEXT, LONGEST_RUN = 400_000, 25_000  # characters encoded at once, and of one kind (space or not) in a row
REPLACEMENT = "\ufffd"

Decode = Callable[[Iterable[int], bool], str]


class Tokenizer(ABC):
    """What the rest of the package needs of a tokenizer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id; the model's own vocabulary may be larger."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text as the checkpoint's tokenizer gives them: a BOS only if it adds one itself."""

    @abstractmethod
    def incremental(self) -> Decode:
        """A decoder of one growing list: (new ids, last?) -> the text that is settled now and was not before."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole list: specials and ids without a token are skipped, invalid UTF-8 becomes U+FFFD."""
        return self.incremental()(ids, True)


class ByteTokenizer(Tokenizer):
    """Every token stands for some bytes: both the hub's tiktoken file and a byte-level tokenizer.json."""

    def __init__(self, encode: Callable[[str], list[int]], token_bytes: dict[int, bytes]):
        """token_bytes: id -> bytes, empty for a special token."""
        self._encode, self._bytes = encode, token_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._bytes) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._encode(text)

    def incremental(self) -> Decode:
        """UTF-8 decoding that keeps the bytes of an unfinished character until its end comes."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids, last: utf8.decode(b"".join(self._bytes.get(i, b"") for i in ids), last)


class TextTokenizer(Tokenizer):
    """A tokenizer.json with any other decoder: tokens have text only in their context, so that all are decoded anew."""

    def __init__(self, encode: Callable[[str], list[int]], inner: tokenizers.Tokenizer):
        self._encode, self._inner = encode, inner
        tokens = inner.get_vocab(with_added_tokens=True)
        self._size = max(tokens.values()) + 1
        special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._words = {i for token, i in tokens.items() if not re.fullmatch("<0x[0-9A-F]{2}>", token)} - special

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._encode(text)

    def incremental(self) -> Decode:
        """The text up to the last word: a run of single bytes after it may read differently with the next byte."""
        ids, sent = [], ""

        def decode(new: Iterable[int], last: bool) -> str:
            nonlocal sent
            ids.extend(new)
            end = len(ids)
            while not last and end and ids[end - 1] not in self._words:
                end -= 1
            text = self._inner.decode(ids[:end], skip_special_tokens=True)
            settled = text if last else text.rstrip(REPLACEMENT)
            piece = settled[len(sent) :]
            sent += piece
            return piece

        return decode


class StreamDecoder:
    """The text of tokens as they come. The pieces joined are `tokenizer.decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.incremental()

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete; an unfinished character waits for its other bytes."""
        return self._decode(ids, False)

    def finish(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that stayed unfinished."""
        return self._decode([], True)


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text, looked for in the text itself, so that token borders do not matter.

    Raises ValueError for an empty stop string: it would end every text at once.
    """

    strings: tuple[str, ...]

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            strings = (strings,)
        if "" in strings:
            raise ValueError(f"stop={list(strings)!r} has an empty string: wanted one character or more; leave it out")
        object.__setattr__(self, "strings", tuple(strings))

    def __bool__(self) -> bool:
        return bool(self.strings)

    def find(self, text: str, seen: int = 0) -> int | None:
        """Where the first stop string begins, or None.

        seen: characters of `text` that were searched before, without a match; only what ends after them is looked at.
        """
        starts = (text.find(stop, max(0, seen - len(stop) + 1)) for stop in self.strings)
        return min((start for start in starts if start >= 0), default=None)

    def held(self, text: str) -> int:
        """How many last characters of `text` must wait: its longest ending that begins some stop string."""
        for n in range(min(len(text), max(map(len, self.strings), default=1) - 1), 0, -1):
            if any(len(stop) > n and stop.startswith(text[-n:]) for stop in self.strings):
                return n
        return 0


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder: its tokenizer.json, else its tiktoken.model, else None.

    Raises ValueError for a file that cannot be read, and for a tiktoken.model when tiktoken is not installed.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return _load_json(folder / "tokenizer.json")
    if (folder / "tiktoken.model").is_file():
        return _load_tiktoken(folder / "tiktoken.model", folder / "tokenizer_config.json")
    return None


def _load_json(file: Path) -> Tokenizer:
    """A tokenizer.json; padding and truncation are switched off, as transformers does."""
    try:
        decoder = json.loads(file.read_text(encoding="utf-8")).get("decoder")
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}; copy it again from the checkpoint") from error
    inner.no_padding()
    inner.no_truncation()

    def encode(text: str) -> list[int]:
        return inner.encode(text).ids

    if (decoder or {}).get("type") != "ByteLevel":
        return TextTokenizer(encode, inner)
    special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    tokens = inner.get_vocab(with_added_tokens=True)
    return ByteTokenizer(encode, {i: b"" if i in special else _byte_level(token) for token, i in tokens.items()})


def _byte_table() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters are their own byte, U+0100 and up the others in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_table()


def _byte_level(token: str) -> bytes:
    """The bytes that a byte-level token spells; an added token with other characters stands for its own text."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _load_tiktoken(file: Path, settings: Path) -> Tokenizer:
    """The hub's rank file, with the split pattern and the special ids of kimi_arch.md section 11."""
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError(f"{file} needs tiktoken, which is not installed: pip install 'kimi_jax[tiktoken]'") from error
    ranks = _read_ranks(file)
    special, token_bytes = _read_specials(settings, len(ranks))
    token_bytes |= {rank: token for token, rank in ranks.items()}
    inner = tiktoken.Encoding(str(file), pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(text: str) -> list[int]:
        return [i for part in _cut(text) for i in inner.encode(part, allowed_special="all")]

    return ByteTokenizer(encode, token_bytes)


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank, from lines of base64 and a number. Ranks count up from 0: the special ids follow them."""
    ranks = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{file} line {number} is not `base64 rank`: {line[:60]!r}; copy it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file} has {len(ranks)} tokens whose ranks are not 0..{len(ranks) - 1}; copy it again")
    return ranks


def _read_specials(settings: Path, first: int) -> tuple[dict[str, int], dict[int, bytes]]:
    """Text -> id of the reserved tokens, named by tokenizer_config.json, and the bytes that decoding gives for each."""
    named: dict[str, dict[str, Any]] = {}
    if settings.is_file():
        named = json.loads(settings.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    texts = {i: f"<|reserved_token_{i}|>" for i in range(first, first + RESERVED)}
    shown = {i: b"" for i in texts}
    for key, token in named.items():
        if int(key) not in texts:
            last = first + RESERVED - 1
            raise ValueError(
                f"{settings} names token {key} {token['content']!r}: wanted ids {first}..{last}, which follow the "
                f"{first} ranks of tiktoken.model; the two files are not of one checkpoint"
            )
        texts[int(key)] = token["content"]
        shown[int(key)] = b"" if token.get("special", True) else token["content"].encode()
    special = {text: i for i, text in texts.items()}
    if len(special) != len(texts):
        raise ValueError(f"{settings} gives two special tokens the same text: wanted {RESERVED} different ones")
    return special, shown


def _cut(text: str) -> Iterator[str]:
    """Parts of a very long text, as the hub's tokenizer cuts it: the split regex is quadratic in the worst case."""
    for start in range(0, len(text), LONGEST_TEXT):
        part, begin = text[start : start + LONGEST_TEXT], 0
        for run in re.finditer(r"\s+|\S+", part):
            for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield part[begin:end]
                begin = end
        yield part[begin:]
