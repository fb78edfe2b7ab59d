"""A hostile REPL that returns crafted values: the orchestrator says one clear sentence, and goes on."""

import time
from collections.abc import Iterator

import psutil
import pytest

from rlm_broker.errors import ValueUnavailable
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools
from tests.support.tables import table
from tests.support.waiting import WAIT_S

FORGES = """
import json, os, struct, threading, time
def send(payload):
    data = struct.pack('>I', len(payload)) + payload
    while data: data = data[os.write(4, data):]
def result(block, field, value):
    send(b'{"type":"result","block":%d,"status":"ok","final_answer":"text","' % block + field.encode() + b'":' + value + b'}')
    time.sleep(1000)
"""
CRAFTED = {
    "a_huge_shape": (b'{"$array":["<f8",[1000000000,1000000000],"AAAAAAAAAAA="]}', "has 1 elements"),
    "a_huge_empty_shape": (b'{"$array":["<f8",[1000000000000,0],""]}', "an array without elements"),
    "elements_of_no_size": (b'{"$array":["|S0",[1000000000000],""]}', "has the unsupported dtype '|S0'"),
    "objects": (b'{"$array":["|O",[1],"AAAAAAAAAAA="]}', "has the unsupported dtype '|O'"),
    "a_dtype_of_fields": (b'{"$array":["f8,f8",[1],"AAAAAAAAAAA="]}', "has the unsupported dtype 'f8,f8'"),
    "a_dtype_that_is_none": (b'{"$array":["__class__",[1],"AAAA"]}', "has the unsupported dtype '__class__'"),
    "wrong_base64": (b'{"$bytes":"####"}', "does not encode a value"),
    "half_of_a_base64": (b'{"$array":["<f8",[1],"AAAA"]}', "has 3 bytes"),
    "an_unknown_tag": (b'{"$import":"os"}', "unknown tag '$import'"),
    "a_tag_of_a_wrong_type": (b'{"$tuple":{"$set":5}}', "a tag with content of type dict"),
    "a_zone_that_is_a_path": (b'{"$datetime":["2026-01-01",0,"../../etc/passwd"]}', "there is no time zone"),
    "a_gigabyte_as_an_integer": (b'{"$decimal":"1E+999999999"}', "a Decimal is too long"),
    "deep_tags": (b'{"$tuple":[' * 300 + b"1" + b"]}" * 300, "nested deeper than 200 levels"),
    "deep_lists": (b"[" * 300 + b"]" * 300, "nested deeper than 200 levels"),
    "many_empty_lists": (b"[" + b"[]," * (2 << 20) + b"1]", "more than 1,048,576 values"),
    "keys_that_collide": (
        b'{"$set":[%s]}' % b",".join(b"%d" % (n * (2**61 - 1)) for n in range(100_000)),
        "more than 32 keys of the same hash",
    ),
    "an_unhashable_key": (b'{"$dict":[[1],2]}', "unhashable"),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(interrupt_grace_s=0.3, max_repl_restarts=1000, max_replay_s=0), warm=0) as opened:
        yield opened


@table("name", CRAFTED)
def test_crafted_value_is_one_sentence(sandbox: Sandbox, name: str) -> None:
    crafted, why = CRAFTED[name]
    half = len(crafted) // 2
    is_long = len(crafted) > 10_000  # then the code that sends it makes it
    with sandbox.repl(
        values={"CRAFTED": crafted if is_long else crafted[:half], "REST": b"" if is_long else crafted[half:]}
    ) as repl:
        assert repl.execute("state = 1").status == "ok"
        before = psutil.Process().memory_info().rss
        started = time.process_time()
        block = repl.execute(f"{FORGES}\nresult(2, 'value', CRAFTED + REST)", timeout_s=WAIT_S, value=True)
        assert (block.status, block.value, block.final_answer) == ("ok", None, "text")
        assert why in str(block.value_problem)
        assert len(str(block.value_problem)) < 300
        assert time.process_time() - started < 10
        assert psutil.Process().memory_info().rss - before < 300 << 20
        assert repl.execute("time.sleep(1000)", timeout_s=0.1).status in ("killed", "interrupted", "ok")
        assert repl.execute("1 + 1", value=True).value == 2


def test_crafted_final_value_keeps_its_text(sandbox: Sandbox) -> None:
    with sandbox.repl() as repl:
        block = repl.execute(f"{FORGES}\nresult(1, 'final_value', b'{{\"$x\":1}}')", timeout_s=WAIT_S)
        assert (block.status, block.final_answer, block.final_value) == ("ok", "text", None)
        assert block.final_value_problem == "the REPL sent an invalid value: it has the unknown tag '$x'"


def test_value_not_requested_is_absent(sandbox: Sandbox) -> None:
    with sandbox.repl() as repl:
        block = repl.execute(f"{FORGES}\nresult(1, 'value', b'5')", timeout_s=WAIT_S)
        assert (block.value, block.value_problem) == (None, None)


def test_value_too_deep_breaks_the_protocol(sandbox: Sandbox) -> None:
    with sandbox.repl() as repl:
        block = repl.execute(f"{FORGES}\nresult(1, 'value', b'[' * 100_000)", timeout_s=WAIT_S, value=True)
        assert (block.status, block.value) == ("killed", None)
        assert "broke the protocol" in str(block.error)
        assert repl.execute("1", value=True).value == 1


ANSWERS_GET = """
class Meta(type):
    def __hash__(cls): result(2, 'value', SENT)  # in the midst of what encodes the value
n = [Meta('Forges', (), {})()]
"""


@table("sent", [b"5", b"[1,2]", b'{"$tuple":[1]}', b'{"$x":1}', b"null"])
def test_unrequested_get_value_is_an_error(sandbox: Sandbox, sent: bytes) -> None:
    with sandbox.repl() as repl:
        repl.execute(f"SENT = {sent!r}\n{FORGES}\n{ANSWERS_GET}")
        with pytest.raises(ValueUnavailable, match=r"n is not available: the REPL sent other values|invalid value"):
            repl.get("n")
        repl.execute("time.sleep(1000)", timeout_s=0.1)
        assert repl.execute("1", value=True).value == 1


async def test_crafted_tool_arguments_are_call_errors() -> None:
    seen: list[object] = []

    def see(value: object) -> None:
        seen.append(value)

    tools = Tools({"see": see})
    for crafted, _ in CRAFTED.values():
        slot = await tools.call("see", f'{{"args":[{crafted.decode()}],"kwargs":{{}}}}', WAIT_S)
        assert slot.error is not None
        assert slot.error.startswith("see() was given ")
        assert len(slot.error) < 300
    for arguments in (b'{"$tuple":[]}', b'{"args":{"$set":[]},"kwargs":{}}', b'{"args":[],"kwargs":{"$dict":[1,2]}}'):
        assert (await tools.call("see", arguments.decode(), WAIT_S)).error is not None
    assert seen == []
