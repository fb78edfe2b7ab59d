"""The settings on which the results of a batch depend, as values that a journal keeps and compares."""

import hashlib
import json
from typing import Any

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.models.model import Model
from rlm_broker.run.engine import Engine
from rlm_broker.run.request import RunRequest
from rlm_broker.values.text import clip, jsonable
from rlm_broker.version import __version__

MOST_CHARS = 200
"""Characters of a text that a journal keeps; of a longer one it has the beginning and the digest."""


def settings_of(engine: Engine, request: RunRequest) -> dict[str, Any]:
    """Return the settings of all runs of a batch.

    Args:
        engine: Open engine of the runs. Its registry knows how the user has described the models.
        request: What all runs are asked with.
    """
    routing, registry = engine.handler.routing, engine.registry
    by_name, instructions, tools = routing.by_name, request.instructions, request.tools
    output_type, query_handler = request.output_type, request.query_handler

    def model(client: BaseClient) -> str:
        described = None if registry is None else registry.described(client)
        return _model(client, described)

    system = instructions.system
    return {
        "release": __version__,
        "model": model(routing.root),
        "sub_model": None if routing.sub is None else model(routing.sub),
        "models": {name: model(client) for name, client in by_name.items() if name in routing.names},
        "routes": [str(route) for route in routing.routes],
        "model_policy": routing.policy,
        "limits": jsonable(engine.limits.model_dump()),
        "system_prompt": _short(system) if isinstance(system, str | None) else _name(system),
        "prompt_profile": instructions.profile,
        "user_prologue": _short(instructions.prologue),
        "tools": sorted([*tools.names, *tools.values]),
        "sub_tools": sorted([*tools.for_children.names, *tools.for_children.values]),
        "output_type": None if output_type is None else _short(output_type.schema),
        "recursion": "auto" if request.is_auto else "always",
        "query_handler": None if query_handler is None else _name(query_handler),
        "isolation": engine.level,
    }


def _model(client: BaseClient, described: Model | None) -> str:
    """Return the name of a model; with a digest of its options, if there are any.

    Its address is none of them: a server may be started again elsewhere.
    """
    if described is not None:
        options = {"options": dict(described.options), "context_tokens": described.context_tokens}
        told = None if not described.options and described.context_tokens is None else json.dumps(jsonable(options))
    else:
        told = client.fingerprint
    return client.model_name if told is None else f"{client.model_name} {_digest(told)}"


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MOST_CHARS else f"{clip(text, MOST_CHARS)} {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _name(function: object) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
