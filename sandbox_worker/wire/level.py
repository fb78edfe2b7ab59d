"""Isolation levels, as facts that both sides ask for. A name stands for a level where users or the wire give one.

Code that applies layers imports this, so it needs the standard library alone; `layers` likewise.
"""

from typing import Literal, NamedTuple

LevelName = Literal["strict", "standard", "process"]
"""An isolation level, the strongest first; see `LEVELS`."""


class Level(NamedTuple):
    """What a level gives. `LEVELS` holds all that there are.

    Attributes:
        name: What users give and see, and what the wire carries.
        is_security_boundary: Whether layers are applied at all, for code that means harm.
        confines_zygote: Whether the fork server is isolated, too: what it decodes or runs has no network and none
            of the host's files.
        has_own_root: Whether workers have a root of their own; their scratch folder is then a file system in it.
            Elsewhere they see the host's names, and the scratch folder is one of the host's.
        has_pid_namespace: Whether the end of init is the end of all processes of its worker. Elsewhere init ends with
            the fork server and the REPL with init, by a signal, and the orchestrator holds a pidfd of the REPL.
        has_user_namespace: Whether the kernel counts a worker's processes apart from all others of its user.
        may_exec: Whether code may start processes, and programs where `allow_exec` is set. Elsewhere it has threads
            alone, since nothing would end its processes.
        runs_programs: Whether the host may run programs beside code, where code may: each has a session that its
            processes cannot leave, by which all of them are found and ended.
    """

    name: LevelName
    is_security_boundary: bool
    confines_zygote: bool
    has_own_root: bool
    has_pid_namespace: bool
    has_user_namespace: bool
    may_exec: bool
    runs_programs: bool


STRICT = Level(
    "strict",
    is_security_boundary=True,
    confines_zygote=True,
    has_own_root=True,
    has_pid_namespace=True,
    has_user_namespace=True,
    may_exec=True,
    runs_programs=True,
)
STANDARD = Level(
    "standard",
    is_security_boundary=True,
    confines_zygote=False,
    has_own_root=False,
    has_pid_namespace=False,
    has_user_namespace=False,
    may_exec=False,
    runs_programs=False,
)
PROCESS = Level(
    "process",
    is_security_boundary=False,
    confines_zygote=False,
    has_own_root=False,
    has_pid_namespace=False,
    has_user_namespace=False,
    may_exec=True,
    runs_programs=False,
)
LEVELS = (STRICT, STANDARD, PROCESS)
"""All levels, the strongest first."""


def level_named(name: object) -> Level:
    """Find the level of that name.

    Raises:
        LookupError: There is none.
    """
    for level in LEVELS:
        if level.name == name:
            return level
    raise LookupError(f"there is no isolation level {name!r}")
