import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.arms import arms_of


def test_arms_keep_their_order() -> None:
    assert [(arm.name, arm.max_depth) for arm in arms_of("rlm2, plain,rlm1,rlm2")] == [
        ("rlm2", 2),
        ("plain", 0),
        ("rlm1", 1),
    ]


@pytest.mark.parametrize("text", ["rlm", "rlm0", "rlm10", "Plain", "../plain"])
def test_unknown_arm_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no arm"):
        arms_of(text)


def test_no_arm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no arm: name some"):
        arms_of(",")
