"""Functions that all clients share: the estimate of a text's tokens."""

from rlm_broker.clients.base import estimate_tokens
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN


def test_tokens_are_estimated_in_one_way_and_limits_count_more_than_the_average() -> None:
    assert estimate_tokens(1_200) == 300
    assert estimate_tokens(1_200, CAUTIOUS_CHARS_PER_TOKEN) == 400
