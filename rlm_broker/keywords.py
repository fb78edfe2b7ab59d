"""Keyword arguments of `RLM` that stand for one argument of `Models`, `Tools`, `Instructions` or `Sandbox`."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar

from rlm_broker.callback import Callback
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.engine import OwnSandbox
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import Emit
from rlm_broker.handler.cache import Cache
from rlm_broker.handler.routing import ModelPolicy, Route
from rlm_broker.limits import Limits
from rlm_broker.lm_handler import LMHandler
from rlm_broker.models.models import FilePath, Models, models_of
from rlm_broker.prompts.instructions import Instructions, Profile
from rlm_broker.run.tools import Tools
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.validation import suggestion
from rlm_broker.watch.terminal import print_events

T = TypeVar("T")


class Keywords(TypedDict, total=False):
    """Keyword arguments that `RLM` takes besides its parameters. Each is short for the argument that is named here."""

    routes: Sequence[Route]
    """`Models(routes=...)`; the next four stand for arguments of `Models`, too."""
    model_policy: ModelPolicy
    cache: FilePath | Cache | None
    record: FilePath | None
    replay: FilePath | None
    sub_tools: Mapping[str, Any] | None
    """`Tools(tools, for_children=...)`"""
    system_prompt: str | Callable[[int], str] | None
    """`Instructions(system=...)`; the next two stand for arguments of `Instructions`, too."""
    prompt_profile: Profile
    user_prologue: str | None
    isolation: str
    """`Sandbox(isolation=...)`; the next four stand for arguments of `Sandbox`, too."""
    allow_exec: bool | None
    seed: int | None
    python: str | os.PathLike[str] | None
    packages: Sequence[str] | None
    verbose: bool
    """Show the run: a display in a notebook, else lines on stderr. An `on_event` that is given is called as well."""
    cluster: Nodes | None
    """Cluster on whose nodes whole runs take place; None runs them on this machine. Settings of the sandbox hold on the
    nodes. A `Sandbox`, `persistent`, `query_handler`, `record` and `replay` are for runs on this machine."""


_MODELS = {"routes": "routes", "model_policy": "policy", "cache": "cache", "record": "record", "replay": "replay"}
_INSTRUCTIONS = {"system_prompt": "system", "prompt_profile": "profile", "user_prologue": "prologue"}
_SANDBOX = {
    "isolation": "isolation",
    "allow_exec": "allow_exec",
    "seed": "seed",
    "python": "python",
    "packages": "packages",
}
_ELSEWHERE = {
    "backend": 'the model is the first argument: RLM("openai/gpt-5-mini")',
    "backend_kwargs": 'a model with options is a Model: RLM(Model(name="openai/gpt-5-mini", options={...}))',
    "other_backends": 'the model that REPLs ask is the second argument: RLM("openai/gpt-5", "openai/gpt-5-mini")',
    "other_backend_kwargs": 'a model with options is a Model: RLM("openai/gpt-5", Model(name=..., options={...}))',
    "environment": 'the isolation level is given as sandbox: RLM(model, sandbox="strict")',
    "environment_kwargs": "options of the sandbox are given there: RLM(model, sandbox=Sandbox(...))",
    "custom_tools": 'tools are given as tools: RLM(model, tools={"name": function})',
    "custom_sub_tools": 'tools of children are given there: RLM(model, tools=Tools({"name": function}, {...}))',
    "custom_system_prompt": 'instructions are given as instructions: RLM(model, instructions="...")',
    "logger": 'what happens goes to on_event: RLM(model, on_event=TraceWriter("run.jsonl"))',
}
"""Maps argument names of the reference runtime to a sentence on what replaces them here."""


def models_with(given: Any, keywords: Mapping[str, Any]) -> Models:
    """Return the models that the parameter `models` and the keywords stand for."""
    return _with("models", models_of(given), isinstance(given, Models), _MODELS, keywords)


def instructions_with(given: Any, keywords: Mapping[str, Any]) -> Instructions:
    """Return the instructions that the parameter `instructions` and the keywords stand for."""
    if given is not None and not isinstance(given, Instructions):
        given = Instructions(given)
    is_whole = given is not None
    return _with("instructions", given or Instructions(), is_whole, _INSTRUCTIONS, keywords)


def sandbox_with(given: Any, keywords: Mapping[str, Any]) -> Sandbox | OwnSandbox:
    """Return the sandbox that the parameter `sandbox` and the keywords stand for."""
    if not isinstance(given, str | Sandbox | None):
        raise ConfigurationError(f"sandbox must be a Sandbox or the name of a level, not {type(given).__name__}")
    made = given if isinstance(given, Sandbox) else OwnSandbox() if given is None else OwnSandbox(given)
    if isinstance(given, str) and "isolation" in keywords:
        raise ConfigurationError("give the isolation level once, as sandbox or as isolation")
    return _with("sandbox", made, isinstance(given, Sandbox), _SANDBOX, keywords)


def tools_with(given: Any, keywords: Mapping[str, Any]) -> Tools:
    """Return the tools that the parameter `tools` and the keywords stand for."""
    if not isinstance(given, Tools):
        return Tools(given, keywords.get("sub_tools"))
    if "sub_tools" in keywords:
        raise ConfigurationError("tools is a Tools, so give sub_tools there: Tools(..., for_children={...})")
    return given


def cluster_with(keywords: Mapping[str, Any], persistent: bool, query_handler: object) -> Nodes | None:
    """Return the cluster of the keywords.

    Raises:
        ConfigurationError: It is none, or another argument needs a REPL on this machine.
    """
    cluster: Nodes | None = keywords.get("cluster")
    require_kind("cluster", cluster, Nodes, type(None))
    if cluster is not None and (persistent or query_handler is not None):
        named = "persistent" if persistent else "query_handler"
        raise ConfigurationError(f"{named} needs a REPL on this machine: leave it out, or the cluster")
    return cluster


def receivers_with(on_event: Any, keywords: Mapping[str, Any]) -> tuple[Callback, ...]:
    """Return the callbacks for each event, from the parameter `on_event` and the keywords."""
    verbose = keywords.get("verbose", False)
    require_kind("verbose", verbose, bool)
    own = (Callback(_shows_events(), "verbose"),) if verbose else ()
    return own if on_event is None else (*own, Callback(on_event, "on_event"))


def _shows_events() -> Emit:
    """Return the callback of a verbose run: a display in a notebook, else lines on stderr."""
    from rlm_broker.watch.notebook import notebook_progress  # 5 ms, which only a verbose run pays

    return notebook_progress() or print_events


def require_consistent(model: Any, sub_model: Any, models: Models, handler: Any, has_policy: bool) -> None:
    """Refuse models beside a handler or a recording, which bring their own.

    Raises:
        ConfigurationError: Both were given.
    """
    has_models = model is not None or sub_model is not None
    if handler is not None and (has_models or models.needs_own_handler or has_policy):
        raise ConfigurationError("give either models or a handler: a handler brings its own models")
    if models.replay is not None and has_models:
        raise ConfigurationError("give either models or a recording to replay: it brings its own models")


def require_arguments(
    keywords: Mapping[str, Any],
    front_door: Callable[..., Any],
    limits: object,
    handler: object,
    query_handler: object,
    recursion: object,
    persistent: object,
) -> None:
    """Refuse unknown keywords of `RLM`, and arguments of another type or value than is allowed.

    Raises:
        ConfigurationError: There is one.
    """
    require_known(keywords, front_door)
    require_kind("limits", limits, Limits, type(None))
    require_kind("handler", handler, LMHandler, type(None))
    if query_handler is not None and not callable(query_handler):
        raise ConfigurationError(f"query_handler must be a function, not {type(query_handler).__name__}")
    require_kind("persistent", persistent, bool)
    if recursion not in ("always", "auto"):
        raise ConfigurationError(f"recursion must be 'always' or 'auto', not {recursion!r}")


def require_known(keywords: Mapping[str, Any], front_door: Callable[..., Any]) -> None:
    """Refuse unknown keywords, and name what replaces them.

    Args:
        keywords: Keywords that the caller gave.
        front_door: Function or class that took them; its parameters are suggested for misspelt names.

    Raises:
        ConfigurationError: A keyword is unknown.
    """
    for name in keywords:
        if name in Keywords.__annotations__:
            continue
        if name in _ELSEWHERE:
            raise ConfigurationError(f"RLM takes no {name}: {_ELSEWHERE[name]}")
        if name in Limits.model_fields:
            raise ConfigurationError(f"RLM takes no {name}: it is a limit: RLM(model, limits=Limits({name}=...))")
        known = [*inspect.signature(front_door).parameters, *Keywords.__annotations__]
        known.remove("keywords")
        limits = get_close_matches(name, Limits.model_fields, 1, cutoff=0.8)
        if limits and not get_close_matches(name, known, 1, cutoff=0.8):
            raise ConfigurationError(f"RLM takes no {name}; did you mean limits=Limits({limits[0]}=...)?")
        raise ConfigurationError(f"RLM takes no {name}{suggestion(name, known)}")


def _with(parameter: str, made: T, is_whole: bool, names: Mapping[str, str], keywords: Mapping[str, Any]) -> T:
    """Return `made`, changed as the keywords say.

    Raises:
        ConfigurationError: `is_whole`: the caller gave the object itself, so its arguments belong into its constructor.
    """
    said = {name: keywords[name] for name in names if name in keywords}
    if said and is_whole:
        kind, first = type(made).__name__, next(iter(said))
        raise ConfigurationError(f"{parameter} is a {kind}, so give {first} there: {kind}({names[first]}=...)")
    changes: Any = {names[name]: value for name, value in said.items()}
    of_dataclass: Any = made
    changed: T = replace(of_dataclass, **changes) if said else made
    return changed
