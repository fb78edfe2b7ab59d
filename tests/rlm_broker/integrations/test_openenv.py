"""The executors for OpenEnv, against a stand-in of its contract."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlm_broker import Sandbox
from rlm_broker.integrations import openenv
from rlm_broker.integrations.openenv import PyExecutor, PythonExecutor
from tests.support.tables import table
from tests.support.waiting import until_now


class Opaque:
    """A value that does not cross."""


@pytest.fixture
def executor(open_sandbox: Sandbox) -> Iterator[PythonExecutor]:
    made = PythonExecutor(sandbox=open_sandbox)
    yield made
    made.close()


def test_block_has_its_output_its_value_and_the_texts_of_new_variables(executor: PythonExecutor) -> None:
    executor.set_context("some text")
    first = executor.execute("print('a')\nwords = context.split()\n_own = 1\nlong = 'x' * 900\nn = len(words)")
    assert first["stdout"] == "a\n\n2"
    assert first["locals_snapshot"].keys() == {"words", "long", "n"}
    assert first["locals_snapshot"]["words"] == "['some', 'text']"
    assert len(first["locals_snapshot"]["long"]) == 503
    assert (first["success"], first["exception"], first["stderr"]) == (True, None, "")
    assert executor.execute("n = 3; f = lambda: 0")["locals_snapshot"].keys() == {"f"}
    assert (executor.get_variable("n"), executor.get_variable("f"), executor.get_variable("nothing")) == (3, None, None)
    assert {"words", "n", "context", "f", "safe_json_dumps"} <= {*executor.list_variables()}
    assert executor.execute("safe_json_dumps({'f': f})")["stdout"].startswith('"{\\"f\\": \\"<function')


def test_functions_read_variables_of_the_block_that_waits_for_them(executor: PythonExecutor) -> None:
    executor.inject_function("FINAL_VAR", lambda name: f"FINAL({executor.get_variable(name)})")
    executor.inject_function("SHOW_VARS", lambda: sorted(executor.list_variables()))
    assert executor.execute("own = [1]\nFINAL_VAR('own')")["stdout"] == '"FINAL([1])"'
    assert {"own", "mine", "FINAL_VAR"} <= {*executor.execute("mine = 1\nprint(*SHOW_VARS())")["stdout"].split()}


def test_names_can_be_listed_after_a_block_that_was_refused(executor: PythonExecutor) -> None:
    executor.set_variable("n", 1)
    executor.close()
    assert not executor.execute("n")["success"]
    assert "n" in executor.list_variables()


def test_failed_block_keeps_its_output_and_the_variable_of_the_environment(executor: PythonExecutor) -> None:
    executor.set_variable("answer", {"content": "", "ready": False})
    failed = executor.execute("answer['content'] = 'so far'\nprint('before')\n1 / 0")
    assert failed["stdout"] == "before\n"
    assert failed["exception"].startswith("ZeroDivisionError: division by zero\nTraceback")
    assert failed["exception"] in failed["stderr"]
    assert not failed["success"]
    assert executor.get_variable("answer")["content"] == "so far"
    killed = executor.execute("import os; os._exit(1)")
    assert "os._exit" in killed["exception"]
    assert executor.execute("answer")["stdout"] == '{"content": "so far", "ready": false}'


def test_output_is_cut_and_its_length_told(open_sandbox: Sandbox) -> None:
    executor = PythonExecutor(max_output_length=10, sandbox=open_sandbox)
    assert executor.execute("print('a' * 50)")["stdout"] == "a" * 10 + "\n... (truncated, total 51 chars)"
    executor.close()


def test_reset_begins_with_a_fresh_repl(executor: PythonExecutor) -> None:
    executor.inject_function("double", lambda number: 2 * number)
    assert executor.execute("x = double(4)")["stdout"] == "8"
    executor.reset()
    assert executor.get_variable("x") is None
    assert "NameError" in executor.execute("double(1)")["exception"]
    assert "x" not in executor.list_variables()


def test_py_executor_says_by_its_exit_code_whether_a_step_failed(open_sandbox: Sandbox) -> None:
    executor = PyExecutor(["numpy"], sandbox=open_sandbox)
    assert executor.run("import sys; print(1, file=sys.stderr); x = {1}").model_dump() == {
        "stdout": "{1}",
        "stderr": "1\n",
        "exit_code": 0,
    }
    failed = executor.run("print('so far')\nx.y")
    assert (failed.stdout, failed.exit_code) == ("so far\n", 1)
    assert "AttributeError" in failed.stderr
    executor.close()
    assert "was shut down" in executor.run("1").stderr


def test_dropped_executors_end_their_processes_although_their_functions_refer_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openenv, "_most_open", 4)
    gc.collect()
    gc.disable()
    try:
        with Sandbox(warm=0) as sandbox:
            for _ in range(5):
                executor = PythonExecutor(sandbox=sandbox)
                executor.inject_function("look", executor.list_variables)
                assert executor.execute("1")["success"]
            until_now(lambda: sandbox.stats().workers <= 2)
    finally:
        gc.enable()


WRONG: dict[str, tuple[Callable[[PythonExecutor], Any], str]] = {
    "function's name": (lambda executor: executor.inject_function("no name", print), "'no name'"),
    "variable's name": (lambda executor: executor.set_variable("class", 1), "'class'"),
    "variable": (lambda executor: executor.set_variable("it", Opaque()), "it is an Opaque, which does not cross"),
}


@table("what", WRONG)
def test_bad_input_is_refused_in_a_sentence_and_harms_nothing(what: str, executor: PythonExecutor) -> None:
    wrong, told = WRONG[what]
    with pytest.raises(RuntimeError, match=told) as refused:
        wrong(executor)
    assert "\n" not in str(refused.value)
    assert executor.execute("1")["success"]


def test_block_that_cannot_begin_is_a_failed_one(executor: PythonExecutor) -> None:
    assert "code must be text" in executor.execute(5)["exception"]  # type: ignore[arg-type]
    executor.inject_function("again", lambda: executor.execute("1")["exception"])
    assert "cannot execute recursively" in executor.execute("again()")["stdout"]
    runs, goes_on = threading.Event(), threading.Event()
    executor.inject_function("wait", lambda: runs.set() or goes_on.wait())  # type: ignore[func-returns-value]
    thread = threading.Thread(target=executor.execute, args=["kept = wait()"])
    thread.start()
    runs.wait()
    assert "for another thread" in executor.execute("1")["exception"]
    goes_on.set()
    thread.join()
    assert executor.get_variable("kept") is True
    executor.close()
    assert "was shut down" in executor.execute("1")["exception"]
