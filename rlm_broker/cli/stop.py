"""`rlm-broker runs stop RUN|REPL|PID`: ends a run with its best answer so far, or the block of a REPL."""

import asyncio
import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.messages import ProcessStatus, StopOutcome

_WHOLE = "process"
"""Kind of a target and of an outcome: a process as a whole."""
MOST_NAMED = 8
"""Ids listed in a sentence about an ambiguous beginning."""


class StopTarget(NamedTuple):
    """Target of the command.

    Attributes:
        pid: Its process.
        kind: "run", "repl" or "process".
        id: Its id.
        name: Id, and the question or the command.
    """

    pid: int
    kind: str
    id: str
    name: str


def run(target: str, *, now: bool, dry_run: bool, as_json: bool) -> int:
    """Stop what an id means, wait for its end, and return the exit code."""
    processes = asyncio.run(MachineRuns().processes())
    found = target_of(target, processes)
    if dry_run:
        would = {"pid": found.pid, "kind": found.kind, "id": found.id}
        say(json.dumps({"would_stop": would}) if as_json else f"would {_verb(now)} {found.name}")
        return 0
    _require_answer(found, processes)
    outcomes = asyncio.run(MachineRuns().end(found.pid, None if found.kind == _WHOLE else found.id, now))
    if as_json:
        say(json.dumps({"outcomes": msgspec.to_builtins(outcomes)}, ensure_ascii=False))
    else:
        for outcome in outcomes:
            say(_sentence(outcome))
        if not outcomes:
            say(f"{found.name} has no run and no REPL to stop")
    return 0 if all(outcome.has_ended or outcome.kind == _WHOLE for outcome in outcomes) else 1


def _require_answer(target: StopTarget, found: Sequence[ProcessStatus]) -> None:
    """Refuse to stop a hung process: it would not answer.

    Raises:
        RlmBrokerError: The process hangs.
    """
    pid = target.pid
    if any(process.pid == pid and process.is_hung for process in found):
        raise RlmBrokerError(
            f"the process {pid} does not answer: end it with `kill {pid}`, or with `kill -9 {pid}` if it is suspended"
        )


def target_of(given: str, found: Sequence[ProcessStatus]) -> StopTarget:
    """Return what an id, or its beginning, means. A whole id comes before a beginning.

    Raises:
        ConfigurationError: There is no such id, or several begin so.
    """
    targets = [target for process in found for target in _targets(process)]
    meant = [target for target in targets if target.id == given]
    if not meant and given:
        meant = [target for target in targets if target.kind != _WHOLE and target.id.startswith(given)]
    if len(meant) > 1:
        named = ", ".join(target.name for target in meant[:MOST_NAMED])
        raise ConfigurationError(f"{given!r} is the beginning of {len(meant)} ids, give more of one: {named}")
    if not meant:
        raise ConfigurationError(f"there is no run, REPL or process {given!r}: see `rlm-broker runs`")
    return meant[0]


def _targets(process: ProcessStatus) -> list[StopTarget]:
    pid = process.pid
    live = [run for run in process.runs if run.ended is None]
    return [
        StopTarget(pid, _WHOLE, str(pid), f"the process {process.command} {pid}"),
        *(StopTarget(pid, "run", run.id, f"the run {run.id} ({(run.question or '')[:40]!r})") for run in live),
        *(StopTarget(pid, "repl", repl.id, f"the REPL {repl.id}") for repl in process.repls),
    ]


def _verb(now: bool) -> str:
    return "cancel" if now else "stop"


def _sentence(outcome: StopOutcome) -> str:
    name = {"run": "run", "repl": "REPL", "process": "process"}[outcome.kind]
    if outcome.has_ended:
        return f"{name} {outcome.id}: {outcome.state}"
    return f"{name} {outcome.id}: {outcome.state}{'' if outcome.kind == _WHOLE else ', it goes on'}"
