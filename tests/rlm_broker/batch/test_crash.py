"""Batches that are killed: real processes, ended by SIGKILL, go on and pay no answer again that a run has had."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.batch.items import BatchResult
from rlm_broker.batch.status import read_status
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.batches import CountingModel, comparable, items, lines_of
from tests.support.forked_child import in_child
from tests.support.journals import DyingDisk, kill_this_process, was_killed

pytestmark = pytest.mark.filterwarnings("ignore:isolation level 'process'")

CODE = """```repl
import random
parts = [llm_query(f"{context.strip()} part {number} {random.random()} {list({'a', 'b', 'c'})}") for number in range(3)]
FINAL("; ".join(parts))
```"""
"""Code whose queries depend on random numbers and on the order of a set: the seed of the batch makes them the same."""
ITEMS = 3
ASKS = 4
"""Calls of an item: its turn, and three queries."""


class Provider(CountingModel):
    """A model that writes down each call that it is asked, in a file that outlives the process.

    Args:
        log: Path of that file.
        dies_at: Number of the call, in this process, that it answers no more; 0 answers all.
    """

    def __init__(self, log: Path, dies_at: int = 0) -> None:
        super().__init__(self._answer)
        self._log = log
        self._dies_at = dies_at
        self._asked = 0

    def _answer(self, text: str) -> str:
        self._asked += 1
        with self._log.open("a") as log:
            log.write(f"{place_of(text)}\n")
        if self._asked == self._dies_at:
            kill_this_process()
        return f"answer to {text}" if " part " in text else CODE


def place_of(text: str) -> str:
    """Return "item call" of a request: the number of its item, and 0 for the turn, else that of its part from 1."""
    number = text.partition("context ")[2].split()[0]
    part = text.partition(" part ")[2].partition(" ")[0]
    return f"{number} {int(part) + 1 if part else 0}"


def batch_of(out: Path, log: Path, dies_at: int = 0, **more: Any) -> list[BatchResult]:
    rlm = RLM(Provider(log, dies_at), sandbox=Sandbox(isolation="process", seed=7))  # so that all batches ask the same
    return list(rlm.batch(items(ITEMS), out=out, **more))


def test_batch_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    """Killed in the middle of writes, between them, and during calls; never is a call paid before one that is known.

    Each query names the place of its call, and an item asks one call after the other. So a call that was asked after
    another one was answered shows that the run has had that answer.
    """
    whole, out, log = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / "asked"
    in_child(lambda: len(batch_of(whole, tmp_path / "whole.log", max_concurrent=1)))

    def work(attempt: int) -> None:
        if attempt % 3 < 2:
            DyingDisk(40 + 5 * attempt, tears=attempt % 4 < 2).patch()
        batch_of(out, log, 2 + attempt % 2 if attempt % 3 == 2 else 0, max_concurrent=1)

    kills = 0
    while was_killed(partial(work, kills)):
        kills += 1
    assert kills > 3
    assert comparable(lines_of(out)) == comparable(lines_of(whole))
    asked = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    for item in range(ITEMS):
        places = [place for number, place in asked if number == item]
        assert places == sorted(places)
        assert set(places) == set(range(ASKS))
    assert len(asked) - ITEMS * ASKS <= kills
    assert read_status(out).unfinished == 0
    assert any("replayed" in line for line in lines_of(out))
