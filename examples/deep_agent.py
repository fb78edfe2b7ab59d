"""A deep agent of LangChain whose commands and files are in a sandbox: it writes a program, runs it and edits a file.

Needs `pip install 'rlm-broker[langchain]'`. Without an argument a scripted model answers; else give a model's name,
such as anthropic:claude-sonnet-4-5, whose key is in the environment.
"""

import sys
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from rlm_broker.integrations.langchain import Backend

QUESTION = "Write a program that adds up the first five squares, run it, and tell me the sum."


class Scripted(GenericFakeChatModel):  # type: ignore[misc]
    """A model that says what it is told to, and calls tools."""

    def bind_tools(self, *_tools: Any, **_options: Any) -> Any:
        """Return the model, which knows its tools from the script."""
        return self


def call(number: int, name: str, **arguments: Any) -> AIMessage:
    """Return a reply that calls one tool."""
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}"}])


SCRIPT = [
    call(1, "write_file", file_path="/w/squares.py", content="print('sum', sum(n * n for n in range(5)))\n"),
    call(2, "execute", command="python3 squares.py | tee out.txt; cat /etc/passwd"),
    call(3, "edit_file", file_path="/w/out.txt", old_string="sum", new_string="The sum is"),
    call(4, "execute", command="cat out.txt"),
    AIMessage("The sum is 30."),
]


def main() -> None:
    """Answer one question, and print what the agent's commands printed."""
    model: Any = sys.argv[1] if len(sys.argv) > 1 else Scripted(messages=iter(SCRIPT))
    with Backend() as backend:
        agent = create_deep_agent(model, backend=backend)
        messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    for message in messages:
        if message.type == "tool" and message.name == "execute":
            print(message.text.strip())
    print(messages[-1].text)


if __name__ == "__main__":
    main()
