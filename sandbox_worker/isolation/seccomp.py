"""Seccomp: which system calls a process may make, and with which arguments.

`seccomp_rules` is an allow-list by name. A pure function turns it into a BPF program. Filters add up: a call passes if
all filters of the process allow it, so an earlier filter must allow what a later one allows. There are four:

    template                        init's calls, and those that apply init's layers: for fork servers with set-up code
    init                            the REPL's calls, and those that apply the REPL's layers
    repl                            ordinary Python, in a pid namespace and a root of its own
    threads                         the same without either: it may start and signal no process but its own

A call is answered in one of these ways:

    another architecture's call     the process is killed
    allowed, arguments fit          the call is made
    clone3, unknown or newer, x32   ENOSYS: the C library falls back to an older call
    sendfile, at times getxattr     an error on which Python copies in another way, see `seccomp_rules`
    setsid, at times chmod          0, without an effect, see `seccomp_rules`
    all else                        EPERM

The REPL's only way out is a connected TCP socket. Other layers cannot guard it: also in an empty network namespace, and
in a Landlock domain without TCP, a socket that exists can be made to listen or be connected to another peer. The filter
denies both. io_uring makes system calls that no filter sees, and is denied as a whole.
"""

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Sequence
from typing import Literal

from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.seccomp_rules import (
    ALLOWED,
    ALLOWED_TO_EXEC,
    ALLOWED_TO_INIT,
    ALLOWED_TO_REPL,
    ALLOWED_TO_TEMPLATE,
    ANSWERED,
    ANSWERED_TO_THREADS,
    ARGUMENTS,
    ARGUMENTS_OF_INIT,
    ARGUMENTS_OF_REPL,
    ARGUMENTS_OF_THREADS,
    NOT_WITHOUT_NAMESPACES,
    OWN_PID,
    PRETENDED,
    PRETENDED_TO_THREADS,
    AllOf,
    Check,
    IfThen,
    NoneOf,
    NotAllOf,
    Null,
    OneOf,
)
from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS

Kind = Literal["template", "init", "repl", "program", "threads"]

# -- the program: pure -----------------------------------------------------------------------------------------------

Verdict = int | tuple[Check, ...]  # the answer to a call: a SECCOMP_RET_* value, or checks of its arguments

RET_KILL_PROCESS = 0x80000000
RET_ALLOW = 0x7FFF0000
RET_PRETEND = 0x00050000  # SECCOMP_RET_ERRNO, with the number of the error in its low bits
RET_EPERM = RET_PRETEND | errno.EPERM
RET_ENOSYS = RET_PRETEND | errno.ENOSYS
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16  # in struct seccomp_data

Instruction = tuple[int, int, int, int]  # struct sock_filter: code, jump if true, jump if false, operand


@functools.cache
def program(kind: Kind, allow_exec: bool, arch: str) -> bytes:
    """Return the BPF program for one process of a worker, as an array of `struct sock_filter`.

    Args:
        kind: "template" may make namespaces and mounts. "init" may pass descriptors, and apply the REPL's layers after
            its fork. A "repl" may become a hub, and a "program" beside it may not. In "threads", `OWN_PID` stands for
            the process's own pid.
        allow_exec: Whether the process may start programs. Init must be allowed to if its REPL will be; "threads" never
            is.
        arch: Machine, as `uname -m` prints it.

    Raises:
        OSError: ENOSYS if there is no table of system calls for `arch`.
    """
    if arch not in NUMBERS:
        known = ", ".join(sorted(NUMBERS))
        raise OSError(errno.ENOSYS, f"no table of system calls for machine {arch!r}; there are: {known}")
    of_kinds = {"init": ARGUMENTS_OF_INIT, "repl": ARGUMENTS_OF_REPL, "threads": ARGUMENTS_OF_THREADS}
    arguments = ARGUMENTS | of_kinds.get(kind, {})
    answered = ANSWERED | (ANSWERED_TO_THREADS if kind == "threads" else {})
    pretended = {"repl": PRETENDED, "program": PRETENDED, "threads": PRETENDED | PRETENDED_TO_THREADS}.get(
        kind, frozenset()
    )
    of_kind = {"init": ALLOWED_TO_INIT, "template": ALLOWED_TO_TEMPLATE, "repl": ALLOWED_TO_REPL}
    with_any_arguments = of_kind.get(kind, frozenset())
    arguments = {name: checks for name, checks in arguments.items() if name not in with_any_arguments}
    allowed = with_any_arguments | ALLOWED | (ALLOWED_TO_EXEC if allow_exec else frozenset())

    def verdict(name: str) -> Verdict:
        if name in answered:
            return RET_PRETEND | answered[name]
        if name in pretended:
            return RET_PRETEND
        if kind == "threads" and name in NOT_WITHOUT_NAMESPACES:
            return RET_EPERM
        return arguments.get(name, RET_ALLOW if name in allowed else RET_EPERM)

    ranges = _ranges({number: verdict(name) for name, number in NUMBERS[arch].items()})
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _assemble(ranges, AUDIT_ARCH[arch]))


def _ranges(verdicts: dict[int, Verdict]) -> list[tuple[int, Verdict]]:
    """Return the first number and the verdict of each run of equal verdicts, from 0 to the highest number."""
    ranges: list[tuple[int, Verdict]] = []
    for number in range(max(verdicts) + 2):  # one past the last number: unknown calls begin there, x32 calls among them
        verdict = verdicts.get(number, RET_ENOSYS)
        if not ranges or ranges[-1][1] != verdict:
            ranges.append((number, verdict))
    return ranges


def _assemble(ranges: Sequence[tuple[int, Verdict]], audit_arch: int) -> list[Instruction]:
    """Return a program: it checks the architecture, searches the number, and checks arguments where needed."""
    start: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_IF_EQUAL, 1, 0, audit_arch),
        (_RETURN, 0, 0, RET_KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    blocks: list[Instruction] = []
    block_starts: dict[tuple[Check, ...], int] = {}
    for _, verdict in ranges:
        if isinstance(verdict, tuple):
            block_starts[verdict] = len(blocks)
            blocks += _check_all(verdict)
    return [*start, *_search(ranges, _search_length(ranges), block_starts), *blocks]


def _search_length(ranges: Sequence[tuple[int, Verdict]]) -> int:
    return 2 * len(ranges) - 1  # one leaf for each range, and one comparison less


def _search(
    ranges: Sequence[tuple[int, Verdict]], to_blocks: int, block_starts: dict[tuple[Check, ...], int]
) -> list[Instruction]:
    """Return a binary search. The kernel loads it in a third of the time of a list of comparisons.

    Args:
        ranges: First number and verdict of each range.
        to_blocks: Distance from the first instruction here to the checks of arguments.
        block_starts: Checks → where their block begins, counted from the first block.
    """
    if len(ranges) == 1:
        verdict = ranges[0][1]
        if isinstance(verdict, int):
            return [(_RETURN, 0, 0, verdict)]
        return [(_JUMP, 0, 0, to_blocks - 1 + block_starts[verdict])]  # counted from the next instruction
    middle = len(ranges) // 2
    below, above = ranges[:middle], ranges[middle:]
    below_length = _search_length(below)  # 255 at most: the field has one byte
    return [
        (_IF_AT_LEAST, below_length, 0, above[0][0]),
        *_search(below, to_blocks - 1, block_starts),
        *_search(above, to_blocks - 1 - below_length, block_starts),
    ]


def _check_all(checks: tuple[Check, ...]) -> list[Instruction]:
    instructions = [instruction for check in checks for instruction in _check(check)]
    return [*instructions, (_RETURN, 0, 0, RET_ALLOW)]


def _check(check: Check) -> list[Instruction]:
    """Return instructions that fall through if `check` holds, and answer EPERM otherwise."""
    low = _OFFSET_ARGUMENTS + 8 * check.argument  # both architectures are little-endian
    load: Instruction = (_LOAD, 0, 0, low)
    refuse: Instruction = (_RETURN, 0, 0, RET_EPERM)
    match check:
        case OneOf(values=values):
            last = len(values)
            return [load, *((_IF_EQUAL, last - at, 0, value) for at, value in enumerate(values)), refuse]
        case NoneOf(bits=bits):
            return [load, (_IF_ANY_BIT, 0, 1, bits), refuse]
        case NotAllOf(bits=bits):
            return [load, (_AND, 0, 0, bits), (_IF_EQUAL, 0, 1, bits), refuse]
        case AllOf(bits=bits):
            return [load, (_AND, 0, 0, bits), (_IF_EQUAL, 1, 0, bits), refuse]
        case IfThen(bit=bit, then=then):
            return [load, (_AND, 0, 0, bit | then), (_IF_EQUAL, 0, 1, bit), refuse]
        case Null():
            high: Instruction = (_LOAD, 0, 0, low + 4)
            return [load, (_IF_EQUAL, 1, 0, 0), refuse, high, (_IF_EQUAL, 1, 0, 0), refuse]


# -- and the kernel --------------------------------------------------------------------------------------------------

_SET_MODE_FILTER = 1


class _LoadableProgram(ctypes.Structure):
    """`struct sock_fprog`: the number of instructions and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@functools.cache
def _loadable(code: bytes) -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    memory = ctypes.create_string_buffer(code, len(code))
    return bytes(_LoadableProgram(len(code) // 8, ctypes.addressof(memory))), memory


def prepare() -> None:
    """Assemble all programs of workers, so that `install` costs hardly more than the system call after a fork.

    Raises:
        OSError: See `program`.
    """
    for kind, allow_exec in (("init", True), ("repl", False), ("repl", True), ("program", True), ("threads", False)):
        _loadable(program(kind, allow_exec, MACHINE))


def install(kind: Kind, allow_exec: bool) -> None:
    """Apply `program` to the calling thread and all its future children, for good. no_new_privs must be set."""
    code = program(kind, allow_exec, MACHINE)
    if kind == "threads":
        code = code.replace(struct.pack("=I", OWN_PID), struct.pack("=I", os.getpid()))
    header, _ = _loadable(code)
    syscalls.call("seccomp", _SET_MODE_FILTER, 0, header)
