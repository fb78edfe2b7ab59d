"""A conversation within what its model reads: shortened before it is too long, and once more if a provider refuses
it."""

import json
from itertools import pairwise
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import LimitReached, ModelFailed
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage
from rlm_broker.rlm import RLM
from rlm_broker.run.conversation import (
    FEWEST_LAST_CHARS,
    FEWEST_OLDER_CHARS,
    LEAST_FACTOR,
    Conversation,
    allowed_tokens,
)
from rlm_broker.run.prompts.messages import SUMMARISE
from rlm_broker.run.tree import Progress
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.text import shorten
from tests.support.fake_openai import FakeOpenAI, completion, failure
from tests.support.waiting import LONGER_AND_LONGER, for_ever

MUCH = "```repl\nprint(''.join(f'{n:04} ' for n in range(4_000)))\n```"
"""Prints 20,000 characters, 4,000 words."""
TOO_LONG = "This model's maximum context length is 10000 tokens. However, your messages resulted in 12345 tokens."


class Window(ScriptedClient):
    """A model that reads 10,000 tokens, and refuses what is longer: four characters are one."""

    context_tokens = 10_000

    async def complete(self, request: LMRequest) -> Any:
        if chars(request) / 4 > self.context_tokens:
            raise ModelFailed(f"scripted: 400: {TOO_LONG}", "request")
        return await super().complete(request)


def chars(request: LMRequest) -> int:
    return sum(len(str(message.content)) for message in request.messages)


def test_eight_verbose_turns_fit_a_small_window(open_sandbox: Sandbox) -> None:
    client = Window([*[MUCH] * 8, "FINAL(done)"])
    done = RLM(client, sandbox=open_sandbox).completion("x" * 100_000, "What?")
    assert done.response == "done"
    assert [len(request.messages) for request in client.requests] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    last = client.requests[-1].messages
    outputs = [len(str(message.content)) for message in last[3::2]]
    assert max(outputs[:-1]) < 5_000  # older ones are cut, and the newest is not
    assert outputs[-1] > 7_500  # a quarter of the window
    assert all("characters cut" in str(message.content) for message in last[3:-1:2])
    assert all(str(message.content) == MUCH for message in last[2::2])


def test_uncuttable_messages_are_summarised_repeatedly(open_sandbox: Sandbox) -> None:
    thoughts = "thinking " * 1_500

    def reply(request: LMRequest) -> str:
        asked = str(request.messages[-1].content)
        if asked == SUMMARISE:
            notes.append(f"note {len(notes) + 1}")
            return notes[-1]
        if len(client.requests) > 14:
            return "```repl\nFINAL(str(len(history)))\n```"
        return f"{thoughts}\n```repl\nprint(1)\n```"

    notes: list[str] = []
    client = Window(reply)
    done = RLM(client, sandbox=open_sandbox).completion("x" * 100_000, "What?")
    assert len(notes) >= 3
    begun_again = [str(each.messages[1].content) for each in client.requests if len(each.messages) == 2][1:]
    for number, opening in enumerate(begun_again, 1):
        assert [f"note {n}" for n in range(1, 9) if f"note {n}" in opening] == [f"note {number}"]
        assert opening.count("`context` is a str with 100,000 characters") == 1
        assert "Question: What?" in opening
    assert int(done.response or 0) > 10  # `history` has all of it
    assert all(len(notes) < 50 for notes in notes)


def test_http_refusal_is_recovered_from_alone(open_sandbox: Sandbox) -> None:
    short, refusal = completion(MUCH), failure(400, TOO_LONG)
    with FakeOpenAI(short, short, refusal, completion("FINAL(done)")) as server:
        client = OpenAICompatibleClient(server.base_url, "m")
        assert RLM(client, sandbox=open_sandbox).completion("x" * 100_000, "What?").response == "done"
        sizes = [len(json.dumps(request)) for request in server.requests]
    assert sizes[2] > 40_000
    assert sizes[3] < 0.8 * sizes[2]
    with FakeOpenAI(short, *[refusal] * 20) as server, pytest.raises(ModelFailed, match="maximum context length"):
        RLM(OpenAICompatibleClient(server.base_url, "m"), sandbox=open_sandbox).completion("x" * 100_000, "What?")
    with FakeOpenAI(short, failure(400, "unknown field")) as server, pytest.raises(ModelFailed, match="unknown field"):
        RLM(OpenAICompatibleClient(server.base_url, "m"), sandbox=open_sandbox).completion("x" * 100_000, "What?")
    assert len(server.requests) == 2


def test_compaction_is_off_without_a_threshold(open_sandbox: Sandbox) -> None:
    client = ScriptedClient([MUCH, MUCH, ModelFailed(TOO_LONG)])
    with pytest.raises(ModelFailed, match="maximum context length"):
        RLM(client, limits=Limits(compaction_threshold=None), sandbox=open_sandbox).completion("x" * 100_000, "What?")
    assert [len(request.messages) for request in client.requests] == [2, 4, 6]
    assert len(str(client.requests[2].messages[3].content)) > 20_000


def test_first_request_too_long_fails_at_once(open_sandbox: Sandbox) -> None:
    client = ScriptedClient([ModelFailed(TOO_LONG)])
    with pytest.raises(ModelFailed):
        RLM(client, sandbox=open_sandbox).completion("text", "What?")
    assert len(client.requests) == 1


def test_refused_summary_keeps_the_conversation(open_sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        if str(request.messages[-1].content) == SUMMARISE:
            raise ModelFailed("the provider is down")
        return f"{'thinking ' * 2_000}\n```repl\nprint('seen')\n```"

    client = Window(reply)
    with pytest.raises(ModelFailed, match="the provider is down") as failed:
        RLM(client, sandbox=open_sandbox).completion("x" * 100_000, "What?")
    assert "seen" in str(failed.value.messages[-1].content)
    assert failed.value.messages[-1].role == "user"


# -- what is left when a provider fails ------------------------------------------------------------------------------

DRAFT = "```repl\nanswer['content'] = 'a draft'\n```"
IDEA = "a first idea\n```repl\nprint(1)\n```"


@pytest.mark.parametrize(
    ("replies", "partial"), [([IDEA, DRAFT], "a draft"), ([DRAFT, IDEA], "a draft"), ([IDEA, IDEA], "a first idea")]
)
def test_the_best_answer_so_far_is_in_the_failure(replies: list[str], partial: str, open_sandbox: Sandbox) -> None:
    client = ScriptedClient([*replies, ModelFailed("scripted: 500: down")])
    with pytest.raises(ModelFailed) as failed:
        RLM(client, sandbox=open_sandbox).completion("text", "?")
    assert failed.value.partial_answer == partial
    assert len(failed.value.trajectory) == 2


def test_run_timeout_carries_the_partial_answer(open_sandbox: Sandbox) -> None:
    async def reply(messages: list[dict[str, Any]]) -> str:
        return DRAFT if len(messages) == 2 else await for_ever()

    for timeout_s in LONGER_AND_LONGER:
        with pytest.raises(LimitReached, match="run_timeout_s") as reached:
            RLM(FunctionClient(reply), limits=Limits(run_timeout_s=timeout_s), sandbox=open_sandbox).completion(
                "text", "?"
            )
        if reached.value.trajectory:
            break
    assert reached.value.partial_answer == "a draft"


# -- alone -----------------------------------------------------------------------------------------------------------


async def by_length(text: str) -> float:
    return len(text)


async def never() -> None:
    raise AssertionError("no summary was needed")


def texts_of(progress: Progress) -> list[str]:
    return [str(message.content) for message in progress.messages]


def conversation(limit: float | None, *texts: str) -> tuple[Conversation, Progress]:
    roles = ["system", "user", *["assistant", "user"] * len(texts)]
    progress = Progress(messages=[ChatMessage(role, text) for role, text in zip(roles, texts, strict=False)])  # type: ignore[arg-type]
    return Conversation(progress, limit, by_length), progress


async def test_fitting_conversation_is_unchanged() -> None:
    kept, progress = conversation(100, "s" * 20, "o" * 20, "a" * 20, "u" * 40)
    before = list(progress.messages)
    await kept.fit(never)
    assert progress.messages == before
    assert await kept.tokens() == 100


async def test_older_outputs_are_cut_first() -> None:
    kept, progress = conversation(
        16_000, "s" * 10, "o" * 10, "a" * 3_000, "u" * 9_000, "a" * 10, "v" * 800, "a" * 10, "w" * 9_000
    )
    await kept.fit(never)
    sizes = [*map(len, texts_of(progress))]
    assert sizes[:3] == [10, 10, 3_000]
    assert FEWEST_OLDER_CHARS < sizes[3] < 9_000
    assert sizes[4:] == [10, 800, 10, 9_000]
    assert sum(sizes) <= 16_000


async def test_the_newest_is_cut_last_and_its_end_stays() -> None:
    kept, progress = conversation(4_000, "s" * 1_000, "o" * 1_000, "a" * 100, "u" * 20_000 + "What to do.")
    await kept.fit(never)  # no older messages are there to summarise
    newest = str(progress.messages[-1].content)
    assert newest.endswith("What to do.")
    assert FEWEST_LAST_CHARS <= len(newest) < 3_000
    assert [len(str(message.content)) for message in progress.messages[:2]] == [1_000, 1_000]


async def test_outputs_are_halved_until_the_request_fits() -> None:
    older = shorten("u" * 9_000, 4_500)
    kept, progress = conversation(40 + len(older) + 10, "s" * 10, "o" * 10, "a" * 10, "u" * 9_000, "a" * 10, "w" * 10)
    await kept.fit(never)
    assert texts_of(progress)[3:] == [older, "a" * 10, "w" * 10]


async def test_outputs_keep_a_minimum_of_characters() -> None:
    """An older output keeps 500 characters, and the newest keeps 2,000."""
    summaries = 0

    async def summarise() -> None:
        nonlocal summaries
        summaries += 1

    kept, progress = conversation(1, "s", "o", "a" * 3_000, "u" * 9_000, "b" * 3_000, "w" * 9_000)
    await kept.fit(summarise)
    assert summaries == 1
    older, newest = shorten("u" * 9_000, 500), shorten("w" * 9_000, 2_000)
    assert texts_of(progress) == ["s", "o", "a" * 3_000, older, "b" * 3_000, newest]


async def test_provider_count_decides_what_fits() -> None:
    kept, progress = conversation(4_000, "s" * 10, "o" * 10, "a" * 10, "u" * 3_000, "a" * 10)
    await kept.learn(2 * 3_030)
    progress.messages.append(ChatMessage("user", "w" * 10))
    await kept.fit(never)
    assert texts_of(progress)[3] == shorten("u" * 3_000, 1_500)


async def test_after_a_refusal_three_tenths_less_is_sent_or_the_lower_limit() -> None:
    for limit, chars, kept_chars in ((100_000, 5_000, 2_500), (4_000, 9_000, 2_250)):
        kept, progress = conversation(limit, "s" * 100, "o" * 100, "a" * 100, "u" * chars, "a" * 100, "w" * 100)
        assert await kept.takes_refusal(ModelFailed(TOO_LONG))
        await kept.fit(never)
        assert texts_of(progress)[3] == shorten("u" * chars, kept_chars)
    assert not await kept.takes_refusal(ModelFailed("429: rate limit reached"))


async def test_refusals_are_taken_as_long_as_the_request_shrinks() -> None:
    kept, progress = conversation(100_000, "s" * 100, "o" * 100, "a" * 100, "u" * 50_000)
    sizes = [50_300]
    while await kept.takes_refusal(ModelFailed("the prompt is too long")):
        await kept.fit(never)
        sizes.append(sum(map(len, texts_of(progress))))
    assert len(sizes) > 4
    assert [before > after for before, after in pairwise(sizes)][:-1] == [True] * (len(sizes) - 2)
    assert sizes[-1] == 300 + len(shorten("u" * 50_000, FEWEST_LAST_CHARS))


def test_providers_say_how_many_tokens_they_allow() -> None:
    said = {
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens": 8192,
        "prompt is too long: 210000 tokens > 200000 maximum": 200_000,
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1,048,576).": 1_048_576,
        "Requested tokens (5000) exceed context window of 4096": 4_096,
        "HTTP status 400: the prompt is too long": None,
    }
    assert {sentence: allowed_tokens(sentence) for sentence in said} == said


async def test_the_system_prompt_and_the_opening_are_never_cut() -> None:
    kept, progress = conversation(10, "s" * 1_000, "o" * 50_000)
    await kept.fit(never)
    assert [*map(len, texts_of(progress))] == [1_000, 50_000]


async def test_provider_count_corrects_but_never_to_zero() -> None:
    kept, progress = conversation(1_000, "s" * 100, "o" * 100, "reply")
    await kept.learn(400)
    assert await kept.tokens() == pytest.approx(2 * 205)
    await kept.learn(3)
    assert await kept.tokens() == pytest.approx(LEAST_FACTOR * 205)
    await kept.learn(0)
    assert await kept.tokens() == pytest.approx(LEAST_FACTOR * 205)
    assert len(progress.messages) == 3


async def test_without_a_limit_nothing_is_counted() -> None:
    async def count(_text: str) -> float:
        raise AssertionError("tokens were counted without a limit")

    kept = Conversation(Progress(messages=[ChatMessage("user", "x")] * 5), None, count)
    await kept.fit(never)
    await kept.learn(5)
    assert not await kept.takes_refusal(ModelFailed(TOO_LONG))


def test_how_providers_say_that_a_request_is_too_long() -> None:
    long = [
        "litellm.ContextWindowExceededError: too much",
        TOO_LONG,
        "prompt is too long: 210000 tokens > 200000 maximum",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        "Requested tokens (5000) exceed context window of 4096",
        "the request exceeds the available context size",
        "Input length 9000 exceeds the maximum",
    ]
    others = ["429: rate limit reached", "invalid api key", "unknown model 'x'", "connection lost"]
    assert [said for said in (*long, *others) if ModelFailed(said).is_too_long] == long


def test_provider_refusal_is_retried_with_less(open_sandbox: Sandbox) -> None:
    class Unknown(ScriptedClient):
        """Client that does not state its window, and reads 40,000 characters at most."""

        async def complete(self, request: LMRequest) -> Any:
            self.sizes = [*getattr(self, "sizes", []), chars(request)]
            if chars(request) > 40_000:
                raise ModelFailed(f"scripted: BadRequestError: {TOO_LONG}", "request")
            return await super().complete(request)

    client = Unknown([*[MUCH] * 4, "FINAL(done)"])
    assert RLM(client, sandbox=open_sandbox).completion("x" * 100_000, "What?").response == "done"
    refused = [size for size in client.sizes if size > 40_000]
    assert refused
    assert len(client.sizes) == 5 + len(refused)


async def test_implausible_token_count_is_corrected() -> None:
    kept, progress = conversation(1_000, "", "", "")
    await kept.learn(7)
    progress.messages.append(ChatMessage("user", "ab"))
    assert await kept.tokens() == pytest.approx(14)
    await kept.learn(1)
    assert await kept.tokens() == pytest.approx(2)
    progress.messages.append(ChatMessage("assistant", "cd"))
    await kept.learn(1)
    assert await kept.tokens() == pytest.approx(0.5 * 4)
