"""`POST /run_code`, as ByteDance's SandboxFusion has it: trainers of models send their programs here.

A program runs as `python FILE` would, in a REPL of its own. Two differences: other languages are refused, and files lie
below the current folder alone.
"""

import asyncio
import base64
import binascii
from io import FileIO
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker import Block, FileRefused, ReplLimits, SandboxedRepl
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.replies import SlowJson
from rlm_broker.serve.sandboxes.blocks import Seconds

MOST_FETCHED_BYTES: Final = 64 << 20
"""Bytes of all returned files together."""
LEAST_MB: Final = 4
"""Mebibytes with which a REPL can start and run a line."""
MOST_MB: Final = 1 << 30
"""One pebibyte, more than any machine has: the largest limit."""
KILLED: Final = -9
"""Exit code of a killed program, as SandboxFusion tells it: minus the number of SIGKILL."""
TIME_LIMITS: Final = frozenset({"block_timeout_s", "block_wall_timeout_s", "cpu_s"})


class RunCodeRequest(BaseModel):
    """A program to run. Field names are SandboxFusion's.

    Attributes:
        code: Its source.
        language: "python"; any other language is refused.
        stdin: Text it reads.
        run_timeout: Seconds it may take, waits included; the server's `block_timeout_s` is the most.
        compile_timeout: No effect: Python programs are not compiled apart.
        files: Path → base64 of a file beside it; a path with null is passed over.
        fetch_files: Paths of files to return at its end, if they exist.
        memory_limit_MB: Mebibytes of memory; beyond the server's limit the server's holds, as with -1.
    """

    model_config = ConfigDict(extra="forbid")

    code: str
    language: str
    stdin: str | None = None
    run_timeout: Seconds = 10.0
    compile_timeout: float = 10.0
    files: dict[str, str | None] = {}
    fetch_files: Annotated[list[str], Field(max_length=1_000)] = []
    memory_limit_MB: Annotated[float, Field(allow_inf_nan=False)] = -1


def routes(parts: Parts) -> list[Route]:
    """Return the route of SandboxFusion."""

    async def run_code(request: Request) -> ASGIApp:
        owner = key_of(request).require("execute")
        asked, _ = await parts.parsed(request, RunCodeRequest)
        if asked.language != "python":
            return JSONResponse(_response("SandboxError", f"this server runs python, and no {asked.language[:40]}"))
        servers = parts.rlm.sandbox.limits
        if asked.run_timeout > servers.block_timeout_s:
            most = f"{servers.block_timeout_s:g} of this server"
            raise ApiError(400, f"run_timeout = {asked.run_timeout:g} is above the {most}", param="run_timeout")
        if asked.memory_limit_MB > 0 and not LEAST_MB <= asked.memory_limit_MB <= MOST_MB:
            said = f"memory_limit_MB = {asked.memory_limit_MB:g} is not within {LEAST_MB} and {MOST_MB:,}: give -1 for"
            raise ApiError(422, f"{said} the server's own", param="memory_limit_MB")
        files = _decoded(asked.files)
        wanted = int(asked.memory_limit_MB * (1 << 20))
        limits = None  # REPLs are ready with the server's limits
        if 0 < wanted < servers.memory_bytes:
            limits = servers.replace(memory_bytes=wanted)
        if asked.fetch_files:  # a replay after a kill begins in an empty folder
            limits = (limits or servers).replace(checkpoint="never", max_replay_s=0)

        async def work() -> tuple[int, dict[str, str], Any]:
            return 200, {}, await _ran(parts, owner, asked, files, limits)

        return SlowJson(work, parts.settings.heartbeat_s)

    return [Route("/run_code", run_code, methods=["POST"])]


async def _ran(
    parts: Parts, owner: Owner, asked: RunCodeRequest, files: dict[str, bytes], limits: ReplLimits | None
) -> dict[str, Any]:
    async with parts.places.place(owner), parts.rlm.sandbox.repl(limits=limits) as repl:
        repl.kills_when_cancelled = True
        for path, data in files.items():
            await repl.files.awrite(path, data)
        block = await repl.aexecute_script(asked.code, stdin=asked.stdin, timeout_s=asked.run_timeout)
        fetched = await _fetched(repl, asked.fetch_files)
    result = _result(block)
    is_good = result["status"] == "Finished" and result["return_code"] == 0
    return _response("Success" if is_good else "Failed", "", result, fetched)


async def _fetched(repl: SandboxedRepl, paths: list[str]) -> dict[str, str]:
    """Return the existing files as base64.

    Raises:
        ApiError: 400: they have too many bytes together.
        FileRefused: A path cannot be one.
    """
    fetched, left_bytes = {}, MOST_FETCHED_BYTES
    for path in paths:
        try:
            opened = await repl.files.aopen(path)
        except FileRefused as refused:
            if refused.is_path:
                raise
            continue
        with opened:
            size_bytes, fetched[path] = await asyncio.to_thread(_encoded, opened, left_bytes)
        left_bytes -= size_bytes
        if left_bytes < 0:
            raise ApiError(400, f"the files have more than {MOST_FETCHED_BYTES:,} bytes together", param="fetch_files")
    return fetched


def _encoded(file: FileIO, most_bytes: int) -> tuple[int, str]:
    """Return the size of a file and its base64; of a file with more bytes, the size alone."""
    data = b""
    while len(data) <= most_bytes and (piece := file.read(most_bytes + 1 - len(data))):
        data += piece
    return len(data), base64.b64encode(data).decode() if len(data) <= most_bytes else ""


def _result(block: Block) -> dict[str, Any]:
    """Return the outcome of a program in SandboxFusion's words."""
    is_late = block.limit in TIME_LIMITS
    codes = {"ok": 0, "error": 1, "exited": block.exit_code, "interrupted": KILLED, "killed": KILLED}
    stderr = block.stderr
    if block.error and block.status in ("interrupted", "killed"):
        stderr += f"{'' if not stderr or stderr.endswith(chr(10)) else chr(10)}{block.status}: {block.error}\n"
    return {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "execution_time": block.execution_time,
        "return_code": None if is_late else codes[block.status],
        "stdout": block.stdout,
        "stderr": stderr,
    }


def _response(
    status: Literal["Success", "Failed", "SandboxError"],
    message: str,
    result: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": files or {},
    }


def _decoded(files: dict[str, str | None]) -> dict[str, bytes]:
    decoded = {}
    for path, content in files.items():
        if content is None:
            continue
        try:
            decoded[path] = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(400, f"the file {path[:80]!r} is not base64", param="files") from None
    return decoded
