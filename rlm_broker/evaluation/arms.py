"""The arms of an evaluation: the same model, plainly asked or with runs of a maximum depth, and with other settings.

A plain arm is an `RLM` with `max_depth=0`, whose runs have no REPL. So all arms share the client, with its retries,
cache and prices, and the form of results.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlm_broker.broker.clients.base import Client
from rlm_broker.broker.models.model import Given
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, OutputInvalid, RunFailed
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.prompts.instructions import Instructions

PLAIN: Final = "plain"
KINDS: Final = (PLAIN, *(f"rlm{depth}" for depth in range(1, 10)))
"""Kinds of arms; the place of a kind is its `max_depth`. `rlm` is short for `rlm1`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask all questions.

    Attributes:
        max_depth: Levels of runs with a REPL. With 0 the model gets the context in its prompt.
        settings: Names and values of settings of this arm alone: limits, `recursion` and `prompt_profile`.
    """

    max_depth: int
    settings: Mapping[str, Any]

    def rlm(self, model: Given, sub_model: Given | None = None) -> RLM:
        """Return an `RLM` with the settings of the arm.

        Raises:
            ConfigurationError: There is no such setting, or it has no such value.
        """
        limits: dict[str, Any] = {"max_depth": self.max_depth, **self.settings}
        recursion, profile = limits.pop("recursion", "always"), limits.pop("prompt_profile", "both")
        bounds = Limits.from_dict(limits)
        return RLM(model, sub_model, limits=bounds, recursion=recursion, instructions=Instructions(profile=profile))

    async def ask(
        self, client: Client, sub_client: Client | None, context: object, question: str | None
    ) -> tuple[str, dict[str, Any]]:
        """Return the answer to a question about a context, and the facts of the run for the log.

        Raises:
            RunFailed: The model or the sandbox failed; a context that is too long for a plain arm is no such failure.
        """
        try:
            run = await self.rlm(client, sub_client).acompletion(context, question)
        except (LimitReached, OutputInvalid) as stopped:
            return stopped.partial_answer or "", _facts(stopped, "limited", len(stopped.trajectory))
        except ModelFailed as failed:
            if self.max_depth or not failed.is_too_long:
                raise
            return "", _facts(failed, "does_not_fit", 0)
        return run.response or "", _facts(run, "answered" if run.limit is None else "limited", run.iterations)


def _facts(run: Completion | RunFailed, ended: str, turns: int) -> dict[str, Any]:
    """Return what a log has of a run. Calls, tokens and US dollars are the whole tree's."""
    used = run.usage_summary.total
    return {
        "ended": ended,
        "cost": used.total_cost if used.total_calls else 0.0,
        "tokens": used.total_input_tokens + used.total_output_tokens,
        "calls": used.total_calls,
        "turns": turns,
        "depth": max(run.usage_by_depth, default=0),
        "seconds": run.execution_time,
    }


def arms_of(names: Iterable[str]) -> dict[str, Arm]:
    """Return the arms by their names.

    Examples:
        >>> arms_of(["plain", "rlm2:max_iterations=5:recursion=auto"])["rlm2:max_iterations=5:recursion=auto"]
        Arm(max_depth=2, settings={'max_iterations': '5', 'recursion': 'auto'})

    Raises:
        ConfigurationError: There is no such arm or setting, or none is named.
    """
    arms: dict[str, Arm] = {}
    for name in names:
        kind, *given = name.split(":")
        if kind not in ("rlm", *KINDS):
            raise ConfigurationError(f"there is no arm {kind[:40]!r}: name plain, rlm, or rlm2 to rlm9 for a max_depth")
        settings = dict(each.partition("=")[::2] for each in given)
        arms[name] = Arm(1 if kind == "rlm" else KINDS.index(kind), settings)
        arms[name].rlm("offline")  # refuses a wrong setting before anything is asked
    if not arms:
        raise ConfigurationError("there is no arm: name some of plain, rlm, rlm2")
    return arms


def differences(scores: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, float]:
    """Return how much better each arm is than the plain one, or else than the first, on the same questions.

    The standard error is of the questions' own differences, so what makes a question hard for both arms is not in
    it. A difference of less than two standard errors may be chance.

    Args:
        scores: By arm and length, the score of each question.
    """
    found: dict[str, float] = {}
    for (arm, length), own in scores.items():
        arms = [each for each, its_length in scores if its_length == length]
        base = PLAIN if PLAIN in arms else arms[0]
        pairs = [own[each] - other for each, other in scores[base, length].items() if each in own]
        if arm != base and pairs:
            mean = math.fsum(pairs) / len(pairs)
            square = math.fsum((each - mean) ** 2 for each in pairs) / max(1, len(pairs) - 1)
            found |= {f"{arm} - {base} {length}": mean, f"{arm} - {base} {length} stderr": (square / len(pairs)) ** 0.5}
    return found
