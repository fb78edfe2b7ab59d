"""Isolation levels: their facts agree with each other."""

from typing import get_args

import msgspec
import pytest

from sandbox_worker.wire import zygote_control
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.level import LEVELS, PROCESS, LevelName, level_named

NAMES = get_args(LevelName)


def test_level_name_finds_its_level() -> None:
    assert tuple(level.name for level in LEVELS) == NAMES == ("strict", "standard", "process")
    assert [level_named(name) for name in NAMES] == list(LEVELS)


@pytest.mark.parametrize("name", ["auto", "Strict", "", None, 0, ["strict"]])
def test_unknown_level_name_finds_no_level(name: object) -> None:
    with pytest.raises(LookupError, match="there is no isolation level"):
        level_named(name)


def test_level_without_a_boundary_promises_no_layer() -> None:
    (unprotected,) = [level for level in LEVELS if not level.is_security_boundary]
    assert unprotected is PROCESS
    assert not any(
        (
            unprotected.confines_zygote,
            unprotected.has_own_root,
            unprotected.has_pid_namespace,
            unprotected.has_user_namespace,
        )
    )


def test_boundary_allows_processes_only_with_pid_namespace() -> None:
    """A boundary lets processes start only where the end of init ends them."""
    for level in LEVELS:
        if level.is_security_boundary:
            assert level.may_exec == level.has_pid_namespace, level.name


@pytest.mark.parametrize("name", ["paranoid", "auto", "Strict", "", 0, None])
def test_fork_server_without_level_refuses_the_message(name: object) -> None:
    """A fork server that is told of no level refuses the message."""
    configure = zygote_control.Configure(level="strict", new_root="/n", readable=[], hidden=[])
    fields = msgspec.to_builtins(configure) | {"level": name}
    with pytest.raises(MessageInvalid, match="level"):
        zygote_control.unpack_to_zygote(msgspec.msgpack.encode(fields))
