"""What the documents name exists."""

import re

import rlm_broker
from rlm_broker.limits import Limits
from tests.support.places import PROJECT


def test_every_test_that_the_list_of_differences_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (PROJECT / "docs" / "differences.md").read_text()))
    sources = "\n".join(path.read_text() for path in (PROJECT / "tests").rglob("test_*.py"))
    assert len(named) > 60
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_every_limit_that_the_documents_name_exists() -> None:
    text = "".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    for call in re.findall(r"\bLimits\(([^()]*)\)", text):
        names = [part.partition("=")[0].strip() for part in call.split(",") if part.strip()]
        assert set(names) - set(Limits.model_fields) == set()


def test_public_names_can_be_imported() -> None:
    assert all(getattr(rlm_broker, name) is not None for name in rlm_broker.__all__)


def test_code_in_the_guide_is_python() -> None:
    for document in (PROJECT / "docs" / "guide.md", PROJECT / "README.md"):
        for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
            compile(code, document.name, "exec")
