"""Arguments and variables of a program that the orchestrator starts in a sandbox, encoded for a memfd.

Only the child that init forks for the program decodes them: init itself, pid 1 of the worker, parses as little as it
can.
"""

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PROGRAM_BYTES = 1 << 20
"""Maximum bytes of one encoded `Program`; the orchestrator refuses more. The kernel's own bound for arguments and
variables is a quarter of the stack limit: 2 MiB with the usual 8 MiB (execve(2))."""
MAX_ARGUMENT_BYTES = (1 << 17) - 1
"""Maximum bytes of one argument or variable; more is refused. The kernel's MAX_ARG_STRLEN is 32 pages (131,072 bytes),
the final 0 byte included (execve(2))."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of one program.

    Attributes:
        argv: Arguments, the name of the program first. None contains a 0 byte.
        env: Variables that are added to init's own. None contains a 0 byte.
    """

    argv: list[bytes]
    env: dict[bytes, bytes]


_decoder = msgspec.msgpack.Decoder(Program)


def pack_program(program: Program) -> bytes:
    """Return the program as MessagePack bytes, for a memfd."""
    return msgspec.msgpack.encode(program)


def unpack_program(data: bytes) -> Program:
    """Return the program that `pack_program` encoded.

    Raises:
        MessageInvalid: The bytes are not an encoded `Program`.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageInvalid(str(error) or type(error).__name__) from None
