"""A run that is followed in a notebook, with a real kernel."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker.watch.notebook import MAX_DISPLAYS, REFRESH_S
from tests.support.markup import read
from tests.support.notebook_kernel import Kernel, notebook_kernel
from tests.support.places import PROJECT

SET_UP = """
import asyncio
from rlm_broker import RLM, Limits, Sandbox, ScriptedClient
LOOK = "Look <b>\\n```repl\\nprint(len(context), '<script>')\\nanswers = llm_query_batched(['a', 'b'])\\n```"
REPLIES = [LOOK, "x", "y", "FINAL(done)"]
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with notebook_kernel(tmp_path_factory.mktemp("kernel")) as started:
        assert started.run(SET_UP).error is None
        yield started


@pytest.mark.notebook
@pytest.mark.parametrize(
    "call",
    [
        "rlm.completion('text', 'What?')",
        "await rlm.acompletion('text', 'What?')",
        "await rlm.start('text', 'What?')",
        "await asyncio.to_thread(rlm.completion, 'text', 'What?')",
    ],
)
def test_verbose_run_is_one_display_and_its_completion_a_page(kernel: Kernel, call: str) -> None:
    told = kernel.run(f"rlm = RLM(ScriptedClient(list(REPLIES)), verbose=True)\n{call}")
    assert (told.error, told.streams) == (None, "")
    ((identity, display),) = told.displays.items()
    page = read(display["text/html"])
    assert "scripted, answered after " in display["text/plain"]
    assert display["text/plain"] in page.text
    assert "4 <script>" in page.boxes
    assert "call 3: scripted" in page.text
    assert "starting" in told.sent[identity][0]["text/plain"]
    assert told.result is not None
    assert read(told.result["text/html"]).boxes[0] == "done"
    assert told.result["text/plain"].startswith("Completion(response='done'")


@pytest.mark.notebook
def test_run_of_one_cell_is_waited_for_in_the_next(kernel: Kernel) -> None:
    assert kernel.run("run = RLM(ScriptedClient(list(REPLIES))).start('text', 'What?')").error is None
    told = kernel.run("print(run.result(60).answer, (await run).answer)")
    assert (told.error, told.streams) == (None, "done done\n")


@pytest.mark.notebook
def test_failed_run_shows_the_users_line_and_one_sentence(kernel: Kernel) -> None:
    limited = "RLM(ScriptedClient(['x']), limits=Limits(max_llm_calls=1))"
    for code, error in (
        (f"{limited}.completion('text', 'What?')", "LimitReached: the limit max_llm_calls"),
        ("RLM('offline').completion(Path('missing'), 'What?')", "ContextRefused: missing does not exist"),
        ("RLM('offline').completion(Path('/bin/true'), 'What?')", "ContextRefused: /bin/true is binary"),
        ("RLM('offline').completion('What?', Path('missing'))", "ConfigurationError: the question must be text"),
        ("RLM('offline').start('text', output_type=int).result()", "ConfigurationError: the model offline answers in"),
    ):
        told = kernel.run(f"from pathlib import Path\n{code}")
        assert told.error is not None
        assert told.error.startswith(error)
        assert len(told.traceback) < 30


@pytest.mark.notebook
def test_updates_are_few_however_much_happens(kernel: Kernel) -> None:
    code = (
        "many = '```repl\\nfor number in range(3000): print(number)\\nfor _ in range(300): llm_query(\"x\")\\n```'\n"
        "client = ScriptedClient(lambda request: 'x' if not request.is_loop else many if len(request.messages) < 3 "
        "else 'FINAL(1)')\n"
        "completion = RLM(client, verbose=True, limits=Limits(max_llm_calls=500)).completion('text', 'What?')\n"
        "print(completion.execution_time)"
    )
    told = kernel.run(code)
    assert told.error is None
    ((identity, display),) = told.displays.items()
    assert len(told.sent[identity]) <= 3 + float(told.streams) / REFRESH_S
    assert "302 calls" in read(display["text/html"]).text


@pytest.mark.notebook
def test_many_runs_of_a_cell_share_a_display_and_the_next_cell_has_its_own(kernel: Kernel) -> None:
    told = kernel.run(
        "rlm = RLM(lambda messages: 'FINAL(1)' if 'xyzzy' in str(messages) else 1 / 0, verbose=True)\n"
        f"asked = ['xyzzy'] * {MAX_DISPLAYS + 3} + ['bad']\n"
        "async with rlm:\n"
        "    for context in asked:\n"
        "        await asyncio.gather(rlm.acompletion(context, 'What?'), return_exceptions=True)\n"
    )
    assert told.error is None
    assert len(told.displays) == MAX_DISPLAYS + 1
    shared = list(told.displays.values())[-1]
    assert shared["text/plain"].startswith("4 further runs: 0 open, 4 ended, 1 of them failed; 3 calls, ")
    assert read(shared["text/html"]).text == shared["text/plain"]
    after = kernel.run("rlm.completion('xyzzy', 'What?').response")
    assert ["answered" in display["text/plain"] for display in after.displays.values()] == [True]


@pytest.mark.notebook
def test_each_run_at_the_same_time_has_a_display_a_failed_one_too_and_one_that_is_not_verbose_has_none(
    kernel: Kernel,
) -> None:
    told = kernel.run(
        "def answer(messages):\n"
        "    if 'xyzzy' in str(messages): return 'FINAL(1)'\n"
        "    raise RuntimeError('<i>down</i>')\n"
        "rlm = RLM(answer, verbose=True)\n"
        "asked = [rlm.acompletion('xyzzy', 'A?'), rlm.acompletion('text', 'B?'), RLM(answer).acompletion('xyzzy', 'C?')]\n"
        "done = await asyncio.gather(*asked, return_exceptions=True)\n"
    )
    assert (told.error, told.streams) == (None, "")
    failed, answered = sorted(told.displays.values(), key=lambda display: "answered after" in display["text/plain"])
    assert "answered after" in answered["text/plain"]
    assert "failed after" in failed["text/plain"]
    assert "<i>down</i>" in read(failed["text/html"]).text


@pytest.mark.notebook
def test_a_block_and_its_pictures_are_a_page(kernel: Kernel) -> None:
    told = kernel.run(
        "with Sandbox() as sandbox, sandbox.repl() as repl:\n"
        "    block = repl.execute(\"from PIL import Image\\nImage.new('RGB', (3, 2)).show()\\n1 / 0\")\n"
        "block"
    )
    assert told.result is not None
    page = read(told.result["text/html"])
    assert page.text.startswith("error after ")
    assert "ZeroDivisionError: division by zero" in page.boxes
    assert len(page.pictures) == 1


@pytest.mark.parametrize("before", ["", "import IPython; "])
def test_outside_of_a_kernel_lines_are_printed_and_ipython_is_not_imported(before: str, tmp_path: Path) -> None:
    if before:
        pytest.importorskip("IPython", reason="needs nbclient and ipykernel")
    code = (
        f"import sys; {before}from rlm_broker import RLM, ScriptedClient\n"
        "RLM(ScriptedClient(['FINAL(1)']), verbose=True).completion('text', '?')\nprint('IPython' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{bool(before)}\n"
    assert "[depth 0] run 1 with scripted" in done.stderr
