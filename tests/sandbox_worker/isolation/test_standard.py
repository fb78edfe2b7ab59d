"""One worker at `standard`, where there are no namespaces, and what it found: as root and as an ordinary user."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import landlock
from sandbox_worker.isolation.zygote_layers import _others_can_read
from tests.support.launcher import BOUNDS, ROOT_WITH_PUBLIC_PYTHON, SCRATCH_BYTES, USERS, Launcher, launcher_of
from tests.support.skips import require_time_zones
from tests.support.tables import table


def _why_not() -> str:
    try:
        landlock.abi()
    except OSError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=f"standard cannot be had here: {_why_not()}")

LIBC = "__import__('ctypes').CDLL(None, use_errno=True)"
FAILED_WITH = "__import__('ctypes').get_errno()"

ATTACKS = {
    "reads_the_users_of_the_host": ("open('/etc/passwd')", "PermissionError 13"),
    "lists_what_services_keep": ("os.listdir('/var')", "PermissionError 13"),
    "lists_the_root": ("os.listdir('/')", "PermissionError 13"),
    "lists_temporary_files": ("os.listdir('/tmp')", "PermissionError 13"),
    "reads_a_processs_environment": ("open(f'/proc/{os.getppid()}/environ')", "PermissionError 13"),
    "reads_its_own_environment_in_proc": ("open('/proc/self/environ')", "PermissionError 13"),
    "reads_the_machines_memory": ("open('/proc/meminfo')", "PermissionError 13"),
    "writes_to_the_system": ("open('/usr/x', 'w')", ("PermissionError 13", "OSError 30")),
    "writes_to_python": ("open(os.__file__, 'a')", "PermissionError 13"),
    "writes_to_temporary_files": ("open('/tmp/rlm-broker-canary', 'w')", "PermissionError 13"),
    "makes_a_link_to_the_users_files": ("os.link('/etc/hostname', 'stolen')", ("OSError 18", "PermissionError 1")),
    "follows_its_own_link_out": (
        "(os.symlink('/etc/passwd', 'way out'), open('way out'))",
        "PermissionError 13",
    ),
    "truncates_by_path": ("os.truncate(os.__file__, 0)", "PermissionError 1"),
    "forks": ("os.fork()", "PermissionError 1"),
    "starts_a_program": ("os.execv('/bin/true', ['true'])", "PermissionError 1"),
    "spawns_a_program": ("__import__('subprocess').run(['true'])", "PermissionError 1"),
    "kills_init": ("os.kill(os.getppid(), 9)", "PermissionError 1"),
    "kills_everybody": ("os.kill(-1, 9)", "PermissionError 1"),
    "kills_a_thread": (f"({LIBC}.syscall(200, os.getppid(), 9), {FAILED_WITH})", [-1, 1]),
    "opens_a_process": ("os.pidfd_open(os.getppid())", "PermissionError 1"),
    "limits_init": ("__import__('resource').prlimit(os.getppid(), 7)", "PermissionError 1"),
    "slows_init": ("os.setpriority(0, os.getppid(), 19)", "PermissionError 1"),
    "traces_init": (f"({LIBC}.ptrace(16, os.getppid(), 0, 0), {FAILED_WITH})", [-1, 1]),
    "makes_a_socket": ("__import__('socket').socket()", "PermissionError 1"),
    "unshares": (f"({LIBC}.unshare(0x10000000), {FAILED_WITH})", [-1, 1]),
    "becomes_root": ("os.setuid(0)", "PermissionError 1"),
    "opens_64_files": ("[open('/dev/null') for _ in range(64)]", "OSError 24"),
    "writes_a_file_larger_than_the_scratch_folder": (
        f"(open('big', 'wb').truncate({SCRATCH_BYTES + 1}))",
        "OSError 27",
    ),
    "takes_2_gigabytes": ("len(bytearray(2 << 30))", "MemoryError "),
}
ORDINARY = {
    "databases": ("__import__('sqlite3').connect('a.db').execute('create table t (x)').fetchall()", []),
    "temporary_files": ("__import__('tempfile').TemporaryFile(dir='.').write(b'abc')", 3),
    "copies": ("__import__('shutil').copy2(os.__file__, 'copy.py')", "copy.py"),
    "threads": ("__import__('concurrent.futures').futures.ThreadPoolExecutor(4).submit(len, 'abc').result(10)", 3),
    "event_loops": ("__import__('asyncio').run(__import__('asyncio').to_thread(len, 'abc'))", 3),
    "devices": ("len(open('/dev/urandom', 'rb').read(8)) + len(open('/dev/zero', 'rb').read(8))", 16),
    "nothing_to_write_to": ("open('/dev/null', 'w').write('abc')", 3),
    "time_zones": ("str(__import__('zoneinfo').ZoneInfo('UTC'))", "UTC"),
    "its_own_signals": ("os.kill(os.getpid(), 0)", None),
    "files_of_its_own": (
        "(open('a', 'w').write('x'), os.rename('a', 'b'), os.mkdir('d'), os.unlink('b'), sorted(os.listdir('.'))[-1])[4]",
        "d",
    ),
}


@pytest.fixture(scope="module", params=[*USERS, ROOT_WITH_PUBLIC_PYTHON])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with launcher_of(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def standard(launcher: Launcher) -> dict[str, Any]:
    probes = {name: expression for name, (expression, _) in {**ORDINARY, **ATTACKS}.items()}
    return launcher.run(
        level="standard",
        probes=probes,
        init_probes={
            "parent": "os.getppid()",
            "fork": "os.waitpid(os.fork() or os._exit(0), 0)[1]",
            "sees": "'VmRSS' in open('/proc/self/status').read()",
        },
    )


@table("name", [*ATTACKS, *ORDINARY])
def test_repl_at_standard_is_as_expected(standard: dict[str, Any], name: str) -> None:
    """Attacks are refused, and ordinary work works."""
    if name == "time_zones":
        require_time_zones()
    found, expected = standard["of repl"][name], {**ATTACKS, **ORDINARY}[name][1]
    assert found in expected if isinstance(expected, tuple) else found == expected


def test_standard_layers_are_reported(standard: dict[str, Any]) -> None:
    assert standard["zygote"] == []
    layers = ["capabilities", "parent death signal", "no_new_privs", "not dumpable", "landlock", "seccomp"]
    assert [name for name in standard["init"] if name != "own uid"] == ["session", *layers]
    assert standard["repl"] == ["parent death signal", "rlimits", "landlock", "seccomp"]
    assert standard["stderr"] == ""
    assert (standard["of init"]["fork"], standard["of init"]["sees"]) == (0, True)


def test_user_file_is_unchanged(launcher: Launcher) -> None:
    victim = Path("/usr") if launcher.uid is None and os.getuid() == 0 else Path(os.__file__)
    before = victim.stat()
    probes = {"chmod": f"os.chmod({str(victim)!r}, 0)", "touch": f"os.utime({str(victim)!r}, (0, 0))"}
    found = launcher.run(level="standard", probes=probes)["of repl"]
    assert found == {"chmod": None, "touch": None}
    assert (victim.stat().st_mode, victim.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_root_worker_has_own_uid_and_thread_bound(launcher: Launcher, request: pytest.FixtureRequest) -> None:
    start = "__import__('threading').Thread(target=__import__('time').sleep, args=(5,), daemon=True).start()"
    code = f"[{start} for _ in range({2 * BOUNDS['max_processes']})]"
    report = launcher.run(level="standard", probes={"threads": code, "id": "os.getuid()"})
    launched_as = request.node.callspec.params["launcher"]
    public = all(_others_can_read(path) for path in (sys.prefix, sys.base_prefix))
    if launched_as == ROOT_WITH_PUBLIC_PYTHON or (launched_as == "root" and public):
        assert "own uid" in report["init"]
        assert report["of repl"]["id"] >= 0x70000000
        assert report["of repl"]["threads"] == "RuntimeError can't start new thread"
    else:
        assert "own uid" not in report["init"]
        assert report["of repl"]["id"] == (os.getuid() if launcher.uid is None else launcher.uid)
