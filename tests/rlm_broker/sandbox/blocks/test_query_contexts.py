"""Contexts that a REPL gives its children, as code may describe them by hand on the connection.

A child that cannot have its context is an error in its slot. The REPL goes on, and no descriptor is left open.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.context.store import store
from rlm_broker.errors import ContextRefused
from rlm_broker.limits import Limits
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.messages import MAX_PROMPTS, Query
from sandbox_worker.wire.prompts import MAX_INLINE_BYTES, ChildContext
from tests.support.tables import table
from tests.support.waiting import until_now

SCRATCH_BYTES = 1 << 20
LIMITS = Limits(
    max_depth=2,
    scratch_bytes=SCRATCH_BYTES,
    max_children_total=None,
    max_batch_prompts=MAX_PROMPTS,
    max_output_bytes=16 << 20,
)
RAW = """
import json, os, struct, threading, time
def received(size):
    data = b''
    while len(data) < size: data += os.read(4, size - len(data))
    return data
def ask(contexts, prompts=('task',), want='rlm'):
    query = dict(type='query', id='1:1', want=want, prompts=list(prompts), contexts=contexts)
    message = json.dumps(query, separators=(',', ':')).encode()
    data = struct.pack('>I', len(message)) + message
    while data: data = data[os.write(4, data):]
    (length,) = struct.unpack('>I', received(4))
    for slot in json.loads(received(length))['slots']: print(json.dumps(slot))
def write(data): open('x', 'wb').write(data)
"""


def child(request: LMRequest) -> str:
    """The model of the children: says what the context is; a plain completion says how long its prompt was."""
    if not request.is_loop:
        return f"read {len(str(request.messages[-1].content))} characters"
    return "```repl\nFINAL(f'{type(context).__name__} of {len(str(context))}')\n```"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def handler() -> Iterator[LMHandler]:
    with LMHandler(ScriptedClient(child)) as opened:
        yield opened


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, warm=0) as opened:
        opened.repl().close()
        yield opened


def asked(handler: LMHandler, sandbox: Sandbox, code: str, limits: Limits = LIMITS) -> list[dict[str, Any]]:
    """Run code with `ask` in a REPL, and return the slots. The REPL goes on afterwards, and no context stays open."""
    with sandbox.repl("the parent's", answer=handler.answers(limits, sandbox=sandbox)) as repl:
        before = descriptors()
        block = repl.execute(RAW + code)
        assert (block.status, block.error) == ("ok", None)
        assert repl.execute("print(context)").stdout == "the parent's\n"
        until_now(lambda: descriptors() <= before)
    return [json.loads(line) for line in block.stdout.splitlines()]


def error(slots: list[dict[str, Any]]) -> str:
    """Return the error of all slots."""
    (said,) = {slot["error"] for slot in slots}
    assert isinstance(said, str)
    return said


def test_context_comes_from_value_file_or_repl(handler: LMHandler, sandbox: Sandbox) -> None:
    code = (
        "open('text', 'w').write('é' * 20_000); open('json', 'w').write('[1, 2]')\n"
        "ask([{'value': '{\"a\": 1}'}, {'file': 'text'}, {'file': 'json', 'is_json': True}, {'own': 'context'}, None], "
        "['a', 'b', 'c', 'd', 'e'])\nask([], ['f'])"
    )
    texts = [slot["text"] for slot in asked(handler, sandbox, code)]
    assert texts == ["dict of 8", "str of 20000", "list of 6", "str of 12", "str of 1", "str of 1"]


@table("count", [1, 3, 1_000])
def test_contexts_of_another_number_than_prompts(handler: LMHandler, sandbox: Sandbox, count: int) -> None:
    slots = asked(handler, sandbox, f"ask([{{'value': '1'}}] * {count}, ['a', 'b'])")
    assert (len(slots), error(slots)) == (2, f"{count:,} contexts for 2 prompts")


NO_JSON = (
    "b''",
    "b'no json'",
    "b'{'",
    "b'\\xff'",
    "b'[' * 100_000",
    "b'{\"a\":' * 100_000",
    "b'9' * 100_000",
    "b'[1] 2'",
)
NO_FILES = (
    *("os.symlink('/etc/passwd', 'x')", "open('y', 'w').write('text'); os.symlink('y', 'x')", "os.mkdir('x')"),
    *("os.mkfifo('x')", "import socket; s = socket.socket(socket.AF_UNIX); s.bind('x')"),
)
TOO_LONG = MAX_INLINE_BYTES + 1
NOT_AVAILABLE: list[tuple[str, str, str]] = [
    *(
        ("", f"{{'file': {name!r}}}", "is not a file name$")
        for name in ("../secret", "/etc", "a/b", "..", ".", "", "a\0b")
    ),
    ("", "{'file': 'x'}", "cannot be opened: No such file or directory$"),
    *((code, "{'file': 'x'}", "") for code in NO_FILES),
    *(
        (f"write({data})", "{'file': 'x'}", "a context is not UTF-8: ")
        for data in ("b'\\xff\\xfe'", "b'cut \\xe4\\xb8'")
    ),
    ("", "{}", "a context has no value$"),
    ("", f"{{'value': '1' * {TOO_LONG}}}", f"a value of {TOO_LONG:,} bytes in a query, {MAX_INLINE_BYTES:,} at most$"),
    *(
        ("", f"{{'own': {name!r}}}", f"this REPL has no context {name!r} to give to a child: give a copy$")
        for name in ("context_1", "history", "llm_query", "os", "")
    ),
]


@table("code, context, why", NOT_AVAILABLE)
def test_context_that_is_not_available_is_refused(
    handler: LMHandler, sandbox: Sandbox, code: str, context: str, why: str
) -> None:
    """Links, and files other than regular ones, are not opened."""
    made = f"try:\n    {code or 'pass'}\nexcept OSError: pass\nask([{context}])"
    said = error(asked(handler, sandbox, made))
    assert re.search(f"^a context is not available: .*{why}", said)
    assert "root:" not in said


@table("data", NO_JSON)
def test_json_that_is_none_or_too_deep(handler: LMHandler, sandbox: Sandbox, data: str) -> None:
    said = error(asked(handler, sandbox, f"write({data})\nask([{{'file': 'x', 'is_json': True}}])"))
    assert 0 < len(said) < 1_000


def test_a_file_that_is_larger_than_may_be(handler: LMHandler, sandbox: Sandbox) -> None:
    code = f"f = open('x', 'wb'); f.truncate({SCRATCH_BYTES + 1}); f.close()\nask([{{'file': 'x'}}])"
    with sandbox.repl(answer=handler.answers(LIMITS, sandbox=sandbox)) as repl:  # the kernel bounds files, so that
        block = repl.execute(RAW + code)  # the file cannot be made in the first place
    assert block.status in ("error", "killed") or "more than scratch_bytes" in block.stdout


def test_file_changing_while_read_is_harmless(handler: LMHandler, sandbox: Sandbox) -> None:
    code = (
        "stop = threading.Event()\n"
        "def write():\n"
        "    while not stop.is_set():\n"
        "        with open('x', 'wb') as file:\n"
        "            for _ in range(64): file.write(b'y' * 8_192)\n"
        "open('x', 'w').close()\n"
        "thread = threading.Thread(target=write); thread.start()\n"
        "ask([{'file': 'x'}] * 4, list('abcd'))\n"
        "stop.set(); thread.join()"
    )
    for slot in asked(handler, sandbox, code):
        assert slot.get("text", "").startswith("str of ") or "error" in slot


@table("data", ["b'no json'", "b'[' * 10_000"])
def test_warm_repl_survives_invalid_json(handler: LMHandler, data: str) -> None:
    """A REPL that was made ahead is not lost to invalid JSON."""
    with Sandbox(LIMITS, warm=1) as sandbox, sandbox.repl(answer=handler.answers(LIMITS, sandbox=sandbox)) as repl:
        until_now(lambda: sandbox.stats().ready == 1)
        code = f"open('x', 'wb').write({data})\nask([{{'file': 'x', 'is_json': True}}])"
        said = json.loads(repl.execute(RAW + code).stdout)["error"]
        assert said.startswith("the context is ")
        assert sandbox.stats().ready == 1


@table("value", ["[" * 7_000 + "]" * 7_000, "9" * 10_000, "1e999"])
def test_a_value_that_no_child_could_have(handler: LMHandler, sandbox: Sandbox, value: str) -> None:
    code = (
        'message = b\'{"type":"query","id":"1:1","want":"rlm","prompts":["t"],"contexts":[{"value":%s}]}\''
        f" % {json.dumps(value).encode()!r}\n"
        "os.write(4, struct.pack('>I', len(message)) + message)\n"
        "print(received(struct.unpack('>I', received(4))[0]).decode())"
    )
    with sandbox.repl(answer=handler.answers(LIMITS, sandbox=sandbox)) as repl:
        before = descriptors()
        block = repl.execute(RAW + code)  # text that is no JSON at all breaks the protocol
        assert block.status == "killed" or "a context is not available" in block.stdout
        assert repl.execute("1 + 1").status == "ok"
        until_now(lambda: descriptors() <= before)


def test_contexts_at_their_maximum_leak_no_descriptor(handler: LMHandler, sandbox: Sandbox) -> None:
    limits = LIMITS.replace(max_children_total=2)
    slots = asked(handler, sandbox, f"ask([{{'value': '1'}}] * {MAX_PROMPTS}, ['t'] * {MAX_PROMPTS})", limits)
    assert [slot["text"] for slot in slots] == ["int of 1"] * MAX_PROMPTS  # equal contexts are one child
    code = f"ask([{{'own': 'context'}}] * {1 << 14}, [str(n) for n in range({1 << 14})])"
    slots = asked(handler, sandbox, code, limits)
    assert sum("text" in slot for slot in slots) == 2
    assert {slot.get("error") for slot in slots} == {None, "max_children_total exceeded"}


@table("want", ["llm", "budget"])
def test_contexts_are_ignored_without_children(handler: LMHandler, sandbox: Sandbox, want: str) -> None:
    """Contexts of a query that starts no children are not used."""
    (slot,) = asked(handler, sandbox, f"ask([{{'own': 'nothing'}}], want={want!r})")
    assert slot["text"]


@table(
    "context",
    [
        "5",
        "'text'",
        "{'file': 5}",
        "{'file': 'x' * 65}",
        "{'unknown': 1}",
        "{'own': ['context']}",
        "{'is_task': 'yes'}",
    ],
)
def test_invalid_context_breaks_the_protocol(handler: LMHandler, sandbox: Sandbox, context: str) -> None:
    with sandbox.repl(answer=handler.answers(LIMITS, sandbox=sandbox)) as repl:
        block = repl.execute(f"{RAW}ask([{context}])")
        assert block.status == "killed"
        assert "broke the protocol" in (block.error or "")
        assert repl.execute("1 + 1").status == "ok"


# -- without a REPL --------------------------------------------------------------------------------------------------


async def no_worker() -> Worker:
    raise AssertionError("no file was asked for")


async def test_opened_context_is_closed_on_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> int:
        raise OSError(24, "Too many open files")

    with store("text") as stored:
        contexts = QueryContexts(no_worker, lambda _: stored, 1_000)
        query = contexts.of(Query(id="1:1", want="rlm", prompts=["t"], contexts=[ChildContext(own="context")]))
        (given,) = query.given
        assert given is not None
        assert (query.prompts, query.want, given.name) == (["t"], "rlm", "context")
        before = descriptors()
        async with given.opened() as context:
            assert descriptors() == before + 1
        assert descriptors() == before
        with pytest.raises(ContextRefused):
            context.pieces()
        monkeypatch.setattr("os.dup", full)
        with pytest.raises(ContextRefused, match="Too many open files"):
            await given.opened().__aenter__()


async def test_children_share_the_stored_file_until_the_end() -> None:
    async with Sandbox(LIMITS, warm=0) as sandbox, sandbox.repl() as repl:
        await repl.files.awrite("part", b"p" * 50_000)
        asked = Query(id="1:1", want="rlm", prompts=["a", "b", "c"], contexts=[ChildContext(file="part")] * 3)
        contexts = QueryContexts(repl._worker.beside_blocks, lambda _: None, SCRATCH_BYTES)
        one, other, third = (given for given in contexts.of(asked).given if given is not None)
        before = descriptors()
        async with one.opened() as first:
            async with other.opened() as second:
                assert second is first
            assert first.value() == "p" * 50_000
        assert descriptors() == before
        async with third.opened() as again:
            assert again is not first
        with pytest.raises(ContextRefused, match="it has 50,000 bytes, more than 10"):
            await third.opened(10).__aenter__()
    assert descriptors() <= before
