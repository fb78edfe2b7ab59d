"""A REPL in a process of its own. Tests of single blocks are in `test_execution.py`."""

import json
from collections.abc import Iterator

import pytest
from msgspec import Raw

from sandbox_worker.repl.helpers import HELPERS
from sandbox_worker.wire.messages import MAX_AGAIN_BYTES, Provide
from sandbox_worker.wire.names import ANSWER, CONTEXT, FUNCTIONS, HISTORY, RESERVED, numbered
from sandbox_worker.wire.values import encode
from tests.support.bare_repl import BareRepl, bare_repl
from tests.support.tables import table


@pytest.fixture
def repl() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        yield running


def test_namespace_holds_only_reserved_names(repl: BareRepl) -> None:
    own = "print(*(name for name in globals() if not name.startswith('__')))"
    assert set(repl.run(own).stdout.split()) == FUNCTIONS | {CONTEXT, numbered(CONTEXT, 0), ANSWER, *HELPERS}
    repl.run("1")
    assert set(repl.run(own).stdout.split()) == RESERVED - {HISTORY} | {numbered(CONTEXT, 0), *HELPERS}


def test_variables_live_on_and_reserved_names_return(repl: BareRepl) -> None:
    """Variables live from block to block, and overwritten reserved names come back."""
    repl.run("x = 1\ncontext = 'gone'\nllm_query = None")
    assert repl.run("print(x, context, llm_query('loud'))").stdout == "1 the text LOUD\n"


@table(
    "breaks",
    [
        "sys.stdout.close()",
        "sys.stdout = None",
        "sys.stdout = sys.stderr = open('/dev/null', 'w')",
        "sys.stdout.buffer.close()",
        "io.TextIOWrapper(sys.stdout.buffer)",
        "sys.stdout.detach() if hasattr(sys.stdout, 'detach') else None",
        "sys.stdin.close()",
        "os.close(0)",
    ],
)
def test_broken_streams_are_whole_in_next_block(repl: BareRepl, breaks: str) -> None:
    repl.run(f"import sys, io, os\ntry:\n    {breaks}\nexcept OSError: pass")
    ran = repl.run("print('out'); print('err', file=sys.stderr); sys.stdin.read()")
    assert (ran.result.status, ran.stdout, ran.stderr) == ("ok", "out\n''\n", "err\n")


def test_stdout_wrapper_is_flushed_at_block_end(repl: BareRepl) -> None:
    code = "import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('held')"
    assert repl.run(code).stdout == "held\n"
    assert repl.run("sys.stdout = sys.__stdout__\nprint('after')").stdout == "after\n"


def test_stdout_buffer_decodes_split_bytes(repl: BareRepl) -> None:
    """Bytes written to the buffer are text, even if a character is split."""
    code = "import sys\nraw = 'ä€'.encode()\nfor i in range(len(raw)): sys.stdout.buffer.write(raw[i:i+1])\nsys.stdout.flush()"
    assert repl.run(code).stdout == "ä€"


def test_finalizer_printing_mid_frame_breaks_nothing(repl: BareRepl) -> None:
    code = (
        "import gc\n"
        "class Loud:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self): print('finalized', flush=True)\n"
        "gc.set_threshold(1, 1, 1)\n"
        "for i in range(300):\n"
        "    Loud()\n"
        "    assert llm_query(f'p{i}') == f'P{i}'\n"
        "gc.set_threshold(700, 10, 10)\ngc.collect()\n"
    )
    ran = repl.run(code)
    assert ran.result.status == "ok", ran.stderr
    assert ran.stdout.count("finalized\n") == 300


def test_query_function_in_process_pool_is_refused(repl: BareRepl) -> None:
    ran = repl.run("import pickle\npickle.dumps(llm_query)")
    assert "call llm_query_batched, or use threads" in (ran.result.error or "")


@table("code", ["exit()", "quit(0)", "import sys; sys.exit()"])
def test_exit_ends_only_the_block(repl: BareRepl, code: str) -> None:
    assert repl.run(code).result.status == "exited"
    assert repl.run("'alive'").stdout == "'alive'\n"


@table(
    "first, then, stdout",
    [
        ("import os", "if (pid := os.fork()): os.waitpid(pid, 0)\nprint('once')", "once\n"),
        *(
            (f"import signal as s\nold = s.setitimer(s.{timer}, 1000)", f"s.getitimer(s.{timer})", "(0.0, 0.0)\n")
            for timer in ("ITIMER_REAL", "ITIMER_PROF", "ITIMER_VIRTUAL")
        ),
    ],
)
def test_fork_and_timer_do_not_outlive_their_block(repl: BareRepl, first: str, then: str, stdout: str) -> None:
    for code, printed in ((first, ""), (then, stdout), ("1", "1\n")):
        ran = repl.run(code)
        assert (ran.result.status, ran.stdout) == ("ok", printed)


def test_help_prints_documentation(repl: BareRepl) -> None:
    assert "Return the number of items in a container." in repl.run("help(len)").stdout


@table(
    "fills",
    [
        "answer['content'] = 'done'; answer['ready'] = True",
        "answer['ready'] = True; answer['content'] = 'done'",
        "answer.update(content='done', ready=True)",
        "answer |= {'content': 'done', 'ready': 1}",
        "answer = {'content': 'done', 'ready': True}",
        "answer = 'done'\nSUBMIT(answer)",
        "FINAL('done')",
        "answer['content'] = 'done'\nFINAL(answer)",
        "result = 'done'\nFINAL_VAR('result')",
        "from collections import OrderedDict\nanswer = OrderedDict(content='done', ready=True)",
    ],
)
def test_answer_is_taken_in_every_form(repl: BareRepl, fills: str) -> None:
    assert repl.run(fills).result.final_answer == "done"
    assert repl.run("1").result.final_answer is None


def test_text_assigned_to_answer_becomes_its_content(repl: BareRepl) -> None:
    ran = repl.run("answer = 'mine'")
    assert ran.result.final_answer is None
    assert 'now in answer["content"]' in ran.stderr
    assert repl.run("answer['ready'] = True").result.final_answer == "mine"


def test_empty_answer_is_not_submitted(repl: BareRepl) -> None:
    ran = repl.run("answer['ready'] = True")
    assert ran.result.final_answer is None
    assert "nothing was submitted" in ran.stderr


def test_interrupt_ends_a_loop_and_keeps_variables(repl: BareRepl) -> None:
    repl.begin("x = 'kept'\nprint('go', flush=True)\nwhile True: pass")
    repl.until_printed("go")
    repl.interrupt()
    assert repl.finish().result.status == "interrupted"
    assert repl.run("x").stdout == "'kept'\n"


def test_interrupt_while_printing_loses_no_frame(repl: BareRepl) -> None:
    for _ in range(20):
        repl.begin("while True: print('x' * 100, flush=True)")
        repl.until_printed("x")
        repl.interrupt()
        assert repl.finish().result.status == "interrupted"
    assert repl.run("'whole'").stdout == "'whole'\n"


LIES = """
class Lies(type):
    @property
    def __name__(cls): raise SystemExit
    def __getattribute__(cls, name): raise SystemExit
class Odd(metaclass=Lies):
    @property
    def __class__(self): raise SystemExit
class Key(str):
    def __lt__(self, other): raise SystemExit
    def __eq__(self, other): raise SystemExit
    __hash__ = str.__hash__
odd = Odd()
globals()[Key("key")] = 1
"""


def test_value_with_lying_metaclass_fails_only_its_block(repl: BareRepl) -> None:
    assert repl.run(LIES).result.status == "ok"
    assert "'odd': 'Odd'" in repl.run("print(SHOW_VARS())").stdout
    for code, error in (
        ("FINAL_VAR('none')", "variables: Key, Lies, Odd, odd"),
        ("llm_query(odd)", "TypeError: llm_query() needs text: prompt is a Odd; use str() or an f-string"),
        ("llm_query('?', model=odd)", "TypeError: llm_query() argument 'model' must be str, not Odd"),
        ("raise Odd", ""),
    ):
        ran = repl.run(code)
        assert ran.result.status == "error"
        assert error in (ran.result.error or "")


def test_answer_not_showable_fails_only_its_block(repl: BareRepl) -> None:
    """An answer that cannot be shown ends its own block only."""
    bites = "class Bites:\n    def __str__(self): raise SystemExit\nanswer.update(content=Bites(), ready=True)"
    assert repl.run(bites).result.error == "the answer cannot be read: SystemExit"
    assert repl.run("print(1)").result.status == "ok"
    assert repl.run("answer.update(content='x', ready=True)").result.final_answer == "x"


def test_value_that_could_not_be_loaded_is_no_earlier_one(repl: BareRepl) -> None:
    """A value named again without its content is the one that was given last, or none."""
    long = "x" * (MAX_AGAIN_BYTES + 1)
    repl.say(Provide("text", Raw(encode(long, "it"))))
    assert repl.run("print(len(text))").stdout == f"{len(long)}\n"
    for again in (Provide("text", Raw(b'{"$unknown":1}')), Provide("text")):
        repl.say(again)
        assert (repl.run("print(len(text))").result.error or "").startswith("the value text cannot be loaded: ")


def test_show_vars_names_the_models_variables(repl: BareRepl) -> None:
    repl.run("x = 1\nname = 'n'\nglobals()[5] = 'odd'")
    assert json.loads(repl.run("import json\nprint(json.dumps(SHOW_VARS()))").stdout) == {
        "x": "int",
        "name": "str",
        "json": "module",
    }


@table(
    "code, error",
    [
        ("eval('-' * 100_000 + '1')", "MemoryError"),
        ("x = " + "(" * 1000, "SyntaxError: too many nested parentheses"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_code_too_deep_to_compile_is_an_error(repl: BareRepl, code: str, error: str) -> None:
    # In a process of its own: the parsers of some releases of CPython leave the process damaged.
    assert (repl.run(code).result.error or "").startswith(error)


def test_answer_of_own_class_spoils_no_block(repl: BareRepl) -> None:
    bites = "class D(dict):\n    def get(self, *a): 1 / 0\n    def __iter__(self): 1 / 0\nanswer = D(ready=True, content='x')"
    repl.run(bites)
    assert repl.run("x = 1\nx").stdout == "1\n"
    assert repl.run("type(answer).__name__").stdout == "'dict'\n"
