"""Names of arguments in other systems, and how each is written here. It is imported when an argument is unknown.

Both pages "Coming from" list the names of `RLM`, and a test compares them with this table.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, Never

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import MEANT, Limits, ReplLimits
from rlm_broker.values.validation import suggestion

_LIMIT = "RLM(model, limits=Limits({}=...))"
_MODEL = "RLM(Model(name=..., {}))"
_EVENTS = "RLM(model, on_event=Callbacks({}=function))"
_TRACE = 'RLM(model, on_event=TraceWriter("run.jsonl"))'
_INSTRUCTIONS = 'RLM(model, instructions="...")'
_SUB_MODEL = 'RLM("openai/gpt-5", "openai/gpt-5-mini")'
_PACKAGES = 'RLM(model, sandbox=Sandbox(packages=["numpy"]))'
_SANDBOX = 'RLM(model, sandbox="strict")'
_QUESTION = "rlm.completion(context, question, output_type=...)"

RLM_ARGUMENTS: Final = MappingProxyType(
    {
        "routes": "RLM(model, models=Models(routes=[...]))",
        "model_policy": 'RLM(model, models=Models(policy="pinned"))',
        "cache": 'RLM(model, models=Models(cache="replies.sqlite"))',
        "record": 'RLM(model, models=Models(record="run.jsonl"))',
        "replay": 'RLM(models=Models(replay="run.jsonl"))',
        "sub_tools": "RLM(model, tools=Tools({...}, for_children={...}))",
        "prompt_profile": 'RLM(model, instructions=Instructions(profile="final"))',
        "allow_exec": "RLM(model, sandbox=Sandbox(allow_exec=False))",
        "python": 'RLM(model, sandbox=Sandbox(python="venv"))',
        "packages": _PACKAGES,
        "pip_packages": _PACKAGES,
        "cluster": "RLM(model, sandbox=RayCluster())",
        "query_handler": "RLM(model, recursion=function)",
        "setup_code": "sandbox.template(setup=...)",
        "tool_code": "sandbox.template(setup=...)",
        # models
        "backend": 'RLM("openai/gpt-5-mini")',
        "backend_kwargs": 'RLM(Model(name="openai/gpt-5-mini", options={...}))',
        "model_kwargs": 'RLM(Model(name="openai/gpt-5-mini", options={...}))',
        "model_name": 'RLM("openai/gpt-5-mini")',
        "provider": 'RLM("openai/gpt-5-mini")',
        "llm": 'RLM("openai/gpt-5-mini")',
        "lm": 'RLM("openai/gpt-5-mini")',
        "client": "RLM(client)",
        "lm_client": "RLM(client)",
        "chat_fn": "RLM(function)",
        "llm_chat_fn": "RLM(function)",
        "other_backends": _SUB_MODEL,
        "other_backend_kwargs": 'RLM("openai/gpt-5", Model(name=..., options={...}))',
        "sub_lm": _SUB_MODEL,
        "sub_llm": _SUB_MODEL,
        "recursive_model": _SUB_MODEL,
        "child_model": _SUB_MODEL,
        "base_url": _MODEL.format('base_url="http://..."'),
        "api_base": _MODEL.format('base_url="http://..."'),
        "api_key": _MODEL.format('api_key="env:OPENAI_API_KEY"'),
        "temperature": _MODEL.format('options={"temperature": ...}'),
        "retries": _MODEL.format("max_retries=..."),
        "max_retries": _MODEL.format("max_retries=..."),
        "num_retries": _MODEL.format("max_retries=..."),
        "fallbacks": _MODEL.format('fallbacks=["..."]'),
        "sampling_args": _MODEL.format("options={...}"),
        "sampling_params": _MODEL.format("options={...}"),
        # limits
        **{name: _LIMIT.format(limit) for name, limit in MEANT.items()},
        # the sandbox
        "isolation": _SANDBOX,
        "environment": _SANDBOX,
        "environment_kwargs": "RLM(model, sandbox=Sandbox(...))",
        "env": "RLM(model, sandbox=Sandbox(...))",
        "interpreter": "RLM(model, sandbox=Sandbox(...))",
        "interpreter_factory": "RLM(model, sandbox=Sandbox(...))",
        "seed": "RLM(model, sandbox=Sandbox(seed=7))",
        # texts and tools
        "system_prompt": _INSTRUCTIONS,
        "custom_system_prompt": _INSTRUCTIONS,
        "user_prologue": 'RLM(model, instructions=Instructions(prologue="..."))',
        "tool_prompts": 'RLM(model, instructions=Instructions(prologue="..."))',
        "custom_tools": 'RLM(model, tools={"name": function})',
        "custom_sub_tools": 'RLM(model, tools=Tools({"name": function}, for_children={...}))',
        "signature": _QUESTION,
        "output_type": _QUESTION,
        "context": _QUESTION,
        "prompt": _QUESTION,
        "question": _QUESTION,
        # what is seen of a run
        "logger": _TRACE,
        "trace": _TRACE,
        "enable_logging": _TRACE,
        "log_dir": _TRACE,
        "callbacks": "RLM(model, on_event=Callbacks(...))",
        "on_iteration_start": _EVENTS.format("on_iteration_start"),
        "on_iteration_complete": _EVENTS.format("on_iteration_complete"),
        "on_subcall_start": _EVENTS.format("on_subcall_start"),
        "on_subcall_complete": _EVENTS.format("on_subcall_complete"),
    }
)
"""Name of an argument elsewhere, or of an earlier release → how its argument of `RLM` is written now."""

NOT_OFFERED: Final = MappingProxyType(
    {
        "orchestrator": "there is one loop; for a loop of your own see LMHandler.answers",
        "compactor": "a conversation is kept within its window by Limits(compaction_threshold=...)",
        "docker_image": "a sandbox is no container; it needs no image",
        "docker": "a sandbox is no container; it needs no image",
        "image": "a sandbox is no container; it needs no image",
        "network": 'code has no network; what it may reach is a function of yours, tools={"name": function}',
    }
)
"""Name of an argument elsewhere → why nothing takes its place."""

SANDBOX_ARGUMENTS: Final = MappingProxyType(
    {
        "memory": "Sandbox(ReplLimits(memory_bytes=512 << 20))",
        "memory_mb": "Sandbox(ReplLimits(memory_bytes=512 << 20))",
        "mem_limit": "Sandbox(ReplLimits(memory_bytes=512 << 20))",
        "cpu": "Sandbox(ReplLimits(cpu_s=...))",
        "timeout": "Sandbox(ReplLimits(block_timeout_s=...))",
        "timeout_s": "Sandbox(ReplLimits(block_timeout_s=...))",
        "level": 'Sandbox(isolation="strict")',
        "pip_packages": 'Sandbox(packages=["numpy"])',
        "requirements": 'Sandbox(packages=["numpy"])',
        "env": "sandbox.repl(context, env={...})",
        "context": "sandbox.repl(context)",
        "image": 'Sandbox(packages=["numpy"]): it is no container, and needs no image',
        "template": 'sandbox.template(setup="..."): it is no container, and needs no image',
    }
)
"""The same for arguments of `Sandbox`."""


def refuse(kind: str, unknown: Iterable[str], known: Sequence[str]) -> Never:
    """Refuse the first unknown argument of `RLM` or `Sandbox`, and say how it is written.

    Raises:
        ConfigurationError: Always.
    """
    name = next(iter(unknown))
    written, limits = (RLM_ARGUMENTS, Limits) if kind == "RLM" else (SANDBOX_ARGUMENTS, ReplLimits)
    if name in written:
        raise ConfigurationError(f"{kind} takes no {name}: write {written[name]}")
    if name in NOT_OFFERED:
        raise ConfigurationError(f"{kind} takes no {name}: {NOT_OFFERED[name]}")
    call = "RLM(model, limits=Limits({}=...))" if kind == "RLM" else "Sandbox(ReplLimits({}=...))"
    if name in limits.fields:
        raise ConfigurationError(f"{kind} takes no {name}: it is a limit: write {call.format(name)}")
    if not get_close_matches(name, known, 1, cutoff=0.8):
        for close in get_close_matches(name, limits.fields, 1, cutoff=0.8):
            raise ConfigurationError(f"{kind} takes no {name}; did you mean {call.format(close)}?")
    raise ConfigurationError(f"{kind} takes no {name}{suggestion(name, known)}")
