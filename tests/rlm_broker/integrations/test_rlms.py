"""The environment for the reference RLM, against a stand-in of its contract."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rlm.core.rlm
import rlm.environments
from rlm.core.types import RLMChatCompletion

from rlm_broker import ReplLimits, Sandbox
from rlm_broker.errors import ValueUnavailable
from rlm_broker.integrations import rlms
from rlm_broker.integrations.rlms import SandboxREPL
from tests.support.launcher import needs_strict


@pytest.fixture
def environment(open_sandbox: Sandbox) -> Iterator[Callable[..., SandboxREPL]]:
    made: list[SandboxREPL] = []

    def make(**options: Any) -> SandboxREPL:
        made.append(SandboxREPL(sandbox=open_sandbox, **options))
        return made[-1]

    yield make
    for each in made:
        each.cleanup()


def test_blocks_share_variables_and_show_what_they_print(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(context_payload="some text", custom_tools={"base": {"tool": 3}, "add": lambda n: n + 1})
    result = made.execute_code("import sys\nn = add(base)\nprint(n, len(context))\nprint('err', file=sys.stderr)\nn")
    assert (result.stdout, result.stderr, result.final_answer) == ("4 9\n", "err\n", None)
    assert result.locals == {
        "n": 4,
        "base": 3,
        "context": "some text",
        "context_0": "some text",
        "sys": made.locals["sys"],
        "answer": {"content": "", "ready": False},
    }
    assert isinstance(result.locals["sys"], ValueUnavailable)
    failed = made.execute_code("kept = 1\n1 / 0")
    assert failed.stderr == "\nZeroDivisionError: division by zero"
    assert made.execute_code("print(kept, SHOW_VARS())").stdout == (
        "1 Available variables: {'base': 'int', 'context': 'str', 'context_0': 'str', 'sys': 'module', 'n': 'int', "
        "'kept': 'int'}\n"
    )


def test_answer_is_taken_once(environment: Callable[..., SandboxREPL]) -> None:
    made = environment()
    assert made.execute_code("answer['content'] = 'draft'").final_answer is None
    assert made.execute_code("answer['content'] = 5; answer['ready'] = True").final_answer == "5"
    assert made.execute_code("1").final_answer is None
    assert made.execute_code("answer = {'content': 'new', 'ready': True}\n1 / 0").final_answer == "new"
    lost = made.execute_code("answer = {'content': 'x' * (17 << 20), 'ready': True}")
    assert (lost.final_answer, lost.stderr.startswith("\nanswer: the value is too")) == (None, True)
    assert made.execute_code("answer = 'no dict'").final_answer is None
    assert made.locals["answer"] == {"content": "", "ready": False}


def test_names_of_the_environment_come_back(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(context_payload=[1, 2], compaction=True)
    made.execute_code("context = history = llm_query = SHOW_VARS = None")
    assert made.execute_code("print(context, history, llm_query('x'), SHOW_VARS()[:9])").stdout == (
        "[1, 2] [] Error: No LM handler configured Available\n"
    )
    made.append_compaction_entry({"type": "summary", "content": "short"})
    assert made.execute_code("print(history)").stdout == "[{'type': 'summary', 'content': 'short'}]\n"


def test_contexts_and_histories_are_numbered_and_outlive_a_kill(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(context_payload="first")
    messages = [{"role": "user", "content": "hello"}]
    assert (made.add_context("second"), made.add_context({"a": 1}, 5), made.add_history(messages)) == (1, 5, 0)
    messages.clear()
    killed = made.execute_code("import os; os._exit(3)")
    assert "exit code 3" in killed.stderr
    shown = made.execute_code("print(context_0, context_1, context_5, history, history_0, answer)").stdout
    history = "[{'role': 'user', 'content': 'hello'}]"
    assert shown == f"first second {{'a': 1}} {history} {history} {{'content': '', 'ready': False}}\n"
    assert (made._context_count, made._history_count) == (6, 1)
    late = environment()
    assert late.add_context("only") == 0
    assert late.execute_code("context_0 = 1\nprint(context)").stdout == "only\n"


@needs_strict
def test_rollback_keeps_what_code_has_made_of_values(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(context_payload="first", custom_tools={"base": 3}, limits=ReplLimits(checkpoint="each"))
    made.execute_code("base += 1; kept = 5; answer['content'] = 'half'")
    made.execute_code("import os; os._exit(3)")
    shown = made.execute_code("print(base, kept, context, answer, 'os' in globals())").stdout
    assert shown == "4 5 first {'content': 'half', 'ready': False} False\n"


def test_given_values_are_not_read_back(environment: Callable[..., SandboxREPL]) -> None:
    text = "x" * 20_000_000  # more than all variables together may have
    made = environment(context_payload=text)
    made.execute_code("n = len(context)\nalias = context")
    assert made.locals["context"] is text
    assert made.locals["n"] == 20_000_000
    assert isinstance(made.locals["alias"], ValueUnavailable)


def test_scaffold_that_code_has_replaced_lies_of_its_own_blocks_alone(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(context_payload="text")
    lies = ("lambda: 5", "lambda: ['n', 'no name', 'class', 7, {}]", "lambda: {'content': 1}", "print", "1 / 0")
    for lie in lies:
        made.execute_code(f"import builtins\nn = 1\nfor name in ('made', 'take'): setattr(builtins._rlm, name, {lie})")
        result = made.execute_code("1")
        assert result.final_answer is None, lie
        assert {**{"n": 1}, **result.locals} == {"n": 1, "context": "text", "context_0": "text"}, lie


def test_queries_are_the_references_own(environment: Callable[..., SandboxREPL]) -> None:
    barrier = threading.Barrier(2)

    def child(prompt: str, model: str | None) -> RLMChatCompletion:
        with pytest.raises(RuntimeError, match="cannot execute recursively"):
            made.execute_code("1")
        return RLMChatCompletion(f"child {prompt} {model}")

    made = environment(lm_handler_address=("127.0.0.1", 1), subcall_fn=child)
    result = made.execute_code("print(llm_query('a', model='m'), llm_query_batched(['b']), rlm_query('c'))")
    assert result.stdout == "m: a ['None: b'] child c None\n"
    assert [each.response for each in result.rlm_calls] == ["m: a", "None: b", "child c None"]
    made.custom_tools["meet"] = barrier.wait
    both = environment(custom_tools={"meet": lambda: barrier.wait(60)})
    two = (
        "import concurrent.futures as futures\n"
        "with futures.ThreadPoolExecutor() as threads: print(sorted(threads.map(lambda _: meet(), range(2))))"
    )
    assert both.execute_code(two).stdout == "[0, 1]\n"


def test_limit_of_computing_is_said_and_leaves_variables(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(limits=ReplLimits(block_timeout_s=0.2))
    assert "longer than block_timeout_s = 0.2 s" in made.execute_code("kept = 5\nwhile True: pass").stderr
    assert made.execute_code("print(kept)").stdout == "5\n"


def test_environment_ends_with_cleanup(environment: Callable[..., SandboxREPL]) -> None:
    made = environment(setup_code="n = 1")
    folder = Path(made.temp_dir)
    assert (made.locals["n"], folder.exists()) == (1, True)
    made.cleanup()
    assert (made.locals, folder.exists()) == ({}, False)
    with pytest.raises(RuntimeError, match=r"cleanup\(\) was called"):
        made.execute_code("1")
    with pytest.raises(ValueError, match="llm_query"):
        environment(custom_tools={"llm_query": print})


def test_install_replaces_the_local_environment_alone(monkeypatch: pytest.MonkeyPatch, open_sandbox: Sandbox) -> None:
    for module in (rlm.environments, rlm.core.rlm):
        monkeypatch.setattr(module, "get_environment", rlm.environments.get_environment)
    rlms.install(sandbox=open_sandbox)
    with rlm.core.rlm.environment_of("local", {"context_payload": "text", "depth": 2}) as made:
        assert type(made) is SandboxREPL
        assert (made.execute_code("print(context)").stdout, made.depth) == ("text\n", 2)
    with pytest.raises(ValueError, match="Unknown environment: other"):
        rlm.core.rlm.environment_of("other", {})
