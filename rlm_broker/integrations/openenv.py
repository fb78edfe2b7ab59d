"""The executors of OpenEnv's environments for Python: code of episodes runs in a sandbox, not in the server.

Theory of operation
-------------------
- `PythonExecutor` stands for the one of `repl_env`, `PyExecutor` for the one of `openenv.core.tools` and `coding_env`.
  An episode has one of them, and it has one REPL. A block that kills it is a failed block: the next one finds the
  variables that a checkpoint or a replay brings back, and those that the environment has set.
- Functions of the environment run in the server. Some of them, such as `FINAL_VAR` and `SHOW_VARS`, read variables
  while the block waits for them.
- Environments drop executors and never close them. Their functions refer to the executor that has them, so only the
  garbage collector finds it: it is called when many executors have been made since the last time.
"""

import gc
import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rlm_broker.errors import ConfigurationError, ValueUnavailable
from rlm_broker.integrations.last_value import with_last_value
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.repl_base import PeerRepl, text_of
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.extras import ExtraMissing
from rlm_broker.values.names import require_names

try:
    require("openenv", "openenv", tested=("0.10", "0.11"))
except ExtraMissing as missing:
    try:  # an earlier name of the package, which many environments ask for
        require("openenv-core", "openenv", tested=("0.3", "0.4"))
    except ExtraMissing:
        raise missing from None

from openenv.core.env_server.types import CodeExecResult

_log = logging.getLogger(__name__)
_SETUP: Final = """
from traceback import format_exc

def safe_json_dumps(obj):
    import json
    return json.dumps(obj, default=repr)

def _look(variables, known):
    found = {}
    for name, value in list(variables.items()):
        if type(name) is str and name[:1] != "_":
            try:
                text = None if name in known else repr(value)
            except Exception:
                text = "<unrepresentable>"
            found[name] = text if text is None or len(text) <= 500 else text[:500] + "..."
    return found
"""
"""The functions that these executors have for code, and one of ours: the name of each variable, with a text if new."""
_OWN: Final = ("format_exc", "safe_json_dumps")
_open: "weakref.WeakSet[_Episode]" = weakref.WeakSet()
_most_open = 16
"""Executors at which the garbage collector is called; twice as many as it left the last time."""


class _Episode:
    """The REPL of one episode, with the functions of its environment."""

    def __init__(self, sandbox: Sandbox | None, limits: ReplLimits | None) -> None:
        global _most_open
        if len(_open) >= _most_open:
            gc.collect()
            _most_open = 16 + 2 * len(_open)
        _open.add(self)
        self.repl = PeerRepl("this executor", RuntimeError, sandbox=sandbox, limits=limits, survives=True)
        self.functions: dict[str, Callable[..., Any]] = {}
        self._is_set_up = False

    def run(self, code: str, values: Mapping[str, Any] | None = None) -> Block:
        """Run code, with the functions of these executors in place."""
        if not self._is_set_up:
            self.repl.execute(_SETUP, tools=self.functions)
            self._is_set_up = True
        block = self.repl.execute(code, values=values, tools=self.functions)
        self._is_set_up = self.repl.blocks > 0
        return block


class PythonExecutor:
    """Runs the blocks of one episode of `repl_env` in a sandbox.

    Example:
        ```python
        repl_env.server.repl_environment.PythonExecutor = PythonExecutor
        ```

    Args:
        max_output_length: Characters kept of stdout, and of stderr.
        allowed_imports: Kept as an attribute. Code may import what is installed in the sandbox, and is bounded by that.
        sandbox: An open sandbox; None shares one of the process.
        limits: Limits of the REPL; None takes those of `sandbox`.
    """

    def __init__(
        self,
        max_output_length: int = 8192,
        allowed_imports: list[str] | None = None,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
    ) -> None:
        self.max_output_length = max_output_length
        self.allowed_imports = allowed_imports
        self._where = (sandbox, limits)
        self._episode = _Episode(*self._where)
        self._set: set[str] = set()
        self._names: set[str] = {*_OWN}
        self._runs = False

    def execute(self, code: str) -> dict[str, Any]:
        """Run a block. Return `stdout` with the value of the last statement, `stderr`, `locals_snapshot` with the texts
        of new variables, `execution_time`, `success` and `exception`. Nothing is raised for a block that fails."""
        began = time.monotonic()
        try:
            with self._episode.repl.turn():
                self._runs = True
                try:
                    stdout, stderr, exception = _outcome(self._episode, code)
                finally:
                    self._runs = False
                new = self._new_variables()
        except RuntimeError as refused:
            stdout, stderr, exception, new = "", str(refused), str(refused), {}
        return {
            "stdout": self._cut(stdout),
            "stderr": self._cut(stderr),
            "locals_snapshot": new,
            "execution_time": time.monotonic() - began,
            "success": exception is None,
            "exception": exception,
        }

    def set_context(self, context: str, variable_name: str = "context") -> None:
        """Give code the context as a variable. Raise RuntimeError as `set_variable` does."""
        self.set_variable(variable_name, context)

    def set_variable(self, name: str, value: Any) -> None:
        """Give code a variable. Raise RuntimeError if the value cannot cross, or no variable can have the name."""
        self._episode.run("", values={name: value})
        self._set.add(name)

    def get_variable(self, name: str) -> Any:
        """Return the value of a variable; None if there is none, or its value does not cross, which is logged."""
        value = self._episode.repl.variables(name)[name]
        if isinstance(value, ValueUnavailable):
            _log.info("%s", value)
            return None
        return value

    def list_variables(self) -> list[str]:
        """Return the names of variables and functions of code, those with a leading underscore left out."""
        names = self._names
        if self._runs:
            names = names | self._episode.repl.variables().keys()
        return [*(names | self._set | self._episode.functions.keys())]

    def inject_function(self, name: str, func: Callable[..., Any]) -> None:
        """Let code call a function of this process. Raise RuntimeError if no function can have the name."""
        try:
            require_names([name], scaffold=False)
        except ConfigurationError as error:
            raise RuntimeError(str(error)) from None
        self._episode.functions[name] = func

    def reset(self) -> None:
        """End the REPL, and begin with a fresh one, without variables and functions."""
        self.close()
        self._episode = _Episode(*self._where)
        self._set, self._names = set(), {*_OWN}

    def close(self) -> None:
        """End the REPL with all its processes. Has no effect when repeated."""
        self._episode.repl.close()

    def _new_variables(self) -> dict[str, str]:
        look = self._episode.run(f"_look(globals(), {self._names | self._set!r})")
        found = look.value
        if type(found) is not dict or not all(type(name) is str for name in found):  # code can say anything of itself
            return {}
        functions = self._episode.functions
        self._names = set(found)
        return {name: str(text) for name, text in found.items() if text is not None and name not in functions}

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_output_length:
            return text
        return f"{text[: self.max_output_length]}\n... (truncated, total {len(text)} chars)"


class PyExecutor:
    """Runs the steps of one episode of `coding_env` in a sandbox.

    Example:
        ```python
        coding_env.server.python_codeact_env.PyExecutor = PyExecutor
        ```

    Args:
        additional_imports: Kept as an attribute. Code may import what is installed in the sandbox.
        sandbox: An open sandbox; None shares one of the process.
        limits: Limits of the REPL; None takes those of `sandbox`.
    """

    def __init__(
        self,
        additional_imports: Sequence[str] | None = None,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
    ) -> None:
        self.additional_imports = additional_imports
        self._episode = _Episode(sandbox, limits)

    def run(self, code: str) -> CodeExecResult:
        """Run a step. The value of its last statement follows what it printed. The exit code is 1 for any failure."""
        try:
            stdout, stderr, exception = _outcome(self._episode, code)
        except RuntimeError as refused:
            return CodeExecResult(stdout="", stderr=str(refused), exit_code=1)
        return CodeExecResult(stdout=stdout, stderr=stderr, exit_code=0 if exception is None else 1)

    def close(self) -> None:
        """End the REPL with all its processes. Has no effect when repeated."""
        self._episode.repl.close()


def _outcome(episode: _Episode, code: str) -> tuple[str, str, str | None]:
    """Run a block; return its stdout, its stderr, and its exception or None."""
    block = episode.run(with_last_value(code) if isinstance(code, str) else code)
    exception = None
    if block.status != "ok":
        exception = "\n".join(filter(None, (block.error, block.traceback)))
    shown = _shown(block)
    stdout = "\n".join(filter(None, (block.stdout, shown)))
    return stdout, "\n".join(filter(None, (block.stderr, exception))), exception


def _shown(block: Block) -> str:
    """Return the text of the value of a block, as JSON where it can be."""
    if block.value_problem is not None:
        return text_of(block)
    if block.value is None:
        return ""
    try:
        return json.dumps(block.value)
    except (TypeError, ValueError, RecursionError):
        return repr(block.value)
