"""Truth of what the documents say: defaults of limits, and the way of a call through the code."""

import asyncio
import gc
import inspect
import re
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import pytest

from rlm_broker import RLM, ScriptedClient
from rlm_broker.limits import Limits
from rlm_broker.sandbox.workers.zygote_process import Zygote
from tests.support.places import PROJECT


def test_differences_name_the_default_limits() -> None:
    page = (PROJECT / "docs/coming-from/differences.md").read_text()
    text = page.partition("## Other defaults")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\|[^|]*\| `(\w+)` \| ([^|]*) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    given = {name: None if value == "None" else float(value.replace(",", "")) for name, value in rows}
    assert given == {name: getattr(Limits(), name) for name in given}


def test_walkthrough_of_first_fork_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (PROJECT / "docs/walkthrough.md").read_text().partition("## From a question to the first fork")[2]
    steps = re.findall(r"`[\w/]+\.py:([\w.]+)`", text.partition("\n## ")[0])
    ways: list[set[str]] = []
    spawn = Zygote.spawn

    def recorded(self: Zygote, *arguments: Any) -> Any:
        ways.append(_on_the_way())
        return spawn(self, *arguments)

    with RLM(ScriptedClient(["FINAL(1)"])) as rlm:
        monkeypatch.setattr(Zygote, "spawn", recorded)
        rlm.completion("text", "?")
    others = {"_keep_running", "Job.start", "Job.result", "ColdStart._connect"}  # what waits or goes on beside the way
    assert ways[0] - others == set(steps) - {"Zygote.spawn"}
    assert len(steps) == 15  # `within` twice


def _waits(found: object) -> bool:
    return isinstance(found, asyncio.Task) and not found.done() and found.get_loop() is asyncio.get_running_loop()


def _on_the_way() -> set[str]:
    """Names of our functions that run or wait: in this thread, in the main thread, and in the tasks of this loop."""
    here = str(PROJECT / "rlm_broker")
    codes: list[CodeType] = []
    frame: FrameType | None
    for thread in (threading.get_ident(), threading.main_thread().ident or 0):
        frame = sys._current_frames()[thread]
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
    for task in filter(_waits, gc.get_objects()):  # asyncio does not list the tasks of `within`
        waits: Any = task.get_coro()
        while inspect.iscoroutine(waits):
            codes.append(waits.cr_code)
            waits = waits.cr_await
    return {code.co_qualname for code in codes if code.co_filename.startswith(here)}
