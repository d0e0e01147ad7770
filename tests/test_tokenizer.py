"""Tokenizers: encoding and decoding as the checkpoint's own, streaming without split characters, stop strings."""

import base64
import json
import random
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kimi_jax import tokenizer as module
from kimi_jax.tokenizer import SPLIT_PATTERN, ByteTokenizer, StopStrings, StreamDecoder, TextTokenizer, load_tokenizer

TEXTS = [
    "In the beginning",
    "¿Qué? naïve",
    "日本語 and 漢字，混ざる",
    "family 👨‍👩‍👧‍👦, flag 🇯🇵, wave 👋🏽",
    "e\u0301 combining, a\u0308\u0323",
    "\u0000\t\r\n  x",
    "",
]
many = settings(deadline=None, derandomize=True, max_examples=150)


@pytest.fixture(scope="module")
def byte_level(tiny):
    return load_tokenizer(tiny)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """Words where it knows them, else `<0xNN>` tokens: a decoder that is not byte-level."""
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdeé", "ab", "▁ab"]
    inner = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [("a", "b"), ("▁", "ab")], byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    folder = tmp_path_factory.mktemp("byte_fallback")
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def wrapped(tiny, tmp_path_factory):
    """The shipped tokenizer with its decoder inside another one, so that it is not read as a byte table."""
    inner = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    inner.decoder = decoders.Sequence([decoders.ByteLevel()])
    folder = tmp_path_factory.mktemp("wrapped")
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def write_tiktoken(folder, words=(), named=None):
    """A rank file of all bytes and the beginnings of some words, and the config that names special tokens."""
    tokens = [bytes([b]) for b in random.Random(0).sample(range(256), 256)]
    for word in words:
        tokens += [word[:n] for n in range(2, len(word) + 1) if word[:n] not in tokens]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    if named is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return tokens


WORDS = [b" the", b"hello", "日本".encode(), "👋".encode()[:3], b"12", "é".encode() + b"\xf0\x9f"]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("ranked")
    first = len(write_tiktoken(folder, WORDS))
    named = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|end|>", "special": True},
        str(first + 5): {"content": "<tool>", "special": False},
    }
    write_tiktoken(folder, WORDS, named)
    return load_tokenizer(folder), first


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "wrapped", "ranked"])
def tokenizer(request):
    found = request.getfixturevalue(request.param)
    return found[0] if isinstance(found, tuple) else found


# ------------------------------------------------------------------------------------------------- encoding, decoding
def test_the_shipped_tokenizer_is_bytes_behind_a_bos(byte_level):
    for text in TEXTS:
        assert byte_level.encode(text) == [256, *text.encode()]
        assert byte_level.decode(byte_level.encode(text)) == text
    assert byte_level.vocab_size == 259
    assert byte_level.encode("a<|eos|>b") == [256, 97, 257, 98]


def test_special_tokens_and_ids_without_a_token_have_no_text(byte_level):
    assert byte_level.decode([256, 72, 257, 105, 258, 300, 10**6]) == "Hi"
    assert byte_level.decode([0xE6, 256, 0x97, 257, 0xA5]) == "日"


@many
@given(ids=st.lists(st.integers(0, 319), max_size=40))
def test_decoding_equals_the_library(byte_level, tiny, ids):
    inner = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert byte_level.decode(ids) == inner.decode(ids, skip_special_tokens=True)


def test_added_tokens_decode_as_the_library_does(tmp_path):
    inner = tokenizers.Tokenizer(models.BPE({"Ã": 0, "©": 1, "Ġ": 2}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(["two words", "é", "<tool>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    for ids in ([0, 1], [3, 2, 5], [4], [0, 4, 1], [3]):
        assert ours.decode(ids) == inner.decode(ids)


def test_padding_and_truncation_of_the_file_are_not_used(tiny, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64, pad_id=258)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("In the beginning") == [256, *b"In the beginning"]


def test_the_kind_of_file_decides(byte_level, byte_fallback, wrapped, tmp_path):
    assert isinstance(byte_level, ByteTokenizer)
    assert isinstance(byte_fallback, TextTokenizer) and isinstance(wrapped, TextTokenizer)
    assert load_tokenizer(tmp_path) is None
    assert byte_fallback.encode("ab日") == [266, 2 + 0xE6, 2 + 0x97, 2 + 0xA5]
    assert byte_fallback.decode(byte_fallback.encode("ab é日 cab")) == "ab é日 cab"
    assert byte_fallback.vocab_size == 2 + 256 + 7 + 2


# ----------------------------------------------------------------------------------------------------------- tiktoken
def test_ranks_then_256_special_ids(ranked):
    ours, first = ranked
    assert ours.vocab_size == first + 256
    hello, the = ours.encode("hello"), ours.encode(" the")
    assert len(hello) == len(the) == 1
    assert ours.encode("hello the") == hello + the
    assert ours.encode("[BOS]hello<|end|>") == [first, *hello, first + 2]
    assert ours.encode(f"<|reserved_token_{first + 7}|>") == [first + 7]
    assert ours.decode([first, *hello, first + 2, first + 7]) == "hello"
    assert ours.encode("a<tool>")[-1] == first + 5
    assert ours.decode(ours.encode("a<tool>b")) == "a<tool>b"
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
        assert first not in ours.encode(text)


def test_a_rank_file_needs_no_config(tmp_path):
    pytest.importorskip("tiktoken")
    first = len(write_tiktoken(tmp_path))
    assert load_tokenizer(tmp_path).encode(f"<|reserved_token_{first}|>") == [first]


def split(text):
    """How tiktoken splits: with a rank file in which every piece of the text is one token."""
    tiktoken = pytest.importorskip("tiktoken")
    pieces = {text.encode()[i:j] for i in range(len(text.encode())) for j in range(i + 1, len(text.encode()) + 1)}
    ranks = {t: i for i, t in enumerate(sorted({bytes([b]) for b in range(256)} | pieces, key=lambda t: (len(t), t)))}
    inner = tiktoken.Encoding("split", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return [inner.decode_single_token_bytes(i).decode() for i in inner.encode(text)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("漢字kana漢", ["漢字", "kana", "漢"]),
        ("HelloWorld", ["Hello", "World"]),
        ("HTMLParser", ["HTMLParser"]),
        ("don't WE'LL", ["don't", " WE'LL"]),
        ("12345 6", ["123", "45", " ", "6"]),
        ("a ,.\n\nb", ["a", " ,.\n\n", "b"]),
        ("a  \n b", ["a", "  \n", " b"]),
        ("a \n\n  b", ["a", " \n\n", " ", " b"]),
        ("x   y", ["x", "  ", " y"]),
        ("x   ", ["x", "   "]),
        ("カタkana", ["カタkana"]),
        ("é漢é", ["é", "漢", "é"]),
    ],
)
def test_text_splits_as_the_pattern_of_the_hub_says(text, pieces):
    assert split(text) == pieces


def cut_slowly(text):
    """The cutting rule, character by character."""
    parts = []
    for start in range(0, len(text), module.LONGEST_TEXT):
        run, parts_here = 0, [""]
        part = text[start : start + module.LONGEST_TEXT]
        for i, character in enumerate(part):
            run = run + 1 if i and character.isspace() == part[i - 1].isspace() else 1
            if run > module.LONGEST_RUN:
                parts_here.append("")
                run = 1
            parts_here[-1] += character
        parts += parts_here
    return parts


@many
@given(text=st.text(alphabet="ab \n\u3000", max_size=80))
def test_long_texts_are_cut_by_length_and_by_runs(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONGEST_TEXT", 23)
        patch.setattr(module, "LONGEST_RUN", 3)
        assert list(module._cut(text)) == cut_slowly(text)


@pytest.mark.parametrize("text", ["a" * 60_000, " " * 60_000 + "b", "hello the " * 45_000, "ab" * 12_500 + " x"])
def test_very_long_texts_encode_part_by_part(ranked, text):
    ours, _ = ranked
    parts = cut_slowly(text)
    assert len(parts) > 1 or len(text) < 30_000
    assert ours.encode(text) == [i for part in parts for i in ours.encode(part)]
    assert ours.decode(ours.encode(text)) == text


def test_without_tiktoken_the_error_names_the_extra(tmp_path, monkeypatch):
    write_tiktoken(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"tiktoken\.model needs tiktoken.*pip install 'kimi_jax\[tiktoken\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"YQ== 0\nYg==\n", r"line 2 is not `base64 rank`"),
        (b"YQ== 0\nY*g= 1\n", r"line 2 is not"),
        (b"YQ== 0\nYg== one\n", r"line 2 is not"),
        (b"YQ== 0\nYg== 2\n", r"2 tokens whose ranks are not 0\.\.1"),
    ],
)
def test_a_broken_rank_file_is_an_error(tmp_path, content, said):
    pytest.importorskip("tiktoken")
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load_tokenizer(tmp_path)


def test_a_special_token_outside_the_reserved_ids_is_an_error(tmp_path):
    pytest.importorskip("tiktoken")
    write_tiktoken(tmp_path, named={"12": {"content": "[BOS]"}})
    with pytest.raises(ValueError, match=r"token 12 '\[BOS\]': wanted ids 256\.\.511"):
        load_tokenizer(tmp_path)
    write_tiktoken(tmp_path, named={"256": {"content": "[BOS]"}, "257": {"content": "[BOS]"}})
    with pytest.raises(ValueError, match="two special tokens the same text"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_json_is_an_error(tmp_path):
    for text in ("{", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
            load_tokenizer(tmp_path)


# ---------------------------------------------------------------------------------------------------------- streaming
def stream(tokenizer, groups):
    """The pieces of a text that comes in groups of ids, and of its end."""
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.feed(group) for group in groups), decoder.finish()]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_no_piece_splits_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, [[i] for i in ids])
    assert "".join(pieces) == tokenizer.decode(ids)
    if "<unk>" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(byte_level):
    assert stream(byte_level, [[256], [0xF0], [0x9F], [0x91], [0x8B], [97]]) == ["", "", "", "", "👋", "a", ""]
    assert stream(byte_level, [[97, 0xE6, 0x97], [0xA5, 98]]) == ["a", "日b", ""]
    assert stream(byte_level, [[0xE6, 0x97]]) == ["", "\ufffd"]
    assert stream(byte_level, [[0xE6, 0x97], [97]]) == ["", "\ufffda", ""]


def test_a_run_of_single_bytes_waits_for_its_end_across_special_tokens(byte_fallback):
    a, special, first, second = byte_fallback.encode("a")[-1], 1, 2 + 0xC3, 2 + 0xA9
    pieces = stream(byte_fallback, [[a], [first, second], [special], [first], [10**6], [a]])
    assert pieces == ["a", "", "", "", "", "\ufffd\ufffd\ufffda", ""]
    assert "".join(pieces) == byte_fallback.decode([a, first, second, special, first, a])


@many
@given(data=st.data())
def test_the_pieces_of_any_bytes_join_to_the_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    raw = list("é日👋a\u0301".encode())
    ids = data.draw(st.sampled_from([ids, [*ids, *raw[:3]], [*raw[3:], *ids, *raw[:-1]]]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(stream(tokenizer, groups)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)


@many
@given(raw=st.binary(max_size=30))
def test_invalid_bytes_are_replaced_as_the_library_does(byte_level, tiny, raw):
    inner = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert "".join(stream(byte_level, [[i] for i in raw])) == inner.decode(list(raw))


# ------------------------------------------------------------------------------------------------------- stop strings
def test_the_first_stop_string_is_found_wherever_tokens_end():
    stop = StopStrings(["\n\n", "END", "ND"])
    assert stop.find("a END b\n\n") == 2
    assert stop.find("aND") == 1
    assert stop.find("nothing") is None
    assert StopStrings([]).find("anything") is None and StopStrings([]).held("anything") == 0
    assert StopStrings("END") == StopStrings(["END"])
    assert StopStrings("END") and not StopStrings()


def test_what_may_become_a_stop_string_is_held_back():
    stop = StopStrings(["<end>", "nd\n"])
    assert [stop.held(text) for text in ("a", "a<", "a<en", "a<end", "ab<en>", "nd", "xnn")] == [0, 1, 3, 4, 0, 2, 1]
    assert stop.held("and\n") == 0
    assert StopStrings(["a"]).held("bb") == 0


@many
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    strings=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 5),
)
def test_a_growing_text_shows_exactly_what_precedes_the_first_stop(text, strings, size):
    stop, shown, grown = StopStrings(strings), "", ""
    for end in range(size, len(text) + size, size):
        seen, grown = len(grown), text[:end]
        if (hit := stop.find(grown, seen)) is not None:
            assert hit == min(grown.find(s) for s in strings if s in grown)
            assert len(shown) <= hit
            return
        shown = grown[: len(grown) - stop.held(grown)]
    assert not any(s in text for s in strings)
    endings = [n for n in range(len(text) + 1) for s in strings if s.startswith(text[len(text) - n :]) and n < len(s)]
    assert shown == text[: len(text) - max(endings, default=0)]


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match=r"stop=\['a', ''\] has an empty string"):
        StopStrings(["a", ""])
