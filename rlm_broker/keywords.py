"""Names that `RLM` does not take, and how their arguments are written."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.values.validation import suggestion

WRITTEN: Final = {
    "routes": "RLM(model, models=Models(routes=[...]))",
    "model_policy": 'RLM(model, models=Models(policy="pinned"))',
    "cache": 'RLM(model, models=Models(cache="replies.sqlite"))',
    "record": 'RLM(model, models=Models(record="run.jsonl"))',
    "replay": 'RLM(models=Models(replay="run.jsonl"))',
    "sub_tools": "RLM(model, tools=Tools({...}, for_children={...}))",
    "system_prompt": 'RLM(model, instructions="...")',
    "prompt_profile": 'RLM(model, instructions=Instructions(profile="final"))',
    "user_prologue": 'RLM(model, instructions=Instructions(prologue="..."))',
    "isolation": 'RLM(model, sandbox="strict")',
    "allow_exec": "RLM(model, sandbox=Sandbox(allow_exec=False))",
    "seed": "RLM(model, sandbox=Sandbox(seed=7))",
    "python": 'RLM(model, sandbox=Sandbox(python="venv"))',
    "packages": 'RLM(model, sandbox=Sandbox(packages=["numpy"]))',
    "cluster": "RLM(model, sandbox=nodes)",
    "query_handler": "RLM(model, recursion=function)",
    "backend": 'RLM("openai/gpt-5-mini")',
    "backend_kwargs": 'RLM(Model(name="openai/gpt-5-mini", options={...}))',
    "other_backends": 'RLM("openai/gpt-5", "openai/gpt-5-mini")',
    "other_backend_kwargs": 'RLM("openai/gpt-5", Model(name=..., options={...}))',
    "environment": 'RLM(model, sandbox="strict")',
    "environment_kwargs": "RLM(model, sandbox=Sandbox(...))",
    "custom_tools": 'RLM(model, tools={"name": function})',
    "custom_sub_tools": 'RLM(model, tools=Tools({"name": function}, {...}))',
    "custom_system_prompt": 'RLM(model, instructions="...")',
    "logger": 'RLM(model, on_event=TraceWriter("run.jsonl"))',
}
"""Name that `RLM` took before, or that the reference runtime takes → how its argument is written now."""


def refuse(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that `RLM` does not take, and say how their arguments are written.

    Args:
        unknown: Names that the caller gave.
        known: Names that `RLM` takes.

    Raises:
        ConfigurationError: There is an unknown name.
    """
    for name in unknown:
        if name in WRITTEN:
            raise ConfigurationError(f"RLM takes no {name}: write {WRITTEN[name]}")
        if name in Limits.model_fields:
            raise ConfigurationError(f"RLM takes no {name}: it is a limit: write RLM(model, limits=Limits({name}=...))")
        limits = get_close_matches(name, Limits.model_fields, 1, cutoff=0.8)
        if limits and not get_close_matches(name, known, 1, cutoff=0.8):
            raise ConfigurationError(f"RLM takes no {name}; did you mean limits=Limits({limits[0]}=...)?")
        raise ConfigurationError(f"RLM takes no {name}{suggestion(name, known)}")
