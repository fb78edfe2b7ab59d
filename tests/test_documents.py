"""The code of the documents and docstrings runs, and prints what they show.

The docstring of `tests/support/page_code.py` says which blocks of documents are run and how they are marked, that of
`tests/support/docstring_code.py` what the examples of docstrings find.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import forked_python, page_code, page_run
from tests.support.places import PROJECT
from tests.support.tables import table

WAIT_S = 280
WITH_LITELLM = frozenset({"tutorial.md", "others.md", "rlms.md"})
"""Pages that name a model of a provider. Their processes are forked from one that has litellm, which takes seconds."""
PAGES = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])


def _has_code(path: Path) -> bool:
    return any(
        piece.mark or piece.language in ("python", "console", *page_run.PARSERS)
        for piece in page_code.pieces(path.read_text())
    )


PAGES_WITH_CODE = [path for path in PAGES if _has_code(path)]
PARTS = 6
TOGETHER = [path for path in PAGES_WITH_CODE if path.name in WITH_LITELLM]
WITH_DOCSTRINGS = [PROJECT / "rlm_broker", PROJECT / "sandbox_worker"]


@pytest.mark.parametrize("part", range(PARTS))
def test_page_code_runs(part: int, tmp_path: Path) -> None:
    """Two pages run at the same time: many wait for the end of a block or of a server."""
    forked_python.address()  # one process for both threads

    @table("path", [path for path in PAGES_WITH_CODE if path not in TOGETHER][part::PARTS], at_once=2)
    def run(path: Path, tmp_path: Path) -> None:
        found = faults(path, tmp_path)
        assert not found, "\n".join(found)

    run(tmp_path=tmp_path)


@table("path", [*TOGETHER, *WITH_DOCSTRINGS], at_once=2)
def test_code_that_names_providers_runs(path: Path, tmp_path: Path) -> None:
    """With the examples of docstrings. These are one test, so that litellm is imported by one process of all that run tests."""
    found = faults(path, tmp_path)
    assert not found, "\n".join(found)


def faults(path: Path, tmp_path: Path) -> list[str]:
    """Run the code of a page, or of a package's docstrings, in a process of its own, and return its faults."""
    folder = tmp_path / "page"
    folder.mkdir()
    said = tmp_path / "faults.json"
    forks = forked_python.address(
        *(["tests.support.page_preload"] if path.name in WITH_LITELLM or path.is_dir() else [])
    )
    page = ["-m", "tests.support.page_run", str(path), str(folder), forked_python.address(), str(said)]
    with forked_python.Python(page, cwd=PROJECT, stdout=subprocess.DEVNULL, forks=forks) as process:
        process.communicate(timeout=WAIT_S)
    found: list[str] = json.loads(said.read_text()) if said.exists() else ["its process ended before the page did"]
    return found


WRONG = """
```python
print("one")
```
<!-- output -->
```text
two
```
```python
x = await asyncio.sleep(0, 1)
```
```console
$ rlm-broker --version
rlm-broker, version 9
```
```json
{"open":
```
"""


def test_page_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(WRONG)
    found = faults(page, tmp_path)
    assert [each.partition(": ")[0] for each in found] == [f"wrong.md:{line}" for line in (7, 10, 13, 17)]
    assert "NameError" in found[1]


def test_mark_without_block_is_refused() -> None:
    with pytest.raises(ValueError, match="does not stand"):
        page_code.pieces("<!-- output -->\n\n```text\nx\n```\n")
