"""Usage, and the sum of many."""

from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.results import Tally, Usage

USAGES = st.builds(
    Usage,
    total_calls=st.integers(0, 3),
    total_input_tokens=st.integers(0, 10**9),
    total_output_tokens=st.integers(0, 10**9),
    total_cost=st.none() | st.integers(0, 1000).map(lambda cents: cents / 128),
    stored_calls=st.integers(0, 3),
)


@given(st.lists(USAGES))
def test_a_tally_is_the_sum_of_its_usages(usages: list[Usage]) -> None:
    tally = Tally()
    for usage in usages:
        tally.add(usage)
    assert tally.usage == sum(usages, Usage())
