"""Children, with task and context apart: what each is told, how large its requests are, and which need no run."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.errors import ModelFailed
from rlm_broker.events.event import PREVIEW_CHARS, CallEnded, Event, RunStarted, all_of
from rlm_broker.events.trace import TraceWriter
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.children import OWN_TASK
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.prompts.messages import BEGINNING_CHARS, REMINDER_CHARS
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.prompts import LONG_TASK_CHARS, SHOWN_CHARS
from tests.support.tables import table
from tests.support.waiting import WAIT_S

TWO = Limits(max_depth=2)
LOOK = "print(str(context)[:100])"
TELL = "FINAL(f'{type(context).__name__} {len(context)}')"


def fenced(code: str) -> str:
    return f"```repl\n{code}\n```"


class Tree(ScriptedClient):
    """A root that runs `code` and ends with what it printed, and children that do what they are told.

    Args:
        child: Of each turn of a child, from 1, its reply.
    """

    def __init__(self, code: str, child: Callable[[int], str] = lambda _: fenced(TELL)) -> None:
        super().__init__(self._reply)
        self._code = code
        self._child = child

    def _reply(self, request: LMRequest) -> str:
        if not request.is_loop:
            return "a completion"
        if request.depth == 0:
            return fenced(self._code)
        return self._child(sum(message.role == "assistant" for message in request.messages) + 1)

    def of_depth(self, depth: int, *, is_loop: bool = True) -> list[LMRequest]:
        return [each for each in self.requests if each.depth == depth and each.is_loop is is_loop]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(scratch_bytes=64 << 20, max_children_total=None), warm=1) as opened:
        yield opened


def ran(
    sandbox: Sandbox, client: ScriptedClient, context: Any = "the root's own", limits: Limits = TWO, **more: Any
) -> Completion:
    with RLM(client, limits=limits, sandbox=sandbox, **more) as rlm:
        return rlm.completion(context, more.pop("question", "Which?"))


def request_chars(request: LMRequest) -> int:
    return sum(len(str(message.content)) for message in request.messages)


class Trained(ScriptedClient):
    """Replies with token ids."""

    async def complete(self, request: LMRequest) -> LMReply:
        reply = await super().complete(request)
        return msgspec.structs.replace(reply, extra={"token_ids": [len(reply.text)]})


def test_trainer_gets_token_ids_of_a_run_and_the_whole_conversation_of_its_children(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    def reply(request: LMRequest) -> str:
        return "a completion" if not request.is_loop else ("FINAL(of the child)" if request.depth else next(turns))

    turns = iter([fenced("print(rlm_query('Look.', context='a part'), llm_query('b'))"), "FINAL(end)"])
    seen = list[Event]()
    with TraceWriter(tmp_path / "bare") as bare, TraceWriter(tmp_path / "whole", extras=True) as whole:
        done = ran(sandbox, Trained(reply), on_event=all_of([seen.append, bare, whole]))
    assert [turn.extra for turn in done.trajectory] == [{"token_ids": [len(turn.reply)]} for turn in done.trajectory]
    (child,) = done.child_traces
    assert [message.role for message in child.messages] == ["system", "user", "assistant"]
    assert [turn.extra for turn in child.trajectory] == [{"token_ids": [19]}]
    told = [event.extra for event in seen if isinstance(event, CallEnded)]
    assert len(told) == 4
    assert None not in told
    assert "token_ids" not in (tmp_path / "bare").read_text()
    assert (tmp_path / "whole").read_text().count("token_ids") == 4


# -- how large requests are ------------------------------------------------------------------------------------------

CHILDS_OWN = 2 * SHOWN_CHARS + BEGINNING_CHARS + 1_000
"""Characters of a child's opening beside the system prompt: a task by its ends, the beginning of a context, words."""


@pytest.mark.parametrize(
    "call", ["rlm_query('What is in here?', context=part)", "rlm_query('What is in here? ' + part)", "rlm_query(part)"]
)
def test_child_request_grows_only_by_new_messages(sandbox: Sandbox, call: str) -> None:
    def child(turn: int) -> str:
        return fenced(LOOK if turn < 6 else TELL)

    chars = 400_000
    client = Tree(f"part = 'é line\\n' * {chars // 7}\nFINAL({call})", child)
    done = ran(sandbox, client)
    kind, _, length = (done.response or "").partition(" ")
    assert kind == "str"
    assert int(length) >= chars - 7
    requests = client.of_depth(1)
    assert len(requests) == 6
    sizes = [request_chars(request) for request in requests]
    system = len(str(requests[0].messages[0].content))
    assert sizes[0] <= system + CHILDS_OWN
    for before, after in pairwise(sizes):
        assert after - before <= len(fenced(LOOK)) + 100 + REMINDER_CHARS + 300
    assert all(request_chars(request) < 10_000 for request in client.of_depth(0))


def test_long_question_is_whole_once(sandbox: Sandbox) -> None:
    question = "why " * 10_000
    client = ScriptedClient([*[fenced(LOOK)] * 5, "FINAL(because)"])
    with RLM(client, sandbox=sandbox) as rlm:
        rlm.completion("x" * 5_000, question)
    sizes = [request_chars(request) for request in client.requests]
    assert len(question) < sizes[0] < len(question) + 10_000
    for before, after in pairwise(sizes):
        assert after - before <= len(fenced(LOOK)) + 100 + REMINDER_CHARS + 300


def test_the_task_is_told_in_every_turn(sandbox: Sandbox) -> None:
    client = Tree(
        "FINAL(rlm_query('Find the crane.', context='x' * 50_000))", lambda n: fenced(LOOK if n < 3 else TELL)
    )
    ran(sandbox, client)
    for request in client.of_depth(1):
        assert all("Find the crane." in str(each.content) for each in request.messages if each.role == "user")
    assert all("Which?" in str(each.messages[-1].content) for each in client.of_depth(0))


# -- what a child has ------------------------------------------------------------------------------------------------


def test_child_receives_its_part_unchanged(sandbox: Sandbox) -> None:
    parts = (
        "context[:5], context, '', {'a': [1, None, True]}, [1, 2.5, 'three'], (1, 2), 7, None, 'a\\ud800b', "
        "('é中𝄞' * 20_000)[-3:]"
    )
    code = f"FINAL(str([rlm_query('What is it?', context=part) for part in ({parts})]))"
    done = ran(sandbox, Tree(code, lambda _: fenced("FINAL(ascii(context))")))
    seen = [
        "the r",
        "the root's own",
        "",
        {"a": [1, None, True]},
        [1, 2.5, "three"],
        [1, 2],
        7,
        None,
        "a\ud800b",
        "é中𝄞",
    ]
    assert done.response == str([ascii(each) for each in seen])


def test_a_large_part_arrives_whole_and_leaves_no_file(sandbox: Sandbox) -> None:
    code = (
        "import os, hashlib\n"
        "parts = ['é中𝄞' * 20_000, '\\ud800' * 50_000, {'a': ['b' * 50_000]}, [1.5] * 50_000]\n"
        "digests = [hashlib.sha256(ascii(part).encode()).hexdigest() for part in parts]\n"
        "same = [rlm_query('Digest?', context=part) for part in parts] == digests\n"
        "FINAL(f'{same} {os.listdir()}')"
    )
    child = "import hashlib; FINAL(hashlib.sha256(ascii(context).encode()).hexdigest())"
    assert ran(sandbox, Tree(code, lambda _: fenced(child))).response == "True []"


def test_the_whole_context_is_handed_on_without_a_file(sandbox: Sandbox) -> None:
    code = (
        "import os, threading\nfiles = set()\ndone = threading.Event()\n"
        "def watch():\n    while not done.is_set(): files.update(os.listdir())\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "answers = rlm_query_batched(['a', 'b'], contexts=[context, context_0])\n"
        "done.set(); thread.join()\nFINAL(f'{answers} {files}')"
    )
    assert ran(sandbox, Tree(code), "x" * 5_000_000).response == "['str 5000000', 'str 5000000'] set()"
    folder = {"a.txt": "x" * 2_000, "b.txt": "y" * 2_000}
    assert ran(sandbox, Tree("FINAL(rlm_query('a', context=context))"), folder).response == "dict 2"


def test_template_and_later_contexts_are_handed_on() -> None:
    limits = Limits(max_depth=2, later_context_bytes=1 << 20)
    with LMHandler(Tree("")) as handler, Sandbox(limits) as sandbox:
        with sandbox.template(context="t" * 100_000) as template:
            answer = handler.answers(limits, sandbox=sandbox)
            with template.repl(answer=answer) as repl:
                block = repl.execute("print(rlm_query('a', context=context), rlm_query('b', context=context[1:]))")
            assert block.stdout == "str 100000 str 99999\n"
        with sandbox.repl("first", answer=handler.answers(limits, sandbox=sandbox)) as repl:
            repl.add_context("s" * 50_000)
            block = repl.execute("print(rlm_query('a', context=context_1), rlm_query('b', context=context))")
            assert block.stdout == "str 50000 str 5\n"


def test_child_without_a_sandbox_is_a_completion() -> None:
    client = ScriptedClient(lambda request: str(request.messages[-1].content))
    with LMHandler(client) as handler, Sandbox() as sandbox, sandbox.repl("whole", answer=handler.answers()) as repl:
        code = (
            "print(rlm_query('Task?', context='part'), rlm_query('Task?', context={'a': 'é'}), "
            "rlm_query('Task?', context=context), rlm_query('alone'), len(rlm_query('x' * 9_000)), sep='|')"
        )
        assert repl.execute(code).stdout == 'part\n\nTask?|{"a":"é"}\n\nTask?|whole\n\nTask?|alone|9000\n'


def test_child_below_the_last_depth_is_a_completion(sandbox: Sandbox) -> None:
    client = Tree("FINAL(rlm_query('Task?', context='part'))")
    assert ran(sandbox, client, limits=Limits(max_depth=1)).response == "a completion"
    (request,) = client.of_depth(1, is_loop=False)
    assert [message.content for message in request.messages] == ["part\n\nTask?"]


def test_oversized_part_is_refused_as_a_completion(sandbox: Sandbox) -> None:
    code = "FINAL(rlm_query('Task?', context='x' * 5_000_000, repl=False))"
    assert (ran(sandbox, Tree(code)).response or "").startswith(
        "Error: a context is not available: it has 5,000,000 bytes, more than 4,194,304: give a smaller part"
    )


def test_code_may_say_whether_a_child_has_a_repl(sandbox: Sandbox) -> None:
    code = "FINAL('|'.join([rlm_query('Task?', context='part', repl=repl) for repl in (False, True, None)]))"
    assert ran(sandbox, Tree(code)).response == "a completion|str 4|str 4"


def test_auto_recursion_depends_on_the_parts_form(sandbox: Sandbox) -> None:
    words, numbers = "'a plain sentence. ' * 500", "' '.join(map(str, range(300)))"
    calls = [
        f"rlm_query('Task?', context={words})",
        f"rlm_query('Task?', context={words}, repl=True)",
        f"rlm_query('Task?', context={numbers})",
        "rlm_query('Task?', context={'a': 1})",
        f"rlm_query('Task?', context={words} * 100)",
        f"rlm_query('Task?\\n' + {words})",
        f"rlm_query('Task?\\n' + {numbers})",
    ]
    done = ran(sandbox, Tree(f"FINAL(str([{', '.join(calls)}]))"), recursion="auto")
    runs = ["str 9000", "str 1089", "dict 1", "str 900000"]
    assert done.response == str(["a completion", *runs, "a completion", "str 1095"])
    assert len(done.child_traces) == 5  # a completion is no child


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_full_scratch_folder_is_an_error_without_files(open_sandbox: Sandbox) -> None:
    limits = Limits(max_depth=2, scratch_bytes=1 << 16)
    code = "import os\nanswer = rlm_query('a', context='x' * 500_000)\nFINAL(f'{answer} {os.listdir()}')"
    response = RLM(Tree(code), limits=limits, sandbox=open_sandbox).completion("", "?").response or ""
    assert response.startswith("Error: a context could not be written to the scratch folder: ")
    assert response.endswith("give smaller parts, or remove files there []")


def test_an_interrupted_block_leaves_no_file(sandbox: Sandbox) -> None:
    asked = threading.Event()

    def never(_messages: object) -> str:
        asked.set()
        threading.Event().wait(WAIT_S)
        return ""

    def interrupt(repl: SandboxedRepl) -> None:
        asked.wait(WAIT_S)
        repl.interrupt()

    with LMHandler(FunctionClient(never)) as handler:
        answer = handler.answers(TWO, sandbox=sandbox)
        with sandbox.repl(answer=answer) as repl:
            interrupter = threading.Thread(target=interrupt, args=[repl])
            interrupter.start()
            block = repl.execute("rlm_query('a', context='x' * 50_000)")
            interrupter.join()
            assert block.status == "interrupted"
            assert repl.execute("import os; print(os.listdir())").stdout == "[]\n"


@pytest.mark.parametrize("code", ["rlm_query('a', context={1})", "rlm_query_batched(['a'], contexts=['b', 'c'])"])
def test_model_is_told_of_a_childs_invalid_context(sandbox: Sandbox, code: str) -> None:
    client = ScriptedClient([fenced(code), "FINAL(done)"])
    assert ran(sandbox, client).response == "done"
    told = str(client.requests[1].messages[-1].content)
    assert "it has a value of class set; give text" in told or "1 tasks and 2 contexts: give one for each" in told


# -- equal ones, and echoes ------------------------------------------------------------------------------------------


def test_equal_task_and_part_run_once(sandbox: Sandbox) -> None:
    children = {
        "['same'] * 4": 1,
        "['same'] * 4, samples=True": 4,
        "['same'] * 4, contexts=['part'] * 4": 1,
        "['same'] * 4, contexts=['x' * 50_000 for _ in range(4)]": 1,
        "['same'] * 4, contexts=[{'a': 'x' * 50_000} for _ in range(4)]": 1,
        "['same'] * 4, contexts=['part'] * 4, samples=True": 4,
        "['same'] * 4, contexts=['a', 'b', 'a', 'b']": 2,
        "['a', 'b', 'a', 'b'], contexts=['part'] * 4": 2,
        "['x' * 9_000] * 4": 1,
    }
    ended = {
        call: ran(sandbox, Tree(f"FINAL(str(rlm_query_batched({call})))", lambda _: "FINAL(fine)")) for call in children
    }
    assert {call: len(done.child_traces) for call, done in ended.items()} == children
    assert {done.response for done in ended.values()} == {str(["fine"] * 4)}


def test_deduplicated_children_count_once(sandbox: Sandbox) -> None:
    client = Tree("FINAL(str(rlm_query_batched(['a', 'a', 'b', 'a', 'c', 'b'])))", lambda _: "FINAL(fine)")
    done = ran(sandbox, client, limits=Limits(max_depth=2, max_children_total=2, max_concurrent_children=1))
    assert done.response == str(["fine", "fine", "fine", "fine", "Error: max_children_total exceeded", "fine"])


@table(
    "given echo",
    [
        ("rlm_query('Count the words.')", "rlm_query('Count the words.')"),
        ("rlm_query('Count the words.')", "rlm_query(context)"),
        ("rlm_query('Count the words.', context='of this')", "rlm_query('Count the words.', context=context)"),
        (
            "rlm_query('Count the words.', context='of this')",
            "(globals().pop('context'), rlm_query('Count the words.', context=context_0))[1]",
        ),
        ("rlm_query('w ' * 9_000)", "rlm_query(context)"),
        ("rlm_query('w ' * 9_000)", "rlm_query(context_0)"),
    ],
)
def test_child_handing_its_task_on_gets_a_completion(sandbox: Sandbox, given: str, echo: str) -> None:
    client = Tree(f"FINAL({given})", lambda turn: fenced(f"print({echo})") if turn == 1 else "FINAL(done)")
    done = ran(sandbox, client, limits=Limits(max_depth=4))
    assert done.response == "done"
    assert client.of_depth(2) == []
    (completion,) = client.of_depth(2, is_loop=False)
    told = str(client.of_depth(1)[1].messages[-1].content)
    assert f"stdout:\na completion\n\nstderr:\n{OWN_TASK}" in told or f"a completion\n\nstderr:\n{OWN_TASK}" in told
    assert len(str(completion.messages[-1].content)) >= len("Count the words.")


@pytest.mark.parametrize("other", ["rlm_query('Count the words.', context=context[1:])", "rlm_query('Count more.')"])
def test_child_with_another_task_has_a_grandchild(sandbox: Sandbox, other: str) -> None:
    code = "FINAL(rlm_query('Count the words.', context='of this'))"
    client = Tree(code, lambda turn: fenced(f"print({other})") if turn == 1 else "FINAL(done)")
    ran(sandbox, client, limits=Limits(max_depth=3))
    assert client.of_depth(2)


def test_prompt_above_4000_characters_is_a_context(sandbox: Sandbox) -> None:
    for chars in (LONG_TASK_CHARS, LONG_TASK_CHARS + 1):
        client = Tree(f"FINAL(rlm_query('x' * {chars}))")
        assert ran(sandbox, client).response == f"str {chars}"
        opening = str(client.of_depth(1)[0].messages[1].content)
        assert ("x" * chars in opening) == (chars == LONG_TASK_CHARS)
        assert "Your task stands in `context`." in opening


def test_child_answers_with_a_value_of_a_type(sandbox: Sandbox) -> None:
    replies = iter(["FINAL(three)", "FINAL(3)", "FINAL(many)", "FINAL(many)"])
    asked = "rlm_query(each, context='a part', output_type={'type': 'integer'})"
    client = Tree(f"FINAL([type({asked}).__name__ for each in 'ab'])", lambda _: next(replies))
    assert ran(sandbox, client).response == '["int", "str"]'
    tasks = [str(request.messages[1].content) for request in client.of_depth(1)]
    assert len(tasks) == 4
    assert "Answer with a JSON value of this schema" in tasks[0]
    assert "You answered: three" in tasks[1]


def test_long_task_beside_a_context_is_a_variable(sandbox: Sandbox) -> None:
    child = "FINAL(f'{len(task)} {context}')"
    client = Tree(
        "FINAL(rlm_query('Find it.' + 'x' * 9_000 + 'Say where.', context='a part'))", lambda _: fenced(child)
    )
    assert ran(sandbox, client).response == "9018 a part"
    opening = str(client.of_depth(1)[0].messages[1].content)
    assert "Find it.xxx" in opening
    assert "Say where." in opening
    assert "all of it stands in the variable `task`" in opening
    assert len(opening) < 5_000
    named = fenced("FINAL(f'{len(_task)} {task()}')")
    assert ran(sandbox, Tree(client._code, lambda _: named), tools={"task": lambda: "own"}).response == "9018 own"


async def test_foreign_long_prompt_is_told_by_its_ends() -> None:
    client = Tree("", lambda turn: fenced(LOOK if turn < 3 else TELL))
    async with LMHandler(client) as handler, Sandbox(TWO, warm=0) as sandbox:
        answers = handler.answers(TWO, sandbox=sandbox)
        (slot,) = await answers(Query(id="1:1", want="rlm", prompts=["x" * 400_000]))
    assert slot.text == "str 400000"
    assert all(request_chars(request) < 20_000 for request in client.requests)


# -- what is left of children ----------------------------------------------------------------------------------------


def test_children_are_numbered_and_leave_what_became_of_them(sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        if request.depth == 0:
            return fenced("FINAL(str([rlm_query('first'), rlm_query('second' * 100), rlm_query('third')]))")
        if "third" in str(request.messages[1].content):
            raise ModelFailed("scripted: 500: down")
        return "FINAL(fine)"

    events: list[Event] = []
    done = ran(sandbox, ScriptedClient(reply), on_event=events.append)
    assert done.response == "['fine', 'fine', 'Error: scripted: 500: down']"
    assert [each.run for each in events if isinstance(each, RunStarted)] == ["1", "1.1", "1.2", "1.3"]
    assert [(each.depth, each.result_preview, each.error) for each in done.child_traces] == [
        (1, "fine", None),
        (1, "fine", None),
        (1, None, "scripted: 500: down"),
    ]
    assert [each.prompt_preview for each in done.child_traces] == ["first", ("second" * 100)[:PREVIEW_CHARS], "third"]
    assert 0 < sum(each.duration_s for each in done.child_traces) < done.execution_time


def test_failed_childs_partial_answer_comes_with_its_error(sandbox: Sandbox) -> None:
    def child(turn: int) -> str:
        if turn == 1:
            return f"an idea\n{fenced('print(1)')}"
        raise ModelFailed("scripted: 500: down")

    done = ran(sandbox, Tree("FINAL(rlm_query('a'))", child))
    assert done.response == "Error: scripted: 500: down\nan idea"
    trace, _ = done.child_traces  # the root was asked about it, and gave it again
    assert (trace.result_preview, trace.error) == ("an idea", "scripted: 500: down")


def test_child_whose_turns_are_used_up_is_an_error(sandbox: Sandbox) -> None:
    code = "print(rlm_query('Add up.'), rlm_start('Count.').result(), sep='; ')"
    completion = ran(sandbox, Tree(code, lambda _: fenced("pass")), limits=TWO.replace(max_iterations=2))
    shown = completion.trajectory[0].blocks[0].stdout
    assert shown.count("Error: the child ended at the limit max_iterations without an answer") == 2


def test_without_a_time_limit_a_child_has_none(sandbox: Sandbox) -> None:
    limits = Limits(max_depth=2, child_timeout_s=None, run_timeout_s=None)
    client = Tree("FINAL(rlm_query('a'))", lambda _: fenced("FINAL(str(budget()['run_timeout_s']))"))
    assert ran(sandbox, client, limits=limits).response == "None"


def test_auto_recursion_gives_numbers_to_a_child(sandbox: Sandbox) -> None:
    numbers = "' '.join(map(str, range({}, 500)))"
    code = f"FINAL(str(rlm_query_batched(['What is in here?', {numbers.format(0)}, {numbers.format(9)}])))"
    limits = Limits(max_depth=2, max_children_total=1, max_concurrent_children=1)
    done = ran(sandbox, Tree(code), limits=limits, recursion="auto")
    assert done.response == str(["a completion", "str 1889", "Error: max_children_total exceeded"])


def test_users_handler_may_ask_for_children(sandbox: Sandbox) -> None:
    def factory(_run: str, _depth: int, ours: QueryHandler) -> QueryHandler:
        async def answer(query: Query) -> list[Slot]:
            return await ours(Query(id=query.id, want="rlm", prompts=["from a handler"]))

        return answer

    done = ran(sandbox, Tree("FINAL(rlm_query('a'))"), recursion=factory)
    assert done.response == "str 14"
