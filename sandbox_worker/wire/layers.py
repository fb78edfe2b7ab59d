"""Names of isolation layers: those that a process reports as applied, and those that it names in a failure."""

from typing import Literal

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
    # named for a process that was killed, as by SIGSYS, before it could name a layer
    "system calls",
]
