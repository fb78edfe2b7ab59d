"""Recursive Language Models on untrusted code.

Public names are loaded when they are first used: pydantic alone takes 0.1 s, which `--help` need not pay.
"""

import importlib
from typing import Any

_PUBLIC = {
    "RLM": "rlm_broker.rlm",
    "Model": "rlm_broker.models.model",
    "Route": "rlm_broker.handler.routing",
    "Cache": "rlm_broker.handler.cache",
    "OpenAICompatibleClient": "rlm_broker.clients.openai_compatible",
    "LiteLLMClient": "rlm_broker.clients.litellm",
    "LMHandler": "rlm_broker.handler.handler",
    "Sandbox": "rlm_broker.sandbox.sandbox",
    "Template": "rlm_broker.sandbox.template",
    "SandboxedRepl": "rlm_broker.sandbox.repl",
    "Limits": "rlm_broker.limits",
    "Callbacks": "rlm_broker.trace.callbacks",
    "TraceWriter": "rlm_broker.trace.writer",
    "FunctionClient": "rlm_broker.clients.function",
    "ScriptedClient": "rlm_broker.clients.scripted",
    "Paths": "rlm_broker.context.store",
    "Block": "rlm_broker.results",
    "Completion": "rlm_broker.results",
    "Usage": "rlm_broker.results",
    "UsageSummary": "rlm_broker.results",
    "RlmBrokerError": "rlm_broker.errors",
    "LimitReached": "rlm_broker.errors",
    "IsolationUnavailable": "rlm_broker.errors",
    "ReplayDiverged": "rlm_broker.errors",
    "ModelFailed": "rlm_broker.errors",
    "ConfigurationError": "rlm_broker.errors",
    "ContextRefused": "rlm_broker.errors",
    "OutputInvalid": "rlm_broker.errors",
    "RunCancelled": "rlm_broker.errors",
    "RunFailed": "rlm_broker.errors",
    "SandboxFailed": "rlm_broker.errors",
    "UnknownModel": "rlm_broker.errors",
    "ValueUnavailable": "rlm_broker.errors",
}

__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
