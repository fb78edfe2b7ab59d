"""Headers of failed calls."""

from rlm_broker.broker.clients.failures import LONGEST_RETRY_AFTER_S, retry_after_s


def test_retry_after_is_taken_if_plausible() -> None:
    longest = str(int(LONGEST_RETRY_AFTER_S))
    assert retry_after_s({"retry-after": "7"}) == 7.0
    assert retry_after_s({"retry-after-ms": "250", "retry-after": "7"}) == 0.25
    assert retry_after_s({"retry-after": longest}) == LONGEST_RETRY_AFTER_S
    odd = ["1e300", "99999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT", "-5", "nan", "soon"]
    assert [retry_after_s(headers) for headers in ({}, *({"retry-after": each} for each in odd))] == [None] * 7
