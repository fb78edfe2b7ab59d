import json

import pytest

from rlm_broker.cli.failing import failures
from rlm_broker.errors import LimitReached, RunCancelled


@pytest.mark.parametrize("error", [LimitReached("max_tokens", 5, 4, "so far"), RunCancelled("so far")])
def test_what_was_found_before_the_end_is_in_the_json_of_a_failure(
    error: LimitReached | RunCancelled, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, failures("ask", as_json=True):
        raise error
    assert left.value.code == error.exit_code
    told = {"kind": error.kind, "message": str(error), "partial_answer": "so far"}
    assert json.loads(capsys.readouterr().out) == {"error": told}
