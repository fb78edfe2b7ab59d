"""Model code that changes names while the orchestrator reads and writes files: no file of the host is read or changed."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

import pytest

from rlm_broker.errors import FileRefused
from tests.attacks.arena import LIMITS, PROTECTED, Arena, arena_of
from tests.support.waiting import WAIT_S

SWAPS = """
import ctypes, os
os.makedirs('d', exist_ok=True)
open('d/secret.py', 'w').write('own'); open('f', 'w').write('own')
os.symlink('<FOLDER>', 'l'); os.symlink('<FILE>', 'm')
try: os.mkfifo('p')
except OSError: os.symlink('/dev/zero', 'p')
open('ready', 'w').close()
libc = ctypes.CDLL(None)
while not os.path.exists('stop'):
    for one, other in ((b'd', b'l'), (b'f', b'm'), (b'f', b'p')):
        assert libc.renameat2(-100, one, -100, other, 2) == 0  # they are exchanged at once
print('swapped')
"""
SHUTS = """
import ctypes, os, time
os.mkdir('shut', 0)
os.symlink('<FOLDER>', 'link')
libc = ctypes.CDLL(None)
ends = time.monotonic() + 0.5
while time.monotonic() < ends:
    assert libc.renameat2(-100, b'shut', -100, b'link', 2) == 0
print('swapped')
"""


@pytest.fixture(scope="module", params=PROTECTED)
def protected(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with arena_of(request.param) as opened:
        yield opened


def test_swapped_names_never_lead_to_the_host(protected: Arena) -> None:
    with protected.sandbox.repl() as repl:
        ended: list[str] = []
        code = protected.fill_in(SWAPS)
        thread = threading.Thread(target=lambda: ended.append(repl.execute(code, timeout_s=WAIT_S).stdout))
        thread.start()
        while not any(entry.name == "ready" for entry in repl.files.list()):
            assert thread.is_alive()
        read = 0
        for number in itertools.count():
            if number >= 150 and read:
                break
            assert thread.is_alive()
            for path in ("d/secret.py", "f"):
                with contextlib.suppress(FileRefused):
                    assert protected.secret.encode() not in repl.files.read(path, 1 << 16)
                    read += 1
                with contextlib.suppress(FileRefused):
                    repl.files.write(path, b"overwritten")
        repl.files.write("stop", b"")
        thread.join(WAIT_S)
        assert ended == ["swapped\n"]
    assert protected.file.read_text() == f"SECRET = '{protected.secret}'\n"
    protected.goes_on()


def test_folder_swapped_while_counted_keeps_modes(protected: Arena) -> None:
    """Init opens folders without permissions to count them. It must open only those of the scratch folder."""
    before = protected.folder.stat()
    with protected.sandbox.repl() as repl:
        block = repl.execute(protected.fill_in(SHUTS))
    after = protected.folder.stat()
    assert (after.st_mode, after.st_ctime_ns) == (before.st_mode, before.st_ctime_ns)
    assert block.stdout == "swapped\n"


def test_links_planted_by_code_are_not_followed(protected: Arena) -> None:
    with protected.sandbox.repl() as repl:
        repl.execute(protected.fill_in("import os; os.symlink('<FOLDER>', 'out'); os.symlink('<FILE>', 'file')"))
        for path in ("out/secret.py", "file"):
            with pytest.raises(FileRefused, match="links are not followed"):
                repl.files.read(path)
            with pytest.raises(FileRefused, match="links are not followed"):
                repl.files.write(path, b"overwritten")
        with pytest.raises(FileRefused, match="links are not followed"):
            repl.files.list("out")
        with pytest.raises(FileRefused) as refused:
            repl.files.read(str(protected.file))
        assert refused.value.kind in ("missing", "permission")
        assert {(entry.name, entry.kind) for entry in repl.files.list()} == {("out", "link"), ("file", "link")}
    assert protected.file.read_text() == f"SECRET = '{protected.secret}'\n"


def test_absolute_paths_show_no_more_than_code_sees(protected: Arena) -> None:
    """Init sees more of /proc than code, and code may leave links outside of its scratch folder."""
    planted = "import os\ntry: os.symlink('/proc/1/environ', '/dev/shm/environ')\nexcept OSError: pass"
    with protected.sandbox.repl() as repl:
        repl.execute(planted)
        for path in ("/dev/shm/environ", "/proc/1/environ", "/proc/self/mem", f"/proc/{os.getpid()}/cmdline"):
            with pytest.raises(FileRefused):
                repl.files.read(path)
        for path in ("/proc", "/proc/self/cwd", "/proc/self/root"):
            with pytest.raises(FileRefused):
                repl.files.list(path)
        for path in ("/dev/shm/new", "/usr/new"):
            with pytest.raises(FileRefused, match="outside of the scratch folder"):
                repl.files.write(path, b"overwritten")
        for path in (str(protected.file), str(protected.folder / "new")):
            with contextlib.suppress(FileRefused):  # at `strict` /tmp is the scratch folder
                repl.files.write(path, b"overwritten")
    assert not (protected.folder / "new").exists()
    assert protected.file.read_text() == f"SECRET = '{protected.secret}'\n"


def test_hard_link_to_host_file_is_refused(protected: Arena) -> None:
    with protected.sandbox.repl() as repl:
        repl.execute(protected.fill_in("import os; os.link('<FILE>', 'hard')"))
        repl.execute("import os, sys; os.link(os.__file__, 'library')")
        assert repl.files.list() == []


def test_unreadable_folder_costs_only_its_repl(protected: Arena) -> None:
    with protected.sandbox.repl() as repl:
        repl.execute(
            "import os\nos.makedirs('shut/in'); os.chmod('shut', 0)\n"
            "for _ in range(1200):\n    os.mkdir('d'); os.chdir('d')"
        )
        for call in (
            lambda: repl.files.list("shut/in"),
            lambda: repl.files.write("d/" * 1100 + "x", b""),
            lambda: repl.files.write("y", bytes(LIMITS.scratch_bytes + 1)),
        ):
            with contextlib.suppress(FileRefused):
                call()
        assert repl.files.list() != []
    protected.goes_on()
    assert os.path.exists(protected.file)  # noqa: PTH110
