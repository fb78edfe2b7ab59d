"""A program that the host has run in a sandbox: what it is started with. Init's child alone decodes it."""

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PROGRAM_BYTES = 1 << 20
"""Arguments and variables of one program together. The kernel takes 2 MiB with the usual limit of a stack."""
MAX_ARGUMENT_BYTES = (1 << 17) - 1
"""Of one argument, as the kernel has it (MAX_ARG_STRLEN)."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments, the name of the program first, and what is added to init's variables. None of the bytes is 0."""

    argv: list[bytes]
    env: dict[bytes, bytes]


_decoder = msgspec.msgpack.Decoder(Program)


def pack_program(program: Program) -> bytes:
    """The program as bytes, for a memfd."""
    return msgspec.msgpack.encode(program)


def unpack_program(data: bytes) -> Program:
    """Raises: MessageInvalid."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageInvalid(str(error) or type(error).__name__) from None
