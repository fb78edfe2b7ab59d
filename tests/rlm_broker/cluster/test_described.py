"""A run in words: what a node is told, and what is refused because it cannot be told."""

from typing import Any

import pytest

from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.broker.routing import Route, Routing
from rlm_broker.cluster import described
from rlm_broker.cluster.described import context_spec, limits_spec, routing_spec, system_prompts, tools_spec
from rlm_broker.cluster.messages import ModelSpec, ToolSpec
from rlm_broker.context.store import store
from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.tools import Tools


class Slow(ScriptedClient):
    """A client that knows its window only once it is loaded."""

    async def loaded(self) -> None:
        self.context_tokens = 8_000


async def test_windows_are_waited_for() -> None:
    """Each client is told once, and names lead to places."""
    root, judge = Slow([], "gpt"), ScriptedClient([], "own")
    routing = Routing(root, root)
    routing.register("judge", judge)
    routing.register("again", judge)
    routing.add(Route("judge", "j-*", "1-"))
    spec = await routing_spec(routing)
    assert spec.models == (ModelSpec("gpt", 8_000), ModelSpec("own"))
    assert (spec.root, spec.sub, spec.named) == (0, 0, (("judge", 1), ("again", 1)))
    assert (spec.routes, spec.policy, spec.opens) == ((("judge", "j-*", "1-"),), "allow", False)


def test_functions_are_told_and_not_sent() -> None:
    """A signature, a paragraph and a time limit go; values go encoded; children that have the same are not repeated."""

    def find(name: str, n: int = 3) -> list[str]:
        """Find it."""
        return [name] * n

    spec = tools_spec(Tools({"find": {"tool": find, "timeout_s": 5}, "pair": (1, 2)}))
    assert spec.tools == (ToolSpec("find", "(name: str, n: int = 3) -> list[str]", "Find it.", 5),)
    assert (spec.values, spec.descriptions) == ({"pair": '{"$tuple":[1,2]}'}, {"pair": "a tuple"})
    assert spec.for_children is None
    other = tools_spec(Tools({"find": find}, {}))
    assert other.for_children == tools_spec(Tools())


def test_too_large_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "MOST_VALUES_BYTES", 100)
    with pytest.raises(ConfigurationError, match=r"the values among the tools take 202 bytes.*into the context"):
        tools_spec(Tools({}, {"text": "x" * 200}))


@pytest.mark.parametrize(
    ("said", "depth", "wanted"),
    [
        (None, 3, ()),
        ("S", 3, ("S",)),
        (lambda depth: f"S{depth}", 3, ("S0", "S1", "S2")),
        (lambda depth: f"S{min(depth, 1)}", 50, ("S0", "S1")),
        (lambda _: "S", 0, ("S",)),
    ],
)
def test_system_prompts_by_depth(said: Any, depth: int, wanted: tuple[str, ...]) -> None:
    """Depths at the end that have the prompt of the one before are not repeated."""
    assert system_prompts(Instructions(said), Limits(max_depth=depth)) == wanted


def test_prompts_that_cannot_be_told_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must return text, not int"):
        system_prompts(Instructions(lambda depth: depth), Limits())  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="max_depth = 101 with a function"):
        system_prompts(Instructions(str), Limits(max_depth=101))


def test_equal_contexts_have_one_digest() -> None:
    """Content and form decide, and not where it came from."""
    with store("text") as one, store("text") as same, store("texT") as other, store(["text"]) as listed:
        digests = [context_spec(each).digest for each in (one, same, other, listed)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(max_iterations=(9, 3), max_budget_usd=0.5, run_timeout_s=None, max_output_lines=7)]
)
def test_limits_arrive_equal(limits: Limits) -> None:
    assert Limits(**limits_spec(limits)) == limits
