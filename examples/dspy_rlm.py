"""A `dspy.RLM` whose code runs in a sandbox: a tool, a question to a sub-model, and an attempt to read a file.

Needs `pip install 'rlm-broker[dspy]'`. Without an argument a scripted model answers; else give a model's name, such as
openai/gpt-5-mini, whose key is in the environment.
"""

import sys
from typing import Any

import dspy
from dspy.utils.dummies import DummyLM

from rlm_broker.integrations.dspy import Interpreter

ORDERS = "2 lenses for Ines\n1 tripod for Jun\n3 lenses for Kai\n"
STEPS = [
    {"reasoning": "Look first.", "code": "print(orders[:20])\nprint(open('/etc/passwd').read())"},
    {"reasoning": "Files are out of reach; count.", "code": "n = sum(int(line[0]) for line in orders.splitlines())"},
    {"reasoning": "Ask for the price.", "code": "SUBMIT(answer=str(n * price_of(item='lens')))"},
]


def price_of(item: str) -> float:
    """Return the price of an item, from a shop that only this process can reach."""
    return {"lens": 20.0, "tripod": 85.0}[item]


def main() -> None:
    """Answer one question, and print the steps."""
    model: Any = dspy.LM(sys.argv[1]) if len(sys.argv) > 1 else DummyLM(STEPS)
    dspy.configure(lm=model, adapter=dspy.ChatAdapter(), interpreter_factory=Interpreter)
    rlm = dspy.RLM("orders, question -> answer", tools=[price_of])
    result = rlm(orders=ORDERS, question="What would it cost if all ordered lenses?")
    for step in result.trajectory:
        print(step["output"].strip().splitlines()[-1])
    print(result.answer)


if __name__ == "__main__":
    main()
