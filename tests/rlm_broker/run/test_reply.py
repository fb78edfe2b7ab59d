"""Answers that are taken: those that the model wrote after it had seen what they rest on."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, ReplClosed
from rlm_broker.events.event import BlockEnded, BlockPrinted, BlockStarted, Event, Replied, TreeEvents
from rlm_broker.limits import Limits, ReplLimits
from rlm_broker.results import Block, ChatMessage, Completion
from rlm_broker.rlm import RLM
from rlm_broker.run import reply
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.prompts.messages import CUT, NOT_LOOKED_AT
from rlm_broker.run.reply import MAX_REPLY_CHARS, SHORT_REPLY_CHARS, ReplyActions, ReplyAnswer, read_reply
from rlm_broker.run.tree import Progress
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.parsing.finals import FinalText
from tests.support.tables import table

LONG = "a long context. " * 1_000
NO_EVENTS = TreeEvents("tree", []).of("1", 0)
UNSEEN = "was written before you saw this output, so it was not taken"
NOT_LOOKED = "You have answered without having looked at the context"
PRINTS = "```repl\nprint(1)\n```"
RAISES = "```repl\n1 / 0\n```"
SILENT = "```repl\nx = 'from x'\n```"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(warm=1) as opened:
        yield opened


def ran(sandbox: Sandbox, *replies: str, context: Any = LONG, **limits: Any) -> tuple[Completion, list[str]]:
    """One run; its completion, and what the model was told last in each of its turns."""
    client = ScriptedClient(replies)
    with RLM(client, limits=Limits(**limits), sandbox=sandbox) as rlm:
        done = rlm.completion(context, "Which?")
    assert len(client.requests) == len(replies)
    assert {request.messages[-1].role for request in client.requests} == {"user"}
    return done, [str(request.messages[-1].content) for request in client.requests]


@table("beside", [PRINTS, RAISES, "```repl\nimport sys; print(2, file=sys.stderr)\n```", "```repl\nx = 5\nx\n```"])
def test_answer_beside_output_is_questioned_once(sandbox: Sandbox, beside: str) -> None:
    for again in ("FINAL(a guess)", "It is as I said.\nFINAL(a guess)", "FINAL(corrected)"):
        done, told = ran(sandbox, f"{beside}\nFINAL(a guess)", again)
        assert done.response == again.rpartition("FINAL(")[2][:-1]
        assert UNSEEN in told[1]
        assert "'a guess'" in told[1]
        assert "Block 1: " in told[1]


def test_answer_beside_an_unseen_picture_is_doubted(sandbox: Sandbox) -> None:
    """The block prints nothing, and what it shows has no text: only its picture has not been seen."""
    code = (
        "from sandbox_worker.repl.displays import Forms, current\n"
        "current().show(Forms({}, {'image/png': b'\\x89PNG\\r\\n\\x1a\\n'}))"
    )
    done, told = ran(sandbox, f"```repl\n{code}\n```\nFINAL(a guess)", "FINAL(corrected)")
    (shown,) = done.trajectory[0].blocks
    assert (shown.stdout, shown.stderr, len(shown.displays)) == ("", "", 1)
    assert UNSEEN in told[1]
    assert done.response == "corrected"


@pytest.mark.parametrize("beside", [PRINTS, RAISES])
def test_repeated_answer_with_the_same_code_is_taken(sandbox: Sandbox, beside: str) -> None:
    done, told = ran(sandbox, f"{beside}\nFINAL(a guess)", f"{beside}\nFINAL(a guess)")
    assert done.response == "a guess"
    assert sum(UNSEEN in each for each in told) == 1


def test_another_answer_beside_code_is_asked_about_again(sandbox: Sandbox) -> None:
    done, told = ran(sandbox, f"{PRINTS}\nFINAL(one)", f"{PRINTS}\nFINAL(two)", "FINAL(two)")
    assert done.response == "two"
    assert [UNSEEN in each for each in told] == [False, True, True]


def test_answer_beside_silent_blocks_is_taken(sandbox: Sandbox) -> None:
    done, _ = ran(sandbox, f"{SILENT}\n{SILENT}\nFINAL(sure)")
    assert done.response == "sure"
    assert len(done.trajectory[0].blocks) == 2


def test_answer_before_a_look_is_questioned_once(sandbox: Sandbox) -> None:
    done, told = ran(sandbox, "FINAL(from memory)", "FINAL(from memory)")
    assert done.response == "from memory"
    assert NOT_LOOKED_AT in told[0]
    assert NOT_LOOKED in told[1]
    assert "no answer in your reply" not in told[1]
    done, told = ran(sandbox, "FINAL(from memory)", PRINTS, "FINAL(looked)")
    assert done.response == "looked"
    done, told = ran(sandbox, "FINAL(from memory)", "FINAL(another thought)")
    assert done.response == "another thought"


def test_a_context_that_is_shown_whole_needs_no_look(sandbox: Sandbox) -> None:
    short: tuple[Any, ...] = ("short", "x" * 2_000, {"a": 1}, None)
    for context in short:
        done, told = ran(sandbox, "FINAL(at once)", context=context)
        assert done.response == "at once"
        assert NOT_LOOKED_AT not in told[0]
    longer: tuple[Any, ...] = ("x" * 2_001, {"a": "x" * 3_000}, ["x" * 1_000] * 3)
    for context in longer:
        _, told = ran(sandbox, "FINAL(at once)", "FINAL(at once)", context=context)
        assert NOT_LOOKED in told[1]


def test_answer_in_the_last_turn_is_taken(sandbox: Sandbox) -> None:
    for said in ("FINAL(a guess)", f"{PRINTS}\nFINAL(a guess)", f"{RAISES}\nFINAL(a guess)"):
        done, _ = ran(sandbox, said, max_iterations=1)
        assert done.response == "a guess"
        done, _ = ran(sandbox, PRINTS, said, max_iterations=2)
        assert done.response == "a guess"


def test_a_variable_is_taken_after_blocks_that_ran(sandbox: Sandbox) -> None:
    for code in (SILENT, f"{PRINTS}\n{SILENT}"):
        done, _ = ran(sandbox, f"{code}\nFINAL_VAR(x)")
        assert done.response == "from x"


@pytest.mark.parametrize("before", [RAISES, "```repl\nimport sys; sys.exit()\n```"])
def test_variable_after_a_failed_block_is_not_read(sandbox: Sandbox, before: str) -> None:
    done, told = ran(sandbox, SILENT, f"{before}\nFINAL_VAR(x)", "FINAL_VAR(x)")
    assert done.response == "from x"
    assert "Not run: FINAL_VAR('x'). A block before it did not run through: look at its output first" in told[2]


def test_last_turn_asks_again_after_a_failed_block(sandbox: Sandbox) -> None:
    done, told = ran(sandbox, SILENT, f"{RAISES}\nFINAL_VAR(x)", "FINAL_VAR(x)", max_iterations=2)
    assert done.response == "from x"
    assert "no turns left" in told[2]


def test_a_variable_that_is_not_there_is_told(sandbox: Sandbox) -> None:
    done, told = ran(sandbox, "FINAL_VAR(missing)", "FINAL(then this)")
    assert done.response == "then this"
    assert "missing" in told[1]


def test_submission_wins_over_the_text_of_its_reply(sandbox: Sandbox) -> None:
    done, _ = ran(sandbox, "```repl\nprint(1)\nFINAL('seen')\n```\n```repl\nprint('never')\n```\nFINAL(a guess)")
    assert done.response == "seen"
    assert len(done.trajectory[0].blocks) == 1


def test_answer_beside_a_killed_block_is_a_guess(sandbox: Sandbox) -> None:
    kill = "```repl\nimport os; os._exit(1)\n```"
    done, told = ran(sandbox, f"{kill}\n{PRINTS}\nFINAL(a guess)", "FINAL(a guess)")
    assert done.response == "a guess"
    assert UNSEEN in told[1]
    assert "Not run: block 2. Block 1 was killed." in told[1]


def test_failure_of_a_call_is_no_answer_unless_it_is_given_again(sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        if not request.is_loop:
            raise ModelFailed("the provider is down")
        told.append(str(request.messages[-1].content))
        return next(replies)

    for code in ("FINAL(llm_query('a'))", "FINAL('\\n'.join(llm_query_batched(['a', 'b'])))"):
        for second, answer in ((f"```repl\n{code}\n```", "Error: the provider is down"), ("FINAL(42)", "42")):
            replies, told = iter([f"```repl\n{code}\n```", second]), list[str]()
            with RLM(ScriptedClient(reply), sandbox=sandbox) as rlm:
                done = rlm.completion(LONG, "?")
            assert done.answer.startswith(answer)
            assert "is the failure of a call that your code made" in told[1]
            assert ("Every one of the 2 calls of a batch failed" in told[1]) == ("batched" in code)


def test_messages_of_a_turn_are_those_of_the_users_function(sandbox: Sandbox) -> None:
    def pruned(depth: int, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [*messages[:2], ChatMessage("user", f"{len(messages)} at {depth}")]

    client = ScriptedClient([PRINTS, PRINTS, "FINAL(done)"])
    with RLM(client, sandbox=sandbox, instructions=Instructions(messages=pruned)) as rlm:
        done = rlm.completion(LONG, "?")
    assert [request.messages[-1].content for request in client.requests] == ["2 at 0", "4 at 0", "6 at 0"]
    assert len(done.messages) == 7
    wrong: Any = Instructions(messages=lambda *_: [])
    with RLM(ScriptedClient([PRINTS]), sandbox=sandbox, instructions=wrong) as rlm, pytest.raises(ConfigurationError):
        rlm.completion(LONG, "?")


def test_mistake_is_told_three_times_at_most(sandbox: Sandbox) -> None:
    long = "```repl\nprint('x' * 30_000)\n```"
    _, told = ran(sandbox, *[long] * 5, "FINAL(done)")
    assert [CUT in each for each in told] == [False, True, True, True, False, False]


def test_calls_about_the_first_of_many_are_noticed(sandbox: Sandbox) -> None:
    told = "Your calls saw the first {} of the {} in `{}`"
    for code, expected in (
        ("found = list(range(90))", None),
        ("got = llm_query_batched([f'a {each}' for each in found[:20]])", (20, 90, "found")),
        ("sample = found[0:4]\nfor each in sample: llm_query(f'b {each}')", (4, 90, "found")),
        ("got = llm_query_batched([f'c {each}' for each in list(context)[:2]])", (2, 3, "context")),
        ("print(found[:20])\nllm_query('d')", None),  # a look, and another question
        ("got = llm_query_batched([f'e {each}' for each in found])\nprint(got[:20])", None),
        ("got = llm_query_batched([f'f {each}' for each in found[:100]])", None),
        ("text = 'x' * 900\nllm_query(text[:1])", None),
    ):
        replies = iter(["```repl\nfound = list(range(90))\n```", f"```repl\n{code}\n```", "FINAL(done)"])
        last = list[str]()

        def reply(request: LMRequest, replies: Iterator[str] = replies, last: list[str] = last) -> str:
            if not request.is_loop:
                return "yes"
            last.append(str(request.messages[-1].content))
            return next(replies)

        with RLM(ScriptedClient(reply), sandbox=sandbox) as rlm:
            rlm.completion({"a": LONG, "b": "b", "c": "c"}, "?")
        assert (told.format(*expected) in last[2]) if expected else ("Your calls saw" not in last[2]), code


def test_picture_of_the_context_is_shown_to_a_model(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nrest")
    (tmp_path / "a.txt").write_text("text")
    code = (
        "print(llm_query([{'type': 'text', 'text': 'What is on it?'}, "
        "{'type': 'image_url', 'image_url': {'url': context['a.png']}}]))"
    )
    client = ScriptedClient([f"```repl\n{code}\n```", "a cat", "FINAL(a cat)"])
    with RLM(client, sandbox=sandbox) as rlm:
        assert rlm.completion(tmp_path, "Which animal?").response == "a cat"
    opening, asked = client.requests[0].messages[1].content, client.requests[1].messages[-1].content
    assert "Pictures: 1, each given as a `data:` address and not as text" in opening
    assert "{'url': context['...']}" in opening
    assert isinstance(asked, list)
    assert asked[1]["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgp")


def test_means_that_the_user_set_are_told_and_again_when_they_are_scarce(sandbox: Sandbox) -> None:
    client = ScriptedClient([f"```repl\nprint({number})\n```" for number in range(4)] + ["FINAL(done)"])
    with RLM(client, sandbox=sandbox, limits=Limits(max_llm_calls=5, run_timeout_s=3600)) as rlm:
        rlm.completion(LONG, "?")
    assert "You and your children have 5 calls of models and 3600 s in all" in str(
        client.requests[0].messages[0].content
    )
    told = [re.findall(r"Left: (.*)\.$", str(request.messages[-1].content)) for request in client.requests]
    assert told == [[], [], [], [], ["1 calls of models"]]


def test_refused_answer_is_the_partial_answer(sandbox: Sandbox) -> None:
    client = ScriptedClient([f"{PRINTS}\nFINAL(a guess)"])
    with RLM(client, sandbox=sandbox) as rlm, pytest.raises(Exception, match="call 2 of a script") as failed:
        rlm.completion(LONG, "?")
    assert getattr(failed.value, "partial_answer", None) == "a guess"


def test_child_with_its_task_as_context_needs_no_look(sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        if "Your task stands" in str(messages[1]["content"]):
            return "FINAL(at once)"
        return "```repl\nFINAL(rlm_query('why ' * 3_000))\n```"

    with RLM(FunctionClient(reply), limits=Limits(max_depth=2), sandbox=sandbox) as rlm:
        done = rlm.completion(LONG, "?")
    assert done.response == "at once"
    assert done.usage_summary.total.total_calls == 2


def test_none_is_an_empty_reply_and_not_the_end(sandbox: Sandbox) -> None:
    replies = iter([None, None, "FINAL(at last)"])
    with RLM(lambda _messages: next(replies), sandbox=sandbox) as rlm:
        done = rlm.completion("short", "?")
    assert done.response == "at last"
    assert "There was no code to run and no answer in your reply." in str(done.messages[3].content)
    assert all(str(message.content).strip() for message in done.messages)  # no provider takes an empty one


# -- alone -----------------------------------------------------------------------------------------------------------


async def test_blocks_per_run_are_bounded(open_sandbox: Sandbox) -> None:
    async with open_sandbox.repl() as repl:
        progress = Progress()
        actions = ReplyActions(repl, Limits(max_blocks=3), NO_EVENTS, progress)
        answer, not_run = await actions.act(1, f"{PRINTS}\n{PRINTS}", [])
        assert (answer, [*not_run], actions.blocks_left()) == (None, [], 1)
        answer, not_run = await actions.act(2, f"{PRINTS}\n{PRINTS}\nFINAL(a guess)", [])
        assert answer is not None
        assert (answer.text, answer.is_guess) == ("a guess", True)
        assert [each.what for each in not_run] == ["block 2"]
        assert (progress.blocks, actions.blocks_left()) == (3, 0)
        assert ReplyActions(repl, Limits(max_blocks=None), NO_EVENTS, progress).blocks_left() is None


async def test_draft_is_kept_until_withdrawn_and_through_a_kill(open_sandbox: Sandbox) -> None:
    async with open_sandbox.repl(limits=ReplLimits(max_replay_s=0)) as repl:
        progress = Progress()
        actions = ReplyActions(repl, Limits(), NO_EVENTS, progress)
        await actions.act(1, "so far\n```repl\nanswer['content'] = 'a draft'\n```", [])
        assert progress.partial_answer == "a draft"
        await actions.act(2, "```repl\nimport os; os._exit(1)\n```", [])
        assert progress.partial_answer == "a draft"
        await actions.act(3, "```repl\n1\n```", [])
        assert progress.partial_answer == "so far"


async def test_implausible_reply_is_not_read() -> None:
    long = await read_reply("```\n" * (MAX_REPLY_CHARS // 4 + 1))
    assert (long.code, long.final) == ((), None)
    assert [each.what for each in long.not_run] == [f"all of a reply of {4 * (MAX_REPLY_CHARS // 4 + 1):,} characters"]
    middling = await read_reply("x " * SHORT_REPLY_CHARS + "\nFINAL(yes)")
    assert middling.final == FinalText("yes")


async def test_reply_outcome_is_told_by_events(open_sandbox: Sandbox) -> None:
    events: list[Event] = []
    async with open_sandbox.repl() as repl:
        actions = ReplyActions(repl, Limits(), TreeEvents("tree", [events.append]).of("1", 0), Progress())
        said = f"{PRINTS}\n{SILENT}\n```bash\nls\n```"
        blocks: list[Block] = []
        await actions.act(4, said, blocks)
    replied, *others = events
    assert isinstance(replied, Replied)
    assert (replied.number, replied.text, [each[:15] for each in replied.not_run]) == (4, said, ["a ```bash fence"])
    assert [(type(each), each.block) for each in others] == [  # type: ignore[union-attr]
        (BlockStarted, 1),
        (BlockPrinted, 1),
        (BlockEnded, 1),
        (BlockStarted, 2),
        (BlockEnded, 2),
    ]
    begun, printed, ended = others[:3]
    assert isinstance(begun, BlockStarted)
    assert isinstance(printed, BlockPrinted)
    assert isinstance(ended, BlockEnded)
    assert (begun.iteration, begun.code, printed.stream, printed.text) == (4, "print(1)", "stdout", "1\n")
    assert ended.outcome == blocks[0]
    assert [variable.name for variable in blocks[1].variables] == ["x"]


async def test_of_several_blocks_the_last_that_ran_decides(open_sandbox: Sandbox) -> None:
    kill = "```repl\nimport os; os._exit(1)\n```"
    async with open_sandbox.repl() as repl:
        actions = ReplyActions(repl, Limits(), NO_EVENTS, Progress())
        answer, _ = await actions.act(1, f"{SILENT}\n```repl\nFINAL('second')\n```\n{PRINTS}", [])
        assert answer == ReplyAnswer("second")
        answer, _ = await actions.act(2, f"{SILENT}\n{PRINTS}\nFINAL(a guess)", [])
        assert answer == ReplyAnswer("a guess", is_guess=True)
        blocks: list[Block] = []
        answer, not_run = await actions.act(3, f"{PRINTS}\n{kill}\n{PRINTS}", blocks)
        assert (answer, [each.status for each in blocks]) == (None, ["ok", "killed"])
        assert [each.reason for each in not_run] == ["Block 2 was killed."]


async def test_answer_lookup_uses_no_block_of_the_run(open_sandbox: Sandbox) -> None:
    async with open_sandbox.repl() as repl:
        actions = ReplyActions(repl, Limits(max_blocks=1), NO_EVENTS, Progress())
        answer, _ = await actions.act(1, f"{SILENT}\nFINAL_VAR(x)", [])
        assert (answer, actions.blocks_left()) == (ReplyAnswer("from x"), 0)


async def test_repl_killed_too_often_is_a_limit() -> None:
    limits = Limits(max_repl_restarts=0)
    async with Sandbox(limits, warm=0) as sandbox:
        async with sandbox.repl() as repl:
            actions = ReplyActions(repl, limits, NO_EVENTS, Progress())
            await actions.act(1, "```repl\nimport os; os._exit(1)\n```", [])
            with pytest.raises(LimitReached, match="max_repl_restarts = 0 was reached, 0 used"):
                await actions.act(2, PRINTS, [])
        with pytest.raises(ReplClosed):
            await actions.act(3, PRINTS, [])


@pytest.mark.parametrize(("fewer", "kept"), [(0, [1, 1, 0]), (1, [1, 0, 0])])
async def test_past_their_bytes_displays_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, fewer: int, kept: list[int], open_sandbox: Sandbox
) -> None:
    shows = "```repl\nclass Rich:\n    def _repr_html_(self): return '<b>' + 'x' * 1_000\nRich()\n```"
    async with open_sandbox.repl() as repl:
        blocks: list[Block] = []
        await ReplyActions(repl, Limits(), NO_EVENTS, Progress()).act(1, shows, blocks)
        size = sum(sys.getsizeof(data) for data in blocks[0].displays[0].data.values())
        monkeypatch.setattr(reply, "MAX_DISPLAYS_BYTES", 2 * size - fewer)
        blocks = []
        await ReplyActions(repl, Limits(), NO_EVENTS, Progress()).act(1, "\n".join([shows] * 3), blocks)
        assert [len(block.displays) for block in blocks] == kept
        assert [block.displays_omitted for block in blocks] == [1 - each for each in kept]
