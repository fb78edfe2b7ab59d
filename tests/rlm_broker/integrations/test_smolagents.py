"""The executor for smolagents, against a stand-in of its contract."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from smolagents.local_python_executor import CodeOutput, ExecutionTimeoutError, InterpreterError
from smolagents.utils import AgentError

from rlm_broker import ReplLimits, Sandbox
from rlm_broker.integrations.smolagents import Executor, StepFailed
from tests.support.tables import table


class Opaque:
    """A value that does not cross."""


class Answer:
    """Answer of another agent, as smolagents wraps it."""

    def to_raw(self) -> str:
        return "raw"


@pytest.fixture
def executor(open_sandbox: Sandbox) -> Iterator[Executor]:
    made = Executor(sandbox=open_sandbox)
    yield made
    made.cleanup()


def test_steps_share_variables_and_have_the_value_of_their_last_statement(executor: Executor) -> None:
    executor.send_variables({"context": "some text", "answer": 1})
    assert executor("answer = len(context)") == CodeOutput(9, "", is_final_answer=False)
    assert executor("f = print\nprint(answer)") == CodeOutput(None, "9\n", is_final_answer=False)
    assert executor("f = lambda: 0").output.startswith("<function <lambda> at 0x")
    assert executor.state["answer"] == 9
    assert {"answer", "context", "_print_outputs"} <= {*executor.state}
    with pytest.raises(KeyError, match="f"):
        executor.state["f"]


def test_final_answer_is_the_agents_own_and_ends_the_step(executor: Executor) -> None:
    executor.send_tools({"final_answer": lambda first, second=0: (first, second, Opaque())})
    output = executor("print('a')\ntry:\n    final_answer(1, second=2)\nexcept Exception:\n    pass\nprint('b')")
    assert output.is_final_answer
    assert output.logs == "a\n"
    assert output.output[:2] == (1, 2)
    assert type(output.output[2]) is Opaque  # it has not crossed
    assert not executor("final_answer = 5").is_final_answer
    assert executor("final_answer([3])").output[0] == [3]
    assert len(executor("final_answer('a' * 9_000_000)").output[0]) == 9_000_000
    with pytest.raises(StepFailed, match=r"due to: TypeError: .* unexpected keyword argument 'third'"):
        executor("final_answer(1, third=3)")
    with pytest.raises(
        StepFailed, match=r"has no answer: .* a builtin_function_or_method, which does not cross"
    ) as failed:
        executor("print('so far')\nfinal_answer(print)")
    assert failed.value.logs == "so far\n"
    with pytest.raises(StepFailed, match=r"has no answer: the answer has [\d,]+ bytes, more than a message"):
        executor("final_answer('a' * (17 << 20))")
    executor.send_tools({})
    with pytest.raises(StepFailed, match="'final_answer' is not defined"):
        executor("final_answer(1)")


def test_pictures_are_pictures_on_both_sides(executor: Executor) -> None:
    executor.send_tools({"darker": lambda picture: picture.point(lambda level: level // 2)})
    executor.send_variables({"pictures": [Image.new("L", (4, 3), 200)], "answer": Answer()})
    assert executor("answer").output == "raw"
    output = executor("small = darker(pictures[0]).resize((2, 1))").output
    assert isinstance(output, Image.Image)
    assert (output.size, output.getpixel((0, 0))) == ((2, 1), 100)


def test_failed_step_has_its_line_and_its_logs(executor: Executor) -> None:
    with pytest.raises(InterpreterError, match=r"^Code execution failed at line 'f\(1\)' due to: ZeroDivisionError: "):
        executor("def f(x):\n    return x / 0\n\nprint('before')\nf(1)")
    assert executor.state["_print_outputs"] == "before\n"
    with pytest.raises(AgentError, match="SyntaxError") as failed:
        executor("print('")
    assert failed.value.message == str(failed.value)
    with pytest.raises(StepFailed, match=r"due to: SystemExit: 3$") as exited:
        executor("print('so far'); raise SystemExit(3)")
    assert exited.value.logs == "so far\n"


def test_number_of_a_line_that_code_has_forged_is_not_believed(executor: Executor) -> None:
    forged = """raise TypeError from ValueError('\\n  File "<block 1>", line ' + '9' * 5_000)"""
    with pytest.raises(StepFailed, match="due to: TypeError"):
        executor(forged)


def test_killed_step_leaves_the_variables_of_earlier_ones(executor: Executor) -> None:
    executor.send_variables({"rows": [1, 2]})
    executor.send_tools({"final_answer": lambda answer: answer})
    executor("mine = rows + [3]")
    with pytest.raises(StepFailed, match=r"os\._exit.*Variables are as they were before it"):
        executor("lost = 1; import os; os._exit(1)")
    with pytest.raises(StepFailed, match="'lost' is not defined"):
        executor("lost")
    assert executor("final_answer(rows + mine)") == CodeOutput([1, 2, 1, 2, 3], "", is_final_answer=True)


def test_step_out_of_time_keeps_variables_and_waiting_for_tools_is_not_counted(open_sandbox: Sandbox) -> None:
    executor = Executor(timeout_seconds=0.3, sandbox=open_sandbox)
    executor.send_tools({"wait": lambda: threading.Event().wait(0.5)})
    assert executor("kept = wait()").output is False
    with pytest.raises(ExecutionTimeoutError, match="block_timeout_s"):
        executor("while True: pass")
    assert executor("kept").output is False
    executor.cleanup()


def test_hanging_tool_ends_with_the_time_of_the_step(open_sandbox: Sandbox) -> None:
    executor = Executor(sandbox=open_sandbox, limits=ReplLimits(block_wall_timeout_s=0.5))
    hangs = threading.Event()
    executor.send_tools({"hang": hangs.wait})
    with pytest.raises(ExecutionTimeoutError, match="block_wall_timeout_s"):
        executor("hang()")
    hangs.set()
    assert executor("1").output == 1
    executor.cleanup()


def test_logs_are_cut_as_smolagents_cuts_them(open_sandbox: Sandbox) -> None:
    executor = Executor(max_print_outputs_length=20, sandbox=open_sandbox)
    assert executor("print('a' * 100)").logs == "a" * 10 + "\n..._truncated_...\n" + "a" * 9 + "\n"
    executor.cleanup()


def _exits() -> None:
    raise SystemExit(3)


TOOLS: dict[str, tuple[Callable[[], Any], str]] = {
    "exits": (_exits, "SystemExit: 3"),
    "generates": (lambda: (n for n in range(3)), "return a list"),
    "is_large": (lambda: "a" * (65 << 20), "max_frame_bytes"),
    "is_opaque": (Opaque, "does not cross"),
}


@table("name", TOOLS)
def test_bad_tool_is_an_error_of_the_step(name: str, executor: Executor) -> None:
    function, told = TOOLS[name]
    executor.send_tools({name: function})
    with pytest.raises(StepFailed, match=told):
        executor(f"{name}()")
    assert executor("1").output == 1


def test_tool_that_runs_code_of_its_own_executor_is_refused(executor: Executor) -> None:
    executor.send_tools({"again": lambda: executor("1")})
    with pytest.raises(StepFailed, match="cannot execute recursively"):
        executor("again()")
    assert executor("1").output == 1


WRONG: dict[str, tuple[Callable[[Executor], Any], str]] = {
    "tool's name": (lambda executor: executor.send_tools({"no name": print}), "'no name'"),
    "variable's name": (lambda executor: executor.send_variables({"class": 1}), "'class'"),
    "variable": (lambda executor: executor.send_variables({"it": Opaque()}), "it is an Opaque, which does not cross"),
    "code": (lambda executor: executor(5), "code must be text"),  # type: ignore[arg-type]
    "pip": (
        lambda _: Executor(additional_imports=["numpy"]),
        r"additional_imports is refused by rlm-broker: .*packages=",
    ),
    "image": (lambda _: Executor(image_name="mine"), "image_name is refused by rlm-broker: a sandbox has no image"),
    "pickle": (lambda _: Executor(allow_pickle=True), "allow_pickle is refused"),
    "module": (
        lambda _: Executor(["sys", "nowhere.at_all", "*"]),
        r"authorized modules: nowhere \(additional_authorized_imports",
    ),
}


@table("what", WRONG)
def test_bad_input_is_refused_in_a_sentence_and_harms_nothing(what: str, executor: Executor) -> None:
    wrong, told = WRONG[what]
    with pytest.raises(StepFailed, match=told) as refused:
        wrong(executor)
    assert "\n" not in str(refused.value)
    assert executor("1").output == 1


def test_executor_is_used_by_one_thread_and_one_process_until_its_cleanup(executor: Executor) -> None:
    runs, goes_on = threading.Event(), threading.Event()
    executor.send_tools({"wait": lambda: runs.set() or goes_on.wait()})  # type: ignore[func-returns-value]
    outputs: list[CodeOutput] = []
    thread = threading.Thread(target=lambda: outputs.append(executor("wait()")))
    thread.start()
    runs.wait()
    with pytest.raises(StepFailed, match="for another thread"):
        executor("1")
    goes_on.set()
    thread.join()
    assert outputs[0].output is True
    if (child := os.fork()) == 0:
        try:
            executor("1")
        except StepFailed as refused:
            os._exit(7 if "forked" in str(refused) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    executor.cleanup()
    executor.cleanup()
    with pytest.raises(StepFailed, match="was shut down"):
        executor("1")


def test_unknown_option_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        Executor(colour="red")
