"""Functions of model code that ask the orchestrator, at a channel that answers at once."""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
from pydantic import BaseModel

from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.queries import TYPED_ATTEMPTS, Queries
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import MAX_PROMPTS, Query, Reply, Slot
from sandbox_worker.wire.prompts import MessagePart, TextPart
from tests.support.tables import table


class Answering:
    """Substitute for a channel, which answers at once."""

    def __init__(self, answer: Callable[[Query], list[Slot]]) -> None:
        self._answer = answer
        self.asked: list[Query] = []

    def ask(self, query: Query) -> Reply:
        self.asked.append(query)
        return Reply(id="1:1", slots=self._answer(query))


def queries(answer: Callable[[Query], list[Slot]] | None = None) -> tuple[Queries, Answering]:
    channel = Answering(answer or (lambda query: [Slot(text=prompt.upper()) for prompt in query.texts]))
    return Queries(cast("Channel", channel), lambda: None), channel


def test_queries_return_text_in_order() -> None:
    asking, channel = queries()
    assert asking.llm_query("a") == "A"
    assert asking.llm_query_batched(["a", "b"]) == ["A", "B"]
    assert asking.llm_batch(["c"], max_concurrent=3) == ["C"]
    assert asking.rlm_query("d") == "D"
    assert asking.rlm_query_batched(iter(["e", "f"])) == ["E", "F"]  # type: ignore[arg-type]
    assert [query.want for query in channel.asked] == ["llm", "llm", "llm", "rlm", "rlm"]
    assert channel.asked[2].max_concurrent == 3


def test_failed_call_starts_with_error() -> None:
    """A failed call is a text that starts with "Error", and keeps the partial text."""
    asking, _ = queries(lambda _: [Slot(text="partial", error="too slow"), Slot(error="no"), Slot(text="fine")])
    assert asking.llm_query_batched(["a", "b", "c"]) == ["Error: too slow\npartial", "Error: no", "fine"]


def test_batch_without_prompts_sends_no_query() -> None:
    asking, channel = queries()
    assert asking.llm_query_batched([]) == asking.llm_query_batched([], output_type=NUMBER) == []
    assert channel.asked == []


def test_unsendable_prompt_is_an_error_in_place() -> None:
    def refuse(_: Query) -> list[Slot]:
        raise FrameTooLarge(100, 10)

    asking, _ = queries(refuse)
    texts = asking.llm_query_batched(["a", "b"])
    why = "pass a large text as a context, which takes any size: rlm_query(task, context=part)"
    assert texts == [f"Error: the query is too large: 100 bytes, 10 at most; {why}"] * 2


def test_large_batch_is_asked_in_parts() -> None:
    def few(query: Query) -> list[Slot]:
        if len(query.prompts) > 3:
            raise FrameTooLarge(100, 10)
        return [Slot(text=text.upper()) for text in query.texts]

    asking, channel = queries(few)
    assert asking.llm_query_batched(list("abcdefgh"), timeout_s=60, samples=True) == list("ABCDEFGH")
    sent = [query for query in channel.asked if len(query.prompts) <= 3]
    assert all(query.samples and query.timeout_s is not None and 0 < query.timeout_s <= 60 for query in sent)
    channel.asked.clear()
    assert asking.rlm_query_batched(list("abcd"), contexts=[1, 2, 3, 4]) == list("ABCD")
    contexts = [[context and context.value for context in query.contexts] for query in channel.asked]
    assert contexts == [["1", "2", "3", "4"], ["1", "2"], ["3", "4"]]


@table(
    "call, said",
    [
        (lambda asking: asking.llm_query(5), r"llm_query\(\) needs text: prompt is a int"),
        (lambda asking: asking.llm_query_batched("abc"), "takes a list of prompts, not one string"),
        (lambda asking: asking.llm_query_batched(["a", None]), r"prompts\[1\] is a NoneType"),
        (lambda asking: asking.llm_query("a", model=7), "argument 'model' must be str, not int"),
        (
            lambda asking: asking.rlm_query("a", "a part\nof the context"),
            "put data into the prompt, or give it as conte",
        ),
        (lambda asking: asking.llm_query("a", "a long part" * 100), "put data into the prompt, or give it as context="),
        (lambda asking: asking.llm_query("a", max_completion_tokens=True), "must be int, not bool"),
    ],
)
def test_wrong_argument_is_a_named_type_error(call: Callable[[Queries], Any], said: str) -> None:
    asking, channel = queries()
    with pytest.raises(TypeError, match=said):
        call(asking)
    assert channel.asked == []


def test_number_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="'max_concurrent' must be at least 1, not 0"):
        queries()[0].llm_query_batched(["a"], max_concurrent=0)


def test_batch_past_a_frame_is_an_error() -> None:
    """A batch that no frame should hold is an error, and no protocol violation."""
    asking, channel = queries()
    texts = asking.llm_query_batched([""] * (MAX_PROMPTS + 1))
    assert texts[0].startswith("Error: batch too large: 65,537 prompts")
    assert channel.asked == []


def test_max_tokens_is_max_completion_tokens() -> None:
    asking, channel = queries()
    asking.llm_query("a", max_tokens=5)
    asking.llm_query_batched(["a"], max_tokens=6)
    asking.llm_batch(["a"], max_tokens=7, temperature=1)
    asking.llm_query("a", max_completion_tokens=8)
    assert [query.max_completion_tokens for query in channel.asked] == [5, 6, 7, 8]
    for call in (asking.llm_query, asking.llm_query_batched):
        with pytest.raises(TypeError, match=r"takes either max_tokens= or max_completion_tokens=, not both"):
            call(["a"], max_completion_tokens=5, max_tokens=5)
    with pytest.raises(TypeError, match="argument 'max_tokens' must be int, not str"):
        asking.llm_query("a", max_tokens="5")  # type: ignore[arg-type]


def test_temperature_is_sent_and_checked() -> None:
    asking, channel = queries()
    for temperature in (0, 0.5, 2, None):
        asking.llm_query("a", temperature=temperature)
        asking.llm_query_batched(["a"], temperature=temperature)
    assert [query.temperature for query in channel.asked[::2]] == [0, 0.5, 2, None]
    assert [query.temperature for query in channel.asked[1::2]] == [0, 0.5, 2, None]
    for wrong in (-0.1, 2.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="argument 'temperature' must be from 0 to 2"):
            asking.llm_query("a", temperature=wrong)
    for other in (True, "0"):
        with pytest.raises(TypeError, match="argument 'temperature' must be a number"):
            asking.llm_query("a", temperature=other)  # type: ignore[arg-type]


MESSAGES = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
]


def test_prompt_may_be_chat_messages() -> None:
    asking, channel = queries(lambda query: [Slot(text="x")] * len(query.prompts))
    asking.llm_query(MESSAGES)
    asking.llm_query_batched(["a", MESSAGES[1:]], system="s")
    sent = [MessagePart("system", "brief"), MessagePart("user", [TextPart("a")])]
    assert [query.prompts for query in channel.asked] == [[sent], ["a", sent[1:]]]


@table(
    "prompt, options, said",
    [
        (MESSAGES, {"system": "s"}, "takes either system= or a system message, not both: prompt has one"),
        ([{"role": "user", "content": "a"}, {"type": "text", "text": "b"}], {}, "not both"),
        ([{"role": "tool", "content": "a"}], {}, "needs text, content parts or chat messages: prompt is none of them"),
        ([{"role": "user", "content": None}], {}, "prompt is none of them"),
        ([{"role": "user", "content": "a", "name": "b"}], {}, "prompt is none of them"),
        ([{"role": "user"}], {}, "prompt is none of them"),
        ([], {}, "prompt is none of them"),
    ],
)
def test_prompt_must_be_a_conversation(prompt: Any, options: dict[str, Any], said: str) -> None:
    asking, channel = queries()
    with pytest.raises(TypeError, match=said):
        asking.llm_query(prompt, **options)
    assert channel.asked == []


# -- answers of a type -----------------------------------------------------------------------------------------------

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Count(BaseModel):
    n: int


def test_typed_query_repeats_only_failed_prompts() -> None:
    """Only failed prompts are asked again, and all of them in one batch."""
    seen = Counter[str]()

    def answer(text: str) -> Slot:
        word = text.partition("\n")[0]
        seen[word] += 1
        return {
            "good": Slot(text='{"n": 1}'),
            "fenced": Slot(text='```json\n{"n": 2}\n```'),
            "late": Slot(text='{"n": 3}' if seen[word] == TYPED_ATTEMPTS else "three"),
            "never": Slot(text='{"n": "four"}'),
            "down": Slot(error="the provider is down"),
        }[word]

    asking, channel = queries(lambda query: list(map(answer, query.texts)))
    values = asking.llm_query_batched(["good", "late", "fenced", "never", "down"], output_type=NUMBER, temperature=1)
    assert values[:3] == [{"n": 1}, {"n": 3}, {"n": 2}]
    assert values[3] == "Error: the answer is not of the output_type: 'four' is not of type 'integer'"
    assert values[4] == "Error: the provider is down"
    assert [len(query.prompts) for query in channel.asked] == [5, 2, 2]
    assert all(query.temperature == 1 for query in channel.asked)
    assert "You answered: three\nThat is wrong: " in channel.asked[1].texts[0]


def test_pydantic_models_make_values_of_their_class() -> None:
    asking, _ = queries(lambda query: [Slot(text='{"n": "5"}')] * len(query.prompts))
    assert asking.llm_query_batched(["a", "b"], output_type=Count) == [Count(n=5), Count(n=5)]
    assert asking.llm_query("a", output_type=Count) == Count(n=5)


def test_schema_follows_a_prompt_of_each_kind() -> None:
    asking, channel = queries(lambda query: [Slot(text='{"n": 1}')] * len(query.prompts))
    conversation = [{"role": "user", "content": "a"}]
    asking.llm_query_batched(["a", [{"type": "text", "text": "a"}], conversation], output_type=NUMBER)
    text, parts, messages = channel.asked[0].prompts
    assert isinstance(text, str)
    assert text.startswith("a\n\nAnswer with a JSON value of this schema")
    wanted = text.removeprefix("a\n\n")
    assert parts == [TextPart("a"), TextPart(wanted)]
    assert messages == [MessagePart("user", "a"), MessagePart("user", wanted)]


def test_time_limit_holds_for_all_attempts() -> None:
    asking, channel = queries(lambda query: [Slot(text="no")] * len(query.prompts))
    asking.llm_query_batched(["a"], output_type=NUMBER, timeout_s=50)
    limits = [query.timeout_s or 0 for query in channel.asked]
    assert len(limits) == TYPED_ATTEMPTS
    assert 50 >= limits[0] > limits[1] > limits[2] > 0


@table(
    "output_type, error, said",
    [
        (int, TypeError, r"llm_query_batched\(\) argument 'output_type' must be a JSON schema"),
        ({"type": "nothing"}, ValueError, "is not a JSON schema"),
    ],
)
def test_invalid_type_is_refused_before_asking(output_type: Any, error: type[Exception], said: str) -> None:
    asking, channel = queries()
    with pytest.raises(error, match=said):
        asking.llm_query_batched(["a"], output_type=output_type)
    with pytest.raises(TypeError, match="takes a list of prompts, not one string"):
        asking.llm_query_batched("a", output_type=NUMBER)
    with pytest.raises(TypeError, match="'timeout_s' must be a number, not str"):
        asking.llm_query_batched(["a"], output_type=NUMBER, timeout_s="5")  # type: ignore[arg-type]
    assert channel.asked == []
