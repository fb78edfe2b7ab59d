"""Contexts of many texts in real REPLs: mapped once for all, and as good as ordinary ones in every use."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from tests.support.contexts import form_of
from tests.support.processes import living_below
from tests.support.tables import table

MIB = 1 << 20
FILES = 1_000
FILE_CHARS = 200_000
LINES = (
    "0123456789abcde\n",
    "caf\xe9 0123456789\n",
    "za\u017c\xf3\u0142\u0107 g\u0119\u015bl\n",
    "\U0001f600 01234567890123\n",
)
LIMITS = Limits(memory_bytes=128 * MIB, interrupt_grace_s=0.5, max_repl_restarts=100, max_replay_s=0)


@pytest.fixture(scope="module", params=["strict", "standard", "process"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "process":
        with pytest.warns(UserWarning, match="not a security boundary"):
            unprotected = Sandbox(LIMITS, "process", warm=0)
        with unprotected as opened:
            yield opened
        return
    with Sandbox(LIMITS, request.param, warm=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 200 MB of ASCII, and a fortieth of everything else."""
    tree = tmp_path_factory.mktemp("tree")
    for number in range(FILES):
        line = LINES[number // 10 % 4 if number % 10 == 0 else 0]
        path = tree / f"part_{number % 10}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text((line * (FILE_CHARS // len(line) + 1))[:FILE_CHARS])
    return tree


@pytest.fixture(scope="module")
def large(tree: Path) -> Iterator[StoredContext]:
    with store(tree) as stored:
        assert form_of(stored).kind == "texts"
        assert form_of(stored).size_bytes > 200_000_000
        yield stored


def written_bytes(processes: set[psutil.Process]) -> int:
    """Return the bytes that are not mapped from a file or memfd. Pages that they share with their fork server count for each of them."""
    written = 0
    for process in processes:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        written += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return written


def test_folder_past_memory_limit_is_read_whole(sandbox: Sandbox, large: StoredContext) -> None:
    count = "sum(text.count('9') for text in context.values()), sum(map(len, context.values())), len(context)"
    with sandbox.repl(large) as repl:
        block = repl.execute(count)
        assert (block.status, block.stdout.split()[1:]) == ("ok", ["200000000,", "1000)"])
        grown = repl.execute("x = bytearray(b'x') * (60 << 20); len(x)")
        assert grown.status == "ok", "what is mapped is not the REPL's own"
        assert repl.execute("y = bytearray(b'y') * (120 << 20)").status in ("error", "killed")
        assert repl.execute(count).stdout == block.stdout


def test_further_repls_on_folder_take_little_memory(sandbox: Sandbox, large: StoredContext) -> None:
    taken = {}
    for context, said in (("", "0\n"), (large, "200000000\n")):
        before = living_below()
        with sandbox.repl(context) as one, sandbox.repl(context) as other:
            for repl in (one, other):
                block = repl.execute("sum(len(text) for text in context.values() if 'x' not in text) if context else 0")
                assert block.stdout == said
            taken[said] = written_bytes(living_below() - before)
    assert taken["200000000\n"] - taken["0\n"] < 12 * MIB


EVERYTHING = """
import gc, io, json, pickle, re, sys
ordinary = {name: ''.join(text[at:at + 1000] for at in range(0, len(text), 1000)) for name, text in chosen.items()}
for name, text in chosen.items():
    same = ordinary[name]
    assert type(text) is str and text == same and hash(text) == hash(same) and {text: 1}[same] == 1
    assert text.encode() == same.encode() and pickle.loads(pickle.dumps(text)) == same
    assert json.loads(json.dumps(text)) == same and text.upper() == same.upper() and text[::-1] == same[::-1]
    assert text.split() == same.split() and re.findall(r'\\d+', text) == re.findall(r'\\d+', same)
    assert io.StringIO(text).readline() == io.StringIO(same).readline() and f'{text}!' == f'{same}!'
    assert sys.intern(text) == same and text.replace('0', 'x') == same.replace('0', 'x')
    with open('file', 'w') as file: file.write(text)
    with open('file') as file: assert file.read() == same
assert chosen == ordinary
"""


def test_mapped_texts_survive_any_use(sandbox: Sandbox, large: StoredContext) -> None:
    """Code may use the texts in any way, and the REPL lives on."""
    with sandbox.repl(large) as repl:
        for code in (
            "chosen = {name: text for name, text in context.items() if name.split('/')[1] in "
            "('0.txt', '1.txt', '10.txt', '20.txt', '30.txt')}\nassert len(chosen) == 5",
            EVERYTHING,
            "import ctypes\nfor text in context.values(): ctypes.string_at(id(text), str.__basicsize__)\n"
            "ctypes.pythonapi.PyUnicode_AsUTF8.restype = ctypes.c_char_p\n"
            "assert ctypes.pythonapi.PyUnicode_AsUTF8(ctypes.py_object(chosen['part_0/10.txt'])).decode() == chosen['part_0/10.txt']",
            "kept = list(context.values()); del context, context_0, chosen, ordinary; kept.clear(); gc.collect()",
            "del context['part_0/0.txt']; context.update(a='b'); assert len(context) == 1000",
            "context.clear(); gc.collect(); del context",
            "assert len(context_0) == 0 and len(context) == 0",
        ):
            block = repl.execute(code)
            assert block.status == "ok", block
        repl.execute("import os; os._exit(3)")
        assert repl.execute("len(context), len(context['part_0/10.txt'])").stdout == "(1000, 200000)\n"


def test_mapped_texts_pass_forks_and_pools(large: StoredContext) -> None:
    code = """
import multiprocessing, os
def count(name): return context[name].count('0')
with multiprocessing.Pool(2) as pool: counts = pool.map(count, list(context))
assert counts == [text.count('0') for text in context.values()]
with multiprocessing.Pool(2) as pool: assert pool.map(len, list(context.values())[:9]) == [200_000] * 9
if (child := os.fork()) == 0:
    context.clear()
    os._exit(7)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(context)
"""
    with Sandbox(LIMITS, "strict", warm=0) as sandbox, sandbox.repl(large) as repl:
        block = repl.execute(code)
        assert (block.status, block.stdout) == ("ok", "(7, 1000)\n"), block


def test_mapped_texts_cannot_be_written_to(sandbox: Sandbox, large: StoredContext) -> None:
    code = """
import ctypes
text = context['part_0/0.txt']
start = ctypes.c_uint64.from_address(id(text) + str.__basicsize__ - 8).value
page = start // 4096 * 4096
libc = ctypes.CDLL(None)
if libc.mprotect(ctypes.c_void_p(page), 4096, 3) == 0:
    ctypes.memmove(start, b'WRITTEN', 7)
text[:7]
"""
    with sandbox.repl(large) as one, sandbox.repl(large) as other:
        assert one.execute(code).stdout in ("'WRITTEN'\n", "'0123456'\n")
        assert other.execute("context['part_0/0.txt'][:7]").stdout == "'0123456'\n"
        assert one.execute("import os; os.kill(os.getpid(), 9)").status == "killed"
        assert one.execute("context['part_0/0.txt'][:7]").stdout == "'0123456'\n"


@table("level", ["strict", "standard"])
async def test_template_maps_once_for_all_repls(level: LevelName, tree: Path) -> None:
    setup = "sizes = {name: len(text) for name, text in context.items()}"
    async with (
        Sandbox(LIMITS, level, warm=0) as sandbox,
        sandbox.template(tree, setup=setup) as template,
        template.repl() as one,
    ):
        async with template.repl() as two:
            block = await two.aexecute("sum(sizes.values()), sum(text.count('9') for text in context.values()) > 10**7")
            assert block.stdout == "(200000000, True)\n"
            # Of the template's fork server, and of an init and a REPL of each of the two.
            assert written_bytes(living_below()) < 200 * MIB
            await two.aexecute("context.clear(); del context")
        assert (await one.aexecute("len(context)")).stdout == "1000\n"
        async with template.repl() as three:
            assert (await three.aexecute("len(context)")).stdout == "1000\n"


@table("level", ["strict", "standard"])
@table("warm", [0, 1])
async def test_stored_contexts_are_one_dict_for_repls(level: LevelName, warm: int) -> None:
    with store("x" * 1_000_000) as log, store([{"n": 1}]) as rows:
        both = {"log": log, "rows": rows, "note": "plain"}
        async with Sandbox(LIMITS, level, warm=warm) as sandbox:
            for _ in range(2):
                async with sandbox.repl(both) as repl:
                    code = "[*context], len(context['log']), context['rows'], context['note'], context_0 is context"
                    expected = "(['log', 'rows', 'note'], 1000000, [{'n': 1}], 'plain', True)\n"
                    assert (await repl.aexecute(code)).stdout == expected
                    await repl.aexecute("import os; os.kill(os.getpid(), 9)")
                    assert (await repl.aexecute(code)).stdout == expected
            async with sandbox.template(both) as template, template.repl() as repl:
                assert (await repl.aexecute(code)).stdout == expected
        assert log.value().startswith("xx")  # it stays the caller's
