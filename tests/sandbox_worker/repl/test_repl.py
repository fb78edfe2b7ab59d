"""A REPL in a process of its own. Tests of single blocks are in `test_execution.py`."""

import json
from collections.abc import Iterator

import pytest

from sandbox_worker.repl.helpers import HELPERS
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.names import ANSWER, CONTEXT, FUNCTIONS, HISTORY, RESERVED, numbered
from tests.support.bare_repl import OUTPUT, BareRepl, bare_repl


@pytest.fixture
def repl() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        yield running


def test_namespace_of_a_repl_holds_exactly_the_reserved_names(repl: BareRepl) -> None:
    own = "print(*(name for name in globals() if not name.startswith('__')))"
    assert set(repl.run(own).stdout.split()) == FUNCTIONS | {CONTEXT, numbered(CONTEXT, 0), ANSWER, *HELPERS}
    repl.run("1")
    assert set(repl.run(own).stdout.split()) == RESERVED - {HISTORY} | {numbered(CONTEXT, 0), *HELPERS}


def test_names_live_from_block_to_block_and_ours_come_back(repl: BareRepl) -> None:
    repl.run("x = 1\ncontext = 'gone'\nllm_query = None")
    assert repl.run("print(x, context, llm_query('loud'))").stdout == "1 the text LOUD\n"


@pytest.mark.parametrize(
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
def test_streams_that_a_block_broke_are_whole_in_the_next(repl: BareRepl, breaks: str) -> None:
    repl.run(f"import sys, io, os\ntry:\n    {breaks}\nexcept OSError: pass")
    ran = repl.run("print('out'); print('err', file=sys.stderr); sys.stdin.read()")
    assert (ran.result.status, ran.stdout, ran.stderr) == ("ok", "out\n''\n", "err\n")


def test_what_a_wrapper_around_stdout_holds_is_flushed_at_the_end(repl: BareRepl) -> None:
    code = "import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('held')"
    assert repl.run(code).stdout == "held\n"
    assert repl.run("sys.stdout = sys.__stdout__\nprint('after')").stdout == "after\n"


def test_bytes_written_to_the_buffer_are_text_even_in_halves(repl: BareRepl) -> None:
    code = "import sys\nraw = 'ä€'.encode()\nfor i in range(len(raw)): sys.stdout.buffer.write(raw[i:i+1])\nsys.stdout.flush()"
    assert repl.run(code).stdout == "ä€"


def test_a_finalizer_that_prints_in_the_middle_of_a_frame_breaks_nothing(repl: BareRepl) -> None:
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


def test_threads_that_print_and_ask_at_once_get_what_is_theirs(repl: BareRepl) -> None:
    code = (
        "import sys\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def ask(i):\n    sys.stdout.write(f'line {i}\\n')\n    return llm_query(f'a{i}') == f'A{i}'\n"
        "with ThreadPoolExecutor(16) as pool: print(all(pool.map(ask, range(400))))"
    )
    ran = repl.run(code)
    assert ran.stdout.endswith("True\n")
    assert sorted(int(line[5:]) for line in ran.stdout.splitlines()[:-1]) == list(range(400))


def test_a_forked_process_prints_to_the_descriptor_and_cannot_ask(repl: BareRepl) -> None:
    code = (
        "import os\npid = os.fork()\n"
        "if pid == 0:\n"
        "    try: llm_query('x')\n"
        "    except RuntimeError as error: print('refused:', error)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\nprint('parent')"
    )
    assert repl.run(code).stdout == "parent\n"
    assert b"refused: another process cannot use the REPL's connection" in repl.written_to_descriptors()


def test_a_fork_that_falls_out_of_its_block_does_not_answer_for_its_parent(repl: BareRepl) -> None:
    assert repl.run("import os\nif (pid := os.fork()): os.waitpid(pid, 0)\nprint('once')").stdout == "once\n"
    assert repl.run("1").stdout == "1\n"


def test_a_query_function_that_a_process_pool_pickles_is_refused_in_words(repl: BareRepl) -> None:
    ran = repl.run("import pickle\npickle.dumps(llm_query)")
    assert "call llm_query_batched, or use threads" in (ran.result.error or "")


@pytest.mark.parametrize("code", ["exit()", "quit(0)", "import sys; sys.exit()"])
def test_exit_ends_the_block_alone(repl: BareRepl, code: str) -> None:
    assert repl.run(code).result.status == "exited"
    assert repl.run("'alive'").stdout == "'alive'\n"


def test_help_prints_documentation(repl: BareRepl) -> None:
    assert "Return the number of items in a container." in repl.run("help(len)").stdout


def test_an_alarm_does_not_outlive_its_block(repl: BareRepl) -> None:
    assert repl.run("import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)").result.status == "ok"
    assert repl.run("signal.getitimer(signal.ITIMER_REAL)").stdout == "(0.0, 0.0)\n"


@pytest.mark.parametrize(
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
    ],
)
def test_every_way_to_answer(repl: BareRepl, fills: str) -> None:
    assert repl.run(fills).result.final_answer == "done"
    assert repl.run("1").result.final_answer is None


def test_text_assigned_to_answer_becomes_its_content(repl: BareRepl) -> None:
    ran = repl.run("answer = 'mine'")
    assert ran.result.final_answer is None
    assert 'now in answer["content"]' in ran.stderr
    assert repl.run("answer['ready'] = True").result.final_answer == "mine"


def test_an_empty_answer_is_not_submitted_and_the_model_is_told(repl: BareRepl) -> None:
    ran = repl.run("answer['ready'] = True")
    assert ran.result.final_answer is None
    assert "nothing was submitted" in ran.stderr


def test_a_print_loop_keeps_head_and_tail(repl: BareRepl) -> None:
    ran = repl.run("for i in range(400_000): print(i)")
    assert len(ran.stdout) < 1.2 * OUTPUT.max_output_bytes
    assert ran.stdout.startswith("0\n1\n")
    assert ran.stdout.endswith("399999\n")
    assert " more cut] ..." in ran.stdout


def test_an_interrupt_ends_a_loop_and_the_variables_stay(repl: BareRepl) -> None:
    repl.begin("x = 'kept'\nprint('go', flush=True)\nwhile True: pass")
    repl.until_printed("go")
    repl.interrupt()
    assert repl.finish().result.status == "interrupted"
    assert repl.run("x").stdout == "'kept'\n"


def test_an_interrupt_in_the_midst_of_printing_loses_no_frame(repl: BareRepl) -> None:
    for _ in range(20):
        repl.begin("while True: print('x' * 100, flush=True)")
        repl.until_printed("x")
        repl.interrupt()
        assert repl.finish().result.status == "interrupted"
    assert repl.run("'whole'").stdout == "'whole'\n"


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ("'one'", "takes a list of prompts, not one string"),
        ("{'a': 1}", "takes a list of prompts, not a dict"),
        ("b'x'", "takes a list of prompts, not a bytes"),
        ("5", "takes a list of prompts, not a int"),
        ("['a', 5]", "needs text: prompts[1] is a int"),
    ],
)
def test_prompts_of_a_wrong_kind_are_named(repl: BareRepl, prompts: str, error: str) -> None:
    assert error in (repl.run(f"llm_query_batched({prompts})").result.error or "")


def test_str_subclasses_are_prompts_and_errors_are_texts(repl: BareRepl) -> None:
    def refuse(query: Query) -> list[Slot]:
        return [Slot(error=f"no {prompt}") for prompt in query.prompts]

    ran = repl.run("class S(str): pass\nprint(llm_query_batched([S('a'), 'b']))", refuse)
    assert ran.stdout == "['Error: no a', 'Error: no b']\n"


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


def test_value_with_a_lying_metaclass_ends_no_other_block(repl: BareRepl) -> None:
    assert repl.run(LIES).result.status == "ok"
    assert "'odd': 'Odd'" in repl.run("print(SHOW_VARS())").stdout
    assert "variables: Key, Lies, Odd, odd" in (repl.run("FINAL_VAR('none')").result.error or "")
    assert (
        repl.run("llm_query(odd)").result.error
        == "TypeError: llm_query() needs text: prompt is a Odd; use str() or an f-string"
    )
    assert (
        repl.run("llm_query('?', model=odd)").result.error
        == "TypeError: llm_query() argument 'model' must be str, not Odd"
    )
    assert repl.run("raise Odd").result.status == "error"


def test_answer_that_cannot_be_shown_ends_its_own_block_only(repl: BareRepl) -> None:
    bites = "class Bites:\n    def __str__(self): raise SystemExit\nanswer.update(content=Bites(), ready=True)"
    assert repl.run(bites).result.error == "the answer cannot be read: SystemExit"
    assert repl.run("print(1)").result.status == "ok"
    assert repl.run("answer.update(content='x', ready=True)").result.final_answer == "x"


def test_show_vars_names_what_the_model_made(repl: BareRepl) -> None:
    repl.run("x = 1\nname = 'n'\nglobals()[5] = 'odd'")
    assert json.loads(repl.run("import json\nprint(json.dumps(SHOW_VARS()))").stdout) == {
        "x": "int",
        "name": "str",
        "json": "module",
    }


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("eval('-' * 100_000 + '1')", "MemoryError"),
        ("x = " + "(" * 1000, "SyntaxError: too many nested parentheses"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_code_too_deep_for_the_compiler_is_an_error(repl: BareRepl, code: str, error: str) -> None:
    # In a process of its own: the parsers of some releases of CPython leave the process damaged.
    assert (repl.run(code).result.error or "").startswith(error)


@pytest.mark.parametrize("timer", ["ITIMER_PROF", "ITIMER_VIRTUAL"])
def test_a_timer_of_cpu_time_does_not_hit_a_later_block(repl: BareRepl, timer: str) -> None:
    assert repl.run(f"import signal\nsignal.setitimer(signal.{timer}, 1000)").result.status == "ok"
    assert repl.run(f"signal.getitimer(signal.{timer})").stdout == "(0.0, 0.0)\n"


def test_an_answer_of_a_class_of_the_models_spoils_no_later_block(repl: BareRepl) -> None:
    bites = "class D(dict):\n    def get(self, *a): 1 / 0\n    def __iter__(self): 1 / 0\nanswer = D(ready=True, content='x')"
    repl.run(bites)
    assert repl.run("x = 1\nx").stdout == "1\n"
    assert repl.run("type(answer).__name__").stdout == "'dict'\n"


def test_an_answer_in_another_kind_of_dict_is_taken(repl: BareRepl) -> None:
    code = "from collections import OrderedDict\nanswer = OrderedDict(content='done', ready=True)"
    assert repl.run(code).result.final_answer == "done"
