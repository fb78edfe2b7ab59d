"""Control messages of init and of the fork server: each arrives unchanged, and any other packet is one error."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sandbox_worker.loading.form import ContextForm, ContextPiece
from sandbox_worker.wire import control
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.errors import MessageInvalid
from tests.support.tables import table

BOUNDS = ReplBounds(
    memory_bytes=1 << 40,
    max_processes=2,
    max_open_files=3,
    scratch_bytes=4,
    max_scratch_files=7,
    cpu_s=None,
    max_frame_bytes=5,
    max_output_bytes=6,
)
TO_ZYGOTE = [
    control.Configure(level="strict", new_root="/n", readable=["/r"], hidden=[], preload=["json"]),
    control.Spawn(True, "/s", BOUNDS),
    control.Spawn(False, "", msgspec.structs.replace(BOUNDS, cpu_s=0.5)),
]
FROM_ZYGOTE = [
    control.ZygoteReady(layers=["pid 1", "namespaces"], memory_bytes=5),
    control.ZygoteFailed(reason="why", layer="mounts"),
    control.NotPrepared(step="imports", reason="why"),
    control.Spawned(),
    control.SpawnFailed(reason="why"),
]
TO_INIT = [
    control.Load(piece=ContextPiece(ContextForm("text", 3, 1, True))),
    control.Start(),
    control.Resume(3),
    control.Checkpoint(number=3),
    control.ForkRepl(needs_hub=True),
    control.EndHub(),
    control.Hand(),
    control.Begin(cpu_s=120.5, is_late=True),
    control.Interrupt(block=1),
    control.Drain(),
    control.Stop(explain=True),
    control.RunProgram(number=1, cwd=[b"\xff"]),
    control.EndProgram(number=1),
    control.OpenToRead(path=[b"a", b"\xff"]),
    control.OpenToWrite(path=[b"a"], size_bytes=5),
    control.ListFolder(path=[], after=b"x"),
    control.RemoveFile(path=[b"a"]),
]
FROM_INIT = [
    control.Loaded(layers=["mounts"]),
    control.Forked(),
    control.Started(layers=[]),
    control.Failed(step="load", reason="why", layer=None),
    control.Written(stream="stdout", data=b"\xff\x00raw"),
    control.Handed(taken=False),
    control.Prepared(problem="why"),
    control.Checkpointed(number=3, cost_s=0.5),
    control.Interrupted(),
    control.Drained(),
    control.Stopped(post_mortem=control.LastSeen("stack", 1, 0.5, 2, 3), checkpoints=[1, 3]),
    control.Opened(),
    control.Listed(entries=[control.ListedEntry(b"\xff", "file", 5)], is_all=True),
    control.Removed(),
    control.Refused(reason="is a folder"),
    control.Burned(cpu_s=0.5),
    control.Exceeded("memory_bytes", 2, 1, control.LastSeen()),
    control.Died(signal=9),
    control.ProgramEnded(
        1, signal=9, limit="cpu_s", with_repl=True, not_started="why", no_folder=control.Refused("why", "missing")
    ),
]


UNPACKERS: list[tuple[Callable[[bytes], object], list[Any], Any]] = [
    (control.unpack_to_zygote, TO_ZYGOTE, control.ToZygote),
    (control.unpack_from_zygote, FROM_ZYGOTE, control.FromZygote),
    (control.unpack_to_init, TO_INIT, control.ToInit),
    (control.unpack_from_init, FROM_INIT, control.FromInit),
]


@table("unpack, own, union", UNPACKERS)
def test_messages_of_each_direction_come_out_unchanged(
    unpack: Callable[[bytes], object], own: list[Any], union: Any
) -> None:
    assert [unpack(control.pack(message)) for message in own] == own
    assert {type(message) for message in own} == set(union.__args__)


@table("unpack, own", [row[:2] for row in UNPACKERS])
def test_any_other_packet_is_one_error(unpack: Callable[[bytes], object], own: list[Any]) -> None:
    """Garbage, cut packets, messages for another process, unknown fields and wrong types are invalid."""
    rng = random.Random(20261121)
    wrong = [rng.randbytes(rng.randrange(40)) for _ in range(1000)]
    wrong += [b"", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x81\xa4type\xa4\xff\xff\xff\xff"]
    wrong += [control.pack(message) for _, others, _ in UNPACKERS if others is not own for message in others]
    for message in own:
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        changed = [{**fields, "more": 1}, *({**fields, name: {"a": 1}} for name in fields)]
        wrong += [control.pack(message)[:-1], *map(msgspec.msgpack.encode, changed)]
    for packet in wrong:
        with pytest.raises(MessageInvalid):
            unpack(packet)


def test_number_below_its_bound_is_refused() -> None:
    with pytest.raises(MessageInvalid, match="memory_bytes"):
        control.unpack_from_zygote(control.pack(control.ZygoteReady(layers=[], memory_bytes=-1)))
    for bound in {*ReplBounds.__struct_fields__} - {"cpu_s", "later_context_bytes"}:  # tmpfs takes 0 for "no bound"
        spawn = control.Spawn(True, "/s", msgspec.structs.replace(BOUNDS, **{bound: 0}))
        with pytest.raises(MessageInvalid, match=bound):
            control.unpack_to_zygote(control.pack(spawn))


def test_incomplete_bounds_are_refused() -> None:
    for bound in (field.name for field in msgspec.structs.fields(ReplBounds) if field.required):
        packed = msgspec.to_builtins(control.Spawn(True, "/s", BOUNDS))
        del packed["bounds"][bound]
        with pytest.raises(MessageInvalid, match=bound):
            control.unpack_to_zygote(msgspec.msgpack.encode(packed))


def test_program_comes_out_unchanged() -> None:
    program = control.Program([b"ls", b"\xff", b""], {b"A": b"\xff", b"": b""})
    assert control.unpack_program(control.pack(program)) == program


@table("data", [b"", b"\x80", b"\xff" * 100, control.pack(control.Program([], {}))[:-1]])
def test_invalid_program_is_refused(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        control.unpack_program(data)
