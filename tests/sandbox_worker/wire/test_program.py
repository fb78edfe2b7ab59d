"""Arguments and variables of a program, encoded for a memfd."""

import pytest

from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.program import Program, pack_program, unpack_program


def test_program_comes_out_unchanged() -> None:
    program = Program([b"ls", b"\xff", b""], {b"A": b"\xff", b"": b""})
    assert unpack_program(pack_program(program)) == program


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 100, pack_program(Program([], {}))[:-1]])
def test_invalid_program_is_refused(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        unpack_program(data)
