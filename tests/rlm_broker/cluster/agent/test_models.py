"""Routes on a node: they pick the same model as those that they were made of."""

import pytest

from rlm_broker.broker.clients.base import BaseClient, LMRequest
from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.broker.routing import Route, Routing
from rlm_broker.cluster.agent.models import RemoteModel, routing_of
from rlm_broker.cluster.described import routing_spec
from rlm_broker.cluster.messages import ModelSpec, RoutingSpec
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.results import ChatMessage

NAMES = (None, "root", "sub", "judge", "gpt-judge", "gpt-x", "cheap", "unheard-of")


def client(name: str, window: int | None = None) -> BaseClient:
    made = ScriptedClient([], name)
    made.context_tokens = window
    return made


def outcome(routing: Routing, name: str | None, depth: int) -> object:
    """Return what code gets for a name: the model and its window, or the words of the refusal."""
    try:
        picked = routing.pick_for_code(name, depth)
    except UnknownModel as unknown:
        return str(unknown)
    return picked.model_name, picked.context_tokens


@pytest.mark.parametrize("policy", ["allow", "pinned", "open"])
@pytest.mark.parametrize("has_sub", [True, False])
async def test_a_node_picks_what_the_orchestrator_picks(policy: str, has_sub: bool) -> None:
    """Every name at every depth leads to the same model, or is refused in the same words."""
    sub = client("sub", 1_000) if has_sub else None
    routing = Routing(client("root", 9_000), sub, model_policy=policy, open_client=client)  # type: ignore[arg-type]
    routing.register("judge", client("gpt-judge", 500))
    routing.add(Route("judge", "gpt-*"))
    routing.add(Route("root", "cheap", "2-"))
    made = routing_of(await routing_spec(routing))
    assert [outcome(made, name, depth) for name in NAMES for depth in range(4)] == [
        outcome(routing, name, depth) for name in NAMES for depth in range(4)
    ]
    assert (made.names, made.policy, made.opens) == (routing.names, routing.policy, True)


async def test_facts_of_a_client_arrive() -> None:
    """One client under two names stays one, with its price and its window."""
    root = client("root", 7)
    root.is_priced, root.answers_types = False, False
    routing = Routing(root)
    routing.register("alias", root)
    made = routing_of(await routing_spec(routing))
    assert made.pick("alias", 1) is made.root
    assert (made.root.is_priced, made.root.answers_types, made.sub) == (False, False, None)


def test_a_contradicting_description_is_refused() -> None:
    spec = RoutingSpec((ModelSpec("root"),), 0, None, (("judge", 4),), (), "allow")
    with pytest.raises(ConfigurationError, match="names a model that it does not have"):
        routing_of(spec)


async def test_a_node_calls_no_model_itself() -> None:
    with pytest.raises(ModelFailed, match="by the orchestrator alone"):
        await RemoteModel(ModelSpec("root")).complete(LMRequest((ChatMessage("user", "?"),)))
