"""The kernel for Jupyter, as a front end talks to it. Jupyter's own packages are used, and no stand-in."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from rlm_broker.cli.main import cli
from tests.support.notebook_kernel import kernel_environment
from tests.support.tables import table

manager_module = pytest.importorskip("jupyter_client.manager", reason="needs ipykernel")
pytest.importorskip("ipykernel", reason="needs ipykernel")
WAIT_S = 120


class FrontEnd:
    """A front end of one kernel."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str, **given: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        """Run a cell; return the reply to it, and what it sent: kind and content of each message under its request."""
        return self.outcome(self.client.execute(code, **{"allow_stdin": False, **given}))

    def outcome(self, request: str) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        """Wait for the end of a cell."""
        sent: list[tuple[str, dict[str, Any]]] = []
        while True:
            kind, content = self.next(request)
            if kind == "status" and content["execution_state"] == "idle":
                return self.reply(request), sent
            if kind not in ("status", "execute_input"):
                sent.append((kind, content))

    def next(self, request: str) -> tuple[str, dict[str, Any]]:
        """Return the next message to all front ends, which must be under this request."""
        message = self._message(self.client.get_iopub_msg, request)
        return message["msg_type"], message["content"]

    def reply(self, request: str) -> dict[str, Any]:
        """Return the reply to a request."""
        content: dict[str, Any] = self._message(self.client.get_shell_msg, request)["content"]
        return content

    def _message(self, receive: Callable[..., dict[str, Any]], request: str) -> dict[str, Any]:
        """Return a message under a request. The client asks a slow kernel several times whether it is ready."""
        while (message := receive(timeout=WAIT_S))["parent_header"].get("msg_type") == "kernel_info_request":
            pass
        assert message["parent_header"].get("msg_id") == request, message
        return message

    def ask(self, call: str, *given: Any, **named: Any) -> dict[str, Any]:
        """Make a request that is none to run a cell, and return its reply."""
        request = getattr(self.client, call)(*given, **named)
        while self.next(request) != ("status", {"execution_state": "idle"}):
            pass
        return self.reply(request)


@contextlib.contextmanager
def started(folder: Path, *options: str) -> Iterator[FrontEnd]:
    """Install the kernel below `folder`, and start it."""
    command = ["kernel", "install", "--prefix", str(folder), "--limit", "memory_bytes=256MB", *options]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    spec = json.loads((folder / "share" / "jupyter" / "kernels" / "rlm-broker" / "kernel.json").read_text())
    manager = manager_module.KernelManager(transport="ipc", ip=str(folder / "kernel"))
    manager._kernel_spec = manager.kernel_spec_manager.kernel_spec_class(**spec)
    manager.start_kernel(env=kernel_environment(folder), cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WAIT_S)
        yield FrontEnd(manager, client)
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def front_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    with started(tmp_path_factory.mktemp("kernel")) as opened:
        yield opened


def test_cell_has_its_streams_and_its_result(front_end: FrontEnd) -> None:
    reply, sent = front_end.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nn = 6\nn * 7")
    assert sent[:2] == [
        ("stream", {"name": "stdout", "text": "out\n"}),
        ("stream", {"name": "stderr", "text": "err\n"}),
    ]
    kind, result = sent[2]
    assert (kind, result["data"], result["execution_count"]) == (
        "execute_result",
        {"text/plain": "42"},
        reply["execution_count"],
    )
    assert front_end.run("%matplotlib inline\n_ + n")[1][0][1]["data"] == {"text/plain": "48"}
    assert [front_end.run(code)[1] for code in ("n;", "n\nif n:\n    n;  # hidden\n")] == [[], []]
    assert len(front_end.run("n  # shown;")[1]) == 1
    reply, sent = front_end.run("n", silent=True, user_expressions={"twice": "n * 2", "bad": "none"})
    assert sent == []
    assert reply["user_expressions"]["twice"]["data"] == {"text/plain": "12"}
    assert reply["user_expressions"]["bad"]["ename"] == "NameError"


def test_output_comes_while_a_cell_runs_and_interrupt_keeps_its_variables(front_end: FrontEnd) -> None:
    request = front_end.client.execute("kept = 5\nprint('begun', flush=True)\nwhile True: pass")
    while front_end.next(request)[0] != "stream":
        pass
    front_end.manager.interrupt_kernel()
    reply, (error,) = front_end.outcome(request)
    assert reply["ename"] == error[1]["ename"] == "KeyboardInterrupt"
    assert any("while True" in line for line in error[1]["traceback"])
    assert front_end.run("kept")[1][0][1]["data"] == {"text/plain": "5"}


def test_traceback_names_cells(front_end: FrontEnd) -> None:
    made, _ = front_end.run("def fail():\n    1 / 0")
    front_end.ask("complete", "fa")  # a block of the kernel's own, between
    reply, ((kind, error),) = front_end.run("fail()")
    assert (kind, error["ename"], error["evalue"]) == ("error", "ZeroDivisionError", "division by zero")
    assert f'  File "<cell {made["execution_count"]}>", line 2, in fail' in error["traceback"]
    assert f'  File "<cell {reply["execution_count"]}>", line 1, in <module>' in error["traceback"]
    assert front_end.run("raise SystemExit('over')")[0]["evalue"] == "over"


def test_displays_come_in_order_and_can_be_replaced(front_end: FrontEnd) -> None:
    _, sent = front_end.run(
        "from IPython.display import clear_output, display, update_display, HTML\n"
        "print('a')\ndisplay(1, HTML('<b>2</b>'))\nclear_output(wait=True)\n"
        "handle = display('x', display_id='own')\nhandle.update('y')\nupdate_display({'text/plain': 'z'}, display_id='own', raw=True)"
    )
    kinds = ["stream", "display_data", "display_data", "clear_output", "display_data", *["update_display_data"] * 2]
    assert [kind for kind, _ in sent] == kinds
    assert sent[1][1]["data"] == {"text/plain": "1"}
    assert sent[2][1]["data"]["text/html"].startswith("<iframe sandbox srcdoc=")
    assert sent[3][1] == {"wait": True}
    assert [content["transient"] for _, content in sent[4:]] == [{"display_id": "own"}] * 3
    assert [content["data"]["text/plain"] for _, content in sent[4:]] == ["'x'", "'y'", "z"]


def test_picture_that_code_leaves_to_the_sandbox_is_shown(front_end: FrontEnd) -> None:
    _, sent = front_end.run("from PIL import Image\nImage.new('1', (2, 2)).show()")
    assert [kind for kind, _ in sent] == ["display_data"]
    assert sent[0][1]["data"]["image/png"].startswith("iVBORw0KGgo")


def test_display_beyond_its_bound_raises_in_code(front_end: FrontEnd) -> None:
    code = "text = 'x' * 3_000_000\nfor shown in range(100):\n    display({'text/plain': text}, raw=True)"
    reply, sent = front_end.run(code)
    assert "one cell may show 67,108,864 characters" in reply["evalue"]
    assert [kind for kind, _ in sent] == ["display_data"] * 22 + ["error"]


def test_input_asks_the_front_end_of_the_cell(front_end: FrontEnd) -> None:
    request = front_end.client.execute("import getpass\ninput('name? ') + getpass.getpass()", allow_stdin=True)
    for prompt, is_hidden, line in (("name? ", False, "a"), ("Password: ", True, "b")):
        asked = front_end.client.get_stdin_msg(timeout=WAIT_S)
        assert asked["parent_header"]["msg_id"] == request
        assert asked["content"] == {"prompt": prompt, "password": is_hidden}
        front_end.client.input(line)
    assert front_end.outcome(request)[1][0][1]["data"] == {"text/plain": "'ab'"}
    assert front_end.run("input()")[0]["ename"] == "EOFError"


def test_input_without_an_answer_can_be_interrupted(front_end: FrontEnd) -> None:
    request = front_end.client.execute("input()", allow_stdin=True)
    front_end.client.get_stdin_msg(timeout=WAIT_S)
    front_end.manager.interrupt_kernel()
    assert front_end.outcome(request)[0]["ename"] == "KeyboardInterrupt"
    front_end.client.input("late")  # for no cell
    request = front_end.client.execute("input()", allow_stdin=True)
    front_end.client.get_stdin_msg(timeout=WAIT_S)
    front_end.client.input("in time")
    assert front_end.outcome(request)[1][0][1]["data"] == {"text/plain": "'in time'"}


def test_completion_and_help_leave_no_trace_in_variables(front_end: FrontEnd) -> None:
    front_end.run("import email\nnumber_of_parts = 3\n'last'")
    before = front_end.run("sorted(globals())")[1][0][1]["data"]
    front_end.run("'last'")
    assert front_end.ask("complete", "x = number_o")["matches"] == ["number_of_parts"]
    found = front_end.ask("complete", "number_of_parts.bit_c")
    assert (found["matches"], found["cursor_start"], found["cursor_end"]) == (["bit_count"], 16, 21)
    assert "message" in front_end.ask("complete", "from email.mess")["matches"]
    assert front_end.ask("complete", "none.x")["matches"] == []
    text = front_end.ask("inspect", "email.message_from_string(", 24)["data"]["text/plain"]
    assert "Signature: email.message_from_string(s, *args, **kws)" in text
    assert "Parse a string into a Message object model." in text
    assert not front_end.ask("inspect", "none")["found"]
    assert front_end.run("zip?")[0]["payload"][0]["data"]["text/plain"].startswith("Type: type\n\nzip(")
    assert front_end.run("_")[1][0][1]["data"] == {"text/plain": "'last'"}
    assert front_end.run("sorted(globals())")[1][0][1]["data"] == before


def test_lookup_of_an_object_that_hangs_ends(front_end: FrontEnd) -> None:
    front_end.run("class Slow:\n    def __dir__(self):\n        import time; time.sleep(1000)\nslow = Slow()")
    assert front_end.ask("complete", "slow.a")["matches"] == []
    assert front_end.run("1")[0]["status"] == "ok"


@table(
    "code, status",
    [
        ("1", "complete"),
        ("def f():", "incomplete"),
        ("def f():\n  1", "incomplete"),
        ("f(", "incomplete"),
        ("1 +* 2", "invalid"),
    ],
)
def test_prompt_is_told_whether_code_is_whole(front_end: FrontEnd, code: str, status: str) -> None:
    assert front_end.ask("is_complete", code)["status"] == status


def test_history_has_the_cells_of_this_kernel(front_end: FrontEnd) -> None:
    for code in ("10 + 1", "10 + 2", "10 + 2"):
        reply, _ = front_end.run(code)
    last = reply["execution_count"]
    assert front_end.ask("history", hist_access_type="tail", n=2, output=True)["history"] == [
        [1, last - 1, ["10 + 2", "12"]],
        [1, last, ["10 + 2", "12"]],
    ]
    found = front_end.ask("history", hist_access_type="search", pattern="10 +*", unique=True)["history"]
    assert [each[2] for each in found] == ["10 + 1", "10 + 2"]
    assert front_end.ask("history", hist_access_type="range", start=last, stop=last + 1)["history"] == [
        [1, last, "10 + 2"]
    ]


def test_killed_cell_is_told_and_its_variables_are_lost(front_end: FrontEnd) -> None:
    reply, ((kind, error),) = front_end.run("lost = 1\nimport os; os._exit(3)")
    assert (kind, error["ename"]) == ("error", "ReplKilled")
    assert "exit code 3 (os._exit)" in error["evalue"]
    assert "variables are as they were before" in error["evalue"]
    assert reply["status"] == "error"
    assert front_end.ask("complete", "displ")["matches"] == ["display"]
    assert [kind for kind, _ in front_end.run("display(1)")[1]] == ["display_data"]
    assert front_end.run("lost")[0]["ename"] == "NameError"
    for _ in range(6):  # more than max_repl_restarts
        front_end.run("import os; os._exit(3)")
    assert front_end.run("1")[0]["status"] == "ok"


def test_function_of_the_kernel_refuses_what_code_forges(front_end: FrontEnd) -> None:
    for call in ("__kernel__()", "__kernel__('display', 1, 2, 3)", "__kernel__('input', 1, 2)", "__kernel__(x=1)"):
        assert front_end.run(call)[0]["ename"] in ("ToolError", "TypeError"), call
    _, sent = front_end.run("__kernel__('display', {'text/evil': 'x', 'text/plain': 'y', 'image/png': 5}, 7, True)")
    assert sent == [("display_data", {"data": {"text/plain": "y"}, "metadata": {}, "transient": {}})]
    assert front_end.run("llm_query('a')")[0]["ename"] == "NameError"


def test_shutdown_and_kill_leave_no_process(tmp_path: Path) -> None:
    for end in ("shut down", "killed"):
        (tmp_path / end).mkdir()
        with started(tmp_path / end) as front_end:
            front_end.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
            kernel = psutil.Process(front_end.manager.provisioner.pid)
            below = kernel.children(recursive=True)
            assert len(below) >= 4
            if end == "killed":
                os.kill(kernel.pid, signal.SIGKILL)
            else:
                front_end.manager.shutdown_kernel()
            assert psutil.wait_procs(below, WAIT_S)[1] == []


def test_kernel_is_installed_with_its_options_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    options = ["--prefix", str(tmp_path), "--name", "tables", "--no-allow-exec", "--limit", "block_timeout_s=5"]
    done = CliRunner().invoke(cli, ["kernel", "install", *options])
    assert "installed tables" in done.output
    spec = json.loads((tmp_path / "share" / "jupyter" / "kernels" / "tables" / "kernel.json").read_text())
    given = json.loads(spec["argv"][-1])
    assert given["limits"] == {"block_timeout_s": 5, "block_wall_timeout_s": 86_400}
    assert given["allow_exec"] is False
    assert spec["display_name"] == "Python (sandbox, tables)"
    assert "removed" in CliRunner().invoke(cli, ["kernel", "uninstall", "--name", "tables"]).output
    gone = CliRunner().invoke(cli, ["kernel", "uninstall", "--name", "tables"])
    assert (gone.exit_code, "there is no kernel 'tables'" in gone.output) == (2, True)
    others = CliRunner().invoke(cli, ["kernel", "uninstall", "--name", "python3"])
    assert (others.exit_code, "is not one of rlm-broker's" in others.output) == (2, True)


@table(
    "options, why",
    [
        (["--user", "--sys-prefix"], "exclude each other"),
        (["--name", "a b"], "letters, digits"),
        (["--limit", "memory=1"], "memory"),
        (["--prefix", "/proc/none"], "cannot be installed"),
    ],
)
def test_kernel_is_not_installed_with_options_that_cannot_be_used(options: list[str], why: str) -> None:
    done = CliRunner().invoke(cli, ["kernel", "install", *options])
    assert done.exit_code == 2
    assert why in done.output


@table(
    "forms, shown",
    [
        ({"text/plain": "a", "image/png": "aa"}, {"text/plain": "a", "image/png": "aa"}),
        ({"text/plain": "<M>", "text/markdown": "<script>"}, {"text/plain": "<script>"}),
        ({"text/plain": "x", "text/latex": "$x$"}, {"text/plain": "x", "text/latex": "$x$"}),
        ({"text/latex": r"\href{javascript:1}{x}"}, {"text/plain": r"\href{javascript:1}{x}"}),
        (
            {"text/latex": r"\csname href\endcsname{javascript:1}{x}"},
            {"text/plain": r"\csname href\endcsname{javascript:1}{x}"},
        ),
        ({"image/svg+xml": "<svg/>"}, {"text/html": '<img src="data:image/svg+xml;base64,PHN2Zy8+">'}),
        ({"text/latex": "</script>"}, {"text/plain": "</script>"}),
        ({"image/png": 'aa" onerror="1', "application/javascript": "1"}, {}),
    ],
)
def test_forms_that_could_act_in_a_page_become_others(forms: dict[str, str], shown: dict[str, str]) -> None:
    from rlm_broker.integrations.jupyter import shown_forms

    assert shown_forms(forms) == shown


def test_html_cannot_leave_its_frame() -> None:
    from rlm_broker.integrations.jupyter import shown_forms

    page = shown_forms({"text/html": "\"></iframe><script>1</script>'"})["text/html"]
    assert page.count("<") == 2
    assert page.startswith('<iframe sandbox srcdoc="&lt;meta http-equiv=&quot;Content-Security-Policy&quot;')
    assert page.endswith("</iframe>")
