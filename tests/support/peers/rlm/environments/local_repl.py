"""The environment in the caller's process: what it has beside running code."""

import tempfile
from collections.abc import Callable
from typing import Any

from rlm.core.types import RLMChatCompletion

RESERVED = (
    "llm_query",
    "llm_query_batched",
    "rlm_query",
    "rlm_query_batched",
    "SHOW_VARS",
    "answer",
    "context",
    "history",
)


class LocalREPL:
    """Queries of code, accounts of them, and a folder."""

    def __init__(
        self,
        lm_handler_address: tuple[str, int] | None = None,
        context_payload: Any = None,
        setup_code: str | None = None,
        persistent: bool = False,
        depth: int = 1,
        subcall_fn: Callable[..., RLMChatCompletion] | None = None,
        custom_tools: dict[str, Any] | None = None,
        custom_sub_tools: dict[str, Any] | None = None,
        compaction: bool = False,
        max_concurrent_subcalls: int = 4,
    ) -> None:
        assert context_payload is setup_code is None, "ours gives them by itself"
        self.lm_handler_address = lm_handler_address
        self.persistent = persistent
        self.depth = depth
        self.subcall_fn = subcall_fn
        self.max_concurrent_subcalls = max_concurrent_subcalls
        self.temp_dir = tempfile.mkdtemp(prefix="repl_env_")
        self.compaction = compaction
        self._context_count = self._history_count = 0
        self._pending_llm_calls: list[RLMChatCompletion] = []
        self.custom_tools = custom_tools or {}
        self.custom_sub_tools = self.custom_tools if custom_sub_tools is None else custom_sub_tools
        if taken := sorted({*self.custom_tools} & {*RESERVED}):
            raise ValueError(f"Custom tools cannot override reserved REPL functions: {taken}")
        self.setup()

    def setup(self) -> None:
        """Prepare the namespace."""
        raise NotImplementedError

    def _llm_query(self, prompt: str, model: str | None = None) -> str:
        if self.lm_handler_address is None:
            return "Error: No LM handler configured"
        completion = RLMChatCompletion(f"{model}: {prompt}")
        self._pending_llm_calls.append(completion)
        response: str = completion.response
        return response

    def _llm_query_batched(self, prompts: list[str], model: str | None = None) -> list[str]:
        return [self._llm_query(prompt, model) for prompt in prompts]

    def _rlm_query(self, prompt: str, model: str | None = None) -> str:
        if self.subcall_fn is None:
            return self._llm_query(prompt, model)
        completion = self.subcall_fn(prompt, model)
        self._pending_llm_calls.append(completion)
        response: str = completion.response
        return response

    def _rlm_query_batched(self, prompts: list[str], model: str | None = None) -> list[str]:
        return [self._rlm_query(prompt, model) for prompt in prompts]

    def __enter__(self) -> "LocalREPL":
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """End the environment."""
        raise NotImplementedError
