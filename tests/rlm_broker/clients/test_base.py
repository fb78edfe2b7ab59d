"""What all clients share: how many tokens a text is estimated to have."""

from rlm_broker.clients.base import estimate_tokens
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN
from rlm_broker.run.queries import needs_repl


def test_tokens_are_estimated_in_one_way_and_limits_count_more_than_the_average() -> None:
    assert estimate_tokens(1_200) == 300
    assert estimate_tokens(1_200, CAUTIOUS_CHARS_PER_TOKEN) == 400


def test_needs_repl_of_a_prompt_that_fills_more_than_half_of_the_window() -> None:
    assert not needs_repl("a" * 200, window_tokens=100)
    assert needs_repl("a" * 201, window_tokens=100)
