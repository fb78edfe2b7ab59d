"""The canary: its attempts fail behind the layers, and would succeed without them."""

import json

import pytest

from rlm_broker.errors import IsolationUnavailable
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers import canary
from sandbox_worker.wire.level import STANDARD, STRICT, Level
from tests.support.tables import table

HARMLESS_WITHOUT_WALLS = {"read the host's list of users", "list the machine's devices", "open a socket"}


@table("level", [STRICT, STANDARD])
def test_at_every_level_of_protection_all_attempts_are_held(level: Level) -> None:
    with Sandbox(isolation=level.name) as sandbox, sandbox.repl() as repl:
        block = repl.execute(canary.PROGRAM)
    held = canary.verdict(level, block.final_answer)
    assert held == dict.fromkeys(canary.ATTEMPTS, True)
    canary.require_held(level, held)


@pytest.mark.filterwarnings("ignore::rlm_broker.sandbox.workers.levels.IsolationWarning")
def test_canary_fails_without_isolation() -> None:
    """The attempts succeed without isolation, which proves that the canary can fail."""
    with Sandbox(isolation="process") as sandbox, sandbox.repl() as repl:
        for name in HARMLESS_WITHOUT_WALLS:
            assert repl.execute(f"import os, socket\n{canary.ATTEMPTS[name]}").status == "ok", name


def test_successful_attempt_is_named() -> None:
    held = dict.fromkeys(canary.ATTEMPTS, True) | {"become root": False}
    with pytest.raises(IsolationUnavailable, match="'strict' does not hold here: a worker could become root"):
        canary.require_held(STRICT, held)


@table("answer", [None, "", "{}", "[]", json.dumps({"become root": True})])
def test_a_canary_that_does_not_report_is_no_proof(answer: str | None) -> None:
    with pytest.raises(IsolationUnavailable, match="its first worker did not report"):
        canary.verdict(STRICT, answer)
