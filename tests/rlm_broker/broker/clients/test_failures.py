"""Headers of failed calls."""

import pytest

from rlm_broker.broker.clients.failures import LONGEST_RETRY_AFTER_S, retry_after_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": str(int(LONGEST_RETRY_AFTER_S))}, LONGEST_RETRY_AFTER_S),
        ({"retry-after": "1e300"}, None),
        ({"retry-after": "99999999999999999999"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_taken_if_plausible(headers: dict[str, str], seconds: float | None) -> None:
    """The retry-after time is taken if a provider can mean it."""
    assert retry_after_s(headers) == seconds
