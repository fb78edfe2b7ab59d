"""Whole programs of DSPy's on scripted models, with our interpreter."""

import contextlib
from collections.abc import Iterator
from typing import Any

import dspy
from dspy.utils.dummies import DummyLM

from rlm_broker.integrations.dspy import Interpreter

STEPS = [
    {"reasoning": "look", "code": "print(len(context), context[:5])\nlabels = llm_query_batched(prompts=['a', 'b'])"},
    {"reasoning": "mistake", "code": "SUBMIT(wrong=1)"},
    {
        "reasoning": "ask an agent",
        "code": "import dspy\nagent = dspy.Predict('question -> reply')(question='how many?')",
    },
    {"reasoning": "submit", "code": "SUBMIT(answer=f'{agent.reply} {price(item=labels[1])} {context.count(\"x\")}')"},
]
FLEX = """
class Doubler(dspy.Module):
    def __init__(self):
        super().__init__()
        self.solve = dspy.Predict("value: int -> result: int")

    def forward(self, **inputs):
        predicted = self.solve(value=inputs["value"])
        return dspy.Prediction(result=doubled(value=predicted.result))
"""


class SubModel(DummyLM):  # type: ignore[misc]
    """Answers plain prompts by themselves, and those of predictors as scripted."""

    def __call__(self, prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        return [f"<{prompt}>"] if isinstance(prompt, str) else super().__call__(prompt, *args, **kwargs)


def rlm() -> None:
    """An RLM with queries, a tool, a wrong submission and a sub-agent, on the interpreter of `dspy.configure`."""

    def price(item: str) -> int:
        return len(item)

    dspy.configure(lm=DummyLM(STEPS), adapter=dspy.ChatAdapter(), interpreter_factory=Interpreter)
    program = dspy.RLM("context -> answer", tools=[price], sub_lm=SubModel([{"reply": "many"}]))
    done = program(context="x" * 1_000_000)
    assert done.answer == "many 3 1000000", done
    assert done.trajectory[0]["output"] == "1000000 xxxxx\n"
    assert "unexpected keyword argument 'wrong'" in done.trajectory[1]["output"], done.trajectory[1]


def flex() -> None:
    """A Flex module whose code runs in the sandbox, and whose predictor and tool run here."""

    class Task(dspy.Signature):  # type: ignore[misc]
        value: int = dspy.InputField()
        result: int = dspy.OutputField()

    def doubled(*, value: int) -> int:
        return 2 * value

    dspy.configure(interpreter_factory=Interpreter)
    program = dspy.Flex(Task, tools=[doubled])
    program._bind_code(FLEX.strip())
    with dspy.context(lm=DummyLM([{"result": "21"}])):
        assert program(value=20).result == 42


@contextlib.contextmanager
def opened() -> Iterator[Interpreter]:
    """Open an interpreter of its own, with a variable and a tool."""
    with Interpreter(tools={"add": lambda left, right: left + right}) as interpreter:
        assert interpreter.execute("add(left=n, right=2)", {"n": 40}) == 42
        yield interpreter
