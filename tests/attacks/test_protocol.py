"""Model code that writes its own frames on the connection, and code that goes after its budget."""

import asyncio
import json
from collections.abc import Iterator

import psutil
import pytest

from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.errors import LimitReached
from rlm_broker.limits import Limits
from rlm_broker.results import Block
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.repl_blocks import MOST_KILLS
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.messages import Query, Slot
from tests.support.tables import table
from tests.support.waiting import WAIT_S

LIMITS = Limits(interrupt_grace_s=0.3, max_repl_restarts=1000, max_frame_bytes=1 << 20, max_queries_in_flight=64)
RAW = """
import json, os, struct, time
def send(payload, length=None):
    data = struct.pack('>I', len(payload) if length is None else length) + payload
    while data: data = data[os.write(4, data):]
def say(**message): send(json.dumps(message).encode())
def replies(number):
    seen = b''
    while seen.count(b'"slots"') < number: seen += os.read(4, 1 << 16)
"""
VIOLATIONS = {
    "claims_a_depth": "say(type='query', id='N:1', want='llm', prompts=['forged'], depth=0)",
    "claims_a_budget": "say(type='query', id='N:1', want='llm', prompts=['forged'], budget=10**9)",
    "answers_for_another_block": "say(type='result', block=N+1, status='ok', final_answer='forged')",
    "answers_for_an_earlier_block": "say(type='result', block=N-1, status='ok', final_answer='forged')",
    "prints_for_another_block": "say(type='output', block=N+7, stream='stdout', text='forged')",
    "asks_for_another_block": "say(type='query', id=f'{N+1}:1', want='llm', prompts=['forged'])",
    "asks_with_another_sessions_id": "say(type='query', id='sibling', want='llm', prompts=['forged'])",
    "asks_with_a_long_id": "say(type='query', id='N:' + '1' * 100, want='llm', prompts=['forged'])",
    "asks_twice_with_one_id": "for _ in range(2): say(type='query', id='N:9', want='llm', prompts=['slow'])",
    "is_ready_again": "say(type='ready')",
    "says_hello_again": "say(type='hello', token='x' * 43)",
    "welcomes": "say(type='welcome')",
    "executes": "say(type='execute', block=1, code='forged')",
    "replies": "say(type='reply', id='N:1', slots=[])",
    "says_something_unknown": "say(type='root', command='forged')",
    "says_nothing": "send(b'')",
    "says_no_object": "send(b'[1, 2, 3]')",
    "says_no_json": "send(b'forged')",
    "says_no_utf8": 'send(b\'{"type":"output","block":N,"stream":"stdout","text":"\\xff"}\')',
    "says_nan": 'send(b\'{"type":"result","block":NaN,"status":"ok"}\')',
    "says_a_huge_number": 'send(b\'{"type":"result","block":\' + b\'9\' * 5000 + b\',"status":"ok"}\')',
    "nests_deep": "send(b'[' * 100_000)",
    "nests_objects_deep": "send(b'{\"a\":' * 100_000)",
    "announces_4_gigabytes": "send(b'x', length=0xFFFFFFFF)",
    "announces_a_byte_too_much": "send(b'x', length=(1 << 20) + 1)",
    "wants_something_unknown": "say(type='query', id='N:1', want='root', prompts=['forged'])",
    "asks_for_a_negative_number": "say(type='query', id='N:1', want='llm', prompts=['forged'], max_concurrent=-1)",
    "shows_for_another_block": "say(type='display', block=N+1, texts={'text/html': 'forged'})",
    "shows_a_type_of_its_own": "say(type='display', block=N, texts={'text/javascript': 'forged'})",
    "shows_html_as_a_picture": "say(type='display', block=N, pictures={'text/html': 'Zm9yZ2Vk'})",
    "shows_no_base64": "say(type='display', block=N, pictures={'image/png': '!forged!'})",
    "shows_a_number": "say(type='display', block=N, texts={'text/html': 5})",
    "shows_too_often": "for _ in range(33): say(type='display', block=N, texts={'text/html': 'forged'})",
    "omits_fewer_than_none": "say(type='result', block=N, status='ok', displays_omitted=-1)",
    "tells_a_variable_of_a_long_name": "say(type='result', block=N, status='ok', variables=[{'name': 'forged' * 11, 'type': ''}])",
    "tells_too_many_variables": "say(type='result', block=N, status='ok', variables=[{'name': 'f', 'type': ''}] * 41)",
    "tells_a_size_below_nothing": "say(type='result', block=N, status='ok', variables=[{'name': 'f', 'type': '', 'size': -1}])",
    "mixes_messages_and_parts": "say(type='query', id='N:1', want='llm', prompts=[[{'type': 'message', 'role': 'forged', 'content': 'x'}]])",
    "sends_variables_unasked": "say(type='values', block=N, number=1, value=[{'x': 'forged'}, {}])",
    "submits_for_another_block": "say(type='submit', id=f'{N+1}:1', fields={'n': 1})",
    "submits_nothing": "say(type='submit', id='N:1')",
    "answers_a_read_of_its_own": "say(type='read', block=N, number=1, names=['forged'])",
    "starts_a_child_in_another_block": "say(type='query', id=f'{N+1}:1', want='rlm', prompts=['forged'], background=True)",
    "waits_for_fewer_than_none": "say(type='query', id='N:1', want='wait', prompts=['forged'], count=-1)",
    "asks_without_text": "say(type='query', id='N:1', want='llm', prompts=[7])",
}


class Answers:
    """Answers queries of the victim and of its sibling, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, query: Query, /) -> list[Slot]:
        self.asked += query.texts
        if "slow" in query.prompts or query.want == "keep":
            await asyncio.Event().wait()
        return [Slot(text=prompt.upper()) for prompt in query.texts]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as opened:
        yield opened


def run_beside_a_sibling(sandbox: Sandbox, code: str, timeout_s: float = WAIT_S) -> tuple[Block, Answers]:
    """Run `code` with N as its block's number; afterwards the next block and the sibling must be as before."""
    mine, others = Answers(), Answers()
    with sandbox.repl("mine", mine) as victim, sandbox.repl("other", others) as sibling:
        sibling.execute("state = llm_query('hello')")
        victim.execute("1")
        before = psutil.Process().memory_info().rss
        block = victim.execute(RAW + code.replace("N", "2"), timeout_s=timeout_s)
        assert psutil.Process().memory_info().rss - before < 200 << 20
        assert victim.execute("print(context, llm_query('next'))").stdout == "mine NEXT\n"
        assert sibling.execute("print(state, llm_query('and on'))").stdout == "HELLO AND ON\n"
    assert others.asked == ["hello", "and on"]
    return block, mine


@table("name", VIOLATIONS)
def test_forged_frame_ends_only_its_own_repl(sandbox: Sandbox, name: str) -> None:
    block, answers = run_beside_a_sibling(sandbox, VIOLATIONS[name] + "\ntime.sleep(1000)")
    assert block.status == "killed"
    assert "broke the protocol" in (block.error or "")
    assert block.final_answer is None
    assert "forged" not in answers.asked


@table(
    "code, timeout_s",
    [
        ("send(b'{', length=100)", 0.5),  # half a frame and silence are only a block that takes too long
        ("os.write(4, os.urandom(100_000))", WAIT_S),
    ],
)
def test_bytes_that_are_no_frame_hurt_only_their_repl(sandbox: Sandbox, code: str, timeout_s: float) -> None:
    assert run_beside_a_sibling(sandbox, f"{code}\ntime.sleep(1000)", timeout_s)[0].status == "killed"


def test_forged_result_costs_only_its_block(sandbox: Sandbox) -> None:
    code = "say(type='result', block=N, status='ok', final_answer='mine')\ntime.sleep(0.2)"
    mine = Answers()
    with sandbox.repl("mine", mine) as victim:
        victim.execute("1")
        assert victim.execute(RAW + code.replace("N", "2")).final_answer == "mine"
        assert victim.execute("print(1)", timeout_s=5).status in ("killed", "ok")
        # A replay ruins it again, until the kills in a row are too many.
        assert any(victim.execute("print(context)").stdout == "mine\n" for _ in range(MOST_KILLS + 1))


def test_query_flood_costs_no_memory(sandbox: Sandbox) -> None:
    """A flood of queries is answered or held back."""
    code = (
        "import threading\n"
        "def read():\n"
        "    while True: os.read(4, 1 << 20)\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        "for i in range(20_000): say(type='query', id=f'N:{i}', want='llm', prompts=['q'])\n"
        "os._exit(0)"  # its thread would else take the next block from the REPL
    )
    block, answers = run_beside_a_sibling(sandbox, code)
    assert block.status in ("ok", "killed", "interrupted")
    assert len(answers.asked) <= 20_001


def test_unread_replies_hold_back_queries(sandbox: Sandbox) -> None:
    """A flood of queries that never reads its replies is held back."""
    code = "i = 0\nwhile True:\n    i += 1; say(type='query', id=f'N:{i}', want='llm', prompts=['x' * 10_000])"
    block, answers = run_beside_a_sibling(sandbox, code, timeout_s=2)
    assert block.status in ("killed", "interrupted")
    assert sum(map(len, answers.asked)) < 100 << 20


# -- children in the background --------------------------------------------------------------------------------------

EVERY_ID = "[f'{block}:{n}' for block in range(1, 9) for n in range(99)]"


@table(
    "code, said",
    [
        (f"say(type='query', id='N:1', want='cancel', prompts={EVERY_ID})\nreplies(1)", "ok"),
        (f"say(type='query', id='N:1', want='wait', prompts={EVERY_ID}, count=9)\nreplies(1)", "ok"),
        ("say(type='query', id='N:1', want='rlm', prompts=['x'], background=True, child='2:1')\nreplies(1)", "ok"),
        (
            f"rlm_start('slow')\nsay(type='query', id='N:9', want='wait', prompts={EVERY_ID}, count=10**9)\nreplies(2)",
            "interrupted",
        ),
        (
            "for n in range(9): say(type='query', id=f'N:{n}', want='tool', prompts=['slow'], background=True)\nreplies(9)",
            "ok",
        ),
    ],
)
def test_forged_id_reaches_no_child_of_another_repl(sandbox: Sandbox, code: str, said: str) -> None:
    mine, others = Answers(), Answers()
    with sandbox.repl("mine", mine) as attacker, sandbox.repl("other", others) as sibling:
        sibling.execute("child, kept = rlm_start('slow'), rlm_start('hello', keep=True)")
        attacker.execute("1")
        block = attacker.execute(
            RAW + code.replace("N", "2"),
            timeout_s=WAIT_S if said == "ok" else 0.3,
            wall_timeout_s=WAIT_S if said == "ok" else 1,
        )
        assert block.status == said
        assert attacker.execute("print(context)").stdout == "mine\n"
        assert (
            sibling.execute("print(child.done, kept.result(), kept.ask('more').result())").stdout
            == "False HELLO MORE\n"
        )


def test_flood_of_children_is_bounded_and_ends_with_its_repl(sandbox: Sandbox) -> None:
    code = (
        "import threading\n"
        "def read():\n"
        "    while True: os.read(4, 1 << 20)\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        "wants = ('rlm', 'keep')\n"
        "for i in range(5_000): say(type='query', id=f'N:{i}', want=wants[i % 2], prompts=['slow'], background=True)\n"
        "os._exit(0)"
    )
    block, answers = run_beside_a_sibling(sandbox, code)
    assert block.status in ("ok", "killed", "interrupted")
    assert len(answers.asked) <= LIMITS.max_queries_in_flight + 1


# -- budgets ---------------------------------------------------------------------------------------------------------


def counted_run(sandbox: Sandbox, code: str, limits: Limits) -> tuple[object, list[str]]:
    """A root that runs `code` in each of its turns; what it ended with, and what was asked of each model."""
    asked: list[str] = []

    def root(_messages: object) -> str:
        asked.append("root")
        return f"```repl\n{code}\n```"

    def sub(_messages: object) -> str:
        asked.append("sub")
        return "ok"

    try:
        rlm = RLM(FunctionClient(root, "root"), FunctionClient(sub, "sub"), limits=limits, sandbox=sandbox)
        return rlm.completion("", "?"), asked
    except LimitReached as reached:
        return reached, asked


@table(
    "code",
    [
        "for _ in range(100): llm_query('x')",
        "llm_query_batched(list(map(str, range(100))))",
        "llm_query_batched(list(map(str, range(100))), max_concurrent=10**9)",
        "import threading\nts = [threading.Thread(target=llm_query, args=('x',)) for _ in range(50)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()",
        RAW + "for i in range(100): say(type='query', id=f'1:{i}', want='llm', prompts=['x'])\nreplies(100)",
        "rlm_query_batched(list(map(str, range(100))))",
    ],
)
def test_call_count_is_out_of_reach(sandbox: Sandbox, code: str) -> None:
    """Code cannot change the number of its calls."""
    ended, asked = counted_run(sandbox, code, Limits(max_llm_calls=10, max_iterations=3))
    assert len(asked) <= 10
    assert isinstance(ended, LimitReached)


@table("model", ["root", "Root", "root ", "openai/gpt-5", "", "../root"])
def test_expensive_model_cannot_be_named(sandbox: Sandbox, model: str) -> None:
    code = f"print(llm_query('x', model={model!r}))\nFINAL('done')"
    _, asked = counted_run(sandbox, code, Limits(max_iterations=1))
    assert asked.count("root") == 1


def test_query_below_last_depth_starts_no_child(sandbox: Sandbox) -> None:
    code = (
        RAW
        + f"send({json.dumps(dict(type='query', id='1:1', want='rlm', prompts=['x'])).encode()!r})\nreplies(1)\nFINAL('x')"
    )
    ended, asked = counted_run(sandbox, code, Limits(max_depth=1, max_iterations=1))
    assert not isinstance(ended, LimitReached)
    assert asked.count("root") == 1
