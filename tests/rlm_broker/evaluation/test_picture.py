import xml.etree.ElementTree as ElementTree

from rlm_broker.evaluation.picture import svg
from rlm_broker.evaluation.report import report
from tests.rlm_broker.evaluation.test_report import outcome

NAMESPACE = "{http://www.w3.org/2000/svg}"


def _picture(*tasks: str, model: str = "offline") -> ElementTree.Element:
    outcomes = [
        outcome(arm, f"{task}-{length}", float(arm == "rlm1"), task=task, length=length)
        for arm in ("plain", "rlm1", "rlm2")
        for task in tasks
        for length in ("8k", "64k")
    ]
    return ElementTree.fromstring(svg(report({"model": model}, ["plain", "rlm1", "rlm2"], outcomes, len(outcomes))))


def test_picture_has_a_panel_for_each_task() -> None:
    picture = _picture("needle", "pairs")
    texts = [text.text for text in picture.iter(f"{NAMESPACE}text")]
    assert {"needle", "pairs", "8k", "64k", "plain", "rlm1", "rlm2"} <= set(texts)
    points = [title.text for title in picture.iter(f"{NAMESPACE}title")]
    assert len(points) == 2 * 2 * 3
    assert "rlm1, pairs, 64k: 1.00 (0.21 to 1.00)" in points


def test_points_are_where_their_scores_are() -> None:
    """A higher score is further up; the line of an arm goes through its points."""
    picture = _picture("needle")
    lines = [line.attrib["points"].split() for line in picture.iter(f"{NAMESPACE}polyline")]
    (plain, rlm1, _) = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    assert plain[0][1] == plain[1][1] > rlm1[0][1] == rlm1[1][1]
    assert plain[0][0] < rlm1[0][0] < plain[1][0]


def test_picture_has_both_schemes_and_no_other_file() -> None:
    text = svg(report({}, ["plain"], [outcome("plain", "a", 1)], 1))
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert text.count("http") == 1  # the name of SVG itself


def test_names_in_a_picture_are_text() -> None:
    """Names of tasks and models come from files of users: they are no markup."""
    picture = _picture("<script>\x00&", model='"/><script>')
    assert not list(picture.iter(f"{NAMESPACE}script"))
    assert any(text.text == "<script> &" for text in picture.iter(f"{NAMESPACE}text"))


def test_picture_without_results_is_whole() -> None:
    assert ElementTree.fromstring(svg(report({}, ["plain"], [], 1))).tag == f"{NAMESPACE}svg"
