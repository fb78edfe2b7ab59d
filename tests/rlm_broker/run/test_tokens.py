"""The number of tokens of a text: by the client's count if it has one, and never much too low."""

import threading

import pytest

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.run.tokens import SAMPLE_CHARS, count_tokens, estimated


class Counting(BaseClient):
    """Counts one token for each character, and keeps what it was asked."""

    model_name = "counting"
    counts_tokens = True

    def __init__(self, knows: bool = True) -> None:
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self._knows = knows

    def count_tokens(self, text: str) -> int | None:
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return len(text) if self._knows else None


class Plain(BaseClient):
    model_name = "plain"


def test_estimate_counts_three_characters_a_token() -> None:
    tokens = {"": 0, "abc" * 100: 100, "中" * 100: 100, "𝄞" * 3: 3, "中abc" * 10: 20}
    assert {text: estimated(text) for text in tokens} == pytest.approx(tokens)


async def test_a_client_that_counts_is_asked_in_a_thread() -> None:
    client = Counting()
    assert await count_tokens(client, "x" * 100) == 100
    assert threading.get_ident() not in client.threads


@pytest.mark.parametrize("client", [Plain(), Counting(knows=False)])
async def test_estimate_is_used_without_a_count(client: BaseClient) -> None:
    assert await count_tokens(client, "中" * 99) == 99


async def test_of_a_long_text_three_samples_are_counted() -> None:
    client, text = Counting(), "a" * 1_000_000 + "b" * 1_000_000 + "c" * 1_000_000
    assert await count_tokens(client, text) == pytest.approx(len(text))
    (sample,) = client.texts
    assert sample == "a" * SAMPLE_CHARS + "b" * SAMPLE_CHARS + "c" * SAMPLE_CHARS


async def test_a_text_of_three_samples_is_counted_whole() -> None:
    client, text = Counting(), "d" * 3 * SAMPLE_CHARS
    assert await count_tokens(client, text) == len(text)
    assert client.texts == [text]
