"""Answers of a type from `llm_query` and `llm_query_batched`, in this process."""

from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel

from sandbox_worker.repl.queries import TYPED_ATTEMPTS
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.prompts import MessagePart, TextPart
from tests.sandbox_worker.repl.test_queries import queries
from tests.support.tables import table

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Count(BaseModel):
    n: int


def test_typed_query_repeats_only_failed_prompts() -> None:
    """Only failed prompts are asked again, and all of them in one batch."""
    seen = Counter[str]()

    def answer(query: Query) -> list[Slot]:
        slots = []
        for text in query.texts:
            word = text.partition("\n")[0]
            seen[word] += 1
            slots.append(
                {
                    "good": Slot(text='{"n": 1}'),
                    "fenced": Slot(text='```json\n{"n": 2}\n```'),
                    "late": Slot(text='{"n": 3}' if seen[word] == TYPED_ATTEMPTS else "three"),
                    "never": Slot(text='{"n": "four"}'),
                    "down": Slot(error="the provider is down"),
                }[word]
            )
        return slots

    asking, channel = queries(answer)
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


def test_typed_batch_without_prompts_sends_no_query() -> None:
    asking, channel = queries()
    assert asking.llm_query_batched([], output_type=NUMBER) == []
    assert channel.asked == []


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
