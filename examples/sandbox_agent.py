"""A `SandboxAgent` of the OpenAI Agents SDK whose workspace is in a sandbox: it runs a command over a file of yours.

Needs `pip install 'rlm-broker[openai-agents]'`. Without an argument a scripted model answers; else give a model's name,
such as gpt-5-mini, with OPENAI_API_KEY in the environment.
"""

import asyncio
import json
import sys
from typing import Any

from agents import Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from rlm_broker.integrations.openai_agents import Client

FILES = Manifest(entries={"numbers.txt": File(content=b"7\n30\n4\n")})


class Scripted(Model):  # type: ignore[misc]
    """A model that runs one command and reads its answer off the output."""

    async def get_response(self, *, input: Any, **_more: Any) -> ModelResponse:
        """Return the next reply."""
        outputs = [each["output"] for each in input if each.get("type") == "function_call_output"]
        if not outputs:
            command = json.dumps({"cmd": "sort -n numbers.txt | tail -1; cat /etc/passwd"})
            reply: Any = ResponseFunctionToolCall(
                arguments=command, call_id="call-1", name="exec_command", type="function_call"
            )
        else:
            found = next(line for line in str(outputs[0]).splitlines() if line.isdigit())
            content: list[Any] = [ResponseOutputText(annotations=[], text=f"It is {found}.", type="output_text")]
            reply = ResponseOutputMessage(id="m", content=content, role="assistant", status="completed", type="message")
        return ModelResponse(output=[reply], usage=Usage(), response_id=None)

    def stream_response(self, *_given: Any, **_named: Any) -> Any:
        """Refuse, since nothing here streams."""
        raise NotImplementedError


def main() -> None:
    """Answer one question."""
    scripted = len(sys.argv) == 1
    set_tracing_disabled(scripted)
    agent = SandboxAgent(name="sorter", model=Scripted() if scripted else sys.argv[1], default_manifest=FILES)
    config = RunConfig(sandbox=SandboxRunConfig(client=Client()))
    result = asyncio.run(Runner.run(agent, "Which number of numbers.txt is the largest?", run_config=config))
    print(result.final_output)


if __name__ == "__main__":
    main()
