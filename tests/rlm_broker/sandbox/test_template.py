"""Templates: what their REPLs find, what they cannot change, and when their fork servers end."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.store import store
from rlm_broker.errors import ConfigurationError, ContextRefused, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers import zygote_process
from rlm_broker.sandbox.workers.python_paths import python_paths
from sandbox_worker.wire.level import LevelName
from tests.support.processes import living_below
from tests.support.skips import require_cpp_library
from tests.support.sources import pool_of
from tests.support.tables import table
from tests.support.waiting import until


async def run(repl: Any, code: str) -> Block:
    async with repl as opened:
        block: Block = await opened.aexecute(code)
        return block


@table("level", ["strict", "standard"])
async def test_repl_has_the_templates_state_copied(level: LevelName) -> None:
    """A REPL finds context, modules and variables of the template and shares none of its changes."""
    setup = "import json\nby_name = {each['name']: each for each in context}\ndef find(name): return by_name[name]"
    look = (
        "import sys\nprint('decimal' in sys.modules, find('b'), context == context_0, len(by_name))\n"
        "by_name.clear(); context.append(1); left = 1\nprint(sys.getrefcount(by_name) < 100)"
    )
    async with Sandbox(isolation=level, warm=0) as sandbox:
        data = [{"name": "a"}, {"name": "b"}]
        async with sandbox.template(data, imports=["decimal"], setup=setup) as template:
            plain = await run(sandbox.repl(), "print(1)")
            first, second = [await run(template.repl(), look) for _ in range(2)]
    assert plain.stdout == "1\n"
    assert first.stdout == second.stdout == "True {'name': 'b'} True 2\nTrue\n", (first, second)
    assert living_below() == set()


async def test_layers_and_limits_are_those_of_any_other_repl() -> None:
    limits = Limits(memory_bytes=256 << 20)
    async with Sandbox(limits, warm=0) as sandbox, sandbox.template(setup="x = bytearray(150 << 20)") as template:
        async with sandbox.repl() as usual, template.repl() as prepared:
            assert prepared.isolation == usual.isolation
            grown = await prepared.aexecute("y = bytearray(200 << 20)\nlen(x) + len(y)")
            assert grown.status == "ok", "what is shared is not the REPL's own"
            more = await prepared.aexecute("z = bytearray(200 << 20)")
            assert more.status in ("error", "killed")
            assert (await prepared.aexecute("print(len(x))")).stdout == f"{150 << 20}\n"
        for attempt in (
            "import os; os.unshare if hasattr(os, 'unshare') else None\nimport ctypes\n"
            "print(ctypes.CDLL(None).unshare(0x10000000), ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None))",
            "open('/etc/shadow')",
            "import socket; socket.socket()",
        ):
            block = await run(template.repl(), attempt)
            assert block.status == "error" or block.stdout == "-1 -1\n", block


async def test_killed_repl_has_the_templates_state_again(open_sandbox: Sandbox) -> None:
    async with (
        open_sandbox.template({"a": 1}, setup="n = 5") as template,
        template.repl(tools=["t"], values={"V": 2}) as repl,
    ):
        await repl.aexecute("n = 6; import os; os.kill(os.getpid(), 9)")
        assert (await repl.aexecute("print(n, context, V)")).stdout == "5 {'a': 1} 2\n"


async def test_warm_repls_of_a_template_are_its_own() -> None:
    async with Sandbox(warm=1) as sandbox, sandbox.template(["data"], warm=2) as template:
        pool = pool_of(template)
        await until(lambda: len(pool.ready) == 2)
        ready = set(pool.ready)
        async with template.repl() as repl:
            assert (await repl.aexecute("print(context)")).stdout == "['data']\n"
            assert len(ready - set(pool.ready)) == 1  # the REPL was one of the ready ones
        assert (await run(sandbox.repl("text"), "print(context)")).stdout == "text\n"


async def test_forks_draw_different_random_numbers(open_sandbox: Sandbox) -> None:
    require_cpp_library()
    async with open_sandbox.template(imports=["random", "numpy"]) as template:
        code = "import random, numpy\nprint(random.random(), numpy.random.rand())"
        drawn = {(await run(template.repl(), code)).stdout for _ in range(3)}
    assert len({text.split()[0] for text in drawn}) == len({text.split()[1] for text in drawn}) == 3


async def test_template_without_context_takes_one_per_repl(open_sandbox: Sandbox) -> None:
    async with open_sandbox.template(setup="n = 1") as template:
        assert (await run(template.repl(context="text"), "print(context, n)")).stdout == "text 1\n"
        assert (await run(template.repl(), "print(context, n)")).stdout == "None 1\n"


async def test_template_leaves_a_stored_context_to_its_owner(open_sandbox: Sandbox) -> None:
    """Its REPLs take no other."""
    with store({"a": 1}) as stored:
        for _ in range(2):
            async with open_sandbox.template(stored) as template:
                assert (await run(template.repl(), "print(context['a'])")).stdout == "1\n"
                with pytest.raises(ConfigurationError, match="has a context already"):
                    template.repl(context="another")


@table(
    "given, said",
    [
        (
            {"setup": "1/0"},
            r"^a template cannot be made: its setup failed: ZeroDivisionError: division by zero \(line 1 of <setup>\)$",
        ),
        ({"setup": "def f(:"}, r"its setup failed: SyntaxError: .* \(<setup>, line 1\)$"),
        ({"setup": "import sys; sys.exit(3)"}, "SystemExit: 3"),
        (
            {"setup": "import threading, time; threading.Thread(target=time.sleep, args=(60,), name='poller').start()"},
            r"its setup failed: it or an import started a thread \(poller\), and a fork server may have none",
        ),
        ({"setup": "f = open('/dev/null')"}, "leaves a file open: .*/dev/null"),
        ({"setup": "import mmap; m = mmap.mmap(-1, 4096)"}, "leaves memory that its forks would share"),
        (
            {"setup": "import mmap; m = mmap.mmap(-1, 4096, mmap.MAP_SHARED, mmap.PROT_READ)"},
            "leaves memory that its forks would share",
        ),
        (
            {"setup": "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\n    os._exit(0)"},
            "leaves a process running",
        ),
        ({"imports": ["no_such_module"]}, "its imports failed: no_such_module: ModuleNotFoundError: .*'$"),
    ],
)
async def test_template_error_is_one_sentence_without_a_leak(
    given: dict[str, Any], said: str, open_sandbox: Sandbox
) -> None:
    before = living_below()
    with pytest.raises((ConfigurationError, SandboxFailed), match=said) as refused:
        async with open_sandbox.template(**given):
            pass
    assert "\n" not in str(refused.value)
    assert living_below() == before


async def test_mapped_files_are_shared_only_if_unwritable(tmp_path: Path) -> None:
    """Files mapped for reading are shared only if they cannot be written to."""
    file = tmp_path / "data"
    file.write_bytes(bytes(4096))
    file.chmod(0o644)
    # Not by the module mmap, which keeps the file open: a template refuses that in any case.
    setup = (
        "import ctypes, os\nmap = ctypes.CDLL(None).mmap\nmap.restype = ctypes.c_void_p\n"
        f"f = os.open({str(file)!r}, os.O_RDONLY)\nm = map(None, 4096, 1, 1, f, 0)\nos.close(f)"
    )
    async with Sandbox(isolation="standard", warm=0) as sandbox:
        async with sandbox.template(setup=setup) as template:
            assert (await run(template.repl(), "print(ctypes.string_at(m, 1))")).stdout == "b'\\x00'\n"
        with pytest.raises(ConfigurationError, match="leaves memory that its forks would share"):
            async with sandbox.template(setup=setup.replace("O_RDONLY", "O_RDWR")):
                pass


async def test_endless_set_up_code_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, open_sandbox: Sandbox) -> None:
    monkeypatch.setattr(zygote_process, "END_TIMEOUT_S", 0.1)
    before = living_below()
    with pytest.raises(SandboxFailed, match=r"took longer than timeout_s = 0.5"):
        async with open_sandbox.template(setup="while True: pass", timeout_s=0.5):
            pass
    assert living_below() == before


async def test_set_up_code_is_isolated_too(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    setup = (
        f"import os, socket\nfound = os.path.exists('{tmp_path}/secret'), os.path.exists('/etc/shadow')\n"
        "try:\n    socket.create_connection(('127.0.0.1', 1))\nexcept OSError as error:\n    network = str(error)"
    )
    async with Sandbox(isolation="strict", warm=0) as sandbox, sandbox.template(setup=setup) as template:
        seen = (await run(template.repl(), "print(found, network)")).stdout
    assert seen.startswith("(False, False)")
    assert "refused" not in seen


@table(
    "given, said",
    [
        ({"setup": 5}, "imports must be a list"),
        ({"imports": "numpy"}, "imports must be a list"),
        ({"imports": [5]}, "imports must be a list"),
        ({"setup": "#" * 40_000}, "setup is longer than"),
        ({"timeout_s": -1}, "give a positive number"),
        ({"timeout_s": "5"}, "give a positive number"),
        ({"warm": -3}, "warm must be a number"),
    ],
)
async def test_invalid_template_is_refused(given: dict[str, Any], said: str, open_sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_sandbox.template(**given)


async def test_template_that_cannot_be_used_is_refused(open_sandbox: Sandbox) -> None:
    """A context of an unknown kind, and a REPL of what is not open, are refused."""
    with pytest.raises(ContextRefused):
        async with open_sandbox.template(object()):
            pass
    with pytest.raises(SandboxFailed, match="the template is not open"):
        open_sandbox.template().repl()
    async with Sandbox(warm=0) as closed:
        pass
    for sandbox in (Sandbox(), closed):
        with pytest.raises(SandboxFailed, match="the sandbox is not open"):
            sandbox.template()


async def test_copies_of_shared_memory_are_counted() -> None:
    """Each REPL process has a copy of its own, made by reference counts. Its siblings and their inits have none."""
    setup = "texts = [str(number) * 3 for number in range(1_200_000)]"
    code = (
        "import os\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        kept = [text for text in texts]\n"
        "        import time; time.sleep(1000); os._exit(0)\n"
        "import time; time.sleep(1000)"
    )
    limits = Limits(memory_bytes=150 << 20, block_timeout_s=600)
    async with (
        Sandbox(limits, warm=0) as sandbox,
        sandbox.template(setup=setup) as template,
        contextlib.AsyncExitStack() as siblings,
    ):
        for _ in range(5):
            await siblings.enter_async_context(template.repl())
        assert (await run(template.repl(), "print(len(texts), sum(map(len, texts)) > 0)")).status == "ok"
        block = await run(template.repl(), code)
    assert (block.status, block.limit) == ("killed", "memory_bytes")
    assert block.post_mortem is not None
    assert block.post_mortem.memory_bytes < 300 << 20


STAND_INS = {
    "writes_a_cache": "import os\nos.makedirs(os.path.expanduser('~/.cache/stand-in'))\nimport tempfile\ntempfile.TemporaryFile().close()",
    "starts_a_thread": (
        "import os, threading, time\n"
        "if os.environ.get('JE_ARROW_MALLOC_CONF') != 'background_thread:false': os._exit(3)\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "is_quiet": "value = 5",
}
"""Modules that do at import what matplotlib and pyarrow do, which are too large to be installed for this test."""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    for name, code in STAND_INS.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(zygote_process, "python_paths", lambda: [*python_paths(), str(tmp_path)])


@pytest.mark.usefixtures("stand_ins")
@table("level", ["strict", "standard"])
async def test_template_imports_a_module_that_writes_a_cache(level: LevelName) -> None:
    """Its home is a scratch folder of its own, without the import's file. A module that starts a thread is named."""
    code = "import os, sys\nprint('writes_a_cache' in sys.modules, os.listdir(os.environ['HOME']))"
    async with Sandbox(isolation=level, warm=0) as sandbox:
        async with sandbox.template(imports=["writes_a_cache"]) as template:
            assert (await run(template.repl(), code)).stdout == "True []\n"
        with pytest.raises(ConfigurationError, match=r"starts_a_thread starts a thread \(.*\)"):
            await sandbox.template(imports=["is_quiet", "starts_a_thread"]).__aenter__()
