"""A plugin for pytest: tests of DSPy's own interpreters get ours, for `LocalInterpreter` and `PythonInterpreter`."""

import sys
from typing import Any

import dspy

from rlm_broker.integrations.dspy import Interpreter


class Process:
    """A started process of an interpreter, as far as tests of its start look at it."""

    def poll(self) -> None:
        """Return None, since it runs."""


STARTED = Process()


class StandIn(Interpreter):
    """Ours, with the attributes by which tests ask whether the process of the interpreter was started."""

    @property
    def _process(self) -> Process | None:
        return STARTED if self._repl._repl else None

    deno_process = _process


theirs = [getattr(dspy, name) for name in ("LocalInterpreter", "PythonInterpreter") if hasattr(dspy, name)]
for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "dspy"]:
    for name, value in list(vars(module).items()):
        if any(value is each for each in theirs):
            setattr(module, name, StandIn)
for consumer in (dspy.RLM, dspy.CodeAct, dspy.ProgramOfThought, dspy.Flex):
    init: Any = consumer.__init__
    init = getattr(init, "__wrapped__", init)
    init.__defaults__ = tuple(StandIn if each in theirs else each for each in init.__defaults__ or ())
