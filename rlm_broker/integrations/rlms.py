"""The reference RLM (`rlms`): an environment whose code runs in a sandbox, in the place of its local one.

The queries of code go to the reference's own handler, and its child runs get environments of their own, as before.
"""

import copy
import shutil
import time
from collections.abc import Callable
from typing import Any, Final

from rlm_broker.integrations.peers import require
from rlm_broker.integrations.repl_base import PeerRepl, error_of
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.names import is_identifier

require("rlms", "rlms", tested=("0.1.3", "0.2"))

import rlm.core.rlm
import rlm.environments
from rlm.core.types import REPLResult, RLMChatCompletion
from rlm.environments import extract_tool_value
from rlm.environments.local_repl import LocalREPL

SCAFFOLD: Final = """
def _rlm_scaffold(tools):
    import builtins
    import types

    names, given = globals(), {}

    def shown():
        return [name for name in names if name[:1] != "_" and name not in tools]

    def show_vars():
        found = {name: type(names[name]).__name__ for name in shown() if name != "answer"}
        if not found:
            return "No variables created yet. Use ```repl``` blocks to create variables."
        return f"Available variables: {found}"

    def take():
        names.pop("SHOW_VARS", None)
        answer = names.get("answer")
        if not isinstance(answer, dict):
            answer = names["answer"] = {"content": "", "ready": False}
        if not answer.get("ready"):
            return None
        answer["ready"] = False
        return str(answer.get("content", ""))

    def keep(*kept):
        given.update((name, names[name]) for name in kept)

    def made():
        return [name for name in shown() if not (name in given and names[name] is given[name])]

    builtins.SHOW_VARS = show_vars
    builtins._rlm = types.SimpleNamespace(take=take, keep=keep, made=made)
    take()


_rlm_scaffold({tools!r})
del _rlm_scaffold
"""
"""Code before the first block: `SHOW_VARS`, `answer`, and what the adapter asks for after a block. Code can change all
of it, and so lie about its own blocks only."""


class SandboxREPL(LocalREPL):  # type: ignore[misc]
    """An environment of the reference RLM whose code runs in a sandbox of its own.

    Example:
        ```python
        rlm_broker.integrations.rlms.install()
        print(RLM(backend_kwargs={"model_name": "gpt-5"}).completion(document, "Which year?").response)
        ```

    Args:
        lm_handler_address, context_payload, setup_code, persistent, depth, subcall_fn, custom_tools, custom_sub_tools,
        compaction, max_concurrent_subcalls: As for `LocalREPL`. Tools that are functions run in this process.
        sandbox: An open `Sandbox`, for example one with packages; None shares one of the process.
        limits: Limits of the environment; None takes the sandbox's.

    Raises:
        ValueError: A tool has a name that is the environment's own.
    """

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
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
    ) -> None:
        first = {} if context_payload is None else {"context": context_payload}
        kind: dict[str, Any] = {"sandbox": sandbox, "limits": limits, "waits": True, "survives": True}
        self._repl = PeerRepl("the environment", RuntimeError, **kind, options=first)
        self._context = first
        self._values: dict[str, Any] = {}  # given once, and again to a fresh REPL
        self._kept: dict[str, Any] = {}  # found again by each block
        self._is_set_up = False
        self._seen: dict[str, Any] | None = None
        tools = {"custom_tools": custom_tools, "custom_sub_tools": custom_sub_tools, "subcall_fn": subcall_fn}
        subcalls = {"depth": depth, "max_concurrent_subcalls": max_concurrent_subcalls}
        super().__init__(lm_handler_address, persistent=persistent, **tools, **subcalls)
        self._context_count, self._history_count = len(first), 0
        if compaction:
            self.compaction = True
            self._compaction_history: list[Any] = []
            self._give({}, {"history": []})
        if setup_code:
            self.execute_code(setup_code)

    def setup(self) -> None:
        """Sort the tools: functions are called in this process, and all else are values for code."""
        own = ("llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched")
        self._functions: dict[str, Callable[..., Any]] = {name: getattr(self, f"_{name}") for name in own}
        for name, entry in self.custom_tools.items():
            what = extract_tool_value(entry)
            (self._functions if callable(what) else self._values)[name] = what
        self.globals = dict(self._functions)
        self._pending_llm_calls: list[RLMChatCompletion] = []

    def execute_code(self, code: str) -> REPLResult:
        """Run code. A failure is in `stderr` of the result, as for `LocalREPL`, also if its process was killed.

        Raises:
            RuntimeError: The environment cannot be used: it was cleaned up, or its code waits for the tool that asks.
        """
        started = time.perf_counter()
        with self._repl.turn():
            self._pending_llm_calls = []
            self._set_up()
            block = self._run(code)
            taken = self._run("_rlm.take()") if self._is_set_up else None
            answer = taken.value if taken is not None and taken.status == "ok" else None
            answer = answer if isinstance(answer, str) else None  # code can have the scaffold say anything
            lost = f"\nanswer: {taken.value_problem}" if taken is not None and taken.value_problem else ""
            made = self._pending_llm_calls
        seconds = time.perf_counter() - started
        return LazyResult(block.stdout, _stderr(block) + lost, self._read, seconds, [*made], answer)

    def add_context(self, context_payload: Any, context_index: int | None = None) -> int:
        """Give code a further context as `context_N`. Return its N."""
        index = self._context_count if context_index is None else context_index
        if index:
            self._give({f"context_{index}": context_payload})
        else:
            self._context = {"context": context_payload}
            self._give({}, self._context)
        self._context_count = max(self._context_count, index + 1)
        return index

    def add_history(self, message_history: list[dict[str, Any]], history_index: int | None = None) -> int:
        """Give code the messages of a completion as `history_N`. Return its N."""
        index = self._history_count if history_index is None else history_index
        history = copy.deepcopy(message_history)
        self._give({f"history_{index}": history}, {} if index or self.compaction else {"history": history})
        self._history_count = max(self._history_count, index + 1)
        return index

    def append_compaction_entry(self, entry: list[dict[str, Any]] | dict[str, Any]) -> None:
        """Add messages, or a summary of them, to `history`."""
        if self.compaction:
            self._compaction_history.append(copy.deepcopy(entry))
            self._give({}, {"history": self._compaction_history})

    @property
    def locals(self) -> dict[str, Any]:
        """Variables of code, read when they are first looked at after an execution. One whose value does not cross is
        the `ValueUnavailable` that says why."""
        return self._read()

    def cleanup(self) -> None:
        """End the environment with all its processes."""
        self._repl.close("cleanup() was called")
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        self.globals.clear()

    def __del__(self) -> None:
        """Remove the folder that `LocalREPL` makes. The REPL of a dropped environment ends by itself."""
        if hasattr(self, "temp_dir"):
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    # -- the REPL ----------------------------------------------------------------------------------------------------

    def _run(self, code: str, values: dict[str, Any] | None = None, kept: dict[str, Any] | None = None) -> Block:
        self._seen = None
        block = self._repl.execute(code, values=values, kept=kept, tools=self._functions)
        self._is_set_up = self._is_set_up and self._repl.blocks > 0
        return block

    def _set_up(self) -> None:
        """Give a fresh REPL the scaffold, and all that the environment was given once."""
        if self._is_set_up:
            return
        self._is_set_up = True
        scaffold = SCAFFOLD.replace("{tools!r}", repr(set(self._functions)))
        noted = _noted({**self._values, **self._kept, **self._context})
        block = self._run(scaffold + noted, self._values, self._kept)
        if block.status != "ok":
            raise RuntimeError(f"the environment cannot be prepared: {block.error}")

    def _give(self, values: dict[str, Any], kept: dict[str, Any] | None = None) -> None:
        """Give code values once, and others that each later block finds again."""
        with self._repl.turn():
            self._values |= values
            self._kept |= kept or {}
            if self._is_set_up:
                self._run(_noted({**values, **(kept or {})}), values, kept)
            self._set_up()

    def _read(self) -> dict[str, Any]:
        if self._repl.why_closed is not None:
            return {}
        if self._seen is None:
            with self._repl.turn():
                self._set_up()
                block = self._run("_rlm.made()")
                made = block.value if block.status == "ok" else None  # code can have it say anything
                names = [name for name in made if is_identifier(name)] if type(made) is list else []
                found = self._repl.variables(*names) if names else {}
                given = {**self._values, **self._context, **self._kept}
                if "context" in given:
                    given["context_0"] = given["context"]
                self._seen = {**given, **found}
        return self._seen


class LazyResult(REPLResult):  # type: ignore[misc]
    """A result whose `locals` are read when they are first looked at: most are never looked at, and some are large."""

    _read: Callable[[], dict[str, Any]]
    _found: dict[str, Any] | None = None

    @property
    def locals(self) -> dict[str, Any]:
        """Variables of code at that time."""
        if self._found is None:
            self._found = self._read()
        return self._found

    @locals.setter
    def locals(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read


def install(*, sandbox: Sandbox | None = None, limits: ReplLimits | None = None) -> None:
    """Have all later `RLM(environment="local")`, which is the default, run their code in sandboxes.

    The reference has a closed list of environments, and passes what code needs for recursion to "local" alone. So this
    replaces that one. `environment_kwargs` of an RLM may have a sandbox and limits of its own.

    Args:
        sandbox, limits: As for `SandboxREPL`.
    """
    given = {name: value for name, value in {"sandbox": sandbox, "limits": limits}.items() if value is not None}

    def get_environment(environment: str, environment_kwargs: dict[str, Any]) -> Any:
        if environment == "local":
            return SandboxREPL(**{**given, **environment_kwargs})
        return _get_environment(environment, environment_kwargs)

    rlm.environments.get_environment = rlm.core.rlm.get_environment = get_environment


_get_environment = rlm.environments.get_environment


def _noted(given: dict[str, Any]) -> str:
    """Return code that notes these variables as given, so that they are not read back; `context` has two names."""
    first, names = ("context_0 = context\n", [*given, "context_0"]) if "context" in given else ("", [*given])
    return f"{first}_rlm.keep({', '.join(map(repr, names))})"


def _stderr(block: Block) -> str:
    """Return the errors that code has printed, and in the reference's form what it raised or was ended by."""
    if block.status == "ok":
        return block.stderr
    return f"{block.stderr}\n{error_of(block)}"
