"""Isolation levels and layers, as facts for both sides. Users and the wire give a level by its name.

This module imports the standard library alone, because the code of the layers imports it.
"""

from typing import Literal, NamedTuple

Layer = Literal[
    # applied by the fork server
    "one thread",
    "other uid",
    "private root",
    "namespaces",
    "pid 1",
    "own proc",
    "host name",
    "scratch",
    "out of memory first",
    "fork",
    # applied by init
    "session",
    "own uid",
    "mounts",
    "user namespace",
    "capabilities",
    "no_new_privs",
    "not dumpable",
    "memory control group",
    "memory and CPU watch (approximate)",
    # applied by the REPL
    "rlimits",
    "dumpable",
    # applied by more than one of them
    "parent death signal",
    "landlock",
    "seccomp",
    # named for a killed process, as by SIGSYS, before it could name a layer
    "system calls",
]


LevelName = Literal["strict", "standard", "process"]
"""Name of an isolation level, the strongest first; see `LEVELS`."""


class Level(NamedTuple):
    """The facts about one isolation level. `LEVELS` holds all levels.

    Attributes:
        name: Name for users and on the wire.
        is_security_boundary: Whether layers are applied at all, so that malicious code is confined.
        confines_zygote: Whether the fork server is isolated as well. If so, its set-up code has no network and none of
            the host's files.
        has_own_root: Whether workers have a private root. If so, the scratch folder is a file system in it.
            Otherwise workers see the host's paths, and the scratch folder is a folder of the host.
        has_pid_namespace: Whether the kernel ends all processes of a worker when its init ends. Otherwise parent
            death signals end init with the fork server and the REPL with init, and the orchestrator holds a pidfd
            of the REPL.
        has_user_namespace: Whether the kernel counts a worker's processes apart from all others of its user.
        may_exec: Whether code may start processes, and other programs if `allow_exec` is set. Otherwise code has
            threads alone, since no mechanism would end its processes.
        runs_programs: Whether the orchestrator may run programs beside code, if `allow_exec` is set. Each program has
            a session, and its processes cannot leave it; by this session init finds and ends all of them.
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
    """Return the level called `name`.

    Raises:
        LookupError: No level has that name.
    """
    for level in LEVELS:
        if level.name == name:
            return level
    raise LookupError(f"there is no isolation level {name!r}: choose strict, standard or process")
