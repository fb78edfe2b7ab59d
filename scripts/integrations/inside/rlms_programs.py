"""Whole programs of the reference RLM on scripted models, with our environment."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import rlm.core.rlm
from rlm import RLM
from rlm.clients import BaseLM
from rlm.core.types import ModelUsageSummary, UsageSummary

from rlm_broker.integrations import rlms

ROOT = """```repl
halves = [context[: len(context) // 2], context[len(context) // 2 :]]
counts = rlm_query_batched([f"Count x in {half}" for half in halves])
total = sum(int(count) for count in counts) + bonus(n=base)
print(total, SHOW_VARS())
answer["content"] = f"{total} of {len(context)}"
answer["ready"] = True
```"""
CHILD = """```repl
count = context.count("x")
answer["content"] = llm_query(f"Say {count}")
answer["ready"] = True
```"""
FIRST = """```repl
kept = context.upper()
answer["content"], answer["ready"] = kept, True
```"""
SECOND = """```repl
answer["content"], answer["ready"] = f"{kept} {context_1} {len(history)}", True
```"""


class Scripted(BaseLM):  # type: ignore[misc]
    """A model that answers by what it is asked, at any depth and from any thread."""

    def __init__(self) -> None:
        super().__init__(model_name="scripted")
        self.calls = 0
        self._lock = threading.Lock()

    def completion(self, prompt: Any) -> str:
        """Return the code for a root or a child, or the number that a plain prompt asks for."""
        with self._lock:
            self.calls += 1
        text = str(prompt)
        if isinstance(prompt, str):
            return text.rpartition(" ")[2]
        if "ROOT" in text:
            return ROOT
        if "SECOND" in text:
            return SECOND
        return FIRST if "FIRST" in text else CHILD

    async def acompletion(self, prompt: Any) -> str:
        """Return what `completion` does."""
        return self.completion(prompt)

    def get_usage_summary(self) -> UsageSummary:
        """Return the number of calls."""
        return UsageSummary(model_usage_summaries={"scripted": ModelUsageSummary(self.calls, 0, 0)})

    def get_last_usage(self) -> ModelUsageSummary:
        """Return that of one call."""
        return ModelUsageSummary(1, 0, 0)


def _scripted() -> None:
    rlms.install()
    rlm.core.rlm.get_client = lambda *_: Scripted()


def depth_two() -> None:
    """A run at depth two: children with environments of their own, a tool, a value, and a plain query."""
    _scripted()
    tools = {"bonus": lambda n: n + 1, "base": {"tool": 1, "description": "a number"}}
    model = RLM(
        backend="openai",
        backend_kwargs={"model_name": "scripted"},
        max_depth=2,
        custom_tools=tools,
        custom_sub_tools={},
    )
    done = model.completion("xyzzyx" * 10, root_prompt="ROOT")
    assert done.response == "24 of 60", done.response


def persistent() -> None:
    """Two completions in one environment: variables, contexts and histories stay."""
    _scripted()
    kind: dict[str, Any] = {"backend": "openai", "backend_kwargs": {"model_name": "scripted"}}
    with RLM(**kind, persistent=True, compaction=True) as model:
        assert model.completion("one", root_prompt="FIRST").response == "ONE"
        again = model.completion("two", root_prompt="SECOND").response
    assert again.startswith("ONE two "), again


@contextlib.contextmanager
def opened() -> Iterator[rlms.SandboxREPL]:
    """Open an environment with a context and a tool."""
    with rlms.SandboxREPL(context_payload="some text", custom_tools={"add": lambda left, right: left + right}) as made:
        assert made.execute_code("print(add(len(context), 1))").stdout == "10\n"
        yield made
