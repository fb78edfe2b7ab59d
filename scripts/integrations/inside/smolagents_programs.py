"""Whole programs of smolagents with our executor, on scripted models."""

import contextlib
from collections.abc import Iterator
from typing import Any

import PIL.Image
from smolagents import ChatMessage, CodeAgent, FinalAnswerTool, Model, Tool, tool

from rlm_broker.integrations.smolagents import Executor


class Script(Model):
    """A model that replies with each of these blocks of code in turn, and keeps what it was sent."""

    def __init__(self, *blocks: str) -> None:
        super().__init__(model_id="script")
        self._blocks = [*blocks]
        self.seen: list[str] = []

    def generate(self, messages: list[Any], *_: Any, **__: Any) -> ChatMessage:
        """Return the next block."""
        self.seen.append(str(messages[-1]))
        return ChatMessage(role="assistant", content=f"<code>\n{self._blocks.pop(0)}\n</code>")


@tool
def thumbnail(picture: PIL.Image.Image, width: int) -> PIL.Image.Image:
    """Make a picture smaller.

    Args:
        picture: The picture.
        width: Its new width.
    """
    return picture.resize((width, picture.height * width // picture.width))


class Twice(FinalAnswerTool):
    """A `final_answer` of the user's."""

    def forward(self, answer: Any) -> Any:
        """Return the answer twice."""
        return [answer, answer]


def managed_agent_and_pictures() -> None:
    """An agent that fails once, asks its managed agent, and has a picture made smaller."""
    counter = CodeAgent(
        [],
        Script("total = sum(numbers)", "final_answer(f'the sum is {total}')"),
        executor=Executor(),
        name="counter",
        description="Adds up numbers.",
        verbosity_level=0,
    )
    model = Script(
        "print('before'); small = thumbnail(picture, 'wide')",
        "small = thumbnail(picture, width=4)\nsize = small.size",
        "told = counter('Add them up.', additional_args={'numbers': [1, 2, 39]})\nprint(told)",
        "final_answer({'size': size, 'told': 'the sum is 42' in told, 'picture': small})",
    )
    with CodeAgent([thumbnail], model, managed_agents=[counter], executor=Executor(), verbosity_level=0) as agent:
        answer = agent.run("Go.", additional_args={"picture": PIL.Image.new("RGB", (8, 6), "red"), "answer": 1})
    assert answer["size"] == (4, 3), answer
    assert answer["told"] is True, answer
    assert isinstance(answer["picture"], PIL.Image.Image), answer
    assert answer["picture"].getpixel((0, 0)) == (255, 0, 0), answer
    failed = agent.memory.steps[1]
    assert "before" in failed.observations, failed
    assert "line" in failed.error.message, failed
    counter.cleanup()


def own_answer() -> None:
    """An agent with a `final_answer` of the user's, checks, and a second run that goes on from the first."""
    tools: list[Tool] = [Twice()]
    model = Script("kept = 5\nfinal_answer(kept)", "final_answer(kept + 1)")
    checks = [lambda answer, memory, agent: len(answer) == 2]  # noqa: ARG005 - smolagents gives all three
    with CodeAgent(tools, model, executor=Executor(), final_answer_checks=checks, verbosity_level=0) as agent:
        assert agent.run("Go.") == [5, 5]
        assert agent.run("Go on.", reset=False) == [6, 6]


@contextlib.contextmanager
def opened() -> Iterator[Executor]:
    """An executor that has had its first result."""
    executor = Executor()
    executor.send_tools({"thumbnail": thumbnail, "final_answer": FinalAnswerTool()})
    assert executor("final_answer(6 * 7)").output == 42
    try:
        yield executor
    finally:
        executor.cleanup()
