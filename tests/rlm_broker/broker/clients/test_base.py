"""Functions that all clients share: the estimate of a text's tokens."""

from rlm_broker.broker.clients.base import estimate_tokens
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN


def test_token_estimate_is_the_same_everywhere() -> None:
    """Tokens are estimated in one way everywhere, and limits count more than the average."""
    assert estimate_tokens(1_200) == 300
    assert estimate_tokens(1_200, CAUTIOUS_CHARS_PER_TOKEN) == 400
