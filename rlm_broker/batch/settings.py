"""The settings on which the results of a batch depend, as values that a journal keeps and compares."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.models.model import Model
from rlm_broker.errors import ConfigurationError
from rlm_broker.run.engine import Engine
from rlm_broker.run.request import RunRequest
from rlm_broker.values.text import clip, jsonable

MOST_CHARS = 200
"""Characters kept of a text in a journal; of a longer one it has the beginning and the digest."""
MOST_SHOWN, MOST_SHOWN_CHARS = 3, 60
"""Differences shown in an error, and characters of a value in it."""


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
        "prompts": request.prompts_digest,
        "model": model(routing.root),
        "sub_model": None if routing.sub is None else model(routing.sub),
        "models": {name: model(client) for name, client in by_name.items() if name in routing.names},
        "routes": [str(route) for route in routing.routes],
        "model_policy": routing.policy,
        "limits": jsonable(engine.limits.to_dict()),
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


def changed_settings(
    first: Mapping[str, Any],
    taken: Mapping[str, Sequence[Any]],
    now: Mapping[str, Any],
    seeds: Sequence[int] = (),
    *,
    takes_others: bool = False,
) -> dict[str, Any]:
    """Return the settings, by name, with another value now than in the beginning of a batch.

    Args:
        first: Settings in the beginning.
        taken: Other values that earlier processes have taken, by name. They need no flag again.
        now: Settings of this process.
        seeds: The seed before and now, if both are known.
        takes_others: Whether other limits and prompts are taken for the items left.

    Raises:
        ConfigurationError: A setting has a value that no process before has taken. The message shows the first ones.
    """
    beginning, present = dict(_flat(first)), dict(_flat(now))
    before, after = {name: [value] for name, value in beginning.items()}, dict(present)
    if seeds:
        before["seed"], after["seed"] = [seeds[0]], seeds[1]
    known = {name: [*before.get(name, [None]), *taken.get(name, [])] for name in {**before, **after}}
    names = [name for name, values in known.items() if after.get(name) not in values]
    may_change = all(name.startswith("limits.") or name == "prompts" for name in names)
    if names and not (takes_others and may_change):
        shown = [
            f"{name} was {_shown(known[name][-1])} and is {_shown(after.get(name))}" for name in names[:MOST_SHOWN]
        ]
        more = [f"and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
        others = "; or take them for the items that are left: --settings-changed" if may_change else ""
        raise ConfigurationError(
            f"{'; '.join(shown + more)}; give the same settings, or another file for the results{others}"
        )
    return {name: value for name, value in present.items() if value != beginning.get(name)}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their names, for example `limits.max_depth`."""
    if isinstance(value, Mapping) and (value or not name):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shown(value: Any) -> str:
    return f"{value!r:.{MOST_SHOWN_CHARS}}"


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
