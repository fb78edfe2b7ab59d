"""The faults of a cluster, each played in a batch of its own: what was noticed, what was answered, what is left."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.cluster.director import Play, seconds_until
from scripts.cluster.network import Node

NOTICED_WITHIN_S = 3.0
"""Seconds within which a loss is noticed, and a node has ended what it can not go on with, where nothing else runs."""
UNWRITTEN_S = 0.5
"""Seconds before the end of an orchestrator within which an answer may not have been written down yet."""
LEFT_WITHIN_S = 60.0
"""Seconds to wait for what is to end. Beyond, it counts as left."""


@dataclass
class Outcome:
    """Outcome of a play.

    Attributes:
        is_loss: Whether a node was lost, so that its runs began again elsewhere.
        noticed_s: Seconds until the broker had noticed; None if nothing was to be noticed.
        ended_s: Seconds until the node had ended its runs and REPLs; None if they did not end, or need not.
        left: Processes on each node after the end, beside agents that wait for a broker.
        problems: What is not as it must be.
        within_s: Seconds within which a loss is noticed. Infinity where other work delays all processes of the play.
    """

    is_loss: bool = False
    noticed_s: float | None = None
    ended_s: float | None = None
    left: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    within_s: float = NOTICED_WITHIN_S


Fault = Callable[[Play, Outcome], None]


def nothing(play: Play, _outcome: Outcome) -> None:
    """Inject no fault: what the others are compared with."""
    play.go_on()
    play.finish()


def node_killed(play: Play, outcome: Outcome) -> None:
    """SIGKILL all processes of a node."""
    node = _busy(play)
    since = time.monotonic()
    node.kill()
    play.go_on()
    _noticed(play, outcome, node, since)
    play.finish()


def agent_killed(play: Play, outcome: Outcome) -> None:
    """SIGKILL an agent alone: what it has started ends by itself."""
    node = _busy(play)
    since = time.monotonic()
    node.agent.kill()
    play.go_on()
    _ended(outcome, node, since, agents=0)
    _noticed(play, outcome, node, since)
    play.finish()


def link_cut(play: Play, outcome: Outcome) -> None:
    """Cut a link without FIN, and heal it after both sides have given up."""
    node = _busy(play)
    since = time.monotonic()
    node.cut()
    play.go_on()
    _noticed(play, outcome, node, since)
    _ended(outcome, node, since)
    node.heal()
    play.wait_until_joined(node, time.monotonic())
    play.finish()


def link_flaps(play: Play, _outcome: Outcome) -> None:
    """Cut a link for a moment that is shorter than the silence which counts as a loss."""
    node = _busy(play)
    node.cut()
    play.go_on()
    time.sleep(0.5)
    node.heal()
    play.finish()


def agent_stopped(play: Play, outcome: Outcome) -> None:
    """SIGSTOP an agent, and SIGCONT after its loss was noticed."""
    node = _busy(play)
    since = time.monotonic()
    agent = node.agent
    agent.send_signal(signal.SIGSTOP)
    play.go_on()
    _noticed(play, outcome, node, since)
    agent.send_signal(signal.SIGCONT)
    _ended(outcome, node, time.monotonic())
    play.wait_until_joined(node, time.monotonic())
    play.finish()


def orchestrator_killed(play: Play, outcome: Outcome) -> None:
    """SIGKILL the orchestrator; then give the same command again."""
    play.go_on()
    play.wait_for_done(play.runs // 3)
    since = play.kill_orchestrator()
    for node in play.nodes:
        _ended(outcome, node, since)
        node.end()
    play.start_orchestrator()
    play.finish()


FAULTS: dict[str, Fault] = {
    "none": nothing,
    "node killed": node_killed,
    "agent killed": agent_killed,
    "link cut and healed": link_cut,
    "link cut for 0.5 s": link_flaps,
    "agent stopped": agent_stopped,
    "orchestrator killed": orchestrator_killed,
}
"""Name on the command line → how it is played."""


def judge(play: Play, outcome: Outcome) -> None:
    """Add what is not as it must be at the end of a play."""
    if len(play.done) < play.runs:
        outcome.problems.append(f"{play.runs - len(play.done)} items have no result")
    wrong = [done for done in play.done.values() if not done.is_right]
    if wrong:
        outcome.problems.append(f"{len(wrong)} items have no right answer: {wrong[0].problem}")
    counts = play.counts()
    excused = sum(play.killed_at is not None and at > play.killed_at - UNWRITTEN_S for at in counts.again)
    if twice := len(counts.again) - excused:
        outcome.problems.append(f"{twice} calls were paid twice")
    if counts.paid - len(counts.again) != play.wanted_calls:
        outcome.problems.append(f"{counts.paid - len(counts.again)} different calls were paid, not {play.wanted_calls}")
    since = time.monotonic()
    for node in play.nodes:
        seconds_until(lambda node=node: _below_agent(node) == 0, since, LEFT_WITHIN_S)  # type: ignore[misc]
        outcome.left[node.name] = _below_agent(node)
    if outcome.is_loss and play.over is not None and not play.over.lost_runs:
        outcome.problems.append("the fault hit no run")
    if left := sum(outcome.left.values()):
        outcome.problems.append(f"{left} processes are left")


def _busy(play: Play) -> Node:
    """Wait until all runs wait for the provider, and return a node that has some. The fault then lets them go on."""
    play.wait_until_held()
    return max(play.nodes, key=lambda node: len(node.processes))


def _noticed(play: Play, outcome: Outcome, node: Node, since: float) -> None:
    outcome.is_loss = True
    outcome.noticed_s = play.wait_until_lost(node, since)
    if outcome.noticed_s > outcome.within_s:
        outcome.problems.append(f"noticed after {outcome.noticed_s:.1f} s")


def _ended(outcome: Outcome, node: Node, since: float, agents: int = 1) -> None:
    """Wait until a node has no process of a run any more: its agent, if it lives, may wait for a broker."""
    taken = seconds_until(lambda: len(node.processes) <= agents, since, LEFT_WITHIN_S)
    if taken is None:
        outcome.problems.append(f"{len(node.processes) - agents} processes of {node.name} did not end")
        return
    outcome.ended_s = max(taken, outcome.ended_s or 0.0)
    if taken > outcome.within_s:
        outcome.problems.append(f"{node.name} ended its runs after {taken:.1f} s")


def _below_agent(node: Node) -> int:
    """Return the number of processes of a node beside its agent."""
    return max(0, len(node.processes) - 1)
