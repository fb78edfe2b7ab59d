"""When a checkpoint is worth its cost, and what a REPL is given again after a rollback."""

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.sandbox.blocks.checkpoints import LEAST_COST_S, WORTH, Checkpoints
from sandbox_worker.wire.control import Checkpointed

WORTH_S = WORTH * LEAST_COST_S


def test_checkpoint_is_due_when_more_would_be_lost_than_it_costs() -> None:
    checkpoints = Checkpoints("auto")
    checkpoints.block_ended(WORTH_S)
    assert not checkpoints.is_due
    checkpoints.block_ended(0.001)
    assert checkpoints.is_due
    checkpoints.asked(1)
    assert not checkpoints.is_due
    checkpoints.made(Checkpointed(1, cost_s=1.0))
    checkpoints.block_ended(WORTH)
    assert not checkpoints.is_due
    checkpoints.block_ended(0.001)
    assert checkpoints.is_due


def test_refused_checkpoint_is_asked_for_again_after_twice_the_work() -> None:
    checkpoints = Checkpoints("auto")
    checkpoints.block_ended(1.0)
    checkpoints.refused("threads")
    assert checkpoints.problem == "threads"
    checkpoints.block_ended(1.0)
    assert not checkpoints.is_due
    checkpoints.block_ended(0.001)
    assert checkpoints.is_due


def test_mode_asks_for_each_or_none() -> None:
    assert Checkpoints("each").is_due
    never = Checkpoints("never")
    never.block_ended(1e6)
    assert not never.is_due


def test_rollback_knows_what_is_lost() -> None:
    checkpoints = Checkpoints("auto")
    checkpoints.block_ended(3.0)
    checkpoints.asked(1)
    checkpoints.provided(Provisions.of({"a": 1}, 1000), "context_1")
    checkpoints.made(Checkpointed(1, cost_s=0.001))
    checkpoints.provided(Provisions.of({"b": 1}, 1000))
    checkpoints.block_ended(1.0)
    checkpoints.asked(2)  # and it was not made
    checkpoints.provided(Provisions.of({"c": 1}, 1000))
    checkpoints.block_ended(1.0)
    checkpoints.spared([1])
    point = checkpoints.point()
    assert point is not None
    assert (point.provisions.names(), point.contexts) == ({"a", "b", "c"}, ["context_1"])
    checkpoints.rolled_back(point)
    assert checkpoints.blocks == 1
    assert checkpoints.point() is None
    assert checkpoints.is_due  # the state is worth as much as before, and has no checkpoint any more


def test_false_cost_keeps_to_its_bound() -> None:
    checkpoints = Checkpoints("auto")
    checkpoints.asked(1)
    checkpoints.made(Checkpointed(1, cost_s=float("nan")))
    checkpoints.block_ended(WORTH_S)
    assert not checkpoints.is_due
    checkpoints.made(Checkpointed(7, cost_s=1e9))  # never asked for
    checkpoints.block_ended(0.001)
    assert checkpoints.is_due


def test_older_checkpoints_stay_up_to_the_bound() -> None:
    checkpoints = Checkpoints("each", 2)
    for number in (1, 2, 3):
        checkpoints.asked(number)
        checkpoints.made(Checkpointed(number, cost_s=0.001))
        checkpoints.block_ended(1.0)
    found = [checkpoints.point(back) for back in (1, 2, 3)]
    assert [each and each.number for each in found] == [3, 2, None]
    checkpoints.spared([2])  # code has ended the newer one
    assert checkpoints.problem == "it had ended before, or its memory was needed"
    last = checkpoints.point()
    assert last is not None
    checkpoints.rolled_back(last)
    assert (last.number, checkpoints.blocks) == (2, 1)
    assert checkpoints.point() is None
