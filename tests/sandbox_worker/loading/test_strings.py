"""Many texts of one memfd: each is an ordinary `str`, none takes memory, and no index leads out of the memfd."""

import collections
import csv
import ctypes
import gc
import io
import json
import os
import pickle
import random
import re
import string
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from sandbox_worker.loading.context import ContextBroken, load
from sandbox_worker.loading.form import HEADER_BYTES, ContextForm
from tests.support.sealed import CODECS, characters_of, kind_of, memfd, said_alone, texts_in_memfd, texts_with
from tests.support.tables import table

SAMPLES = ("a", "\xe9", "\u017c", "\U0001f600", "\ud83d", "\x00")
BOTH = pytest.mark.parametrize("maps", [True, False], ids=["mapped", "copied"])


@pytest.fixture(autouse=True)
def _memfds_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[int] = []
    create = os.memfd_create

    def recorded(name: str, flags: int) -> int:
        made.append(create(name, flags))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", recorded)
    yield
    for fd in made:
        os.close(fd)


def of_every_kind(lengths: tuple[int, ...]) -> list[str]:
    return [(sample + " 0123456789\n" * (length // 12 + 1))[:length] for length in lengths for sample in SAMPLES]


def loaded(texts: list[str], maps: bool = True) -> list[str]:
    found: list[str] = load(*texts_in_memfd(None, texts), maps)
    return found


@BOTH
def test_texts_of_all_kinds_keep_their_order(maps: bool) -> None:
    """Texts of all kinds side by side come out equal and in their order."""
    texts = of_every_kind((0, 1, 2, 3, 6, 7, 8, 9, 500, 4094, 4095, 4096, 4097, 20_000))
    names = [f"{number} \u20ac/{text[:1]!a}" for number, text in enumerate(texts)]
    assert loaded(texts, maps) == texts
    by_name = load(*texts_in_memfd(names, texts), maps)
    assert by_name == dict(zip(names, texts, strict=True))
    assert list(by_name) == names
    assert type(by_name) is dict


@BOTH
def test_texts_of_mixed_lengths_come_out_equal(maps: bool) -> None:
    rng = random.Random(20261121)
    for _ in range(100):
        highest = [0x7F, 0xFF, 0xFFFF, 0x10FFFF]
        texts = [
            "".join(chr(rng.randint(0, rng.choice(highest))) for _ in range(rng.randrange(40)))
            for _ in range(rng.randrange(1, 30))
        ]
        assert loaded(texts, maps) == texts


def _sqlite(text: str) -> object:
    import sqlite3

    with sqlite3.connect(":memory:") as connection:
        return connection.execute("select ?, length(?)", (text, text)).fetchall()


def _file(text: str) -> object:
    fd = os.memfd_create("file", 0)
    with open(fd, "w+", encoding="utf-8", closefd=False) as file:
        file.write(text)
        file.seek(0)
        return file.read()


USES: list[Callable[[str], object]] = [
    hash,
    len,
    repr,
    ascii,
    str,
    sys.intern,
    list,
    lambda text: {text: 1}[str(bytes(text, "utf-8"), "utf-8")],
    lambda text: text in collections.Counter([text, "x"]),
    lambda text: [text.encode(codec) for codec in ("utf-8", "utf-16", "utf-32", "utf-7", "unicode-escape")],
    lambda text: [text.encode("utf-8"), text.encode("utf-8")],
    lambda text: [text.encode(codec, "replace") for codec in ("ascii", "latin-1", "cp1252", "cp437")],
    lambda text: [text[1:], text[:-1], text[::-1], text[::3], text[5:6], text[0], text[-1]],
    lambda text: [text + "x", "x" + text, text * 2, text + "\U0001f600", text % ()],
    lambda text: [text.upper(), text.lower(), text.title(), text.swapcase(), text.casefold(), text.capitalize()],
    lambda text: [text.split(), text.split("3"), text.splitlines(), text.partition("5"), text.rpartition("5")],
    lambda text: [text.strip(), text.strip("a\n"), text.center(len(text) + 9), text.zfill(len(text) + 2)],
    lambda text: [text.find("9"), text.rfind("9"), text.count("0"), text.index(text[-3:]), "567" in text],
    lambda text: [text.replace("0", "zero"), text.translate({48: "\U0001f600"}), text.expandtabs()],
    lambda text: [text.startswith(text[:3]), text.endswith("\n"), text.isascii(), text.isprintable(), text.isalpha()],
    lambda text: [f"{text}!", f"{text:>20}", f"{text!r:.9}", "{0:<5}|".format(text), "%s|%.3s" % (text, text)],  # noqa: UP030, UP031, UP032
    lambda text: ["".join([text, text]), text.join("abc"), string.Template(text).safe_substitute()],
    lambda text: [text < text + "a", text == text[:-1], max(text), min(text), sorted(text)[:5]],
    lambda text: [found.span() for found in re.finditer(r"[0-4]+|\s|$", text)],
    lambda text: [
        re.split("5", text),
        re.sub("[3-5]", "\u20ac", text),
        re.compile(re.escape(text)).fullmatch(text) is None,
    ],
    lambda text: [pickle.loads(pickle.dumps(text, protocol)) for protocol in range(6)],
    lambda text: [json.dumps(text), json.loads(json.dumps(text)), json.dumps({text: [text]}, ensure_ascii=False)],
    lambda text: [msgspec.json.encode({text: text}), msgspec.msgpack.encode(text), msgspec.json.encode(text)],
    lambda text: [io.StringIO(text).readlines(), io.StringIO(text + text).read(5)],
    lambda text: list(csv.reader(text.splitlines())),
    lambda text: compile(f"x = {text!r}", "x", "exec").co_consts[0],
    lambda text: setattr(type("C", (), {})(), text, 1),
    lambda text: int("".join(filter(str.isdecimal, text)) or "0"),
    _sqlite,
    _file,
]


@table("sample", ["a", "\xe9", "\u017c", "\U0001f600"])
def test_mapped_text_behaves_as_ordinary(sample: str) -> None:
    texts = [(sample + " 0123456789\n" * 200)[:length] for length in (1, 7, 12, 2000)]
    for text, same in zip(texts, loaded(texts), strict=True):
        assert type(same) is str
        assert id(same) != id(text)
        assert sys.getsizeof(same) >= len(text) * (kind_of(text) or 1)
        for use in USES:
            expected: object
            try:
                expected = use(text)
            except (TypeError, ValueError, re.error) as error:
                with pytest.raises(type(error)):
                    use(same)
            else:
                assert use(same) == expected
        assert same == text
        assert ctypes.c_ssize_t.from_address(id(same)).value > 1 << 31


def test_empty_text_is_shared_and_names_are_free() -> None:
    names = ["", "lone \ud83d", "\ud83d\ude00", "\U0001f600", 'quote " and \\ and \0', "\x7f\xe9"]
    texts = ["x", "", "y", "", "", "z"]
    index = json.dumps(names, ensure_ascii=False).encode("utf-8", "surrogatepass")
    found = load(*texts_with(index, texts, [1, 0, 1, 0, 0, 1], [0] * 6), True)
    assert list(found.items()) == list(zip(names, texts, strict=True))
    assert len({id(text) for text in found.values() if len(text) == 0}) == 1


@BOTH
def test_empty_text_is_false_at_every_test(maps: bool) -> None:
    """An empty text is false, however often code tests it."""
    empties = [*loaded(["x", "", "\u20ac", ""], maps)[1::2], load(memfd(bytes(8)), ContextForm("text", 0), maps)]
    for text in empties:
        asked = [bool(text), not text, "" if text else "false"] * 100
        for _ in range(100):  # enough rounds for CPython to specialise the test for strings (TO_BOOL_STR, from 3.13 on)
            if text:
                asked.append("true")
        assert asked == [False, True, "false"] * 100


def test_texts_are_mapped_side_by_side() -> None:
    """Each text is mapped from where the text before it ends."""
    texts = of_every_kind((1, 5, 4096))
    fd, form = texts_in_memfd(None, texts)
    found = load(fd, form, True)
    pointer = str.__basicsize__ - 8
    base = ctypes.c_uint64.from_address(id(found[0]) + pointer).value
    for text in found:
        start = ctypes.c_uint64.from_address(id(text) + pointer).value
        assert start % 8 == 0
        width = kind_of(text) or 1
        codec = CODECS[kind_of(text)]
        assert ctypes.string_at(start, (len(text) + 1) * width) == text.encode(codec, "surrogatepass") + bytes(width)
        assert base <= start < base + form.length
    assert base % os.sysconf("SC_PAGESIZE") == 0


# -- false columns ---------------------------------------------------------------------------------------------------

TEXTS = ["one", "two \xe9", "", "three \U0001f600" * 3]
LENGTHS, KINDS, NAMES = [3, 5, 0, 21], [0, 1, 0, 4], b'["a","b","c","d"]'


@BOTH
@table(
    "lengths, kinds, sentence",
    [
        ([3, 5, 0, 21], [0, 1, 0, 3], r"have the kinds \[0, 1, 3\]"),
        ([3, 5, 0, 21], [0, 1, 0, 255], "have the kinds"),
        ([3, 5, 0, 21], [0, 1, 8, 4], "have the kinds"),
        ([3, 5, 0], [0, 1, 0], "end at byte 24 by their lengths, expected 112"),
        ([3], [4], "end at byte 16 by their lengths, expected 112"),
        ([3, 5, 0, 1 << 60], [0, 1, 0, 4], "end at byte 4,611,686,018,427,387,936 by their lengths, expected 112"),
        ([3, 5, 0, (1 << 64) - 1], [0, 1, 0, 0], "exceed any memory"),
        ([3, 5, 0, (1 << 62) - 1], [0, 1, 0, 4], "exceed any memory"),
        ([1 << 63, 1 << 63], [0, 0], "exceed any memory"),
        ([3, 5, 0, 40], [0, 1, 0, 4], "end at byte 192 by their lengths, expected 112"),
        ([3, 5, 0, 22], [0, 1, 0, 4], "end at byte 120 by their lengths, expected 112"),
        ([3, 5, 0, 21], [0, 1, 0, 2], "end at byte 72 by their lengths, expected 112"),
        ([3, 5, 0, 21], [4, 4, 4, 4], "end at byte 136 by their lengths, expected 112"),
        ([3, 5, 0, 21, 0], [0, 1, 0, 4, 0], "end at byte 120 by their lengths, expected 112"),
    ],
)
def test_false_lengths_and_kinds_are_refused(maps: bool, lengths: list[int], kinds: list[int], sentence: str) -> None:
    with pytest.raises(ContextBroken, match=sentence):
        load(*texts_with(b"null", TEXTS, lengths, kinds), maps)


@BOTH
@table(
    "names, sentence",
    [
        (b"", "names of the context's texts are broken: .*empty"),
        (b"{}", "names of the context's texts are broken"),
        (b"nul", "names of the context's texts are broken"),
        (b"5", "names of the context's texts are broken"),
        (b'["a","b","c",4]', "names of the context's texts are broken"),
        (b'["a","b","c",null]', "names of the context's texts are broken"),
        (b'["a","b","c","d"', "names of the context's texts are broken"),
        (b'["a","b","c","\xff"]', "names of the context's texts are broken"),
        (b'["a","b","c","\\ud83d",5]', "names of the context's texts are broken"),
        (b"[" * 100_000, "names of the context's texts are broken: .*nested too deeply"),
        (b"[]", "has 4 texts and 0 names"),
        (b'["a","b","c"]', "has 4 texts and 3 names"),
        (b'["a","b","c","d","e"]', "has 4 texts and 5 names"),
    ],
)
def test_false_names_are_refused(maps: bool, names: bytes, sentence: str) -> None:
    """Names that are not those of the texts are refused."""
    with pytest.raises(ContextBroken, match=sentence):
        load(*texts_with(names, TEXTS, LENGTHS, KINDS), maps)
    assert gc.isenabled()


@BOTH
@table("kind", ["text", "json", "texts"])
def test_form_with_misplaced_texts_is_refused(maps: bool, kind: Any) -> None:
    """A form with texts is refused where its kind has none."""
    for texts, names_bytes in ((1, 4), (0, 4), (1, 0)):
        if kind == "texts" and texts:
            continue
        form = ContextForm(kind, 3, texts=texts, names_bytes=names_bytes)
        with pytest.raises(ContextBroken, match=f"{kind}.* cannot have {texts} texts"):
            load(memfd(bytes(form.size_bytes)), form, maps)


@BOTH
def test_changed_index_shows_nothing_outside_the_texts(maps: bool) -> None:
    """Any byte behind the texts may change, and code sees no character outside of them."""
    data = characters_of(TEXTS)
    good = b"".join(length.to_bytes(8, "little") for length in LENGTHS) + bytes(KINDS) + NAMES
    form = ContextForm("texts", len(data), texts=4, names_bytes=len(NAMES))
    assert load(memfd(data + good), form, maps) == dict(zip("abcd", TEXTS, strict=True))
    refused = 0
    for at in range(len(good)):
        for value in (0, 1, 2, 4, 5, 22, 34, 44, 128, 255):
            changed = bytearray(good)
            changed[at] = value
            try:
                found = load(memfd(data + changed), form, maps)
            except ContextBroken:
                refused += 1
            else:
                inside = sum((len(text) + 1) * max(1, _width_of(text)) for text in found.values())
                assert inside <= form.length
    assert refused > 400


def _width_of(text: str) -> int:
    """Return the characters as the header describes them: a changed text may be wider than its characters need."""
    return (text.__sizeof__() - str.__basicsize__) // (len(text) + 1) if text else 0


@BOTH
def test_texts_announced_elsewhere_are_refused(maps: bool) -> None:
    fd, form = texts_in_memfd(["a", "b", "c", "d"], TEXTS)
    assert form.length == 112
    for moved in (-112, -9, -8, -1, 1, 5):
        for texts, names_bytes in ((4, form.names_bytes - moved), (5, form.names_bytes - 9 - moved)):
            wrong = ContextForm("texts", form.length + moved, texts=texts, names_bytes=names_bytes)
            with pytest.raises(ContextBroken, match=r"have the kinds|end at byte|names"):
                load(fd, wrong, maps)


# -- memory ----------------------------------------------------------------------------------------------------------


@table("line", ["0123456789abcde\n", "za\u017c\xf3\u0142\u0107 ge\u015bl\u0105\n"])
def test_texts_take_only_headers_and_names(line: str) -> None:
    taken = said_alone(
        """
text = sys.argv[1] * 2000
kind = 0 if text.isascii() else 2
data = text.encode("utf-16-le" if kind else "ascii").ljust(span_bytes(len(text), kind), b"\\0")
fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
for _ in range(4000):
    assert os.write(fd, data) == len(data)
names = json.dumps([f"file {n}" for n in range(4000)]).encode()
os.write(fd, len(text).to_bytes(8, "little") * 4000 + bytes([kind]) * 4000 + names)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
gc.collect()
before = anonymous_kb()
context = load(fd, ContextForm("texts", 4000 * len(data), texts=4000, names_bytes=len(names)), True)
os.close(fd)
assert len(context) == 4000
assert sum(each.count("\\n") for each in context.values()) == 4000 * 2000
assert all(each == text for each in context.values())
for _ in range(1000):
    for each in list(context.values())[:10]:
        del each
print(anonymous_kb() - before)
context.clear()
del context
gc.collect()
""",
        line,
    )
    assert int(taken) < 3_000


def test_header_size_is_that_of_this_python() -> None:
    assert str.__basicsize__ <= HEADER_BYTES
