"""The layers in their order, around a real worker: at each level, as root and as an ordinary user."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import landlock
from sandbox_worker.isolation.zygote_layers import _others_can_read
from tests.support.launcher import (
    BOUNDS,
    ROOT_WITH_PUBLIC_PYTHON,
    SCRATCH_BYTES,
    USERS,
    WHY_NOT_STRICT,
    Launcher,
    launcher_of,
    needs_strict,
)
from tests.support.skips import NEEDS_ROOT, require_time_zones
from tests.support.tables import table


def _why_not_standard() -> str:
    try:
        landlock.abi()
    except OSError as error:
        return str(error)
    return ""


needs_standard = pytest.mark.skipif(
    bool(_why_not_standard()), reason=f"standard cannot be had here: {_why_not_standard()}"
)


@pytest.fixture(scope="module", params=USERS)
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with launcher_of(request.param) as made:
        yield made


@pytest.fixture(scope="module", params=[*USERS, ROOT_WITH_PUBLIC_PYTHON])
def at_standard(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with launcher_of(request.param) as made:
        yield made


SIGNALS_ARE_GOVERNED = not WHY_NOT_STRICT and landlock.abi() >= 6  # elsewhere the kernel drops what is sent to a pid 1

# -- one worker, and what its REPL found -----------------------------------------------------------------------------

STATUS = "dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())"
FAILED_WITH = "__import__('ctypes').get_errno()"
LIBC = "__import__('ctypes').CDLL(None, use_errno=True)"
GONE, DENIED, NOT_PERMITTED, READ_ONLY = "FileNotFoundError 2", "PermissionError 13", "PermissionError 1", "OSError 30"

AT_BOTH = {
    "reads_the_users_of_the_host": ("open('/etc/passwd')", GONE, DENIED),
    "lists_what_services_keep": ("os.listdir('/var')", GONE, DENIED),
    "reads_the_machines_memory": ("open('/proc/meminfo')", GONE, DENIED),
    "writes_to_the_system": ("open('/usr/x', 'w')", READ_ONLY, (DENIED, READ_ONLY)),
    "writes_to_python": ("open(os.__file__, 'a')", (READ_ONLY, DENIED), DENIED),
    "reads_the_environment_of_init": ("open(f'/proc/{os.getppid()}/environ').read()", DENIED, DENIED),
    "traces_init": (f"({LIBC}.ptrace(16, os.getppid(), 0, 0), {FAILED_WITH})", [-1, 1], [-1, 1]),
    "makes_a_socket": ("__import__('socket').socket()", NOT_PERMITTED, NOT_PERMITTED),
    "unshares": (f"({LIBC}.unshare(0x10000000), {FAILED_WITH})", [-1, 1], [-1, 1]),
    "becomes_root": ("os.setuid(0)", NOT_PERMITTED, NOT_PERMITTED),
    "starts_a_program": ("os.execv('/bin/true', ['true'])", NOT_PERMITTED, NOT_PERMITTED),
    "opens_64_files": ("[open('/dev/null') for _ in range(64)]", "OSError 24", "OSError 24"),
    "writes_too_large_a_file": (f"(open('big', 'wb').truncate({SCRATCH_BYTES + 1}))", "OSError 27", "OSError 27"),
    "takes_2_gigabytes": ("len(bytearray(2 << 30))", "MemoryError ", "MemoryError "),
    # Ordinary work. `tests/attacks/test_controls.py` has more of it.
    "databases": ("__import__('sqlite3').connect('a.db').execute('create table t (x)').fetchall()", [], []),
    "temporary_files": ("__import__('tempfile').TemporaryFile(dir='.').write(b'abc')", 3, 3),
    "copies": ("__import__('shutil').copy2(os.__file__, 'copy.py')", "copy.py", "copy.py"),
    "event_loops": ("__import__('asyncio').run(__import__('asyncio').to_thread(len, 'abc'))", 3, 3),
    "devices": ("len(open('/dev/urandom', 'rb').read(8)) + len(open('/dev/zero', 'rb').read(8))", 16, 16),
    "nothing_to_write_to": ("open('/dev/null', 'w').write('abc')", 3, 3),
    "time_zones": ("str(__import__('zoneinfo').ZoneInfo('UTC'))", "UTC", "UTC"),
}
"""Name → expression, and what comes of it at `strict` and at `standard`: a value, or a tuple of possible ones."""
CAPABILITY_SETS = "('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')"
AT_STRICT = {name: (code, found) for name, (code, found, _) in AT_BOTH.items()} | {
    "lists_the_hosts_devices": ("os.listdir('/sys')", GONE),
    "writes_to_the_root": ("open('/x', 'w')", READ_ONLY),
    "changes_the_modes_of_the_system": ("os.chmod('/usr', 0o777)", READ_ONLY),
    "changes_a_device": ("os.chmod('/dev/null', 0)", READ_ONLY),
    "maps_shared_zeros_that_no_limit_sees": ("open('/dev/zero', 'r+b', buffering=0)", DENIED),
    "reads_the_memory_of_init": ("open('/proc/1/mem', 'rb')", DENIED),
    "reads_the_maps_of_init": ("open('/proc/1/maps').read()", DENIED),
    "lists_the_descriptors_of_init": ("os.listdir('/proc/1/fd')", DENIED),
    "goes_to_the_root_of_init": ("os.listdir('/proc/1/root')", DENIED),
    "mounts": (f"({LIBC}.mount(b'x', b'/w', b'tmpfs', 0, 0), {FAILED_WITH})", [-1, 1]),
    "raises_its_limit": (
        "__import__('resource').setrlimit(7, (1000, 1000))",
        "ValueError not allowed to raise maximum limit",
    ),
    "no_capability_is_left": (f"[{STATUS}[name].strip().strip('0') for name in {CAPABILITY_SETS}]", [""] * 5),
    "no_new_privileges": (f"{STATUS}['NoNewPrivs'].strip()", "1"),
    "two_filters": (f"{STATUS}['Seccomp_filters'].strip()", "2"),
    "it_is_not_root": ("0 in os.getresuid() + os.getresgid()", False),
    "its_init_is_pid_1": ("os.getppid()", 1),
    "it_sees_no_other_process": ("len([name for name in os.listdir('/proc') if name.isdigit()])", 2),
    "its_core_dumps_are_bound_to_a_byte": ("__import__('resource').getrlimit(4)[1] <= 1", True),
    "it_is_the_first_to_be_killed": ("open('/proc/self/oom_score_adj').read().strip()", "1000"),
    "it_is_nice": ("os.getpriority(0, 0) >= 5", True),
    "it_is_in_its_scratch_folder": ("os.getcwd()", "/w"),
    "its_host_name_says_nothing": ("os.uname().nodename", "rlm"),
    "it_has_no_network_but_a_loopback": ("open('/proc/self/net/dev').read().count(':')", 1),
    "what_is_hidden_is_empty": ("os.path.exists('/usr/share/doc') and os.listdir('/usr/share/doc') or []", []),
    "init_cannot_be_killed": ("os.kill(1, 9)", "PermissionError 1" if SIGNALS_ARE_GOVERNED else None),
    "init_is_there_after_it": ("os.getppid()", 1),
    "semaphores": ("__import__('multiprocessing').get_context('fork').Semaphore(2).acquire()", True),
    "forks": ("__import__('multiprocessing').get_context('fork').Pool(2).map(len, ['a', 'bb'])", [1, 2]),
    "links_to_its_own_descriptors": ("os.readlink('/dev/stdin')", "/proc/self/fd/0"),
    "fills_the_scratch_folder": (
        f"[open(name, 'wb').write(bytes({SCRATCH_BYTES // 2})) for name in ('one', '/dev/shm/two', 'three')]",
        "OSError 28",
    ),
}
AT_STANDARD = {name: (code, found) for name, (code, _, found) in AT_BOTH.items()} | {
    "lists_the_root": ("os.listdir('/')", DENIED),
    "lists_temporary_files": ("os.listdir('/tmp')", DENIED),
    "reads_its_own_environment_in_proc": ("open('/proc/self/environ')", DENIED),
    "writes_to_temporary_files": ("open('/tmp/rlm-broker-canary', 'w')", DENIED),
    "makes_a_link_to_the_users_files": ("os.link('/etc/hostname', 'stolen')", ("OSError 18", NOT_PERMITTED)),
    "follows_its_own_link_out": ("(os.symlink('/etc/passwd', 'way out'), open('way out'))", DENIED),
    "truncates_by_path": ("os.truncate(os.__file__, 0)", NOT_PERMITTED),
    "forks": ("os.fork()", NOT_PERMITTED),
    "spawns_a_program": ("__import__('subprocess').run(['true'])", NOT_PERMITTED),
    "kills_init": ("os.kill(os.getppid(), 9)", NOT_PERMITTED),
    "kills_everybody": ("os.kill(-1, 9)", NOT_PERMITTED),
    "kills_a_thread": (f"({LIBC}.syscall(200, os.getppid(), 9), {FAILED_WITH})", [-1, 1]),
    "opens_a_process": ("os.pidfd_open(os.getppid())", NOT_PERMITTED),
    "limits_init": ("__import__('resource').prlimit(os.getppid(), 7)", NOT_PERMITTED),
    "slows_init": ("os.setpriority(0, os.getppid(), 19)", NOT_PERMITTED),
    "its_own_signals": ("os.kill(os.getpid(), 0)", None),
    "files_of_its_own": (
        "(open('a', 'w').write('x'), os.rename('a', 'b'), os.mkdir('d'), os.unlink('b'), os.listdir('d'))[4]",
        [],
    ),
}
OF_INIT = {
    "cannot_be_read": (f"{LIBC}.prctl(3)", 0),  # PR_GET_DUMPABLE
    "leads_a_session_that_no_sibling_is_in": ("os.getsid(0)", 1),
    "is_pid_1": ("os.getpid()", 1),
    "may_fork_and_wait": ("os.waitpid(os.fork() or os._exit(0), 0)[1]", 0),
    "may_pass_descriptors": ("[end.sendmsg([b'x']) for end in __import__('socket').socketpair()]", [1, 1]),
    "may_shrink_a_pipe": ("__import__('fcntl').fcntl(os.pipe()[1], 1031, 4096)", 4096),
    "makes_no_socket": ("__import__('socket').socket()", "PermissionError 1"),
}


def expressions(probes: dict[str, tuple[str, Any]]) -> dict[str, str]:
    return {name: code for name, (code, _) in probes.items()}


@pytest.fixture(scope="module")
def strict(launcher: Launcher) -> dict[str, Any]:
    return launcher.run(probes=expressions(AT_STRICT), init_probes=expressions(OF_INIT), hidden=["/usr/share/doc"])


@pytest.fixture(scope="module")
def standard(at_standard: Launcher) -> dict[str, Any]:
    init_probes = {
        "parent": "os.getppid()",
        "fork": "os.waitpid(os.fork() or os._exit(0), 0)[1]",
        "sees": "'VmRSS' in open('/proc/self/status').read()",
    }
    return at_standard.run(level="standard", probes=expressions(AT_STANDARD), init_probes=init_probes)


def check(found: dict[str, Any], name: str, expected: Any) -> None:
    if name == "time_zones":
        require_time_zones()
    assert found[name] in expected if isinstance(expected, tuple) else found[name] == expected


@needs_strict
@table("name", AT_STRICT)
def test_repl_at_strict_is_as_expected(strict: dict[str, Any], name: str) -> None:
    """Attacks are refused, and ordinary work works."""
    check(strict["of repl"], name, AT_STRICT[name][1])


@needs_standard
@table("name", AT_STANDARD)
def test_repl_at_standard_is_as_expected(standard: dict[str, Any], name: str) -> None:
    """Attacks are refused, and ordinary work works."""
    check(standard["of repl"], name, AT_STANDARD[name][1])


@needs_strict
@table("name", OF_INIT)
def test_init_can_do_its_work_and_not_much_more(strict: dict[str, Any], name: str) -> None:
    check(strict["of init"], name, OF_INIT[name][1])


@needs_strict
def test_layers_are_reported_in_order(launcher: Launcher, strict: dict[str, Any]) -> None:
    as_root = ["private root", "other uid", "namespaces", "pid 1", "own proc", "host name"]
    as_user = ["namespaces", "pid 1", "private root", "own proc", "host name"]
    root = os.getuid() == 0 and launcher.uid is None
    assert strict["zygote"] == (as_root if root else as_user)
    own_uid = ["own uid"] if root else []
    layers_of_init = ["session", *own_uid, "mounts", "user namespace", "capabilities", "no_new_privs", "not dumpable"]
    assert strict["init"] == [*layers_of_init, "landlock", "seccomp"]
    assert strict["repl"] == ["rlimits", "landlock", "seccomp"]


@needs_strict
def test_init_outlives_attacks_and_monitor_ends(strict: dict[str, Any]) -> None:
    assert strict["init ended with"] == 5
    assert strict["exit code"] == 0
    assert strict["stderr"] == ""


@needs_standard
def test_standard_layers_are_reported(standard: dict[str, Any]) -> None:
    assert standard["zygote"] == []
    layers = ["capabilities", "parent death signal", "no_new_privs", "not dumpable", "landlock", "seccomp"]
    assert [name for name in standard["init"] if name != "own uid"] == ["session", *layers]
    assert standard["repl"] == ["parent death signal", "rlimits", "landlock", "seccomp"]
    assert standard["stderr"] == ""
    assert (standard["of init"]["fork"], standard["of init"]["sees"]) == (0, True)


@needs_standard
def test_user_file_is_unchanged(at_standard: Launcher) -> None:
    victim = Path("/usr") if at_standard.uid is None and os.getuid() == 0 else Path(os.__file__)
    before = victim.stat()
    probes = {"chmod": f"os.chmod({str(victim)!r}, 0)", "touch": f"os.utime({str(victim)!r}, (0, 0))"}
    found = at_standard.run(level="standard", probes=probes)["of repl"]
    assert found == {"chmod": None, "touch": None}
    assert (victim.stat().st_mode, victim.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@needs_standard
def test_root_worker_has_own_uid_and_thread_bound(at_standard: Launcher, request: pytest.FixtureRequest) -> None:
    start = "__import__('threading').Thread(target=__import__('time').sleep, args=(5,), daemon=True).start()"
    code = f"[{start} for _ in range({2 * BOUNDS['max_processes']})]"
    report = at_standard.run(level="standard", probes={"threads": code, "id": "os.getuid()"})
    launched_as = request.node.callspec.params["at_standard"]
    public = all(_others_can_read(path) for path in (sys.prefix, sys.base_prefix))
    if launched_as == ROOT_WITH_PUBLIC_PYTHON or (launched_as == "root" and public):
        assert "own uid" in report["init"]
        assert report["of repl"]["id"] >= 0x70000000
        assert report["of repl"]["threads"] == "RuntimeError can't start new thread"
    else:
        assert "own uid" not in report["init"]
        assert report["of repl"]["id"] == (os.getuid() if at_standard.uid is None else at_standard.uid)


# -- other layers ----------------------------------------------------------------------------------------------------


FORK_UNTIL_REFUSED = """
import os, signal
forks = 0
try:
    while os.fork():
        forks += 1
    signal.pause()
except BlockingIOError:
    pass
"""


@needs_strict
def test_fork_bomb_is_bounded_and_killable(launcher: Launcher) -> None:
    """A fork bomb ends at the number of processes, and one signal ends it."""
    bomb = f"(lambda names: exec({FORK_UNTIL_REFUSED!r}, names) or names['forks'])({{}})"
    report = launcher.run(probes={"forks": bomb, "kill": "os.kill(-1, 9)"})
    assert report["of repl"] == {"forks": BOUNDS["max_processes"] - 2, "kill": None}  # init and the REPL count, too
    assert report["init ended with"] == 5


@needs_strict
def test_exec_allows_programs_of_scratch_folder(launcher: Launcher) -> None:
    run = "__import__('subprocess').run({}, capture_output=True, text=True).{}"
    probes = {
        "a_program": run.format("['/bin/sh', '-c', 'echo $((6 * 7)) | cat']", "stdout"),
        "its_own": f"(__import__('shutil').copy('/bin/echo', 'say'), {run.format(['./say', 'hello'], 'stdout')})[1]",
        "as_root": run.format("['/bin/sh', '-c', 'cat /proc/1/environ; touch /usr/x']", "returncode"),
    }
    found = launcher.run(probes=probes, allow_exec=True)["of repl"]
    assert found == {"a_program": "42\n", "its_own": "hello\n", "as_root": 1}


@needs_strict
def test_masked_proc_is_absent_from_workers(launcher: Launcher) -> None:
    if launcher.uid is not None or os.getuid() != 0:
        pytest.skip(NEEDS_ROOT)  # to mask /proc before a fork server starts
    probes = {"proc": "os.listdir('/proc')", "pid": "os.getppid()", "memory": "len(bytearray(2 << 30))"}
    report = launcher.run(probes=probes, masked_proc=True)
    assert not report["proc_is_fresh"]
    assert "own proc" not in report["zygote"]
    assert report["of repl"] == {"proc": [], "pid": 1, "memory": "MemoryError "}


def test_level_process_is_no_boundary_but_bounded(launcher: Launcher) -> None:
    """`process` is no boundary, but dies with its fork server and has limits."""
    probes = {
        "files": "[open('/dev/null') for _ in range(64)]",
        "passwd": "len(open('/etc/passwd').read()) > 0",
        "processes": "__import__('resource').getrlimit(6)[0] != 16",
        "signal": f"(lambda number: ({LIBC}.prctl(2, __import__('ctypes').byref(number)), number.value))(__import__('ctypes').c_int())",
    }
    report = launcher.run(level="process", probes=probes)
    assert report["zygote"] == []
    assert report["init"] == ["parent death signal", "no_new_privs"]
    assert report["repl"] == ["parent death signal", "rlimits"]
    assert report["of repl"] == {"files": "OSError 24", "passwd": True, "processes": True, "signal": [0, 9]}
