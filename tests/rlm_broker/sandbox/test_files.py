"""Files of real REPLs at each level: written, read, saved and listed by the orchestrator, also beside a running block."""

import asyncio
import os
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import ConfigurationError, FileEntry, FileRefused, ReplClosed, ReplLimits, Sandbox, SandboxFailed
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.sandbox import files
from rlm_broker.sandbox.files import ReplFiles
from sandbox_worker.wire.control import Listed, ListedEntry
from tests.support.scratch import TEMPORARY
from tests.support.tables import table
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
SMALL = ReplLimits(scratch_bytes=1 << 20, max_scratch_files=20)


@pytest.fixture(scope="module", params=["strict", "standard", "process"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One open sandbox of each level. It keeps no workers ready, which would open files of their own."""
    with Sandbox(isolation=request.param, warm=0) as opened:
        yield opened


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names


def test_files_go_in_and_come_out_as_they_are(sandbox: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    (tmp_path / "from").write_bytes(data)
    with sandbox.repl() as repl:
        repl.files.write("a.bin", data)
        repl.files.write("deep/er/b.bin", tmp_path / "from")
        repl.files.write("empty", b"")
        code = "import os; [os.path.getsize(name) for name in ('a.bin', 'deep/er/b.bin', 'empty')]"
        assert repl.execute(code).stdout == f"[{len(data)}, {len(data)}, 0]\n"
        repl.execute("open('out', 'wb').write(open('a.bin', 'rb').read()[::-1])")
        before = open_files()
        assert repl.files.read("out") == data[::-1]
        repl.files.save("out", tmp_path / "saved")
        assert (tmp_path / "saved").read_bytes() == data[::-1]
        assert {path.name for path in tmp_path.iterdir()} == {"from", "saved"}
        repl.files.write("out", b"short")
        assert repl.files.read(Path("out")) == b"short"
        assert [each.name for each in repl.files.list()] == ["a.bin", "deep", "empty", "out"]
        assert repl.files.list("deep/er") == [FileEntry("b.bin", "file", len(data))]
        assert open_files() == before


def test_removed_file_is_gone_and_links_keep_targets(sandbox: Sandbox) -> None:
    """A removed file is gone, of a link the link alone goes, and a folder or a missing file is refused."""
    with sandbox.repl() as repl:
        repl.files.write("deep/a.txt", b"a")
        repl.files.write("b.txt", b"b")
        repl.execute("import os; os.symlink('b.txt', 'link'); os.symlink('deep', 'way')")
        repl.files.remove("deep/a.txt")
        repl.files.remove("link")
        assert [each.name for each in repl.files.list()] == ["b.txt", "deep", "way"]
        assert repl.files.list("deep") == []
        for path, why in {"deep": "is a folder", "way/x": "link", "deep/a.txt": "No such file"}.items():
            with pytest.raises(FileRefused, match=f"'{path}' .*{why}"):
                repl.files.remove(path)
        with pytest.raises(FileRefused, match=r"without '\.\.'"):
            repl.files.remove("../b.txt")


def test_absolute_path_is_that_of_the_code(sandbox: Sandbox, tmp_path: Path) -> None:
    """Code and host name the same file by the same path. Elsewhere the host reads what code may read."""
    with sandbox.repl() as repl:
        folders = repl.execute("import os; [os.getcwd(), os.environ['TMPDIR']]", value=True).value
        for folder in {*folders, *([TEMPORARY] if sandbox.level == "strict" else [])}:
            repl.files.write(f"{folder}/sub/a.txt", b"a")
            assert repl.execute(f"open('{folder}/sub/a.txt').read()", value=True).value == "a"
            assert repl.files.list(f"{folder}/sub") == repl.files.list("sub") == [FileEntry("a.txt", "file", 1)]
            repl.files.remove(f"{folder}/sub/a.txt")
            assert repl.files.list("sub") == []
        library = os.__file__
        assert repl.files.read(library) == Path(library).read_bytes()
        repl.files.save(library, tmp_path / "os.py")
        assert any(entry.name == "os.py" for entry in repl.files.list(Path(library).parent))
        for path in ("/usr/new", library):
            with pytest.raises(FileRefused, match=r"is outside of the scratch folder") as refused:
                repl.files.write(path, b"x")
            assert refused.value.kind == "permission"
            assert pickle.loads(pickle.dumps(refused.value)).kind == "permission"


async def test_files_are_copied_beside_a_running_block(sandbox: Sandbox) -> None:
    async with sandbox.repl() as repl:
        code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nopen('done', 'w').write('yes')"
        block = asyncio.create_task(repl.aexecute(code))
        assert await repl.files.alist() == []
        await asyncio.gather(*(repl.files.awrite(f"f{number}", bytes(9)) for number in range(20)))
        assert len(await repl.files.alist()) == 20
        assert not block.done()
        await repl.files.awrite("go", b"")
        assert (await asyncio.wait_for(block, WAIT_S)).status == "ok"
        assert await repl.files.aread("done") == b"yes"


@table(
    "path, why",
    [
        ("/", "names no file"),
        ("/usr/../x", "without '..'"),
        ("../x", "without '..'"),
        ("a/../../x", "without '..'"),
        ("", "names no file"),
        ("./.", "names no file"),
        ("a\0b", "NUL character"),
        ("x" * 5000, "over 4,096 bytes"),
        ("\ud800", "lone surrogates"),
        (7, "a path in a REPL must be text, not int"),
        (b"x", "a path in a REPL must be text, not bytes"),
    ],
)
def test_invalid_path_is_refused_by_each_method(path: Any, why: str, tmp_path: Path, open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        for call in (
            lambda: repl.files.read(path),
            lambda: repl.files.write(path, b""),
            lambda: repl.files.save(path, tmp_path / "x"),
        ):
            with pytest.raises(FileRefused if isinstance(path, str) else ConfigurationError, match=re.escape(why)):
                call()


def test_invalid_file_argument_is_refused_in_words(tmp_path: Path, open_sandbox: Sandbox) -> None:
    os.mkfifo(tmp_path / "fifo")
    with open_sandbox.repl() as repl:
        files: Any = repl.files
        for call, given, why in (
            (files.write, "text", r"data must be bytes or a Path .* not str: for text give `data.encode\(\)`"),
            (files.write, tmp_path / "none", "cannot be read: No such file"),
            (files.write, tmp_path / "fifo", "is not a regular file"),
            (files.write, tmp_path, "is not a regular file"),
            *((files.read, bound, "give a number of bytes") for bound in (-1, True, "9")),
        ):
            with pytest.raises(ConfigurationError, match=why):
                call("x", given)
        assert files.list() == []
        files.write("x", b"x")
        for to, why in (
            (tmp_path, "is a folder: name the file"),
            (tmp_path / "none" / "x", "cannot be written: No such file"),
            ("", "to must be a path of the host"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                files.save("x", to)
        with pytest.raises(FileRefused, match="'none' cannot be opened: No such file or directory"):
            files.save("none", tmp_path / "never")
        assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_scratch_bounds_hold_for_written_files(sandbox: Sandbox) -> None:
    with sandbox.repl(limits=SMALL) as repl:
        repl.execute("x = 1")
        repl.files.write("kept", b"kept")
        with pytest.raises(FileRefused, match=r"'kept' needs 2,097,152 bytes, and scratch_bytes leaves room for"):
            repl.files.write("kept", bytes(2 << 20))
        assert repl.files.read("kept") == b"kept"
        for number in range(19):
            repl.files.write(f"f{number}", b"")
        with pytest.raises(FileRefused, match=r"max_scratch_files|No space left"):
            repl.files.write("one-too-many", b"")
        assert repl.execute("x").stdout == "1\n"


def test_file_above_the_asked_size_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    with sandbox.repl(limits=SMALL) as repl:
        repl.execute("f = open('sparse', 'wb'); f.truncate(1 << 20); f.close()")
        with pytest.raises(
            FileRefused, match=r"'sparse' has 1,048,576 bytes, more than max_bytes = 1,000: raise it, or"
        ) as refused:
            repl.files.read("sparse", 1000)
        assert refused.value.kind == "too_large"
        repl.files.save("sparse", tmp_path / "whole")
        assert (tmp_path / "whole").stat().st_size == 1 << 20


def test_file_growing_while_read_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file has 10 bytes when its size is looked at, and one more after each byte that is read."""
    monkeypatch.setattr(files, "PIECE_BYTES", 1)
    path = tmp_path / "grows"
    path.write_bytes(bytes(10))
    with path.open("rb", 0) as grows, path.open("ab", 0) as more, pytest.raises(FileRefused, match="has grown to 20"):
        files._copy(grows.fileno(), more.write, 20, "20", threading.Event())


def test_files_stay_when_the_repl_is_killed(sandbox: Sandbox) -> None:
    """A file is read in pieces after its removal, too."""
    with sandbox.repl() as repl:
        repl.files.write("kept", b"kept")
        assert repl.execute("import os; os._exit(1)").status == "killed"
        assert repl.files.read("kept") == b"kept"
        assert repl.execute("open('kept').read()").stdout == "'kept'\n"
        before = open_files()
        with repl.files.open("kept") as file:
            assert file.read(2) == b"ke"
            repl.files.remove("kept")
            assert file.read() == b"pt"
        assert open_files() == before


def test_repl_that_is_not_open_has_no_files(open_sandbox: Sandbox) -> None:
    repl = open_sandbox.repl()
    with pytest.raises(SandboxFailed, match="the REPL is not open"):
        repl.files.list()
    with repl:
        repl.files.write("x", b"")
    with pytest.raises(ReplClosed):
        repl.files.read("x")


async def test_copy_that_is_cancelled_leaves_nothing_open(tmp_path: Path, open_sandbox: Sandbox) -> None:
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(64 << 20)
    async with open_sandbox.repl() as repl:
        await repl.files.awrite("x", bytes(32 << 20))
        before = open_files()
        for wait in range(12):
            copies = [
                asyncio.create_task(repl.files.awrite("y", large)),
                asyncio.create_task(repl.files.asave("x", tmp_path / "saved")),
                asyncio.create_task(repl.files.aread("x")),
            ]
            for _ in range(wait * 3):
                await asyncio.sleep(0)
            for copy in copies:
                copy.cancel()
            await asyncio.wait(copies)
        await repl.files.alist()
        assert open_files() == before
        assert {path.name for path in tmp_path.iterdir()} <= {"large", "saved"}


async def test_list_that_never_ends_is_refused() -> None:
    class Init:
        """Return the same page again and again, or a new one each time."""

        def __init__(self, *, goes_on: bool) -> None:
            self.goes_on, self.pages = goes_on, 0

        async def list_folder(self, _path: list[bytes], _after: bytes) -> Listed:
            self.pages += self.goes_on
            names = [b"%06d" % (self.pages * 100 + each) for each in range(100)]
            return Listed(entries=[ListedEntry(name, "file", 1) for name in names], is_all=False)

    for goes_on in (False, True):
        init: Any = Init(goes_on=goes_on)

        async def worker(init: Any = init) -> Any:
            return init

        with pytest.raises(SandboxFailed, match="does not end"):
            await ReplFiles(EventLoopRef.here(), worker, 1 << 20, print).alist()
