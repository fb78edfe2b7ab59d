"""A run in words that a node understands: its models, tools, instructions and context, without the objects themselves.

A node gets facts alone. The clients with their keys, the functions of the user's and the type of the answer stay in the
orchestrator, and the node asks for what they do.
"""

import dataclasses
from typing import Any

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.messages import ContextSpec, ModelSpec, RoutingSpec, ToolSpec, ToolsSpec
from rlm_broker.context.stored import StoredContext, digest_of
from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits, ReplLimits
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.tool_set import ToolSet
from sandbox_worker.wire.errors import ValueRefused
from sandbox_worker.wire.values import encode

MOST_VALUES_BYTES = 16 << 20
"""Maximum bytes of the values for code that one run sends to a node. They go with each run; a context goes once."""
MOST_SYSTEMS = 100
"""Maximum depths that a function for the system prompt is asked for; a run with more levels is refused."""


async def routing_spec(routing: Routing) -> RoutingSpec:
    """Return the facts about a run's models and routes. It waits until the context windows are known."""
    clients = routing.clients
    for client in clients:
        await client.loaded()
    place = {id(client): number for number, client in enumerate(clients)}
    registered = routing.by_name
    return RoutingSpec(
        tuple(map(_model_spec, clients)),
        place[id(routing.root)],
        None if routing.sub is None else place[id(routing.sub)],
        tuple((name, place[id(registered[name])]) for name in routing.names),
        tuple((route.to, route.match, route.depths) for route in routing.routes),
        routing.policy,
        routing.opens,
    )


def tools_spec(tools: ToolSet) -> ToolsSpec:
    """Return the signatures of functions, and the values for code.

    Raises:
        ConfigurationError: The values take more than `MOST_VALUES_BYTES`, or one of them does not cross.
    """
    spec = _tools_spec(tools)
    size = sum(len(text) for each in (spec, spec.for_children) if each is not None for text in each.values.values())
    if size > MOST_VALUES_BYTES:
        raise ConfigurationError(
            f"the values among the tools take {size:,} bytes, and a run on a cluster may have {MOST_VALUES_BYTES:,}: "
            "put them into the context"
        )
    return spec


def system_prompts(instructions: Instructions, limits: Limits) -> tuple[str, ...]:
    """Return the user's system prompts by depth, without those at the end that repeat the one before.

    Raises:
        ConfigurationError: A function for the prompt returned another type, or would be asked for too many depths.
    """
    said = instructions.system
    if said is None or isinstance(said, str):
        return () if said is None else (said,)
    if limits.max_depth > MOST_SYSTEMS:
        raise ConfigurationError(
            f"max_depth = {limits.max_depth:,} with a function for the system prompt: a run on a cluster may have "
            f"{MOST_SYSTEMS}"
        )
    prompts = [said(depth) for depth in range(max(1, limits.max_depth))]
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise ConfigurationError(f"the function for the system prompt must return text, not {type(wrong[0]).__name__}")
    while len(prompts) > 1 and prompts[-1] == prompts[-2]:
        prompts.pop()
    return tuple(prompts)


def context_spec(context: StoredContext) -> ContextSpec:
    """Return the facts about a context. Call it in a thread: it reads all of the context for its digest.

    Raises:
        OSError: There is no address space to read the context.
    """
    pieces = tuple(piece for _, piece in context.pieces())
    return ContextSpec(digest_of(context).hex(), context.size_bytes, pieces, dataclasses.asdict(context.info))


def limits_spec(limits: ReplLimits) -> dict[str, Any]:
    """Return limits as values of JSON, from which `Limits(**values)` makes equal ones."""
    return limits.model_dump(mode="json")


def _model_spec(client: BaseClient) -> ModelSpec:
    return ModelSpec(client.model_name, client.context_tokens, client.is_priced, client.answers_types)


def _tools_spec(tools: ToolSet) -> ToolsSpec:
    functions = tools.functions.items()
    try:
        values = {name: encode(value, name).decode() for name, value in tools.values.items()}
    except ValueRefused as refused:
        raise ConfigurationError(f"a value among the tools does not cross: {refused}") from None
    return ToolsSpec(
        tuple(ToolSpec(name, facts.signature, facts.description, facts.timeout_s) for name, facts in functions),
        values,
        dict(tools.notes),
        None if tools.for_children is tools else _tools_spec(tools.for_children),
    )
