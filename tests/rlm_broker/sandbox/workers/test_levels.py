import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.workers.levels import (
    NEED_KERNEL,
    NEED_NAMESPACES,
    NEED_RIGHTS,
    SYSTEM_CALLS,
    WITHOUT_REMEDY,
    IsolationWarning,
    candidates,
    remedy,
    unavailable,
    warn_if_unprotected,
)
from sandbox_worker.wire.level import PROCESS, STANDARD, STRICT, Layer
from tests.support.tables import table


@table(
    "isolation, allow_exec, levels",
    [
        ("auto", None, ("strict", "standard")),
        ("auto", False, ("strict", "standard")),
        ("auto", True, ("strict",)),
        ("strict", True, ("strict",)),
        ("standard", None, ("standard",)),
        ("standard", False, ("standard",)),
        ("process", None, ("process",)),
    ],
)
def test_level_name_stands_for_levels_to_try(isolation: str, allow_exec: bool | None, levels: tuple[str, ...]) -> None:
    """A name stands for levels to try, and "auto" never includes "process"."""
    assert tuple(level.name for level in candidates(isolation, allow_exec)) == levels


@table("isolation", ["vault", "Strict", "", None, 3, ["strict"], b"strict"])
def test_unknown_level_is_refused(isolation: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no isolation level .*; choose one of: auto, strict, standard, process"
    ):
        candidates(isolation, None)  # type: ignore[arg-type]


def test_programs_are_refused_at_standard() -> None:
    """Programs at "standard" are refused because they could outlive their REPL."""
    with pytest.raises(ConfigurationError, match="'standard' cannot start programs"):
        candidates("standard", allow_exec=True)


def test_unavailable_level_names_reason_and_remedy() -> None:
    error = unavailable(STRICT, "landlock", "landlock: Operation not supported")
    assert str(error).startswith("isolation level 'strict' is not available here: landlock: Operation not supported. ")
    assert error.remedy is not None
    assert error.remedy in str(error)
    assert "`rlm-broker doctor`" in str(error)


def test_only_process_is_warned_of() -> None:
    with pytest.warns(IsolationWarning, match="not a security boundary"):
        warn_if_unprotected(PROCESS)
    warn_if_unprotected(STRICT)
    warn_if_unprotected(STANDARD)


FILTER = {"proc__self__status": "Name:\tx\nSeccomp:\t2"}
CONTAINER = {**FILTER, "run__.containerenv": ""}
APPARMOR = {**CONTAINER, "proc__self__attr__current": "docker-default (enforce)"}
UNIT = {**FILTER, "proc__self__cgroup": "0::/system.slice/broker.service"}
LOGIN = {"proc__self__status": "Seccomp:\t0", "proc__self__cgroup": "0::/user.slice/user-0.slice/session-1.scope"}


def machine(folder: Path, **files: str) -> Path:
    """Return a root folder with these files below /proc; names have __ for each slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


FORBIDDEN = ("namespaces", "unshare: Operation not permitted", errno.EPERM)
MOUNT = ("private root", "mount none on /: x")
RULESET = ("landlock", "landlock_create_ruleset: x")
INVOKED = {"INVOCATION_ID": "1"}
OF_THE_PROFILE = "`docker run --security-opt seccomp=seccomp.json`"
REMEDIES: list[Any] = [
    (FORBIDDEN, {"proc__sys__kernel__unprivileged_userns_clone": "0"}, {}, "kernel.unprivileged_userns_clone=1`"),
    (FORBIDDEN, {"proc__sys__kernel__apparmor_restrict_unprivileged_userns": "1"}, {}, "_unprivileged_userns=0`"),
    (FORBIDDEN, {"proc__sys__user__max_user_namespaces": "0"}, {}, "`sysctl user.max_user_namespaces=15000`"),
    (FORBIDDEN, FILTER, {}, OF_THE_PROFILE),
    (FORBIDDEN, APPARMOR, {}, OF_THE_PROFILE),
    (FORBIDDEN, UNIT, {}, "`RestrictNamespaces=no`"),
    (FORBIDDEN, {"proc__self__mountinfo": "36 35 98:0 /srv /proc rw - proc proc rw"}, {}, "`systemd-nspawn`"),
    (FORBIDDEN, FILTER, INVOKED, "RestrictNamespaces"),
    (FORBIDDEN, CONTAINER, INVOKED, "docker"),
    (FORBIDDEN, FILTER, {**INVOKED, "container": "podman"}, "docker"),
    ((*MOUNT, errno.EACCES), APPARMOR, {}, "apparmor=rlm-broker"),
    ((*MOUNT, errno.EPERM), APPARMOR, {}, OF_THE_PROFILE[1:-1]),
    ((*MOUNT, errno.EPERM), CONTAINER, {}, OF_THE_PROFILE[1:-1]),
    ((*MOUNT, errno.EPERM), UNIT, {}, "RestrictNamespaces=no"),
    ((*MOUNT, errno.EACCES), LOGIN, {}, "not below /root"),
    ((*MOUNT, errno.ENOSYS), {"proc__sys__kernel__osrelease": "5.10.0-28"}, {}, "this is 5.10.0-28"),
    ((*MOUNT, errno.ENOSYS), {"proc__sys__kernel__osrelease": "6.1.0", **CONTAINER}, {}, "seccomp=seccomp.json"),
    ((*RULESET, errno.EOPNOTSUPP), LOGIN, {}, "lsm=landlock"),
    ((*RULESET, errno.ENOSYS), LOGIN, {}, "lsm=landlock"),
    ((*RULESET, errno.EPERM), CONTAINER, {}, "seccomp=seccomp.json"),
    ((*RULESET, errno.EPERM), UNIT, {}, "landlock_create_ruleset landlock_add_rule"),
    ((SYSTEM_CALLS, "killed by SIGSYS", 0), UNIT, {}, "SystemCallFilter=@system-service @mount"),
    (("seccomp", "no table for machine 'ppc64'", errno.ENOSYS), LOGIN, {}, "x86_64 or aarch64"),
    (("own uid", "root lacks CAP_SETUID", errno.EPERM), CONTAINER, {}, "`docker run --user 1000`"),
    (("other uid", "root lacks CAP_SETUID", errno.EPERM), LOGIN, {}, "SETUID, SETGID, CHOWN, KILL"),
    (("one thread", "/proc/self/task: No such file", errno.ENOENT), LOGIN, {}, "`mount -t proc proc /proc`"),
    (("private root", "mount /dev/null on /x: No such file", errno.ENOENT), LOGIN, {}, "`mount -t devtmpfs dev /dev`"),
    (("namespaces", "Too many open files", errno.EMFILE), LOGIN, {}, "ulimit -n"),
    (("fork", "Resource temporarily unavailable", errno.EAGAIN), LOGIN, {}, "TasksMax="),
    (("session", "setsid: x", errno.EPERM), LOGIN, {}, "Please report"),
]


@table("failed, files, environment, words", REMEDIES)
def test_each_refusal_has_a_remedy_of_its_own(
    tmp_path: Path, failed: tuple[Layer, str, int], files: dict[str, str], environment: dict[str, str], words: str
) -> None:
    """Refusals tell AppArmor from a filter and from an old kernel, and a unit from a container within it."""
    assert words in remedy(*failed, machine(tmp_path, **files), environment)


@table("uid, words", [(0, "--cap-add SYS_ADMIN"), (1000, "Start as root")])
def test_denied_namespaces_without_cause_suggest_other_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, words: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert words in remedy("namespaces", "unshare: x", errno.EPERM, machine(tmp_path, **LOGIN), {})


def test_layer_has_one_remedy_or_a_reason() -> None:
    """Each layer has one kind of remedy, or the reason why it has none."""
    kinds = Counter([*NEED_RIGHTS, *NEED_NAMESPACES, *NEED_KERNEL, SYSTEM_CALLS, *WITHOUT_REMEDY])
    assert kinds == dict.fromkeys(get_args(Layer), 1)


@table("layer", get_args(Layer))
def test_layer_without_remedy_asks_for_a_report(tmp_path: Path, layer: Layer) -> None:
    sentence = remedy(layer, "call: Operation not permitted", errno.EPERM, machine(tmp_path, **LOGIN), {})
    assert ("Please report" in sentence) == (layer in WITHOUT_REMEDY)


@table("layer", sorted(set(get_args(Layer)) - NEED_RIGHTS))
def test_layer_that_a_filter_refuses_names_the_filter(tmp_path: Path, layer: Layer) -> None:
    sentence = remedy(layer, "call: Operation not permitted", errno.EPERM, machine(tmp_path, **CONTAINER), {})
    assert "seccomp=seccomp.json" in sentence
