"""A plugin for pytest that puts our executor in the place of smolagents' own, for the tests of smolagents."""

import builtins
import os
from collections.abc import Callable, Mapping
from typing import Any

import smolagents.agents as agents
import smolagents.local_python_executor as local
import smolagents.remote_executors as remote

from rlm_broker.errors import ValueUnavailable
from rlm_broker.integrations.smolagents import Executor

_TIME = local.MAX_EXECUTION_TIME_SECONDS


def evaluate_python_code(
    code: str,
    static_tools: Mapping[str, Callable[..., Any]] | None = None,
    custom_tools: Mapping[str, Callable[..., Any]] | None = None,
    state: dict[str, Any] | None = None,
    authorized_imports: list[str] = local.BASE_BUILTIN_MODULES,  # noqa: ARG001 - no limit, see the adapter
    max_print_outputs_length: int = local.DEFAULT_MAX_LEN_OUTPUT,
    timeout_seconds: int | None = _TIME,
) -> tuple[Any, bool]:
    """Evaluate code as the function of smolagents does, with an executor for this one step."""
    state = {} if state is None else state
    tools = {**(static_tools or {}), **(custom_tools or {})}
    executor = Executor((), max_print_outputs_length, timeout_seconds=timeout_seconds)
    try:
        executor.send_variables({name: value for name, value in state.items() if not name.startswith("_")})
        executor.send_tools({name: tool for name, tool in tools.items() if not hasattr(builtins, name)})
        output = executor(code)
        return output.output, output.is_final_answer
    finally:
        if executor._repl.why_closed is None:
            found = executor._repl.variables()
            state.update({name: value for name, value in found.items() if not isinstance(value, ValueUnavailable)})
        container = local.PrintContainer()
        container.append(executor.state["_print_outputs"])
        state["_print_outputs"] = container
        executor.cleanup()


class LocalExecutor(Executor):
    """Our executor with the parameters and attributes of `LocalPythonExecutor`."""

    def __init__(
        self,
        additional_authorized_imports: list[str],
        max_print_outputs_length: int | None = None,
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        timeout_seconds: float | None = _TIME,
    ) -> None:
        super().__init__(additional_authorized_imports, max_print_outputs_length, additional_functions, timeout_seconds)

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Send the tools that Python does not have."""
        self.static_tools = {**tools, **self._functions}
        super().send_tools({name: tool for name, tool in tools.items() if not hasattr(builtins, name)})


class DockerExecutor(Executor):
    """Our executor with the parameters of the one for Docker, as its tests use them."""

    def __init__(self, additional_imports: list[str], logger: object) -> None:  # noqa: ARG002
        super().__init__([{"pillow": "PIL"}.get(name, name) for name in additional_imports])

    delete = Executor.cleanup


os.environ["RUN_ALL"] = "1"  # or smolagents leaves out the tests of remote executors
local.evaluate_python_code = evaluate_python_code
local.LocalPythonExecutor = agents.LocalPythonExecutor = LocalExecutor
remote.DockerExecutor = DockerExecutor
