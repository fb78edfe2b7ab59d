"""Settings of a batch that goes on, compared with those of its beginning."""

import re
from typing import Any

import pytest

from rlm_broker.batch.settings import changed_settings
from rlm_broker.errors import ConfigurationError
from rlm_broker.run.prompts.system import prompts_digest

FIRST: dict[str, Any] = {"model": "a", "tools": [], "prompts": "p", "limits": {"x": 1, "y": None}, "long": "z" * 60}
SAME = "; give the same settings, or another file for the results"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"model": "b"}, "model was 'a' and is 'b'"),
        (
            {"tools": ["t"], "limits": {"x": 2, "y": 2.5}},
            "tools was [] and is ['t']; limits.x was 1 and is 2; limits.y was",
        ),
        ({"limits": {}}, "limits.x was 1 and is None; limits was None and is {}" + SAME),
        ({"model": 1, "tools": 2, "prompts": 3}, "prompts was 'p' and is 3" + SAME),
        (
            {"model": 1, "tools": 2, "prompts": 3, "limits": {"x": 1, "y": 2}},
            "prompts was 'p' and is 3; and 1 more" + SAME,
        ),
        ({"long": "z" * 61, "new": 0}, f"long was '{'z' * 59} and is '{'z' * 59}; new was None and is 0" + SAME),
    ],
)
def test_other_settings_are_refused_in_words(now: dict[str, Any], said: str) -> None:
    """A flag for other limits takes them alone."""
    for takes_others in (False, True):
        with pytest.raises(ConfigurationError, match=re.escape(said)) as refused:
            changed_settings(FIRST, {}, FIRST | now, takes_others=takes_others)
        assert "--settings-changed" not in str(refused.value)


def test_other_limits_and_prompts_are_taken_by_name() -> None:
    """A setting that is new and not set is no difference: a later release knows more of them."""
    other = FIRST | {"prompts": "q", "limits": {"x": 2, "y": None, "z": None}, "new": None}
    assert changed_settings(FIRST, {}, FIRST | {"new": None}) == {}
    with pytest.raises(
        ConfigurationError, match=f"{SAME}; or take them for the items that are left: --settings-changed"
    ):
        changed_settings(FIRST, {}, other)
    changed = changed_settings(FIRST, {}, other, (1, 1), takes_others=True)
    assert changed == {"prompts": "q", "limits.x": 2}
    taken = {name: [value] for name, value in changed.items()}
    assert changed_settings(FIRST, taken, other) == changed
    assert changed_settings(FIRST, taken, FIRST) == {}
    with pytest.raises(ConfigurationError, match=r"^limits\.x was 2 and is 3;"):
        changed_settings(FIRST, taken, other | {"limits": {"x": 3}})
    with pytest.raises(ConfigurationError, match="seed was 1 and is 2"):
        changed_settings(FIRST, {}, FIRST, (1, 2), takes_others=True)


def test_prompts_are_compared_and_not_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    before = prompts_digest("both")
    assert before == prompts_digest("both") != prompts_digest("compact")
    monkeypatch.setattr("rlm_broker.run.prompts.system.ending", lambda _: "End as you like.")
    assert prompts_digest("both") != before
