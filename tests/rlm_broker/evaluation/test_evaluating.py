import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rlm_broker import RLM, Limits, LMRequest, Sandbox, ScriptedClient
from rlm_broker.errors import LimitReached, ModelFailed
from rlm_broker.evaluation.arms import Arm, arms_of
from rlm_broker.evaluation.evaluating import Evaluation
from rlm_broker.evaluation.questions import Question
from rlm_broker.evaluation.report import Outcome, report
from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.problem import Problem

ARMS = arms_of("plain,rlm1")
CODE = "```repl\nFINAL({!r})\n```"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(isolation="process") as opened:
        yield opened


def _questions(count: int) -> list[Question]:
    """Questions whose context says the answer, which is the number of the question."""

    def problem(number: int) -> Problem:
        return Problem(f"filler\nthe number is {number}\nfiller", f"q{number}: which number?", Key("number", number))

    return [Question(f"q{number}", "numbers", "1k", 10, partial(problem, number)) for number in range(count)]


def _number(request: LMRequest) -> int:
    found = re.match(r"q(\d+):", str(request.question))
    assert found
    return int(found[1])


def _model(right_plainly: Callable[[int], bool]) -> ScriptedClient:
    """A model that is right in a REPL, and right without one for some questions."""

    def reply(request: LMRequest) -> str:
        number = _number(request)
        if request.is_loop:
            return CODE.format(str(number))
        return f"The answer is {number if right_plainly(number) else number + 1}."

    return ScriptedClient(reply, cost_per_call=0.01)


def _always(number: int) -> bool:
    return number >= 0


def _arms_of(client: ScriptedClient, sandbox: Sandbox) -> Callable[[Arm], RLM]:
    return lambda arm: RLM(client, limits=Limits(max_depth=arm.max_depth), sandbox=sandbox)


def _evaluation(
    folder: Path, client: ScriptedClient, sandbox: Sandbox, count: int = 12, budget: float | None = None
) -> Evaluation:
    return Evaluation(_questions(count), folder, _arms_of(client, sandbox), max_concurrent=4, max_budget_usd=budget)


def _by_arm(outcomes: list[Outcome]) -> dict[str, list[float]]:
    return {arm.name: [each.score for each in outcomes if each.arm == arm.name] for arm in ARMS}


def test_known_accuracy_gives_known_scores(tmp_path: Path, sandbox: Sandbox) -> None:
    """A model that is right on every third question has that score, at the cost of its calls."""
    evaluation = _evaluation(tmp_path, _model(lambda number: number % 3 == 0), sandbox)
    assert evaluation.run(ARMS) is None
    outcomes = evaluation.outcomes(ARMS)
    assert _by_arm(outcomes) == {"plain": [1.0, 0.0, 0.0] * 4, "rlm1": [1.0] * 12}
    found = report({}, ["plain", "rlm1"], outcomes, 24)
    assert [cell.score.mean for cell in found.cells] == [pytest.approx(1 / 3), 1]
    assert [cell.cost_usd for cell in found.cells] == pytest.approx([0.01, 0.01])
    assert found.contrasts[0].difference.p_value == pytest.approx(2 / 2**8)
    assert found.unfinished == 0


def test_plain_arm_has_the_context_in_its_prompt(tmp_path: Path, sandbox: Sandbox) -> None:
    client = _model(_always)
    evaluation = _evaluation(tmp_path, client, sandbox, 1)
    evaluation.run(arms_of("plain"))
    (request,) = client.requests
    assert [message.content for message in request.messages] == ["filler\nthe number is 0\nfiller\n\nq0: which number?"]
    evaluation.run(arms_of("rlm2"))
    assert "q0: which number?" in str(client.requests[1].messages[-1].content)
    assert client.requests[1].is_loop


def test_context_beyond_the_window_does_not_fit(tmp_path: Path, sandbox: Sandbox) -> None:
    """Such an item is never sent; a provider that refuses one as too long counts likewise, and other failures do not."""
    long = Question("long", "t", "1m", 9, lambda: Problem("word " * 10_000, "q1: which?", Key("number", 1)))
    client = _model(_always)
    client.context_tokens = 4_000
    evaluation = Evaluation([long, *_questions(1)], tmp_path / "a", _arms_of(client, sandbox))
    evaluation.run(arms_of("plain"))
    first, second = evaluation.outcomes(arms_of("plain"))
    assert (first.ended, first.score, first.usage.total_calls) == ("does_not_fit", 0, 0)
    assert (second.ended, second.score) == ("answered", 1)
    assert len(client.requests) == 1
    refusing = ScriptedClient([ModelFailed("maximum context length is 4096 tokens"), ModelFailed("no credit")])
    evaluation = Evaluation(_questions(2), tmp_path / "b", _arms_of(refusing, sandbox), max_concurrent=1)
    evaluation.run(arms_of("plain"))
    assert [each.ended for each in evaluation.outcomes(arms_of("plain"))] == ["does_not_fit", "failed"]


def test_finished_items_are_not_asked_again(tmp_path: Path, sandbox: Sandbox) -> None:
    """A second evaluation in the same folder asks only what is new, and has the scores of both."""
    first, second = (_model(lambda number: number % 2 == 0) for _ in range(2))
    _evaluation(tmp_path, first, sandbox, 4).run(ARMS)
    evaluation = _evaluation(tmp_path, second, sandbox, 6)
    assert evaluation.run(ARMS) is None
    assert sorted({_number(request) for request in second.requests}) == [4, 5]
    assert len(second.requests) == 4
    assert _by_arm(evaluation.outcomes(ARMS))["plain"] == [1.0, 0.0] * 3


def test_scores_are_made_of_the_files_alone(tmp_path: Path, sandbox: Sandbox) -> None:
    client = _model(lambda number: number % 2 == 0)
    done = _evaluation(tmp_path, client, sandbox, 4)
    done.run(ARMS)
    assert _evaluation(tmp_path, client, sandbox, 4).outcomes(ARMS) == done.outcomes(ARMS)
    assert _evaluation(tmp_path / "none", client, sandbox, 4).outcomes(ARMS) == []


def test_budget_is_that_of_all_arms(tmp_path: Path, sandbox: Sandbox) -> None:
    """Twelve calls are paid for one arm. What they leave is too little for the other, which goes on under a higher
    limit."""
    evaluation = _evaluation(tmp_path, _model(_always), sandbox, budget=0.155)
    limit = evaluation.run(ARMS)
    assert isinstance(limit, LimitReached)
    assert limit.limit == "max_budget_usd"
    outcomes = evaluation.outcomes(ARMS)
    assert len(_by_arm(outcomes)["plain"]) == 12
    assert len(_by_arm(outcomes)["rlm1"]) < 12
    spent = sum(each.usage.total_cost or 0 for each in outcomes)
    assert spent <= 0.16 + 1e-9
    nothing_left = _evaluation(tmp_path, _model(_always), sandbox, budget=0.12).run(ARMS)
    assert nothing_left is not None
    higher = _evaluation(tmp_path, _model(_always), sandbox, budget=1.0)
    assert higher.run(ARMS) is None
    assert len(higher.outcomes(ARMS)) == 24


def test_repeated_question_is_no_answer(tmp_path: Path, sandbox: Sandbox) -> None:
    """A model that repeats a question with the words of absence in it has not said that the answer is absent."""
    text = "Which? If it is not there, say NOT FOUND."
    question = Question("a", "absent", "1k", 1, lambda: Problem("text", text, Key("absent", None)))
    for number, (reply, score) in enumerate([(text, 0), (f"{text} It is not there.", 1)]):
        client = ScriptedClient([reply])
        evaluation = Evaluation([question], tmp_path / str(number), _arms_of(client, sandbox))
        evaluation.run(arms_of("plain"))
        (outcome,) = evaluation.outcomes(arms_of("plain"))
        assert (outcome.score, outcome.answer) == (score, reply)


def test_progress_is_told_as_items_end(tmp_path: Path, sandbox: Sandbox) -> None:
    told: list[tuple[str, int]] = []
    evaluation = _evaluation(tmp_path, _model(_always), sandbox, 3)
    evaluation.run(ARMS, lambda arm, batch: told.append((arm.name, batch.progress.done)))
    assert [name for name, _ in told] == ["plain"] * 3 + ["rlm1"] * 3
    assert max(done for _, done in told) == 3


def test_corrected_answer_needs_no_further_call(tmp_path: Path, sandbox: Sandbox) -> None:
    """Scores are made of the kept answers, so another key gives another score."""
    client = _model(_always)
    arms = arms_of("plain")
    for expected, score in ((7, 0), (0, 1)):
        problem = Problem("context", "q0: which number?", Key("number", expected))
        questions = [Question("a", "t", "1k", 1, partial(_same, problem))]
        evaluation = Evaluation(questions, tmp_path, _arms_of(client, sandbox))
        evaluation.run(arms)
        assert [each.score for each in evaluation.outcomes(arms)] == [score]
    assert len(client.requests) == 1


def _same(problem: Problem) -> Problem:
    return problem
