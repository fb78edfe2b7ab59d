"""The executor for a `CodeAgent` of smolagents: its code runs in a sandbox, its tools in the process of the agent.

Theory of operation
-------------------
- A step is a block in a REPL that lives as long as the executor. After a kill the next step finds
  the variables that a checkpoint or a replay brings back, and those that the agent sent.
- Tools and managed agents stay where they are. Code finds a function for each, and a call goes to the host and back.
- `final_answer` is a function in the REPL. It keeps its arguments in a variable, and ends the block by a BaseException,
  as the remote executors of smolagents do. The host reads the variable and calls the agent's own tool. So an answer may
  be as large as any variable, and what the tool makes of it may be anything. Code can bind the name to something else,
  so the function is made anew after a block that names it.
- The value of a step is that of its last statement, an assignment included.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rlm_broker.errors import ValueUnavailable
from rlm_broker.integrations.last_value import with_last_value
from rlm_broker.integrations.peers import NO_IMAGE, NO_NETWORK, refusal, require
from rlm_broker.integrations.repl_base import PeerRepl, text_of
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox

require("smolagents", "smolagents", tested=("1.26", "1.27"))

from smolagents import PythonExecutor
from smolagents.local_python_executor import (
    DEFAULT_MAX_LEN_OUTPUT,
    CodeOutput,
    ExecutionTimeoutError,
    InterpreterError,
)
from smolagents.utils import AgentExecutionError, truncate_content

_BEYOND: Final = {
    "additional_imports": "nothing is installed while an agent runs: give Sandbox(packages=[...]) as sandbox",
    "allow_pickle": "the host unpickles nothing that comes from a sandbox",
    **dict.fromkeys(("host", "port"), NO_NETWORK),
    **dict.fromkeys(("image_name", "build_new_image", "container_run_kwargs", "dockerfile_content"), NO_IMAGE),
}
"""Options of the remote executors of smolagents → why there is no such thing here."""
_FINAL_ANSWER: Final = "final_answer"
_GIVEN: Final = "_given_to_final_answer"
_ANSWERED: Final = "FinalAnswerException"
_SETUP: Final = f"""
def {_FINAL_ANSWER}(*args, **kwargs):
    class {_ANSWERED}(BaseException):
        pass

    globals()[{_GIVEN!r}] = [args, kwargs]
    raise {_ANSWERED}
"""
_NO_ANSWER: Final = f"globals().pop({_FINAL_ANSWER!r}, None)"
_LINE: Final = re.compile(r'^  File "<block \d+>", line (\d{1,9})\b', re.MULTILINE | re.ASCII)
"""The first one in a traceback is in the step itself, and not in a function of an earlier one."""


class StepFailed(InterpreterError, AgentExecutionError):
    """A step of an agent has failed. It is what the local executor raises, and what the remote ones do.

    Attributes:
        message: The text.
        logs: What the step had printed.
    """

    def __init__(self, message: str, logs: str = "") -> None:
        ValueError.__init__(self, message)  # an AgentError wants a logger, which the agent has and we do not
        self.message = message
        self.logs = logs


class Executor(PythonExecutor):
    """Runs the code of a `CodeAgent` in a sandbox. Give each agent an executor of its own.

    Example:
        ```python
        agent = CodeAgent(tools, model, executor=Executor())
        ```

    Args:
        additional_authorized_imports: Modules that code needs, "*" for all. They are looked for in the sandbox. Code
            may import others, too: what it may do is up to the sandbox, and not to a list of imports.
        max_print_outputs_length: Characters of the logs of a step; None takes the 50,000 of smolagents.
        additional_functions: Further functions on the host that code may call.
        timeout_seconds: Seconds that a step may compute, waiting for tools not counted; None takes
            `ReplLimits.block_timeout_s`.
        sandbox: An open sandbox; None shares one of the process.
        limits: Limits of the REPL; None takes those of `sandbox`.
        beyond: Options of the remote executors of smolagents. They are refused, with the reason.

    Raises:
        InterpreterError: An option asks for what a sandbox does not give, or a module is not there.
    """

    def __init__(
        self,
        additional_authorized_imports: Sequence[str] = (),
        max_print_outputs_length: int | None = None,
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        timeout_seconds: float | None = None,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
        **beyond: Any,
    ) -> None:
        for name in beyond:
            if name not in _BEYOND:
                raise TypeError(f"Executor() got an unexpected keyword argument {name!r}")
            raise StepFailed(refusal(name, _BEYOND[name]))
        self._repl = PeerRepl("this executor", StepFailed, sandbox=sandbox, limits=limits, survives=True)
        self._logs_length = max_print_outputs_length or DEFAULT_MAX_LEN_OUTPUT
        self._functions = dict(additional_functions or {})
        self._timeout_s = timeout_seconds
        self._tools: dict[str, Callable[..., Any]] = self._functions
        self._final_answer: Callable[..., Any] | None = None
        self._is_set_up = False
        self._logs = ""
        wanted = {name.split(".")[0] for name in additional_authorized_imports} - sys.stdlib_module_names - {"*"}
        if wanted:
            here = self._repl.sandbox.importable(sorted(wanted))
            if missing := sorted(wanted.difference(here)):
                told = "additional_authorized_imports: the sandbox does not have them"
                raise StepFailed(f"Non-installed authorized modules: {', '.join(missing)} ({told})")

    @property
    def state(self) -> Mapping[str, Any]:
        """Variables of code, and `_print_outputs`: logs of the last step, which the agent reads if it has failed."""
        return _State(self._repl, self._logs)

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Let code call these tools and managed agents, and no others but `additional_functions`.

        Raises:
            StepFailed: A name cannot be a function's, or the executor cannot be used now.
        """
        given = {**tools, **self._functions}
        final_answer = given.pop(_FINAL_ANSWER, None)
        with self._repl.turn():
            self._set_up(given, final_answer)
            self._tools, self._final_answer = given, final_answer

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        """Give code variables by name. It finds them again after a kill.

        Raises:
            StepFailed: A value cannot cross, or the executor cannot be used now. None is given then.
        """
        if variables:
            values = {name: _raw(value) for name, value in variables.items()}
            self._repl.execute("", values=values, tools=self._tools)

    def __call__(self, code_action: str) -> CodeOutput:
        """Run one step.

        Raises:
            StepFailed: It has failed, or the executor cannot be used now.
            ExecutionTimeoutError: It has taken too long. Variables are there, unless the message denies it.
        """
        with self._repl.turn():
            if not self._is_set_up:
                self._set_up(self._tools, self._final_answer)
            self._logs = ""
            code = with_last_value(code_action) if isinstance(code_action, str) else code_action
            block = self._repl.execute(code, tools=self._tools, timeout_s=self._timeout_s)
            self._is_set_up = block.status != "killed" and _FINAL_ANSWER not in code
            self._logs = truncate_content(block.stdout + block.stderr, self._logs_length)
            if block.error_type == _ANSWERED and self._final_answer is not None:
                return CodeOutput(self._answer(self._final_answer), self._logs, True)
        if block.status == "ok":
            return CodeOutput(block.value if block.value_problem is None else text_of(block), self._logs, False)
        problem = _problem_of(block, code_action)
        if block.limit in ("block_timeout_s", "block_wall_timeout_s"):
            limit = "" if self._timeout_s is None else f" of {self._timeout_s:g} seconds"
            raise ExecutionTimeoutError(f"Code execution exceeded the maximum execution time{limit}. {problem}")
        raise StepFailed(problem, self._logs)

    def cleanup(self) -> None:
        """End the REPL with all its processes. The executor cannot be used any more."""
        self._repl.close()

    def _set_up(self, tools: Mapping[str, Any], final_answer: object) -> None:
        """Offer these tools, and make the function `final_answer`."""
        self._repl.execute(_NO_ANSWER if final_answer is None else _SETUP, tools=tools)
        self._is_set_up = True

    def _answer(self, final_answer: Callable[..., Any]) -> Any:
        """Return what the agent's own tool makes of the arguments that code gave."""
        match self._repl.variables(_GIVEN)[_GIVEN]:
            case [tuple() as args, dict() as kwargs]:
                try:
                    return final_answer(*args, **kwargs)
                except (Exception, SystemExit) as error:
                    told = f"Code execution failed in {_FINAL_ANSWER}() due to: {type(error).__name__}: {error}"
                    raise StepFailed(told, self._logs) from error
            case found:
                told = str(found).replace(_GIVEN, "the answer")
                raise StepFailed(f"Code execution failed: {_FINAL_ANSWER}() has no answer: {told}", self._logs)


def _raw(value: Any) -> Any:
    """Return what an agent's answer stands for: an `AgentImage` is no whole image of PIL, but has one."""
    return value.to_raw() if hasattr(type(value), "to_raw") else value


class _State(Mapping[str, Any]):
    """The variables of code that cross, as they are now; each look asks the REPL."""

    def __init__(self, repl: PeerRepl, logs: str) -> None:
        self._repl = repl
        self._logs = logs

    def __getitem__(self, name: str) -> Any:
        if name == "_print_outputs":
            return self._logs
        value = self._repl.variables(name)[name]
        if isinstance(value, ValueUnavailable):
            raise KeyError(str(value))
        return value

    def __iter__(self) -> Iterator[str]:
        found = self._repl.variables().items()
        return iter(["_print_outputs", *(name for name, value in found if not isinstance(value, ValueUnavailable))])

    def __len__(self) -> int:
        return len([*self])


def _problem_of(block: Block, code: str) -> str:
    """Return why a step has failed, in the words of the local executor, with the line of the step."""
    if block.status == "killed":
        since = "it" if (undone := block.blocks_undone) == 1 else f"the last {undone} blocks of code"
        lost = "All variables are gone, but for those that were sent"
        back = f"Variables are as they were before {since}"
        return f"Code execution failed: {block.error}. {lost if undone is None else back}"
    if block.error_type is None or block.status == "interrupted":
        return f"Code execution failed: {block.error}"
    raised = f"{block.error_type}: {block.error_text}" if block.error_text else block.error_type
    found = _LINE.search(block.traceback or "")
    if block.error_type == "SyntaxError" and block.traceback:
        return f"Code parsing failed due to: {block.traceback}"
    lines = code.splitlines()
    number = int(found[1]) if found else 0
    where = f" at line '{lines[number - 1].strip()}'" if 0 < number <= len(lines) else ""
    return f"Code execution failed{where} due to: {raised}"
