import random

import pytest

from sandbox_worker.loading import ContextForm
from sandbox_worker.wire import control
from sandbox_worker.wire.errors import MessageInvalid

TO_INIT = [
    control.Load(form=ContextForm("text", 3, 1, True)),
    control.Start(),
    control.Begin(),
    control.Interrupt(),
    control.Drain(),
    control.Stop(explain=True),
]
FROM_INIT = [
    control.Locked(layers=["a"]),
    control.Loaded(),
    control.Forked(),
    control.Started(layers=[]),
    control.Failed(step="load", reason="why", layer=None),
    control.Written(stream="stdout", data=b"\xff\x00raw"),
    control.Interrupted(),
    control.Drained(),
    control.Stopped(post_mortem=control.PostMortem("stack", 1, 0.5, 2, 3)),
    control.Burned(cpu_s=0.5),
    control.Exceeded("memory_bytes", 2, 1, control.PostMortem()),
    control.Died(signal=9),
]


@pytest.mark.parametrize("message", TO_INIT)
def test_what_the_host_says_comes_out_as_it_went_in(message: control.ToInit) -> None:
    assert control.unpack_to_init(control.pack(message)) == message


@pytest.mark.parametrize("message", FROM_INIT)
def test_what_init_says_comes_out_as_it_went_in(message: control.FromInit) -> None:
    assert control.unpack_from_init(control.pack(message)) == message


def test_every_message_of_both_directions_is_tried() -> None:
    assert {type(message) for message in TO_INIT} == set(control.ToInit.__args__)
    assert {type(message) for message in FROM_INIT} == set(control.FromInit.__args__)


def test_garbage_and_messages_of_the_other_direction_are_invalid_and_nothing_else() -> None:
    rng = random.Random(20261121)
    garbage = [rng.randbytes(rng.randrange(40)) for _ in range(2000)]
    garbage += [b"\x91" * 100_000, *map(control.pack, TO_INIT)]
    for packet in garbage:
        with pytest.raises(MessageInvalid):
            control.unpack_from_init(packet)
