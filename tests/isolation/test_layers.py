"""The walls in their order, around a real worker: as root and as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import landlock, layers, syscalls
from sandbox_worker.isolation.layers import LayerFailed, WorkerBounds, ZygoteWalls
from tests.isolation.forked_child import in_child

PROJECT = Path(layers.__file__).parents[2]
NOBODY = 65534
SCRATCH_BYTES = 8 << 20
BOUNDS = {"address_space_bytes": 1 << 30, "max_processes": 16, "max_open_files": 64, "scratch_bytes": SCRATCH_BYTES}


def _strict_is_possible() -> str:
    """Why not, or ""."""
    try:
        flags = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
        in_child(lambda: syscalls.unshare(flags))
        landlock.abi()
    except (AssertionError, OSError) as error:
        return str(error).strip().splitlines()[-1]
    return ""


WHY_NOT_STRICT = _strict_is_possible()
needs_strict = pytest.mark.skipif(bool(WHY_NOT_STRICT), reason=f"strict cannot be had here: {WHY_NOT_STRICT}")


class Launcher:
    """Runs `walled_worker.py` as some user.

    Args:
        uid: Whose process it is; None for our own.
        python: An interpreter that this user can reach.
        folder: A folder that this user can reach, with a copy of the project.
    """

    def __init__(self, uid: int | None, python: str, folder: Path) -> None:
        self.uid = uid
        self._python = python
        self._folder = folder

    def run(self, **spec: Any) -> dict[str, Any]:
        """Evaluate `probes` in a REPL and `init_probes` in its init, behind the walls."""
        new_root = Path(tempfile.mkdtemp(dir=self._folder))
        if self.uid is not None:
            os.chown(new_root, self.uid, self.uid)
        defaults = {
            "project": str(self._folder),
            "new_root": str(new_root),
            "level": "strict",
            "hidden": [],
            "allow_exec": False,
            "bounds": BOUNDS,
            "probes": {},
            "init_probes": {},
            "masked_proc": False,
        }
        command = [self._python, "-I", str(self._folder / "walled_worker.py"), json.dumps(defaults | spec)]
        groups: list[int] | None = None if self.uid is None else []
        done = subprocess.run(
            command, user=self.uid, group=self.uid, extra_groups=groups, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert isinstance(report, dict)
        return report | {"exit code": done.returncode, "stderr": done.stderr}


def _python_for(uid: int) -> str | None:
    """An interpreter that `uid` can start: ours may lie below a private home."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(command, user=uid, group=uid, extra_groups=[], check=False).returncode == 0:
                return python
        except OSError:
            continue
    return None


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    as_root = request.param == "root"
    uid, python = None, sys.executable
    if as_root and os.getuid() != 0:
        pytest.skip("the tests do not run as root")
    if not as_root and os.getuid() == 0:
        uid = NOBODY
        found = _python_for(uid)
        if found is None:
            pytest.skip("no Python of 3.11 or later can be reached by an ordinary user")
        python = found
    with tempfile.TemporaryDirectory(prefix="walls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(
            PROJECT / "sandbox_worker", folder / "sandbox_worker", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(Path(__file__).with_name("walled_worker.py"), folder)
        yield Launcher(uid, python, folder)


SIGNALS_ARE_GOVERNED = not WHY_NOT_STRICT and landlock.abi() >= 6  # elsewhere the kernel drops what is sent to a pid 1

# -- one worker at strict, and what it found -------------------------------------------------------------------------

STATUS = "dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())"
FAILED_WITH = "__import__('ctypes').get_errno()"
LIBC = "__import__('ctypes').CDLL(None, use_errno=True)"

ATTACKS = {
    "reads_the_users_of_the_host": ("open('/etc/passwd')", "FileNotFoundError 2"),
    "lists_homes": ("os.listdir('/home')", "FileNotFoundError 2"),
    "lists_the_hosts_devices": ("os.listdir('/sys')", "FileNotFoundError 2"),
    "reads_the_machines_memory": ("open('/proc/meminfo')", "FileNotFoundError 2"),
    "writes_to_the_system": ("open('/usr/x', 'w')", "OSError 30"),
    "writes_to_the_root": ("open('/x', 'w')", "OSError 30"),
    "writes_to_python": ("open(os.__file__, 'a')", ("OSError 30", "PermissionError 13")),
    "changes_the_modes_of_the_system": ("os.chmod('/usr', 0o777)", "OSError 30"),
    "changes_a_device": ("os.chmod('/dev/null', 0)", "OSError 30"),
    "maps_shared_zeros_that_no_limit_sees": ("open('/dev/zero', 'r+b', buffering=0)", "PermissionError 13"),
    "reads_the_environment_of_init": ("open('/proc/1/environ').read()", "PermissionError 13"),
    "reads_the_memory_of_init": ("open('/proc/1/mem', 'rb')", "PermissionError 13"),
    "reads_the_maps_of_init": ("open('/proc/1/maps').read()", "PermissionError 13"),
    "lists_the_descriptors_of_init": ("os.listdir('/proc/1/fd')", "PermissionError 13"),
    "goes_to_the_root_of_init": ("os.listdir('/proc/1/root')", "PermissionError 13"),
    "traces_init": (f"({LIBC}.ptrace(16, 1, 0, 0), {FAILED_WITH})", [-1, 1]),
    "makes_a_socket": ("__import__('socket').socket()", "PermissionError 1"),
    "unshares": (f"({LIBC}.unshare(0x10000000), {FAILED_WITH})", [-1, 1]),
    "mounts": (f"({LIBC}.mount(b'x', b'/w', b'tmpfs', 0, 0), {FAILED_WITH})", [-1, 1]),
    "becomes_root": ("os.setuid(0)", "PermissionError 1"),
    "starts_a_program": ("os.execv('/bin/true', ['true'])", "PermissionError 1"),
    "opens_64_files": ("[open('/dev/null') for _ in range(64)]", "OSError 24"),
    "raises_its_limit": (
        "__import__('resource').setrlimit(7, (1000, 1000))",
        "ValueError not allowed to raise maximum limit",
    ),
    "writes_a_file_larger_than_the_scratch_folder": (
        f"(open('big', 'wb').truncate({SCRATCH_BYTES + 1}))",
        "OSError 27",
    ),
    "fills_the_scratch_folder": (
        f"[open(name, 'wb').write(bytes({SCRATCH_BYTES // 2})) for name in ('one', '/dev/shm/two', 'three')]",
        "OSError 28",
    ),
    "takes_2_gigabytes": ("len(bytearray(2 << 30))", "MemoryError "),
}
CAPABILITY_SETS = "('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')"
FACTS = {
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
}
ORDINARY = {
    "numbers": ("str(__import__('decimal').Decimal('0.1') * 3)", "0.3"),
    "databases": ("__import__('sqlite3').connect('a.db').execute('create table t (x)').fetchall()", []),
    "temporary_files": ("__import__('tempfile').TemporaryFile(dir='/w').write(b'abc')", 3),
    "copies": ("__import__('shutil').copy2(os.__file__, 'copy.py')", "copy.py"),
    "threads": ("__import__('concurrent.futures').futures.ThreadPoolExecutor(4).submit(len, 'abc').result(10)", 3),
    "semaphores": ("__import__('multiprocessing').get_context('fork').Semaphore(2).acquire()", True),
    "event_loops": ("__import__('asyncio').run(__import__('asyncio').to_thread(len, 'abc'))", 3),
    "forks": ("__import__('multiprocessing').get_context('fork').Pool(2).map(len, ['a', 'bb'])", [1, 2]),
    "devices": ("len(open('/dev/urandom', 'rb').read(8)) + len(open('/dev/zero', 'rb').read(8))", 16),
    "nothing_to_write_to": ("open('/dev/null', 'w').write('abc')", 3),
    "time_zones": ("str(__import__('zoneinfo').ZoneInfo('UTC'))", "UTC"),
    "links_to_its_own_descriptors": ("os.readlink('/dev/stdin')", "/proc/self/fd/0"),
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


@pytest.fixture(scope="module")
def strict(launcher: Launcher) -> dict[str, Any]:
    probes = {name: expression for name, (expression, _) in {**ORDINARY, **FACTS, **ATTACKS}.items()}
    return launcher.run(
        probes=probes,
        hidden=["/usr/share/doc"],
        init_probes={name: expression for name, (expression, _) in OF_INIT.items()},
    )


def holds(found: Any, expected: Any) -> bool:
    """Whether `found` is `expected`, or one of them if that is a tuple."""
    return found in expected if isinstance(expected, tuple) else bool(found == expected)


@needs_strict
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(strict: dict[str, Any], name: str) -> None:
    found, expected = strict["of repl"][name], ATTACKS[name][1]
    assert holds(found, expected), found


@needs_strict
@pytest.mark.parametrize("name", FACTS)
def test_a_repl_behind_the_walls_is_as_it_must_be(strict: dict[str, Any], name: str) -> None:
    found, expected = strict["of repl"][name], FACTS[name][1]
    assert holds(found, expected), found


@needs_strict
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_python_works_behind_the_walls(strict: dict[str, Any], name: str) -> None:
    assert strict["of repl"][name] == ORDINARY[name][1]


@needs_strict
@pytest.mark.parametrize("name", OF_INIT)
def test_init_can_do_its_work_and_not_much_more(strict: dict[str, Any], name: str) -> None:
    assert strict["of init"][name] == OF_INIT[name][1]


@needs_strict
def test_the_layers_are_reported_in_the_order_they_were_applied(launcher: Launcher, strict: dict[str, Any]) -> None:
    as_root = ["private root", "other uid", "namespaces", "pid 1", "own proc", "host name"]
    as_user = ["namespaces", "pid 1", "private root", "own proc", "host name"]
    root = os.getuid() == 0 and launcher.uid is None
    assert strict["zygote"] == (as_root if root else as_user)
    walls_of_init = ["session", "mounts", "user namespace", "capabilities", "no_new_privs", "not dumpable"]
    assert strict["init"] == [*walls_of_init, "landlock", "seccomp"]
    assert strict["repl"] == ["rlimits", "landlock", "seccomp"]


@needs_strict
def test_init_outlives_all_of_it_and_the_monitor_ends_as_the_zygote_does(strict: dict[str, Any]) -> None:
    assert strict["init ended with"] == 5
    assert strict["exit code"] == 0
    assert strict["stderr"] == ""


# -- other walls -----------------------------------------------------------------------------------------------------


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
def test_a_fork_bomb_ends_at_the_number_of_processes_and_one_signal_ends_it(launcher: Launcher) -> None:
    bomb = f"(lambda names: exec({FORK_UNTIL_REFUSED!r}, names) or names['forks'])({{}})"
    report = launcher.run(probes={"forks": bomb, "kill": "os.kill(-1, 9)"})
    assert report["of repl"] == {"forks": BOUNDS["max_processes"] - 2, "kill": None}  # init and the REPL count, too
    assert report["init ended with"] == 5


@needs_strict
def test_with_exec_programs_run_also_those_of_the_scratch_folder(launcher: Launcher) -> None:
    run = "__import__('subprocess').run({}, capture_output=True, text=True).{}"
    probes = {
        "a_program": run.format("['/bin/sh', '-c', 'echo $((6 * 7)) | cat']", "stdout"),
        "its_own": f"(__import__('shutil').copy('/bin/echo', 'say'), {run.format(['./say', 'hello'], 'stdout')})[1]",
        "as_root": run.format("['/bin/sh', '-c', 'cat /proc/1/environ; touch /usr/x']", "returncode"),
    }
    found = launcher.run(probes=probes, allow_exec=True)["of repl"]
    assert found == {"a_program": "42\n", "its_own": "hello\n", "as_root": 1}


@needs_strict
def test_where_the_hosts_proc_is_masked_workers_have_none(launcher: Launcher) -> None:
    if launcher.uid is not None or os.getuid() != 0:
        pytest.skip("only root can mask /proc before a zygote starts")
    probes = {"proc": "os.listdir('/proc')", "pid": "os.getppid()", "memory": "len(bytearray(2 << 30))"}
    report = launcher.run(probes=probes, masked_proc=True)
    assert not report["proc_is_fresh"]
    assert "own proc" not in report["zygote"]
    assert report["of repl"] == {"proc": [], "pid": 1, "memory": "MemoryError "}


def test_process_is_no_boundary_but_dies_with_its_zygote_and_has_limits(launcher: Launcher) -> None:
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


# -- failing closed --------------------------------------------------------------------------------------------------


def failure(**changes: Any) -> list[str]:
    """Layer, reason and sentence of entering a zygote that cannot be had."""
    arguments: dict[str, Any] = {
        "level": "strict",
        "new_root": "/",
        "readable": [],
        "hidden": [],
        "worker_uid": NOBODY,
    } | changes

    def enter() -> list[str]:
        with pytest.raises(LayerFailed) as caught:
            layers.enter_zygote(**arguments)
        return [caught.value.layer, caught.value.reason, str(caught.value)]

    result = in_child(enter)
    assert isinstance(result, list)
    return result


def test_an_unknown_level_is_refused_with_those_that_exist() -> None:
    layer, reason, sentence = failure(level="paranoid")
    assert layer == "level"
    assert reason == "there is no level 'paranoid'; there are: strict, process"
    assert sentence == f"isolation layer 'level' failed: {reason}"


@needs_strict
def test_a_root_that_cannot_be_built_names_its_layer_and_the_path() -> None:
    assert failure(new_root="/no/such/folder")[:2] == [
        "private root",
        "mount tmpfs on /no/such/folder: No such file or directory",
    ]
    assert failure(new_root="/mnt", readable=["/no/such/python"])[0] == "private root"


def test_a_process_with_threads_is_refused_before_anything_is_changed() -> None:
    def enter() -> list[str]:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        with pytest.raises(LayerFailed, match="2 threads") as caught:
            layers.enter_zygote("strict", "/", [], [], NOBODY)
        release.set()
        thread.join()
        return [caught.value.layer, str(Path("/proc/self/ns/mnt").readlink())]

    assert in_child(enter) == ["one thread", str(Path("/proc/self/ns/mnt").readlink())]


def _leave_if_child(pid: int) -> None:
    if pid == 0:
        os._exit(0)


def test_a_worker_whose_walls_fail_says_which() -> None:
    walls = ZygoteWalls("strict", (), True, False, 1, -1, 1, 40)

    def fork() -> list[str]:
        with pytest.raises(LayerFailed) as caught:
            _leave_if_child(layers.fork_worker(walls))  # -1 is no way back
        return [caught.value.layer, caught.value.reason]

    layer, reason = in_child(fork)
    assert layer == "fork"
    assert reason.startswith(("setns: ", "unshare: "))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_of_0_which_a_tmpfs_takes_for_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, and must be at least 1"):
        WorkerBounds(**(BOUNDS | {name: 0}))
