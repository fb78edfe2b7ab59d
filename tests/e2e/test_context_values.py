"""Contexts that are tables, arrays and objects, as a REPL has them: cold, ready, restarted, later, and by a template."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import RLM, ReplLimits, Sandbox, ScriptedClient, Template, store
from tests.support.tables import table
from tests.support.venvs import a_venv

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
LOOK = "print(type(context).__name__, context.shape, context['n'].sum(), context_0 is context)"


def frame(rows: int) -> Any:
    import pandas

    return pandas.DataFrame({"n": range(rows), "text": [f"row {number}" for number in range(rows)]})


@pytest.fixture(scope="module")
def with_pandas() -> Iterator[Template]:
    """A template whose REPLs have pandas: its import takes half a second in each other one."""
    with (
        Sandbox(ReplLimits(later_context_bytes=1 << 30), warm=0) as sandbox,
        sandbox.template(imports=["pandas"]) as template,
    ):
        yield template


@table("rows", [3, 50_000])
def test_context_table_survives_a_kill(rows: int) -> None:
    table = frame(rows)
    expected = f"DataFrame ({rows}, 2) {table['n'].sum()} True\n"
    with Sandbox(warm=1) as sandbox, sandbox.repl(table) as repl:
        assert repl.execute(LOOK).stdout == expected
        assert repl.execute("context = None").status == "ok"
        assert repl.execute(LOOK).stdout == expected
        assert repl.execute("import os; os._exit(1)").status == "killed"
        assert repl.execute(LOOK).stdout == expected


def test_context_dict_holds_tables_and_texts(with_pandas: Template) -> None:
    table = frame(20_000)
    look = "print(context['sales'].shape, context['log'][:2], context['kinds'] == {1, 2})"
    with store(table) as stored:
        for sales in (table, stored):
            with with_pandas.repl(context={"sales": sales, "log": "x" * 9, "kinds": {1, 2}}) as repl:
                assert repl.execute(look).stdout == "(20000, 2) xx True\n"


def test_context_table_comes_later_or_by_template(with_pandas: Template, open_sandbox: Sandbox) -> None:
    table = frame(20_000)
    with with_pandas.repl(context="first") as repl:
        assert repl.add_context(table) == "context_1"
        assert repl.execute("print(context, context_1.shape)").stdout == "first (20000, 2)\n"
    with open_sandbox.template(context=table, setup="rows = len(context)") as template, template.repl() as repl:
        assert repl.execute("print(rows, context.shape)").stdout == "20000 (20000, 2)\n"


def test_context_table_without_package_fails_each_block(tmp_path: Path) -> None:
    """A table that cannot be loaded is the error of each block."""
    with Sandbox(python=a_venv(tmp_path / "venv")) as sandbox:
        for rows in (3, 50_000):
            with sandbox.repl(frame(rows)) as repl:
                block = repl.execute("print('ran')")
                assert (block.status, block.stdout) == ("error", "")
                assert "context cannot be loaded: it needs the package" in str(block.error)
                assert "which is not installed here" in str(block.error)


def test_context_table_past_memory_is_told(open_sandbox: Sandbox) -> None:
    import numpy

    array = numpy.zeros(20_000_000)
    with open_sandbox.repl(array, limits=ReplLimits(memory_bytes=400 << 20)) as repl:
        block = repl.execute("1")
        assert block.status in ("error", "killed")
        assert "memory" in str(block.error)


def test_run_tells_the_context_type(open_sandbox: Sandbox) -> None:
    seen: list[str] = []

    def model(messages: Any) -> str:
        seen.append(str(messages))
        return "```repl\nFINAL(context['n'].max())\n```"

    with RLM(ScriptedClient(model), sandbox=open_sandbox) as rlm:
        assert rlm.completion(frame(1_000), "What is the largest?").response == "999"
    assert "`context` is a DataFrame of shape (1000, 2)." in seen[0]
