"""Whole programs of Deep Agents on scripted models, with our backend."""

import contextlib
from collections.abc import Iterator
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from rlm_broker.integrations.langchain import Backend


class Scripted(GenericFakeChatModel):  # type: ignore[misc]
    """A model that says what it is told to, and calls tools."""

    def bind_tools(self, *_tools: Any, **_options: Any) -> Any:
        """Return the model, which knows its tools from the script."""
        return self


def _call(number: int, name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}"}])


def deep_agent() -> None:
    """An agent that writes a program, runs it, reads and edits its output."""
    script = [
        _call(1, "write_file", file_path="/w/squares.py", content="print(sum(n * n for n in range(5)))\n"),
        _call(2, "execute", command="python3 squares.py | tee out.txt; echo done >&2"),
        _call(3, "edit_file", file_path="/w/out.txt", old_string="30", new_string="thirty"),
        _call(4, "read_file", file_path="/w/out.txt"),
        _call(5, "grep", pattern="thirty", path="/w"),
        AIMessage("It is thirty."),
    ]
    with Backend() as backend:
        agent = create_deep_agent(Scripted(messages=iter(script)), backend=backend)
        messages = agent.invoke({"messages": [("user", "What is the sum of the first five squares?")]})["messages"]
    said = [message.text for message in messages if message.type == "tool"]
    assert messages[-1].text == "It is thirty.", messages
    assert "30" in said[1], said
    assert "done" in said[1], said
    assert "thirty" in said[3], said
    assert "out.txt" in said[4], said


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A backend that has run a command."""
    with Backend() as backend:
        assert backend.execute("echo 1").output == "1\n"
        yield
