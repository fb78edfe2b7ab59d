"""Prose is plain: no pronouns that name no actor, docstrings that stand alone, narrow tables."""

import pytest

from tests.support.prose import faults, files, passages, rate

CODE = ("rlm_broker", "sandbox_worker", "scripts", "examples", "tests")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs")
MOST_PER_1000 = 1.0
"""Indefinite pronouns per 1,000 words: the rate of trio's prose, the highest of four codebases measured."""
WIDEST_CELL = 120
"""Characters of a table's cell. Longer text is a list or a section."""


@pytest.mark.parametrize("folder", [*CODE, *DOCUMENTS])
def test_prose_names_its_actors(folder: str) -> None:
    read = [each for path in files(folder) for each in passages(path)]
    assert read
    found = [f"{each.path}:{each.line}: {fault}" for each in read for fault in faults(each)]
    assert found == []
    assert rate(read) <= MOST_PER_1000


@pytest.mark.parametrize("folder", DOCUMENTS)
def test_cells_of_tables_are_narrow(folder: str) -> None:
    wide = [
        f"{path.name}:{number}: {cell.strip()[:60]}"
        for path in files(folder)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith("|")
        for cell in line.replace("\\|", "").split("|")
        if len(cell.strip()) > WIDEST_CELL
    ]
    assert wide == []
