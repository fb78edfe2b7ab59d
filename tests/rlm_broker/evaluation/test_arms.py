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


def test_arm_may_have_settings_of_its_own() -> None:
    first, second = arms_of("rlm1:max_iterations=5:recursion=auto, rlm1:sub_model=openai/gpt-5-mini")
    assert first.settings == (("max_iterations", "5"), ("recursion", "auto"))
    assert second.settings == (("sub_model", "openai/gpt-5-mini"),)
    assert second.file_name == "rlm1:sub_model=openai%2Fgpt-5-mini.jsonl"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rlm1:", "give NAME=VALUE"),
        ("rlm1:recursion", "give NAME=VALUE"),
        ("rlm1:recursoin=auto", "did you mean recursion"),
        ("rlm1:api_key=secret", "which is no setting of an arm"),
        ("rlm1:max_depth=2", "which is no setting of an arm"),
        (f"rlm1:model={'x' * 200}", "has more than 120 characters"),
    ],
)
def test_wrong_setting_of_an_arm_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        arms_of(text)
