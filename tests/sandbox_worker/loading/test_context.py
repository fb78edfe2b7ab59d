"""Loading of a context: a memfd becomes exactly the announced value, or an error of one sentence."""

import fcntl
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandbox_worker.loading.context import SMALL_BYTES, ContextBroken, load
from sandbox_worker.loading.form import SEALS, ContextForm, Width, span_bytes
from tests.support.sealed import memfd, said_alone
from tests.support.tables import table

PAGE = os.sysconf("SC_PAGESIZE")
CODECS: dict[Width, str] = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
KINDS: list[tuple[str, Width]] = [("a", 1), ("\xe9", 1), ("\u017c", 2), ("\U0001f600", 4)]
Sealed = Callable[..., int]


@pytest.fixture
def sealed() -> Iterator[Sealed]:
    """Return a function that makes memfds with the given bytes and seals."""
    made: list[int] = []

    def make(data: bytes, seals: int = SEALS) -> int:
        made.append(memfd(data, seals))
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


def text_in(sealed: Sealed, text: str, width: Width) -> tuple[int, ContextForm]:
    data = text.encode(CODECS[width], "surrogatepass").ljust(span_bytes(len(text), width), b"\0")
    return sealed(data), ContextForm("text", len(text), width, text.isascii())


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def around_page_boundaries() -> Iterator[tuple[str, Width]]:
    yield "", 1
    for character, width in KINDS:
        page_chars = PAGE // width
        for length in (1, 2, page_chars - 1, page_chars, page_chars + 1, 2 * page_chars - 1, 2 * page_chars):
            yield (character + "0123456789" * (length // 10 + 1))[:length], width


USES: list[Callable[[str], object]] = [
    *(hash, len, str.encode, str.isascii),
    lambda text: (text[1:], text[-2:], text[::7], text + "x", text.count("0"), "789" in text),
    lambda text: [found.span() for found in re.finditer("9|$", text)],
]


@table("maps", [True, False])
def test_text_of_any_width_is_ordinary(sealed: Sealed, maps: bool) -> None:
    """A text of any width and length is an ordinary `str` in every respect."""
    for text, width in around_page_boundaries():
        fd, form = text_in(sealed, text, width)
        loaded = load(fd, form, maps)
        assert type(loaded) is str
        assert loaded == text
        assert {loaded: "found"}[text] == "found"
        for use in USES:
            assert use(loaded) == use(text)
        assert sys.getsizeof(loaded) >= len(text) * width


def test_mapped_text_takes_no_memory() -> None:
    """A mapped text takes no memory, is never freed and needs no descriptor."""
    taken = said_alone(
        """
fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
for _ in range(100):
    os.write(fd, b"0123456789abcde\\n" * 65536)
os.write(fd, bytes(8))
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
before = anonymous_kb()
text = load(fd, ContextForm("text", 100 << 20, 1, True), True)
os.close(fd)
assert text.count("abcde") == 100 * 65536
for _ in range(1000):
    again = text
    del again
print(anonymous_kb() - before)
del text
gc.collect()
"""
    )
    assert int(taken) < 2_000


def test_mapped_text_lies_in_the_memfd(sealed: Sealed) -> None:
    """The characters are those of the memfd, and the header lies apart."""
    for character, width in KINDS:
        fd, form = text_in(sealed, character * (SMALL_BYTES // width), width)
        loaded = load(fd, form, True)
        with open("/proc/self/maps") as maps:
            mappings = [line.split() for line in maps]
        around = [
            (permissions, inode)
            for span, permissions, _, _, inode, *_ in mappings
            if int(span.split("-")[0], 16) <= id(loaded) < int(span.split("-")[1], 16)
        ]
        assert around == [("rw-p", "0")]
        of_memfd = str(os.fstat(fd).st_ino)
        assert [permissions for _, permissions, _, _, inode, *_ in mappings if inode == of_memfd] == ["r--p"]
        assert sys.getrefcount(loaded) > 1 << 31


def test_adjacent_lone_surrogates_stay_two_characters(sealed: Sealed) -> None:
    text = "\ud83d\ude00"
    fd, form = text_in(sealed, text, 2)
    for maps in (True, False):
        assert load(fd, form, maps) == text


def test_json_is_decoded_and_its_descriptor_stays_open(sealed: Sealed) -> None:
    value = {"a": [1, 2.5, None, True, "\u017c\U0001f600"], "b": {"c": "d" * 5000}, "big": 2**70}
    data = msgspec.json.encode(value)
    fd = sealed(data)
    descriptors = open_descriptors()
    assert load(fd, ContextForm("json", len(data)), True) == value
    assert open_descriptors() == descriptors
    assert gc.isenabled()


@table(
    "data, expected",
    [
        (json.dumps({"a": "\ud83d", "b": 1}).encode(), {"a": "\ud83d", "b": 1}),
        ('["\ud83d\ude00"]'.encode("utf-8", "surrogatepass"), ["\ud83d\ude00"]),
    ],
)
def test_json_with_lone_surrogates_is_decoded(sealed: Sealed, data: bytes, expected: object) -> None:
    assert load(sealed(data), ContextForm("json", len(data)), True) == expected


@table(
    "data, sentence",
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[NaN]", "not JSON"),
        (b'"\xff"', "not JSON"),
        (b'{"a": 1} 2', "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a":' * 200_000, "nested too deep"),
    ],
)
def test_invalid_json_is_refused_in_one_sentence(sealed: Sealed, data: bytes, sentence: str) -> None:
    with pytest.raises(ContextBroken, match=sentence):
        load(sealed(data), ContextForm("json", len(data)), True)
    assert gc.isenabled()


@table("missing", [fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
@table("form", [ContextForm("text", 3, 1, True), ContextForm("json", 3)])
def test_memfd_without_all_seals_is_refused(sealed: Sealed, missing: int, form: ContextForm) -> None:
    with pytest.raises(ContextBroken, match="seals"):
        load(sealed(b"123", SEALS & ~missing), form, True)


def test_ordinary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("abc")
    with path.open() as file, pytest.raises(ContextBroken, match=r"not a memfd|seals"):
        load(file.fileno(), ContextForm("text", 3, 1, True), True)


@table(
    "form",
    [
        ContextForm("text", 8, 1, True),
        ContextForm("text", 1 << 40, 4),
        ContextForm("text", 4, 2),
        ContextForm("json", 7),
        ContextForm("json", 9),
        ContextForm("texts", 8, texts=1, names_bytes=4),
        ContextForm("texts", 0, texts=1),
    ],
)
def test_size_must_be_the_announced_one(sealed: Sealed, form: ContextForm) -> None:
    """A size that differs from the announced one is refused before any mapping."""
    for maps in (True, False):
        with pytest.raises(ContextBroken, match="memfd has 8 bytes"):
            load(sealed(bytes(8)), form, maps)


@table(
    "form",
    [ContextForm("text", 2, 2, True), ContextForm("json", 8, 2), ContextForm("texts", 8, 4, texts=1, names_bytes=4)],
)
def test_form_that_contradicts_itself_is_refused(sealed: Sealed, form: ContextForm) -> None:
    with pytest.raises(ContextBroken, match=f"cannot be {form.width} bytes wide"):
        load(sealed(bytes(form.size_bytes)), form, True)


@table("change", [{"length": -1}, {"width": 3}, {"kind": "pickle"}, {"length": 1 << 61}, {"more": 1}, {"texts": -1}])
def test_impossible_form_is_refused_by_the_wire(change: dict[str, Any]) -> None:
    fields = {"kind": "text", "length": 1, "width": 1, "ascii": True}
    assert msgspec.convert(fields, ContextForm) == ContextForm("text", 1, 1, True)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**fields, **change}, ContextForm)


def test_text_without_address_space_is_refused() -> None:
    said = said_alone(
        """
fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.pwrite(fd, ((1 << 40) - 65).to_bytes(8, "little") + b"\\0null".ljust(56), (1 << 40) - 64)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for maps in (True, False):
    for form in (
        ContextForm("text", (1 << 40) - 1, 1, True),
        ContextForm("texts", (1 << 40) - 64, texts=1, names_bytes=55),
        ContextForm("json", 1 << 40),
    ):
        try:
            load(fd, form, maps)
        except ContextBroken as error:
            print(error)
"""
    )
    refusal = "a context of 1,099,511,627,776 bytes cannot be loaded into memory: Cannot allocate memory"
    assert said.splitlines() == [refusal] * 6
