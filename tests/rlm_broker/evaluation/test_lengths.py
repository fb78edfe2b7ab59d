import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.lengths import lengths_of


def test_lengths_are_in_rising_order_without_repetitions() -> None:
    found = lengths_of("1M, 8k,64k,8000,1.5k", "tokens")
    assert [(length.name, length.amount) for length in found] == [
        ("1.5k", 1500),
        ("8k", 8000),
        ("64k", 64_000),
        ("1m", 1_000_000),
    ]


def test_length_in_tokens_depends_on_the_text() -> None:
    (tokens,), (chars,) = lengths_of("8k", "tokens"), lengths_of("8k", "chars")
    assert (tokens.chars(4.8), tokens.chars(3.0), chars.chars(3.0)) == (38_400, 24_000, 8_000)


@pytest.mark.parametrize("text", ["8g", "-1", "many", "8 k", "1e9", "٣k"])
def test_length_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        lengths_of(text, "tokens")


def test_no_length_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no length"):
        lengths_of(" , ", "tokens")


@pytest.mark.parametrize("text", ["100", "0", "999m"])
def test_length_out_of_bounds_is_refused(text: str) -> None:
    (length,) = lengths_of(text, "tokens")
    with pytest.raises(ConfigurationError, match="a context has from 3,000 to 100,000,000"):
        length.chars(3.0)
