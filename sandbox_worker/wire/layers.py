"""Names of isolation layers: those that a worker reports, and those that can fail."""

from typing import Literal

Layer = Literal[
    # of the fork server
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
    # of init
    "session",
    "own uid",
    "mounts",
    "user namespace",
    "capabilities",
    "no_new_privs",
    "not dumpable",
    "memory control group",
    "memory and CPU watch (approximate)",
    # of the REPL
    "rlimits",
    "dumpable",
    # of several of them
    "parent death signal",
    "landlock",
    "seccomp",
    # of a process that was killed before it could name one
    "system calls",
]
