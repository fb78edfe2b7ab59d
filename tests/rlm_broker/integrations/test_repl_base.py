"""The part that all adapters with a REPL share, on real sandboxes."""

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlm_broker import ReplLimits, Sandbox
from rlm_broker.errors import ValueUnavailable
from rlm_broker.integrations.repl_base import PeerRepl
from tests.support.forked_child import in_child
from tests.support.launcher import needs_strict
from tests.support.processes import living_below
from tests.support.tables import table
from tests.support.waiting import until_now


class Refused(Exception):
    """The error of a peer."""


@pytest.fixture
def peer(open_sandbox: Sandbox) -> Iterator[Callable[..., PeerRepl]]:
    made: list[PeerRepl] = []

    def make(**options: Any) -> PeerRepl:
        made.append(PeerRepl("the thing", Refused, sandbox=open_sandbox, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_values_tools_and_kept_values_reach_code(peer: Callable[..., PeerRepl]) -> None:
    repl = peer()
    marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker")
    marker.set("of the caller")

    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    tools: dict[str, Callable[..., Any]] = {"later": later, "mark": marker.get}
    block = repl.execute("got = later(n), mark()\nn = kept = 0\ngot", values={"n": 1}, kept={"kept": 5}, tools=tools)
    assert block.value == (2, "of the caller")
    assert repl.execute("n, kept").value == (0, 5)
    assert repl.execute("later(1)").error_type == "NameError"
    assert repl.variables("n", "kept") == {"n": 0, "kept": 5}


def test_tool_reads_variables_and_runs_no_code_of_its_object(peer: Callable[..., PeerRepl]) -> None:
    repl, other = peer(), peer()
    assert repl.execute("n = 3\nread()", tools={"read": lambda: repl.variables("n")["n"]}).value == 3
    assert repl.execute("run()", tools={"run": lambda: other.execute("1 + 1").value}).value == 2
    block = repl.execute("run()", tools={"run": lambda: repl.execute("1")})
    assert "the thing cannot execute recursively" in (block.error_text or "")
    assert repl.execute("n").value == 3


def test_second_thread_is_refused_or_waits(peer: Callable[..., PeerRepl]) -> None:
    runs, ends = threading.Event(), threading.Event()

    def hold() -> bool:
        runs.set()
        return ends.wait()

    tools = {"hold": hold}
    for waits in (False, True):
        repl = peer(waits=waits)
        first = threading.Thread(target=repl.execute, args=("hold()\nn = 1",), kwargs={"tools": tools})
        first.start()
        assert runs.wait(60)
        if waits:
            threading.Thread(target=ends.set).start()
            assert repl.execute("n").value == 1
        else:
            with pytest.raises(Refused, match="runs code for another thread already"):
                repl.execute("1")
            ends.set()
        first.join()
        runs.clear()
        ends.clear()


def test_death_amid_a_tool_call_ends_the_object(peer: Callable[..., PeerRepl]) -> None:
    repl, ends = peer(), threading.Event()
    code = "import os, threading\nthreading.Timer(0.01, os._exit, [3]).start()\nhold()"
    with pytest.raises(Refused, match=r"the thing has ended: .* exit code 3"):
        repl.execute(code, tools={"hold": ends.wait})
    ends.set()
    with pytest.raises(Refused, match=r"the thing was shut down and its session has ended \(its process has ended"):
        repl.execute("1")


@needs_strict
def test_object_with_a_checkpoint_goes_on(peer: Callable[..., PeerRepl]) -> None:
    repl = peer(limits=ReplLimits(checkpoint="each"))
    repl.execute("made = 1")
    with pytest.raises(Refused, match=r"exit code 3 .*\. Executions undone: 1; earlier variables are there$"):
        repl.execute("made = 2\nimport os; os._exit(3)")
    assert repl.execute("made").value == 1


def test_object_that_survives_a_death_has_what_it_keeps(peer: Callable[..., PeerRepl]) -> None:
    repl = peer(survives=True)
    block = repl.execute("made = 1\nimport os; os._exit(3)", kept={"kept": 5})
    assert block.status == "killed"
    assert repl.execute("['made' in globals(), kept]").value == [False, 5]


@table("failure", [SystemExit(3), ValueError("wrong")])
def test_failure_of_a_tool_is_an_error_in_code(peer: Callable[..., PeerRepl], failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    repl = peer()
    block = repl.execute("try: fail()\nexcept RuntimeError as error: print(error)", tools={"fail": fail})
    assert f"{type(failure).__name__}: {failure}" in block.stdout


def test_interrupt_of_a_tool_is_for_the_caller_and_ends_the_object(peer: Callable[..., PeerRepl]) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    repl = peer()
    with pytest.raises(KeyboardInterrupt):
        repl.execute("fail()", tools={"fail": fail})
    with pytest.raises(Refused, match="one of its tools raised KeyboardInterrupt"):
        repl.execute("1")


@table(
    "given, said",
    [
        ({"values": {"n": object()}}, "the value n is an object, which does not cross"),
        ({"values": {"no name": 1}}, "'no name'"),
        ({"tools": {"no name": print}}, "'no name'"),
        ({"submit": {"no name": int}}, "'no name'"),
        ({"code": 5}, "code"),
    ],
)
def test_what_cannot_be_used_is_refused_and_code_goes_on(
    peer: Callable[..., PeerRepl], given: dict[str, Any], said: str
) -> None:
    repl = peer()
    with pytest.raises(Refused, match=said):
        repl.execute(**{"code": "1", **given})
    assert repl.execute("1 + 1").value == 2


def test_converted_values_cross(peer: Callable[..., PeerRepl]) -> None:
    repl = peer(convert=lambda value: str(value) if isinstance(value, Refused) else value)
    assert repl.execute("n, m", values={"n": Refused("x"), "m": 1}).value == ("x", 1)
    repl.execute("def f(): pass")
    assert isinstance(repl.variables("f")["f"], ValueUnavailable)


def test_forked_process_is_refused(peer: Callable[..., PeerRepl]) -> None:
    repl = peer()
    repl.open()

    def use() -> str:
        with pytest.raises(Refused) as refused:
            repl.execute("1")
        repl.close()
        return str(refused.value)

    assert in_child(use) == "the thing was opened before the process was forked: make another one in here"
    assert repl.execute("1 + 1").value == 2


def test_dropped_object_leaves_no_process(open_sandbox: Sandbox) -> None:
    before = living_below()
    held = [PeerRepl("the thing", Refused, sandbox=open_sandbox)]
    assert held[0].execute("f()", tools={"f": lambda: held[0].why_closed}).status == "ok"
    assert living_below() != before
    held.clear()
    gc.collect()
    until_now(lambda: living_below() == before)


def test_weaker_level_runs_code() -> None:
    with Sandbox(isolation="standard", warm=0) as sandbox:
        repl = PeerRepl("the thing", Refused, sandbox=sandbox)
        assert repl.execute("f(1)", tools={"f": lambda n: n + 1}).value == 2
        repl.close("it was enough")
        with pytest.raises(Refused, match="it was enough"):
            repl.open()
