"""Serve questions and untrusted code over HTTP, with REPLs that are ready: `pip install fastapi uvicorn`.

You learn to open one `RLM` for the life of a service, to keep REPLs warm, to bound each request, and to turn errors
into status codes. Each request has a REPL of its own, and sees no variable of another.

It prints uvicorn's lines, such as `Uvicorn running on http://127.0.0.1:8000`:

    python examples/service.py --model openai/gpt-5-mini --port 8000
    curl -s localhost:8000/ask -H 'Content-Type: application/json' -d '{"context": "...", "question": "..."}'
    curl -s localhost:8000/run -H 'Content-Type: application/json' -d '{"code": "print(6 * 7)"}'

Without `--model` the model is "offline": it needs no key. The service has no login: put it behind a proxy that has one.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from rlm_broker import RLM, ConfigurationError, LimitReached, Limits, ModelFailed, RunFailed, Sandbox

LIMITS = Limits(memory_bytes=256 << 20, max_llm_calls=50, run_timeout_s=60, block_timeout_s=10)
Text = Annotated[str, Field(max_length=10_000_000)]


class Ask(BaseModel):
    context: Text
    question: Annotated[str, Field(min_length=1, max_length=2_000)]


class Code(BaseModel):
    code: Text
    context: Text = ""


def service(model: str) -> FastAPI:
    rlm = RLM(model, limits=LIMITS, sandbox=Sandbox(LIMITS, warm=4))

    @contextlib.asynccontextmanager
    async def opened(_app: FastAPI) -> AsyncIterator[None]:
        async with rlm:  # a killed service leaves no worker: they end with its sockets
            yield

    app = FastAPI(title="rlm-broker", lifespan=opened)

    @app.post("/ask")
    async def ask(asked: Ask) -> dict[str, Any]:
        try:
            done = await rlm.acompletion(asked.context, asked.question)
        except RunFailed as failed:
            status = 422 if isinstance(failed, LimitReached) else 502 if isinstance(failed, ModelFailed) else 500
            raise HTTPException(status, {"error": str(failed), "partial_answer": failed.partial_answer}) from None
        except ConfigurationError as error:
            raise HTTPException(400, {"error": str(error)}) from None
        return {"answer": done.response, "turns": done.iterations, "cost": done.usage_summary.total_cost}

    @app.post("/run")
    async def run(given: Code) -> dict[str, Any]:
        async with rlm.sandbox.repl(given.context) as repl:
            block = await repl.aexecute(given.code, wall_timeout_s=20)
        return {"status": block.status, "stdout": block.stdout, "error": block.error, "seconds": block.execution_time}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="offline")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(service(given.model), host="127.0.0.1", port=given.port)
