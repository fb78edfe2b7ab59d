"""A CodeAgent of smolagents whose code runs in a sandbox. Its tool and its managed agent stay in this process.

pip install 'rlm-broker[smolagents]'; the model is a script, so no key is needed.
"""

from typing import Any

from smolagents import ChatMessage, CodeAgent, LogLevel, Model, tool

from rlm_broker.integrations.smolagents import Executor

PRICES = {"lens": 40.0, "tube": 12.5}


class Script(Model):
    """Replies with each of these blocks of code in turn."""

    def __init__(self, *blocks: str) -> None:
        super().__init__(model_id="script")
        self._blocks = [*blocks]

    def generate(self, *_: Any, **__: Any) -> ChatMessage:
        """Return the next block."""
        return ChatMessage(role="assistant", content=f"<code>\n{self._blocks.pop(0)}\n</code>")


@tool
def price_of(item: str) -> float:
    """Price of one item in euros.

    Args:
        item: Name of the item.
    """
    return PRICES[item]


adder = CodeAgent(
    tools=[],
    model=Script("final_answer(sum(numbers))"),
    executor=Executor(),
    name="adder",
    description="Adds up numbers.",
    verbosity_level=LogLevel.OFF,
)
model = Script(
    "prices = [price_of(order['item']) * order['count'] for order in orders]\nprint(prices)",
    "print(open('/etc/passwd').read())",  # fails: files of this machine are not there
    "report = adder('Add these up.', additional_args={'numbers': prices})\nfinal_answer(sum(prices))",
)
orders = [{"item": "lens", "count": 3}, {"item": "tube", "count": 2}]
with (
    adder,
    CodeAgent([price_of], model, managed_agents=[adder], executor=Executor(), verbosity_level=LogLevel.OFF) as agent,
):
    print(agent.run("What do the orders cost?", additional_args={"orders": orders}))
    for step in agent.memory.steps[1:]:
        print(step.error.message if step.error else step.observations.splitlines()[-1])
