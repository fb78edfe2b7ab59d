"""Stored texts come back equal, at their narrowest width, sealed, and without a copy in the memory of a process."""

import errno
import fcntl
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context import found_files
from rlm_broker.context import memfd as context_memfd
from rlm_broker.context.memfd import Memfd
from rlm_broker.context.store import store
from sandbox_worker.loading.context import load
from sandbox_worker.loading.form import SEALS, ContextForm, span_bytes
from tests.support.contexts import fd_of, form_of, loaded, refused, value_of, written
from tests.support.places import PROJECT
from tests.support.tables import table

REPOSITORY = str(PROJECT)
PAGE = os.sysconf("SC_PAGESIZE")
MB = 1 << 20


def test_page_that_the_kernel_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(fd: int, command: int, argument: int) -> int:
        tries.append(command)
        if len(tries) < enough:
            raise BlockingIOError(errno.EBUSY, "Device or resource busy")
        return fcntl.fcntl(fd, command, argument)

    monkeypatch.setattr(context_memfd, "fcntl", busy)
    for enough in (3, 1_000):
        tries: list[int] = []
        if enough == 3:
            assert value_of("some text") == "some text"
            assert len(tries) == 3
        else:
            refused("some text", "cannot be stored in memory: Device or resource busy")


WIDTHS = [
    ("", 1),
    ("plain", 1),
    ("caf\xe9", 1),
    ("\xff" * PAGE, 1),
    ("z\u017c" * 3000, 2),
    ("\u20ac" * (PAGE // 2), 2),
    ("a\U0001f600" * 3000, 4),
    ("\U0001f600" * (PAGE // 4), 4),
    ("a" * (3 * MB) + "\xe9", 1),
    ("\xe9" * (2 * MB + 1) + "\u017c", 2),
    ("\xe9" * (2 * MB + 1) + "\U0001f600" + "a" * MB, 4),
    ("\xe9" * MB + "\u017c" * (MB + 1) + "\U0001f600" + "\xe9", 4),
    ("\ud83d\ude00" * MB + "\U0001f600" + "\udfff", 4),
    ("\ud800\udc00 and \udfff", 2),
    ("nul \0 byte", 1),
]


@table("text, width", WIDTHS)
def test_text_is_kept_at_its_narrowest_width(text: str, width: Any) -> None:
    with store(text) as stored:
        assert form_of(stored) == ContextForm("text", len(text), width, text.isascii())
        assert os.fstat(fd_of(stored)).st_size == span_bytes(len(text), width)
        assert (stored.info.type_name, stored.info.total_chars, stored.info.parts_total) == ("str", len(text), 0)
        for maps in (True, False):
            assert loaded(stored, maps) == text
            assert hash(loaded(stored, maps)) == hash(text)


def test_character_cut_by_a_piece_boundary_is_kept(tmp_path: Path) -> None:
    for before, character in product(range(5), ("\xe9", "\u20ac", "\U0001f600")):
        text = "a" * (found_files.PIECE_BYTES - before) + character + "b" * 10
        assert value_of(written(tmp_path / "file", text)) == text
    value = {"long": '\xe9"\n' * context_memfd._PIECE_CHARS, "after": [1]}
    assert value_of(value) == value


MEASURES = """
import os, sys
from pathlib import Path
from rlm_broker.context.store import store
from sandbox_worker.loading.self_test import mapping_works
from tests.support.contexts import loaded

def status_kb(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))

assert mapping_works()
before = status_kb("VmHWM")
stored = store(Path(sys.argv[1]))
print(status_kb("VmHWM") - before, flush=True)
for _ in range(2):
    child = os.fork()
    if not child:
        before = status_kb("RssAnon")
        found = loaded(stored)
        texts = [found] if isinstance(found, str) else [*found.values()]
        assert sum(map(len, texts)) == stored.info.total_chars
        print(sum(text.count("f") for text in texts), status_kb("RssAnon") - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert "pydantic" not in sys.modules
"""


def test_files_of_any_size_take_no_process_memory(tmp_path: Path) -> None:
    """Storing and loading large files or many takes no memory of any process."""
    (tmp_path / "measures.py").write_text(MEASURES)
    for name, line in (("ascii", "0123456789abcdef\n"), ("polish", "fa\u017c\xf3\u0142\u0107 ge\u015bl\u0105\n")):
        lines = MB // len(line.encode())
        with (tmp_path / name).open("wb") as file:
            for _ in range(100):
                file.write(line.encode() * lines)
        assert measured(tmp_path, name, 60_000) == 100 * lines
        (tmp_path / name).unlink()
    for number in range(200):
        text = "0123456789abcdef" * 32_768 + ("\xe9" if number % 3 == 1 else "")
        written(tmp_path / "tree" / f"{number % 7}" / f"{number}.txt", text)
    assert measured(tmp_path, "tree", 30_000) == 200 * 32_768


def measured(folder: Path, name: str, most_kb: int) -> int:
    """Return how often the letter f is in the texts that a worker has loaded of these files."""
    run = subprocess.run(
        [sys.executable, folder / "measures.py", folder / name],
        env={"PYTHONPATH": REPOSITORY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    stored_kb, count, loaded_kb, _, again_kb = map(int, run.stdout.split())
    assert stored_kb < most_kb
    assert max(loaded_kb, again_kb) < 2_000
    return count


def test_stored_bytes_cannot_be_changed_through_the_descriptor() -> None:
    for value in ("text", {"a": "x" * 5000}, {"a": 1}):
        with store(value) as stored, open(f"/proc/self/fd/{fd_of(stored)}", "r+b", buffering=0) as again:
            assert fcntl.fcntl(fd_of(stored), fcntl.F_GET_SEALS) & SEALS == SEALS
            assert not os.get_inheritable(fd_of(stored))
            for function, *arguments in (
                (os.write, b"x"),
                (os.ftruncate, 0),
                (os.ftruncate, 1 << 20),
                (fcntl.fcntl, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
            ):
                with pytest.raises(PermissionError):
                    function(again.fileno(), *arguments)


def test_context_is_refused_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", no_space)
    for value in ("text", {"a": "text"}, ["text" * 5000, "\u20ac" * 5000]):
        refused(value, "the context cannot be stored in memory: No space left on device")


def test_kernel_without_the_newest_flag_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    create, known = os.memfd_create, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

    def old_kernel(name: str, flags: int) -> int:
        if flags & ~known:
            raise OSError(22, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    with store("text") as stored:
        assert fcntl.fcntl(fd_of(stored), fcntl.F_GET_SEALS) == SEALS
        assert loaded(stored) == "text"


def test_pieces_of_ascii_bytes_are_text_like_any_other() -> None:
    large = b"0123456789abcdef" * 8192
    with context_memfd.TextMemfd() as memfd:
        memfd.add_text(["ab", large, b"cd", "\xe9", b"ef", large, "\u20ac", b"gh", large])
        form, fd = memfd.form, memfd.seal()
    expected = "ab" + large.decode() + "cd\xe9ef" + large.decode() + "\u20acgh" + large.decode()
    try:
        assert load(fd, form, mapping_works=False) == expected
        assert form.length == len(expected)
    finally:
        os.close(fd)


def test_wider_character_widens_only_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_memfd, "_PIECE_CHARS", 5)
    monkeypatch.setattr(context_memfd, "_PIECE_BYTES", 16)
    monkeypatch.setattr(context_memfd, "_LARGE_BYTES", 12)
    rng = random.Random(20261121)
    highest = [0x7F, 0xFF, 0xFFFF, 0x10FFFF]
    for _ in range(300):
        texts: list[list[str | bytes]] = []
        for _ in range(rng.randrange(1, 6)):
            pieces = [
                "".join(chr(rng.randint(0, rng.choice(highest))) for _ in range(rng.randrange(20)))
                for _ in range(rng.randrange(6))
            ]
            texts.append([piece.encode() if piece.isascii() and rng.random() < 0.5 else piece for piece in pieces])
        with context_memfd.TextMemfd() as memfd:
            expected = []
            for pieces_of_text in texts:
                whole = "".join(piece if isinstance(piece, str) else piece.decode() for piece in pieces_of_text)
                if rng.random() < 0.3:
                    with pytest.raises(LookupError):
                        memfd.add_text(failing(pieces_of_text))
                expected.append(whole)
                assert memfd.add_text(pieces_of_text) == len(whole)
            form, fd = memfd.add_names(None), memfd.seal()
        try:
            found = load(fd, form, True)
            assert found == expected
            assert list(map(hash, found)) == list(map(hash, expected))
            assert form.length == sum(-(-(len(text) + 1) * width_of(text) // 8) * 8 for text in expected)
        finally:
            os.close(fd)


def width_of(text: str) -> int:
    widest = max(map(ord, text), default=0)
    return 1 if widest < 0x100 else 2 if widest < 0x10000 else 4


def failing(pieces: list[str | bytes]) -> Iterator[str | bytes]:
    yield from pieces
    yield "\U0001f600"
    raise LookupError


def test_failed_text_is_taken_back() -> None:
    large: list[str | bytes] = [b"a" * MB, "\xe9" * MB, "\u20ac" * MB]
    others: list[list[str | bytes]] = [[], [""], ["small"]]
    with context_memfd.TextMemfd() as memfd:
        memfd.add_text(["before"])
        for pieces in (large, *others):
            with pytest.raises(LookupError):
                memfd.add_text(failing(pieces))
        memfd.add_text([b"behind"])
        form, fd = memfd.add_names(["a", "b"]), memfd.seal()
    try:
        assert form.length == 16
        assert os.fstat(fd).st_size == form.size_bytes
        assert load(fd, form, True) == {"a": "before", "b": "behind"}
    finally:
        os.close(fd)


def test_view_held_by_another_thread_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a profiler holds the view that is being written, which it got from `gc.get_objects`."""
    held: list[object] = []
    write = os.write

    def held_while_written(fd: int, data: memoryview) -> int:
        held.append(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", held_while_written)
    with Memfd() as memfd:
        for _ in range(3):
            memfd.write(b"x" * 100)
            memfd.cut(50)
            memfd.write(b"y" * 100)
        fd = memfd.seal()
    try:
        assert os.pread(fd, 1000, 0) == b"x" * 50 + b"y" * 100
        assert held
    finally:
        os.close(fd)
