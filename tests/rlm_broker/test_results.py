"""Usage, and the sum of many."""

import dataclasses
import pickle

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.results import Block, Tally, Usage

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


class Said:
    value = (1, {2})
    problem = None


def test_a_block_has_values_beside_its_fields_and_keeps_them_when_pickled() -> None:
    block = Block("1", "ok", final_answer="text").with_values(Said(), None)
    assert (block.value, block.value_problem) == ((1, {2}), None)
    assert (block.final_value, block.final_value_problem) == ("text", None)
    assert pickle.loads(pickle.dumps(block)).value == (1, {2})
    assert block == Block("1", "ok", final_answer="text")
    assert msgspec.to_builtins(block) == dataclasses.asdict(block)
    assert "value" not in dataclasses.asdict(block)
