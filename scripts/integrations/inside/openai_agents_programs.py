"""Whole programs of the OpenAI Agents SDK on scripted models, with our sandboxes."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from agents import Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from rlm_broker.integrations.openai_agents import Client


class Scripted(Model):  # type: ignore[misc]
    """A model that says what it is told to, and keeps what it is shown."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.shown: list[Any] = []

    async def get_response(self, *, input: Any, **_more: Any) -> ModelResponse:
        """Return the next reply."""
        self.shown.append(input)
        return ModelResponse(output=[self.outputs.pop(0)], usage=Usage(), response_id=None)

    def stream_response(self, *_given: Any, **_named: Any) -> Any:
        """Refuse, since no program streams."""
        raise NotImplementedError


def _call(number: int, name: str, **arguments: Any) -> ResponseFunctionToolCall:
    text = json.dumps(arguments)
    return ResponseFunctionToolCall(arguments=text, call_id=f"call-{number}", name=name, type="function_call")


def _says(text: str) -> ResponseOutputMessage:
    content: list[Any] = [ResponseOutputText(annotations=[], text=text, type="output_text")]
    return ResponseOutputMessage(id="m", content=content, role="assistant", status="completed", type="message")


def sandbox_agent() -> None:
    """An agent that runs a command in its workspace and answers."""
    set_tracing_disabled(True)
    model = Scripted(_call(1, "exec_command", cmd="sort -n numbers.txt | tail -1"), _says("The largest is 30."))
    manifest = Manifest(entries={"numbers.txt": File(content=b"7\n30\n4\n")})
    agent = SandboxAgent(name="sorter", model=model, default_manifest=manifest)
    config = RunConfig(sandbox=SandboxRunConfig(client=Client()))
    result = asyncio.run(Runner.run(agent, "Which number is the largest?", run_config=config))
    assert result.final_output == "The largest is 30."
    outputs = [each for each in model.shown[-1] if each.get("type") == "function_call_output"]
    assert "30" in str(outputs[0]["output"]), outputs


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A session that has run a command."""
    client = Client()
    loop = asyncio.new_event_loop()
    try:
        session = loop.run_until_complete(client.create())
        loop.run_until_complete(session.start())
        assert loop.run_until_complete(session.exec("echo 1")).stdout == b"1\n"
        yield
        loop.run_until_complete(session.aclose())
        loop.run_until_complete(client.delete(session))
    finally:
        loop.close()
