"""The key of a client: its provider gets it, and no file, message or process shows it."""

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.models.model import Model
from rlm_broker.broker.models.models import Models
from rlm_broker.errors import ModelFailed
from rlm_broker.events.trace import TraceWriter
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure
from tests.support.processes import living_below
from tests.support.tables import table

CANARY = "sk-canary-of-the-test-0123456789"


@table("kind", ["direct", "litellm"])
def test_key_stays_with_its_client(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], open_sandbox: Sandbox
) -> None:
    """The provider itself repeats the key in its errors; code looks for it; and everything that is written is read."""
    monkeypatch.setenv("CANARY_API_KEY", CANARY)
    look = "import os, glob\nprint(dict(os.environ), globals())\nfor p in glob.glob('/proc/*/environ'): print(open(p).read())"
    seen: list[bytes] = []
    trace, recording, cache = (tmp_path / name for name in ("trace.jsonl", "recording.jsonl", "cache"))

    def answer(request: dict[str, Any]) -> Answer:
        for process in [psutil.Process(), *living_below()]:
            for name in ("environ", "cmdline") if process.pid != os.getpid() else ():
                with contextlib.suppress(PermissionError):  # an init hides itself from an ordinary user
                    seen.append(Path(f"/proc/{process.pid}/{name}").read_bytes())
        last = str(request["messages"][-1]["content"])
        if "characters in all." in last:
            return completion(f"```repl\n{look}\n```\n```repl\nprint(llm_query('fail'))\n```")
        return failure(401, f"wrong key: {CANARY}") if last == "fail" else failure(403, f"Bearer {CANARY} again")

    with FakeOpenAI(answer) as server, TraceWriter(trace) as write:
        if kind == "direct":
            model: Any = Model(base_url=server.base_url, name="m", api_key="env:CANARY_API_KEY")
        else:
            model = LiteLLMClient("openai/m", api_base=server.base_url, api_key=CANARY)
        rlm = RLM(model, on_event=write, models=Models(record=recording, cache=cache), sandbox=open_sandbox)
        with pytest.raises(ModelFailed) as failed:
            rlm.completion("some text", "?")
    stack = [frame for frame, _ in traceback.walk_tb(failed.value.__traceback__)]
    frames = [str(frame.f_locals) for frame in stack if frame.f_code.co_filename != __file__]
    printed = capfd.readouterr()
    told = [str(failed.value), *traceback.format_exception(failed.value), repr(model), repr(rlm), repr(vars(rlm))]
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir()]
    assert "[redacted]" in str(failed.value)
    assert len(seen) > 3
    assert server.headers[0]["authorization"] == f"Bearer {CANARY}"
    for text in [*told, *frames, *written, printed.out, printed.err, *(each.decode(errors="replace") for each in seen)]:
        assert CANARY not in text
