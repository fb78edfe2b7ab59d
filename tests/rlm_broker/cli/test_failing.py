import json

import pytest

from rlm_broker.cli.failing import failures
from rlm_broker.errors import LimitReached, ModelFailed, RunCancelled


@pytest.mark.parametrize("error", [LimitReached("max_tokens", 5, 4, "so far"), RunCancelled("so far")])
def test_what_was_found_before_the_end_is_in_the_json_of_a_failure(
    error: LimitReached | RunCancelled, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, failures("ask", as_json=True):
        raise error
    assert left.value.code == error.exit_code
    told = {"kind": error.kind, "message": str(error), "partial_answer": "so far"}
    assert json.loads(capsys.readouterr().out) == {"error": told}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_best_answer_so_far_is_printed_where_the_provider_failed(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ModelFailed("the provider is down")
    failed.partial_answer = "so far"
    with pytest.raises(SystemExit) as left, failures("ask", as_json=as_json):
        raise failed
    said = capsys.readouterr()
    assert left.value.code == 5
    if as_json:
        assert json.loads(said.out)["error"]["partial_answer"] == "so far"
    else:
        assert (said.out, said.err) == ("so far\n", "rlm-broker ask: the provider is down\n")
