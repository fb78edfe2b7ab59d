import json

import pytest

from rlm_broker.cli.failures import failures
from rlm_broker.errors import LimitReached, ModelFailed, RunCancelled


def test_what_was_found_before_the_end_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has it for each failure; stdout has it where the provider failed."""
    failed = ModelFailed("the provider is down")
    failed.partial_answer = "so far"
    for error in (LimitReached("max_tokens", 5, 4, "so far"), RunCancelled("so far"), failed):
        with pytest.raises(SystemExit) as left, failures("ask", as_json=True):
            raise error
        assert left.value.code == error.exit_code
        told = {"kind": error.kind, "message": str(error), "partial_answer": "so far"}
        assert json.loads(capsys.readouterr().out) == {"error": told}
    with pytest.raises(SystemExit) as left, failures("ask", as_json=False):
        raise failed
    assert (left.value.code, *capsys.readouterr()) == (5, "so far\n", "rlm-broker ask: the provider is down\n")
