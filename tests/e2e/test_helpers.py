"""Helpers that code finds for large texts and for queries, in real sandboxes."""

from pathlib import Path
from typing import Any

from rlm_broker import Query, Sandbox, ScriptedClient, Slot, Variable
from tests.e2e.conftest import MakeRLM
from tests.support.venvs import a_venv

FOLDER = {"a.txt": "alpha\nbeta\n" * 1000, "b.txt": "gamma\n" * 1000 + "beta at last"}


def test_helpers_work_on_a_folder(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(FOLDER) as repl:
        ran = repl.execute("search('beta', context, around=3, limit=1)")
        assert (
            ran.stdout == "1,001 matches, of which this has the first 1\n'a.txt', line 2 [6:10] 'ha\\nbeta\\nal'\n"
        ), ran.stderr
        code = "[len(chunks(context, 1000)), chunks(context, 1000)[-1].part, lines(context, 1, 1)]"
        assert repl.execute(code, value=True).value == [19, "b.txt", {"a.txt": "alpha\n", "b.txt": "gamma\n"}]


def test_helpers_work_with_the_packages_of_an_environment(tmp_path: Path) -> None:
    with Sandbox(python=a_venv(tmp_path)) as sandbox, sandbox.repl("x y") as repl:
        assert repl.execute("search('y', context)").stdout == "1 match\nline 1 [2:3] 'x y'\n"


def test_helpers_are_variables_that_code_overwrites_for_good(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(FOLDER) as repl:
        repl.execute("lines = context['a.txt'].splitlines()\ndel chunks\ndef search(x): return x * 2")
        assert repl.execute("[len(lines), search(4), 'chunks' in globals()]", value=True).value == [2000, 8, False]
        assert repl.execute("FINAL_VAR(lines[0])").final_answer == "alpha"
        assert repl.execute("SHOW_VARS()", value=True).value == {"lines": "list", "search": "function"}


def test_helpers_are_no_variables_of_the_code(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("text") as repl:
        assert repl.execute("SHOW_VARS()", value=True).value == {}
        assert repl.execute("FINAL_VAR('lines')").error == (
            "NameError: FINAL_VAR: there is no variable 'lines'; variables: none yet"
        )
        assert "first: int = 1" in repl.execute("help(lines)").stdout


def test_helper_names_are_free_for_tools(open_sandbox: Sandbox) -> None:
    async def answer(query: Query) -> list[Slot]:
        assert query.tool == "search"
        return [Slot(text='"found"')]

    with open_sandbox.repl("x", answer, tools=["search"], values={"lines": [1]}) as repl:
        assert repl.execute("[search('x'), lines]", value=True).value == ["found", [1]]


def test_chunks_are_prompts(rlm: MakeRLM) -> None:
    seen: list[Any] = []

    def reply(request: Any) -> str:
        seen.append(request.messages[-1].content)
        if request.is_loop:
            return "```repl\nFINAL(','.join(llm_query_batched(chunks(context, 4), temperature=0)))\n```"
        assert request.temperature == 0
        return str(seen[-1]).upper()

    assert rlm(ScriptedClient(reply)).completion("aaa bbb ccc", "?").response == "AAA ,BBB ,CCC"


def test_unrequested_variables_are_dropped(open_sandbox: Sandbox) -> None:
    forge = (
        "import gc, msgspec\nfrom sandbox_worker.repl.repl import Repl\n"
        "(own,) = [each for each in gc.get_objects() if type(each) is Repl]\n"
        "frame = Repl._frame_of\n"
        "def forged(self, result):\n"
        "    from sandbox_worker.wire.messages import VariableFact\n"
        "    return frame(self, msgspec.structs.replace(result, variables=[VariableFact('forged', 'int')]))\n"
        "Repl._frame_of = forged"
    )
    with open_sandbox.repl("text") as repl:
        block = repl.execute(forge)
        assert (block.status, block.variables) == ("ok", ())
        assert repl.execute("1", variables=True).variables == (Variable("forged", "int"),)
