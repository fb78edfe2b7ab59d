"""Isolation levels: their facts agree with each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from rlm_broker.limits import Limits
from sandbox_worker.isolation.worker_layers import _INIT_LAYERS
from sandbox_worker.wire import bounds, control
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.level import LEVELS, PROCESS, Layer, LevelName, level_named
from tests.support.places import PROJECT
from tests.support.tables import table

NAMES = get_args(LevelName)


def test_level_name_finds_its_level() -> None:
    assert tuple(level.name for level in LEVELS) == NAMES == ("strict", "standard", "process")
    assert [level_named(name) for name in NAMES] == list(LEVELS)


@table("name", ["auto", "Strict", "", None, 0, ["strict"]])
def test_unknown_level_name_finds_no_level(name: object) -> None:
    with pytest.raises(LookupError, match="there is no isolation level"):
        level_named(name)


def test_level_without_a_boundary_promises_no_layer() -> None:
    (unprotected,) = [level for level in LEVELS if not level.is_security_boundary]
    assert unprotected is PROCESS
    promises = {name for name, holds in unprotected._asdict().items() if holds is True}
    assert promises == {"may_exec"}


def test_boundary_allows_processes_only_with_pid_namespace() -> None:
    """A boundary lets processes start only where the end of init ends them."""
    for level in LEVELS:
        if level.is_security_boundary:
            assert level.may_exec == level.has_pid_namespace, level.name


@table("name", ["paranoid", "auto", "Strict", "", 0, None])
def test_fork_server_without_level_refuses_the_message(name: object) -> None:
    configure = control.Configure(level="strict", new_root="/n", readable=[], hidden=[])
    fields = msgspec.to_builtins(configure) | {"level": name}
    with pytest.raises(MessageInvalid, match="level"):
        control.unpack_to_zygote(msgspec.msgpack.encode(fields))


LAYERS = set(get_args(Layer))
DECLARED = PROJECT / "sandbox_worker/wire/level.py"


def named_where_raised() -> Iterator[str]:
    """Return the arguments of `layer(...)` and `applied.append(...)`, and the constants of type `Layer`."""
    for path in sorted((PROJECT / "sandbox_worker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="layer"), args=[ast.Constant(value=str(name)), _]):
                    yield name
                case ast.Call(func=ast.Attribute(value=ast.Name(id="applied")), args=[argument]):
                    yield from (str(each.value) for each in ast.walk(argument) if isinstance(each, ast.Constant))
                case ast.AnnAssign(annotation=ast.Name(id="Layer"), value=ast.Constant(value=str(name))):
                    yield name


def test_layers_of_the_sandbox_are_the_set() -> None:
    named = {*named_where_raised(), *(name for rows in _INIT_LAYERS.values() for name, _ in rows)}
    assert named == LAYERS - {"system calls"}  # which the orchestrator names for a process that was killed


@table(
    "unpack, message, field",
    [
        (control.unpack_from_zygote, control.ZygoteFailed(reason="why", layer="mounts"), "layer"),
        (control.unpack_from_zygote, control.NotPrepared(step="imports", reason="why"), "step"),
        (control.unpack_from_zygote, control.ZygoteReady(layers=[], memory_bytes=1), "layers"),
        (control.unpack_from_init, control.Failed(step="start", reason="why", layer="seccomp"), "layer"),
        (control.unpack_from_init, control.Failed(step="start", reason="why"), "step"),
        (control.unpack_from_init, control.Loaded(layers=[]), "layers"),
        (control.unpack_from_init, control.Started(layers=[]), "layers"),
        (control.unpack_from_init, control.Exceeded("cpu_s", 2, 1, control.LastSeen()), "limit"),
    ],
)
@table("name", ["", "Seccomp", "level", "no such name"])
def test_unknown_layer_name_makes_a_message_invalid(unpack: Any, message: Any, field: str, name: str) -> None:
    value = [name] if field == "layers" else name
    packet = msgspec.msgpack.encode(msgspec.to_builtins(message) | {field: value})
    with pytest.raises(MessageInvalid, match=field):
        unpack(packet)


def test_watched_limits_are_limits_of_a_user() -> None:
    assert set(get_args(bounds.WatchedLimit)) <= Limits.fields.keys()
    assert set(get_args(bounds.WatchedLimit)) > bounds.SCRATCH_LIMITS


def test_prepared_steps_are_no_layers() -> None:
    assert not LAYERS & set(get_args(control.PreparationStep))


@table("module", ["zygote_layers", "worker_layers"])
def test_layer_code_needs_only_the_standard_library(module: str) -> None:
    program = f"import sys; sys.path.append(sys.argv[1]); import sandbox_worker.isolation.{module}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", program, str(PROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"sandbox_worker", "__main__"}
