"""Contexts: how long until a REPL has one, next to a bare copy of the same bytes and to a bare python."""

import contextlib
import json
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from rlm_broker.context.store import store
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from scripts import make_log
from scripts.bench.measure import Effort, by_turns, opening_seconds, seconds
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Check, Curve, Row, Side, side

MB = 1_000_000
SIZES_MB = (1, 10, 100, 1_000)
FILES = 10_000
FILE_BYTES = 50_000
NON_ASCII = "Zeitüberschreitung — naïve café №7 "


def ascii_file(effort: Effort) -> list[Row]:
    """Time a file of ASCII text: into a first REPL, a further one, and a new one after a kill."""
    size = effort.size(1_000) * MB
    with _folder() as folder, Sandbox(warm=0) as sandbox, Peer("DSPy", "dspy_repl.py", "dspy") as dspy:
        path = _log(folder, size)
        ours, copy, mapped, decoded, wasm = by_turns(
            effort.times(5),
            lambda: opening_seconds(lambda: sandbox.repl(path)),
            lambda: seconds(lambda: _sendfile(path)),
            lambda: seconds(lambda: _str_of_mmap(path)),
            lambda: seconds(lambda: path.read_text(encoding="utf-8")),
            lambda: dspy.samples("context"),
        )
        further = _further(sandbox, path, effort.times(40), at_most=1)
    taken, floor = side(OURS, "s", ours), side("sendfile into a memfd", "s", copy)
    others = (
        floor,
        side("str(mmap), bare python", "s", mapped),
        side("read and decode, bare python", "s", decoded),
        Side("DSPy, 10 MB", "s", wasm, dspy.problem),
    )
    return [
        Row(
            f"context of {size // MB:,} MB of ASCII text into a REPL", taken, others, [taken.at_most_times(1.3, floor)]
        ),
        *further,
    ]


def folder(effort: Effort) -> list[Row]:
    """Time a folder of many files: into a first REPL, a further one, and a new one after a kill."""
    files = effort.size(FILES)
    with _folder() as place, Sandbox(warm=0) as sandbox:
        tree = _tree(place, files)
        ours, bare = by_turns(
            effort.times(5),
            lambda: opening_seconds(lambda: sandbox.repl(tree)),
            lambda: seconds(lambda: {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*.txt")}),
        )
        further = _further(sandbox, tree, effort.times(40), at_most=20)
    taken, python = side(OURS, "s", ours), side("read and decode, bare python", "s", bare)
    what = f"context: a folder of {files:,} files, {files * FILE_BYTES // MB} MB, into a REPL"
    return [Row(what, taken, [python], [taken.at_most_times(1.3, python)]), *further]


def other_contexts(effort: Effort) -> list[Row]:
    """Time contexts that have to be decoded, next to the same work in a bare python."""
    size = effort.size(1_000) * MB
    with _folder() as folder, Sandbox(Limits(memory_bytes=8 << 30)) as sandbox:
        text = _non_ascii(folder, size)
        value = plain_dict(effort.size(200) * MB)
        contexts: Sequence[tuple[str, object, str, Callable[[], object]]] = (
            (f"{size // MB:,} MB that is not ASCII", text, "read and decode", lambda: text.read_text(encoding="utf-8")),
            (f"a dict of {effort.size(200)} MB", value, "json there and back", lambda: json.loads(json.dumps(value))),
        )
        rows = []
        for what, context, how, bare in contexts:
            ours, floor = by_turns(
                effort.times(3), partial(opening_seconds, partial(sandbox.repl, context)), partial(seconds, bare)
            )
            taken, python = side(OURS, "s", ours), side(f"{how}, bare python", "s", floor)
            rows.append(Row(f"context: {what}, into a REPL", taken, [python], [taken.at_most_times(1.3, python)]))
    return rows


def sizes(effort: Effort) -> list[Curve]:
    """Time loading for growing sizes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    with _folder() as folder, Sandbox(warm=0) as sandbox:
        for size in SIZES_MB[:2] if effort.quick else SIZES_MB:
            path = _log(folder, size * MB)
            ours, copy, decoded = by_turns(
                3,
                partial(opening_seconds, partial(sandbox.repl, path)),
                partial(seconds, partial(_sendfile, path)),
                partial(seconds, path.read_text),
            )
            for name, taken in ((OURS, ours), ("sendfile", copy), ("read and decode", decoded)):
                lines.setdefault(name, []).append((size, side(name, "s", taken).median or 0))
            path.unlink()
    return [Curve("context load", "MB of ASCII text", "s", lines)]


# -- ours ------------------------------------------------------------------------------------------------------------


def _further(sandbox: Sandbox, path: Path, times: int, at_most: float) -> list[Row]:
    """Compare a further REPL on a stored context with one on an empty context: `at_most` ms or MB more."""
    with store(path) as stored, store("") as empty, sandbox.repl(stored):
        full, bare = by_turns(
            times,
            lambda: opening_seconds(lambda: sandbox.repl(stored)),
            lambda: opening_seconds(lambda: sandbox.repl(empty)),
        )
        size, bare_size = by_turns(
            max(2, times // 8), lambda: [_repl_bytes(sandbox, stored)], lambda: [_repl_bytes(sandbox, empty)]
        )
        killed, bare_killed = by_turns(
            max(2, times // 8), lambda: [_after_kill(sandbox, stored)], lambda: [_after_kill(sandbox, empty)]
        )
    rows = []
    for what, unit, ours, floor in (
        ("context, as above: a further REPL on it", "ms", full, bare),
        ("context, as above: a fresh REPL after a kill", "ms", killed, bare_killed),
        ("context, as above: memory of a further REPL", "MB", size, bare_size),
    ):
        taken, other = side(OURS, unit, ours), side("empty context", unit, floor)
        more = (taken.median or 0) - (other.median or 0)
        check = Check(f"≤ {at_most} {unit} more than on an empty one", more <= at_most)
        rows.append(Row(what, taken, [other], [check], f"{more:+.2g} {unit}"))
    return rows


def _repl_bytes(sandbox: Sandbox, context: object) -> float:
    before = set(psutil.Process().children(recursive=True))
    with sandbox.repl(context) as repl:
        repl.execute("len(context)")
        new = [process for process in psutil.Process().children(recursive=True) if process not in before]
        return float(sum(process.memory_full_info().uss for process in new))


def _after_kill(sandbox: Sandbox, context: object) -> float:
    """Time the first block after one that ended the REPL: a new REPL is started for it."""
    with sandbox.repl(context) as repl:
        repl.execute("import os; os._exit(1)")
        return seconds(lambda: repl.execute("len(context)"))[0]


# -- beside it -------------------------------------------------------------------------------------------------------


def _sendfile(path: Path) -> None:
    memfd = os.memfd_create("copy")
    with path.open("rb") as file:
        left = path.stat().st_size
        while left:
            left -= os.sendfile(memfd, file.fileno(), None, left)
    os.close(memfd)


def _str_of_mmap(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        str(mapped, "ascii")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _log(folder: Path, size: int) -> Path:
    """Write a log of that size, which repeats one piece."""
    piece, path = folder / "piece", folder / f"{size}.log"
    make_log.write(piece, min(size, 10 * MB), seed=7)
    _repeat(path, piece.read_bytes(), size)
    return path


def _non_ascii(folder: Path, size: int) -> Path:
    path = folder / "not_ascii.txt"
    _repeat(path, (NON_ASCII * 10_000 + "\n").encode(), size)
    return path


def _repeat(path: Path, piece: bytes, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(max(1, size // len(piece))):
            file.write(piece)


def _tree(folder: Path, files: int) -> Path:
    tree, text = folder / "tree", next(make_log.lines(FILE_BYTES, seed=7))
    for number in range(files):
        path = tree / f"part_{number % 100:02}" / f"file_{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(text))
    return tree


def plain_dict(size: int) -> dict[str, object]:
    """Return records of about a kilobyte each, `size` bytes in all."""
    rng = random.Random(7)
    record = {"id": 1, "user": "someone", "tags": ["a", "b", "c"], "score": 0.5, "text": "some words " * 80}
    return {f"key_{number}": {**record, "id": number, "score": rng.random()} for number in range(size // 1_000)}
