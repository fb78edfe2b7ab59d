import re
from collections import Counter

from rlm_broker.evaluation.tasks import sayings
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.messages import classify, count
from rlm_broker.evaluation.tasks.problem import Problem


def _expected(problem: Problem, rows: list[tuple[str, str, int]]) -> object:
    """The answer by an independent way: from the user, kind and amount of each line, and the words of the question."""
    question = problem.question
    kinds = Counter(kind for _, kind, _ in rows)
    if "most frequent" in question:
        return kinds.most_common(1)[0][0]
    kind = re.findall(rf"kind ({'|'.join(sayings.LABELS)})", question)[-1]
    user = re.search(r"U-\d{7}", question)
    if user is None:
        return kinds[kind]
    amounts = [amount for who, what, amount in rows if who == user[0] and what == kind]
    return sum(amounts) if "sum of the amounts" in question else len(amounts)


def test_counts_of_labelled_lines_are_right() -> None:
    kinds = set()
    for seed in range(40):
        problem = count(Draw(seed), 12_000)
        lines = [line.split(" | ") for line in str(problem.context).splitlines()[1:]]
        rows = [(user, kind, int(amount)) for _, user, kind, amount, _ in lines]
        assert problem.key.expected == _expected(problem, rows)
        kinds.add(problem.key.scoring)
    assert kinds == {"near", "choice", "number"}


def test_counts_of_inferred_labels_are_right() -> None:
    """Each message is of the one kind that has its words; here they are looked up, where a model has to judge."""
    by_start = {
        re.escape(template).replace(r"\{\}", r"\w+"): label
        for label, templates in sayings._SAYINGS.items()
        for template in templates
    }
    kinds = set()
    for seed in range(20):
        problem = classify(Draw(seed), 12_000)
        rows = []
        for line in str(problem.context).splitlines()[1:]:
            _, user, text = line.split(" | ")
            (label,) = {label for pattern, label in by_start.items() if re.match(pattern, text)}
            rows.append((user, label, 0))
        assert problem.key.expected == _expected(problem, rows)
        kinds.add(problem.key.scoring)
    assert kinds == {"near", "choice"}


def test_few_users_write_most_messages() -> None:
    lines = str(count(Draw(1), 100_000).context).splitlines()[1:]
    users = Counter(line.split(" | ")[1] for line in lines)
    often = sum(number for _, number in users.most_common(len(users) // 5))
    assert 0.7 < often / len(lines) < 0.95
