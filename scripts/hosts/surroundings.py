"""Surroundings that a host may give a process, each made for one command by what this machine's kernel offers.

    python -m scripts.hosts.surroundings NAME[,NAME...] COMMAND...

A surrounding changes the calling process (capabilities, system call filters, mounts, limits, signals) and then executes
the command. It stands for a container engine, a service manager or a login that does the same.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_worker.isolation import seccomp, syscalls
from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS
from scripts.hosts.seccomp_profile import FOR_STRICT

PROJECT = Path(__file__).resolve().parents[2]
PROFILES = PROJECT / "rlm_broker" / "profiles"

CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "KILL": 5, "SETGID": 6, "SETUID": 7}
SYS_ADMIN = 21
LAST_CAPABILITY = 40
"""CAP_CHECKPOINT_RESTORE, since Linux 5.9."""
UNUSED_UID = 0x6FFF_0001
"""Above the ids that distributions and container engines give, below those of the broker's workers."""
AF_INET, AF_INET6 = 2, 10
EPERM, EACCES, ENOSYS, EAFNOSUPPORT = (
    0x00050000 | code for code in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)
)
LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
MOUNT = ("mount", "umount2", "pivot_root", "mount_setattr", "open_tree", "move_mount", "fsopen", "fsmount", "fsconfig")


CANNOT_BE_MADE = 77
"""Exit code where this machine refuses a surrounding, as in other test harnesses."""


@dataclass(frozen=True)
class Surrounding:
    """One surrounding.

    Attributes:
        stands_for: Where users meet it.
        make: Changes the calling process.
        needs_root: Whether only root can make it.
        tests: Arguments of pytest for the tests that --tests runs there; none are run without any.
    """

    stands_for: str
    make: Callable[[], None]
    needs_root: bool = True
    tests: tuple[str, ...] = ()


# -- system call filters ---------------------------------------------------------------------------------------------


def filter_calls(
    verdicts: Mapping[str, int], default: int = seccomp.RET_ALLOW, families: Mapping[int, int] | None = None
) -> None:
    """Put this process and all that it starts under a filter.

    Args:
        verdicts: Name of a system call → SECCOMP_RET_* value.
        default: For all other calls.
        families: Family of a socket → value, for `socket`.
    """
    numbers = NUMBERS[MACHINE]
    code: list[seccomp.Instruction] = [(0x20, 0, 0, 0)]  # load the number
    for name, verdict in verdicts.items():
        if name in numbers:
            code += [(0x15, 0, 1, numbers[name]), (0x06, 0, 0, verdict)]
    if families:
        code += [(0x15, 0, 2 * len(families) + 1, numbers["socket"]), (0x20, 0, 0, 16)]  # load the first argument
        for family, verdict in families.items():
            code += [(0x15, 0, 1, family), (0x06, 0, 0, verdict)]
    code.append((0x06, 0, 0, default))
    memory = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(memory))
    try:
        syscalls.call("seccomp", 1, 0, header)
    except PermissionError:  # EACCES: without CAP_SYS_ADMIN the kernel wants no_new_privs first
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.call("seccomp", 1, 0, header)


def deny(names: Iterable[str], verdict: int) -> Callable[[], None]:
    """A surrounding that answers these calls with `verdict` and allows all others."""
    return lambda: filter_calls(dict.fromkeys(names, verdict))


def follow_profile(without: Sequence[str] = ()) -> None:
    """Be filtered as a container engine filters with the profile of this package.

    Args:
        without: Calls that the profile shall not allow.
    """
    profile = json.loads((PROFILES / "seccomp.json").read_text())
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    refusal = 0x00050000 | profile["defaultErrnoRet"]
    filter_calls(dict.fromkeys(sorted(allowed - set(without)), seccomp.RET_ALLOW), refusal)


# -- users and capabilities ------------------------------------------------------------------------------------------


def keep_capabilities(*names: str) -> None:
    """Root keeps these alone, as after `docker run --cap-drop ALL --cap-add ...`."""
    _drop_from_bounding_set(set(range(LAST_CAPABILITY + 1)) - {CAPABILITIES[name] for name in names})


def _drop_from_bounding_set(numbers: Iterable[int]) -> None:
    for number in numbers:
        syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)


def _enter_user_namespace(uid: int) -> None:
    outer = os.getuid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {outer} 1"), ("gid_map", f"{uid} {outer} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _no_user_namespaces() -> None:
    _enter_user_namespace(os.getuid())
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def few_processes(limit: int) -> Callable[[], None]:
    """A surrounding of an ordinary user who may have so many processes and threads.

    RLIMIT_NPROC binds neither root nor a process with CAP_SYS_ADMIN; the user here may still read all files.
    """

    def make() -> None:
        uid = UNUSED_UID + os.getpid()  # whose other processes would be counted
        syscalls.prctl(8, 1)  # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        reads = (CAPABILITIES["DAC_OVERRIDE"], CAPABILITIES["DAC_READ_SEARCH"])
        bits = sum(1 << number for number in reads)
        syscalls.call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[bits] * 3, 0, 0, 0))
        for number in reads:
            if ctypes.CDLL(None).prctl(syscalls.PR_CAP_AMBIENT, 2, number, 0, 0):  # PR_CAP_AMBIENT_RAISE
                raise OSError(errno.EPERM, "PR_CAP_AMBIENT_RAISE")
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

    return make


def _ordinary_user() -> None:
    """Become an ordinary user with a home of its own, as after `useradd` and `su -`."""
    home = tempfile.mkdtemp()
    os.chown(home, UNUSED_UID, UNUSED_UID)
    os.environ["HOME"] = home
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    os.setgroups([])
    os.setresgid(UNUSED_UID, UNUSED_UID, UNUSED_UID)
    os.setresuid(UNUSED_UID, UNUSED_UID, UNUSED_UID)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


# -- files -----------------------------------------------------------------------------------------------------------


def _own_mounts() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)


def _no_proc() -> None:
    _own_mounts()
    syscalls.call("umount2", b"/proc", syscalls.MNT_DETACH)


def without_devices(*missing: str) -> Callable[[], None]:
    """A surrounding whose /dev has the usual five devices but these."""

    def make() -> None:
        _own_mounts()
        old = os.open("/dev", os.O_PATH)
        syscalls.mount("tmpfs", "/dev", "tmpfs")
        for name in {"null", "zero", "full", "random", "urandom"} - set(missing):
            Path(f"/dev/{name}").touch()
            syscalls.bind(f"/proc/self/fd/{old}/{name}", f"/dev/{name}")
        os.close(old)

    return make


def _no_temporary_folder() -> None:
    _own_mounts()
    for folder in ("/tmp", "/var/tmp"):
        syscalls.bind(folder, folder)
        syscalls.restrict_mount(folder, syscalls.MOUNT_ATTR_RDONLY)
    for name in ("TMPDIR", "TEMP", "TMP"):
        os.environ.pop(name, None)
    os.chdir("/proc")  # Python tries the current folder last


def odd_temporary_folder(name: bytes) -> Callable[[], None]:
    """A surrounding with a temporary folder of that name, and a locale that has only ASCII."""

    def make() -> None:
        folder = os.path.join(os.fsencode(tempfile.mkdtemp()), name)  # noqa: PTH118 - bytes
        os.mkdir(folder)  # noqa: PTH102
        os.environb[b"TMPDIR"] = folder
        os.environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    return make


def _long_temporary_folder() -> None:
    """TMPDIR is longer than the 107 bytes that an address of a socket may have."""
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="long-" * 35)
    Path(os.environ["TMPDIR"]).chmod(0o1777)


def _public_python() -> None:
    """Make the folders above this Python passable for all users: a mount with one way through each that is closed."""
    _own_mounts()
    for path in {Path(sys.prefix), Path(sys.base_prefix), PROJECT}:
        closed = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
        if closed:
            source = os.open(path, os.O_PATH)
            syscalls.mount("tmpfs", str(closed[0]), "tmpfs", options="mode=755")
            path.mkdir(parents=True)
            syscalls.bind(f"/proc/self/fd/{source}", str(path))
            os.close(source)


def _closed_home() -> None:
    home = tempfile.mkdtemp()
    os.chown(home, UNUSED_UID, UNUSED_UID)
    os.environ["HOME"] = home
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    _enter_user_namespace(1000)


def _no_home() -> None:
    _own_mounts()
    with tempfile.NamedTemporaryFile() as nobody:
        syscalls.bind(nobody.name, "/etc/passwd")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    _enter_user_namespace(1000)  # systemd's name service knows root without any file


def _chroot() -> None:
    """A root that is a plain folder and no mount, as `chroot` and `debootstrap` leave it."""
    _own_mounts()
    folder = Path.cwd()
    base = tempfile.mkdtemp()
    syscalls.mount("tmpfs", base, "tmpfs")
    for entry in Path("/").iterdir():
        target = Path(base, "root", entry.name)
        if entry.is_symlink():
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir(parents=True)
            syscalls.bind(str(entry), str(target))
    os.chroot(f"{base}/root")
    os.chdir(folder)


# -- the table -------------------------------------------------------------------------------------------------------


def _limit(which: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (value, value))


def _ignore(which: int) -> Callable[[], None]:
    def make() -> None:
        signal.signal(which, signal.SIG_IGN)

    return make


ISOLATION_TESTS = ("tests/sandbox_worker/isolation",)
SIGNAL_TESTS = (
    "tests/rlm_broker/cli/test_ask.py",
    "tests/rlm_broker/serve/mcp/test_stdio.py",
    "tests/rlm_broker/cli/test_serve.py",
    "-k",
    "signal or hangup or ends",
)
SURROUNDINGS: dict[str, Surrounding] = {
    "plain": Surrounding("this machine as it is", lambda: None, needs_root=False, tests=ISOLATION_TESTS),
    "ordinary-user": Surrounding("useradd, su -", _ordinary_user, tests=ISOLATION_TESTS),
    "public-python": Surrounding("a Python that all users can read, as in most images", _public_python),
    "cap-drop-all": Surrounding("docker run --cap-drop ALL; CapabilityBoundingSet=", keep_capabilities),
    "cap-no-kill": Surrounding(
        "docker run --cap-drop ALL --cap-add SETUID --cap-add SETGID", lambda: keep_capabilities("SETUID", "SETGID")
    ),
    "cap-four": Surrounding(
        "the same with CHOWN and KILL", lambda: keep_capabilities("SETUID", "SETGID", "CHOWN", "KILL")
    ),
    "cap-five": Surrounding(
        "the same with CHOWN, KILL and DAC_OVERRIDE",
        lambda: keep_capabilities("SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE"),
    ),
    "no-sys-admin": Surrounding("root of a container", lambda: _drop_from_bounding_set([SYS_ADMIN])),
    "userns-root": Surrounding("unshare -r, bubblewrap", lambda: _enter_user_namespace(0), needs_root=False),
    "userns-user": Surrounding("an ordinary user", lambda: _enter_user_namespace(1000), needs_root=False),
    "no-userns": Surrounding("sysctl user.max_user_namespaces=0", _no_user_namespaces, needs_root=False),
    "no-sethostname": Surrounding("rootless podman's default profile", deny(["sethostname"], EPERM), needs_root=False),
    "docker-default": Surrounding(
        "Docker's default profile", lambda: follow_profile(without=FOR_STRICT), needs_root=False
    ),
    "our-profile": Surrounding("rlm_broker/profiles/seccomp.json", follow_profile, needs_root=False),
    "no-mount": Surrounding("AppArmor's docker-default", deny(MOUNT, EACCES), needs_root=False),
    "system-service": Surrounding(
        "SystemCallFilter=@system-service of systemd 252",
        deny((*LANDLOCK, *MOUNT), seccomp.RET_KILL_PROCESS),
        needs_root=False,
    ),
    "system-service-eperm": Surrounding(
        "the same with SystemCallErrorNumber=EPERM", deny((*LANDLOCK, *MOUNT), EPERM), needs_root=False
    ),
    "no-landlock": Surrounding("a kernel without Landlock", deny(LANDLOCK, ENOSYS), needs_root=False),
    "af-unix": Surrounding(
        "RestrictAddressFamilies=AF_UNIX",
        lambda: filter_calls({}, families={AF_INET: EAFNOSUPPORT, AF_INET6: EAFNOSUPPORT}),
        needs_root=False,
    ),
    "no-proc": Surrounding("a chroot without /proc", _no_proc),
    "no-dev-zero": Surrounding("a container with few devices", without_devices("zero", "full")),
    "no-tmp": Surrounding("docker run --read-only", _no_temporary_folder),
    "odd-tmp": Surrounding("TMPDIR in UTF-8 with LC_ALL=C", odd_temporary_folder("é 中".encode()), needs_root=False),
    "latin-tmp": Surrounding("TMPDIR that is not UTF-8", odd_temporary_folder(b"caf\xe9"), needs_root=False),
    "long-tmp": Surrounding(
        "TMPDIR of a deep folder",
        _long_temporary_folder,
        needs_root=False,
        tests=("tests/rlm_broker/watch/test_server.py", "tests/rlm_broker/watch/test_folder.py"),
    ),
    "few-files": Surrounding("ulimit -n 17", _limit(resource.RLIMIT_NOFILE, 17), needs_root=False),
    "one-process": Surrounding("LimitNPROC=1 of an ordinary user", few_processes(1)),
    "two-processes": Surrounding("LimitNPROC=2 of an ordinary user", few_processes(2)),
    "no-sigchld": Surrounding("a supervisor that ignores SIGCHLD", _ignore(signal.SIGCHLD), needs_root=False),
    "no-sigint": Surrounding(
        "a script's job in the background", _ignore(signal.SIGINT), needs_root=False, tests=SIGNAL_TESTS
    ),
    "nohup": Surrounding("nohup", _ignore(signal.SIGHUP), needs_root=False, tests=SIGNAL_TESTS),
    "closed-home": Surrounding("su without -, ENV HOME=/root with --user 1000", _closed_home),
    "no-home": Surrounding("DynamicUser=yes", _no_home),
    "chroot": Surrounding("chroot(2)", _chroot),
}


def main() -> None:
    """Make the surroundings that the first argument names, one in the other, and execute the rest there."""
    names, *command = sys.argv[1:]
    os.environ["PYTHONPATH"] = str(PROJECT)
    command[0] = str(Path(command[0]).absolute()) if "/" in command[0] else command[0]
    try:
        for name in names.split(","):
            SURROUNDINGS[name].make()
    except OSError as error:
        print(f"{names} cannot be made here: {error}", file=sys.stderr)
        sys.exit(CANNOT_BE_MADE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
