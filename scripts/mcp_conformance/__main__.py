"""Runs the official conformance runner and the official inspector of the Model Context Protocol, by npx.

    .venv/bin/python -m scripts.mcp_conformance

The runner's scenarios mostly want its own example tools, prompts and resources. `baseline.yml` lists those that this
server does not have; a scenario that fails without being listed there, or the other way round, fails the script.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvicorn

from rlm_broker.rlm import RLM
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp.http import mcp_app
from rlm_broker.serve.settings import RIGHTS

NODE = "node@22"
RUNNER = "@modelcontextprotocol/conformance@0.1.16"
INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
BASELINE = Path(__file__).with_name("baseline.yml")
SERVER = [sys.executable, "-m", "rlm_broker", "mcp"]
TIMEOUT_S = 300
"""Seconds that npx may take, with its downloads."""


async def main() -> None:
    """Run both, and exit with 1 if one of them fails."""
    inspected = await asyncio.to_thread(_inspected)
    conforms = await _conforms()
    print(f"inspector: {'ok' if inspected else 'FAILED'}; conformance: {'as the baseline' if conforms else 'FAILED'}")
    sys.exit(0 if inspected and conforms else 1)


def _inspected() -> bool:
    """Whether the inspector lists the tools over stdio, and gets the output of a block."""
    listed = _inspect("--method", "tools/list")
    code = ("--tool-name", "execute_python", "--tool-arg", "code=print(6 * 7)")
    called = _inspect("--method", "tools/call", *code)
    return len(listed["tools"]) == len({tool["name"] for tool in listed["tools"]}) == 6 and (
        called["structuredContent"]["stdout"] == "42\n"
    )


def _inspect(*arguments: str) -> dict[str, Any]:
    command = ["npx", "-y", "-p", NODE, "-p", INSPECTOR, "mcp-inspector", "--cli", *SERVER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return dict(json.loads(done.stdout))


async def _conforms() -> bool:
    key = ServerKey(Owner("conformance"), RIGHTS)
    async with RLM("offline") as rlm, HeldRepls() as repls, mcp_app(rlm, HostedRuns(rlm), repls) as app:

        async def behind_guard(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, KEY: key}, receive, send)

        server = uvicorn.Server(uvicorn.Config(behind_guard, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.get_running_loop().create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        done = await asyncio.to_thread(_run_conformance, f"http://127.0.0.1:{port}/mcp")
        server.should_exit = True
        await serving
    return done


def _run_conformance(url: str) -> bool:
    command = ["npx", "-y", "-p", NODE, "-p", RUNNER, "conformance", "server", "--url", url]
    done = subprocess.run([*command, "--expected-failures", str(BASELINE)], timeout=TIMEOUT_S, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    asyncio.run(main())
