"""Isolation levels by their names: the levels to try for a name, and the error for an unavailable level."""

import errno
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from rlm_broker.errors import SHORT_OF, ConfigurationError, IsolationUnavailable, require_kind
from sandbox_worker.wire.level import LEVELS, Layer, Level, level_named

IsolationName = Literal["auto", "strict", "standard", "process"]
"""Name of an isolation level, or "auto"."""
AUTO: Final = "auto"
"""Name for the strongest security boundary on this machine."""
CHOICES: tuple[str, ...] = (AUTO, *(level.name for level in LEVELS))
"""All names that a user may give."""


class IsolationWarning(UserWarning):
    """Code runs without a security boundary, since the caller asked for such a level by name.

    Example:
        ```python
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IsolationWarning)
            Sandbox(isolation="process")
        ```
    """


def candidates(isolation: str, allow_exec: bool | None) -> tuple[Level, ...]:
    """Return the levels to try, the strongest first. "auto" stands only for levels that are a security boundary.

    Args:
        allow_exec: Whether code may start programs. True needs a level with `Level.may_exec`; None allows it where the
            level does.

    Raises:
        ConfigurationError: There is no such level, or it cannot allow programs.
    """
    require_kind("allow_exec", allow_exec, bool, type(None))
    if isolation == AUTO:
        return tuple(level for level in LEVELS if level.is_security_boundary and (level.may_exec or not allow_exec))
    try:
        level = level_named(isolation)
    except LookupError:
        raise ConfigurationError(no_such_level(isolation)) from None
    if allow_exec and not level.may_exec:
        raise ConfigurationError(
            f"isolation level {level.name!r} cannot start programs, since they could outlive their REPL: leave "
            "allow_exec out, or use the level 'strict'"
        )
    return (level,)


def no_such_level(name: object) -> str:
    """Return the sentence that `name` is not a level, with the names of all levels."""
    return f"no isolation level {name!r}; choose one of: {', '.join(CHOICES)}"


def warn_if_unprotected(level: Level) -> None:
    """Warn of a level without a security boundary."""
    if not level.is_security_boundary:
        warnings.warn(
            f"isolation level {level.name!r} is not a security boundary: code in it can read your files, your keys and "
            "other processes' environments, and use the network",
            IsolationWarning,
            stacklevel=3,
        )


def unavailable(level: Level, layer: Layer, reason: str, code: int = 0) -> IsolationUnavailable:
    """Return the error for an unavailable level, with the remedy for the failed layer. `reason` is the failed operation
    with the kernel's error, and `code` that error's number, 0 if there is none."""
    what_would = remedy(layer, reason, code)
    return IsolationUnavailable(
        f"isolation level {level.name!r} is not available here: {reason}. {what_would} "
        "`rlm-broker doctor` shows every layer; `--isolation process` runs without any protection",
        layer=layer,
        reason=reason,
        remedy=what_would,
    )


SWITCHES = (
    # file below /proc/sys, its value without namespaces, and its value with them
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian's and others'
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu from 23.10 on
    ("user/max_user_namespaces", "0", "15000"),
)
FILTERED = "2"
"""`Seccomp:` in /proc/self/status of a process behind a system call filter, as in a container or a unit."""
FIRST_LINUX = (5, 13)
"""First version with Landlock; mount_setattr(2) came with 5.12."""
SYSTEM_CALLS: Layer = "system calls"
"""Layer to name when a system call filter killed a fork server."""
NEED_RIGHTS: frozenset[Layer] = frozenset({"other uid", "own uid"})
"""Layers for which root needs capabilities."""
NEED_NAMESPACES: frozenset[Layer] = frozenset(
    {"namespaces", "user namespace", "mounts", "private root", "own proc", "pid 1", "fork"}
)
"""Layers for which namespaces must be allowed."""
NEED_KERNEL: frozenset[Layer] = frozenset({"landlock", "seccomp"})
"""Layers in need of support by the kernel and the machine."""
WITHOUT_REMEDY: Mapping[Layer, str] = {
    "one thread": "the fork server is exec'd, and has a single thread",
    "host name": "a level holds without it",
    "scratch": "a file system within the private root, which stands",
    "out of memory first": "a process may always ask to be killed earlier",
    "session": "a process that was just forked leads no process group",
    "capabilities": "a process may drop all that it has",
    "no_new_privs": "prctl(2) refuses it to no process",
    "not dumpable": "prctl(2) refuses it to no process",
    "dumpable": "prctl(2) refuses it to no process",
    "parent death signal": "prctl(2) refuses it to no process",
    "rlimits": "limits are only lowered",
    "memory control group": "without one nothing starts that needs it: `GROUP_REMEDY`",
    "memory and CPU watch (approximate)": "it reads files of the worker's own /proc",
}
"""Layers without a remedy → why no command or setting would give them. A filter may still refuse them."""
CONTAINER_FILES = (".dockerenv", "run/.containerenv")


def remedy(
    layer: Layer, reason: str = "", code: int = 0, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> str:
    """Return the remedy for a failed layer, as one sentence; `reason` and `code` as for `unavailable`. This process's
    /proc lies below `root`."""
    if code in SHORT_OF:
        return f"{SHORT_OF[code][0].upper()}{SHORT_OF[code][1:]}."
    if code == errno.ENOENT and (place := re.search(r"(?<!\S)/(proc|dev)\b", reason)):
        kind = "proc" if place[1] == "proc" else "devtmpfs"
        return f"It needs /{place[1]}: `mount -t {kind} {place[1]} /{place[1]}`."
    if layer in NEED_RIGHTS:
        return (
            "Start it as an ordinary user (`docker run --user 1000`, or User= of a unit), or give root the "
            "capabilities SETUID, SETGID, CHOWN, KILL and DAC_OVERRIDE."
        )
    if code == errno.ENOSYS and _version(root) < FIRST_LINUX:
        return f"It needs Linux 5.13 or later, and this is {_release(root)}."
    if layer in NEED_NAMESPACES:
        return _for_namespaces(layer, reason, code, root, environment)
    if layer == "landlock" and code in (errno.ENOSYS, errno.EOPNOTSUPP) and not _is_filtered(root):
        return "It needs a kernel with Landlock among its security modules: boot with `lsm=landlock,...`."
    if _is_filtered(root) or layer == SYSTEM_CALLS:
        return _for_filter(root, environment)
    if layer in NEED_KERNEL:
        return "It needs Linux 5.13 or later with Landlock and seccomp filters, on x86_64 or aarch64."
    return "Please report this with the output of `rlm-broker doctor --json`."


def _for_namespaces(layer: Layer, reason: str, code: int, root: Path, environment: Mapping[str, str]) -> str:
    for switch, forbids, allows in SWITCHES:
        if _read(root / "proc/sys" / switch) == forbids:
            return f"As root: `sysctl {switch.replace('/', '.')}={allows}`."
    if code == errno.ENOSPC:
        return "As root: `sysctl user.max_user_namespaces=15000`."
    is_call = reason.startswith(("mount", "umount", "pivot_root", "unshare", "setns"))
    if code == errno.EACCES and is_call and "(enforce)" in _read(root / "proc/self/attr/current"):
        return (
            "AppArmor forbids it: load the profile rlm_broker/profiles/apparmor of this package, and start the "
            "container with `docker run --security-opt apparmor=rlm-broker --security-opt seccomp=seccomp.json`, as "
            "SECURITY.md describes."
        )
    if code in (errno.EPERM, errno.ENOSYS, 0) and _is_filtered(root):
        return _for_filter(root, environment)
    if layer == "private root" and code in (0, errno.EACCES, errno.ENOENT):
        return "The installation of Python must lie where other users can read it: not below /root, for example."
    if _is_chroot(root):
        return "The kernel forbids namespaces in a chroot: use `systemd-nspawn`, a container, or pivot_root(2) instead."
    if os.geteuid() == 0:
        return "Allow namespaces to root here: `--cap-add SYS_ADMIN`, or fewer restrictions of what started this."
    return "Start as root, or allow namespaces to ordinary users: `sysctl user.max_user_namespaces=15000`."


def _for_filter(root: Path, environment: Mapping[str, str]) -> str:
    in_container = any((root / name).exists() for name in CONTAINER_FILES) or "container" in environment
    groups = _read(root / "proc/self/cgroup").splitlines()
    if not in_container and ("INVOCATION_ID" in environment or any(line.endswith(".service") for line in groups)):
        return (
            "A filter of the systemd unit forbids it: set `RestrictNamespaces=no` and "
            "SystemCallFilter=@system-service @mount landlock_create_ruleset landlock_add_rule landlock_restrict_self "
            "seccomp."
        )
    return (
        "A system call filter, such as a container's profile, forbids it: start the container with `docker run "
        "--security-opt seccomp=seccomp.json`, the file rlm_broker/profiles/seccomp.json of this package (Kubernetes: "
        "securityContext.seccompProfile), as SECURITY.md describes."
    )


def _is_filtered(root: Path) -> bool:
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("Seccomp:"):
            return line.split()[1] == FILTERED
    return False


def _is_chroot(root: Path) -> bool:
    """Whether no mount is at "/": the fifth field of mountinfo(5) is a mount's place below the process's root."""
    mounts = [line.split() for line in _read(root / "proc/self/mountinfo").splitlines()]
    return bool(mounts) and not any(len(fields) > 4 and fields[4] == "/" for fields in mounts)


def _release(root: Path) -> str:
    return _read(root / "proc/sys/kernel/osrelease") or os.uname().release


def _version(root: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", _release(root))[:2])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
