"""Fork servers that have something ready: what their REPLs find, what they cannot change, and when they go."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError, ContextRefused, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.types import Block
from tests.processes import living_below


async def run(repl: Any, code: str) -> Block:
    async with repl as opened:
        block: Block = await opened.aexecute(code)
        return block


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("level", ["strict", "standard"])
async def test_a_repl_finds_context_modules_and_variables_and_shares_none_of_its_changes(level: str) -> None:
    setup = "import json\nby_name = {each['name']: each for each in context}\ndef find(name): return by_name[name]"
    look = (
        "import sys\nprint('decimal' in sys.modules, find('b'), context == context_0, len(by_name))\n"
        "by_name.clear(); context.append(1); left = 1"
    )
    async with Sandbox(isolation=level, warm=0) as sandbox:
        data = [{"name": "a"}, {"name": "b"}]
        async with sandbox.template(data, imports=["decimal"], setup=setup) as template:
            plain = await run(sandbox.repl(), "print(1)")
            first, second = [await run(template.repl(), look) for _ in range(2)]
    assert plain.stdout == "1\n"
    assert first.stdout == second.stdout == "True {'name': 'b'} True 2\n", (first, second)
    assert living_below() == set()


async def test_walls_and_limits_are_those_of_any_other_repl() -> None:
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


async def test_a_killed_repl_has_it_all_again() -> None:
    async with (
        Sandbox(warm=0) as sandbox,
        sandbox.template({"a": 1}, setup="n = 5") as template,
        template.repl(tools=["t"], values={"V": 2}) as repl,
    ):
        await repl.aexecute("n = 6; import os; os.kill(os.getpid(), 9)")
        assert (await repl.aexecute("print(n, context, V)")).stdout == "5 {'a': 1} 2\n"


async def test_warm_repls_of_a_template_are_its_own() -> None:
    async with Sandbox(warm=1) as sandbox, sandbox.template(["data"], warm=2) as template:
        pool = template._pool
        assert pool is not None
        await until(lambda: len(pool._ready) == 2)
        started = time.monotonic()
        assert (await run(template.repl(), "print(context)")).stdout == "['data']\n"
        assert time.monotonic() - started < 5
        assert (await run(sandbox.repl("text"), "print(context)")).stdout == "text\n"


async def test_forks_of_one_process_draw_different_numbers() -> None:
    async with Sandbox(warm=0) as sandbox, sandbox.template(imports=["random", "numpy"]) as template:
        code = "import random, numpy\nprint(random.random(), numpy.random.rand())"
        drawn = {(await run(template.repl(), code)).stdout for _ in range(3)}
    assert len({text.split()[0] for text in drawn}) == len({text.split()[1] for text in drawn}) == 3


async def test_a_template_without_a_context_takes_one_for_each_repl() -> None:
    async with Sandbox(warm=0) as sandbox, sandbox.template(setup="n = 1") as template:
        assert (await run(template.repl(context="text"), "print(context, n)")).stdout == "text 1\n"
        async with sandbox.template("fixed") as fixed:
            assert (await run(fixed.repl(), "print(context)")).stdout == "fixed\n"
            with pytest.raises(ConfigurationError, match="has a context already"):
                fixed.repl(context="another")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"setup": "1/0"}, r"a template cannot be made: .*ZeroDivisionError: division by zero \(line 1 of <setup>\)"),
        ({"setup": "def f(:"}, "SyntaxError"),
        ({"setup": "import sys; sys.exit(3)"}, "SystemExit: 3"),
        ({"setup": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"}, "one thread"),
        ({"setup": "f = open('/dev/null')"}, "leaves a file open: .*/dev/null"),
        ({"setup": "import mmap; m = mmap.mmap(-1, 4096)"}, "leaves memory that its forks would share"),
        (
            {"setup": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)"},
            "leaves a process running",
        ),
        ({"imports": ["no_such_module"]}, "no_such_module: ModuleNotFoundError"),
    ],
)
async def test_what_goes_wrong_in_it_is_one_sentence_and_leaves_nothing(given: dict[str, Any], said: str) -> None:
    async with Sandbox(warm=0) as sandbox:
        before = living_below()
        with pytest.raises((ConfigurationError, SandboxFailed), match=said) as refused:
            async with sandbox.template(**given):
                pass
        assert "\n" not in str(refused.value)
        assert living_below() == before


async def test_set_up_code_that_never_ends_is_ended_at_its_time() -> None:
    async with Sandbox(warm=0) as sandbox:
        before = living_below()
        with pytest.raises(SandboxFailed, match=r"did not answer within 0.5 s"):
            async with sandbox.template(setup="while True: pass", timeout_s=0.5):
                pass
        assert living_below() == before


async def test_set_up_code_is_behind_walls_too(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    setup = (
        f"import os, socket\nfound = os.path.exists('{tmp_path}/secret'), os.path.exists('/etc/shadow')\n"
        "try:\n    socket.create_connection(('127.0.0.1', 1))\nexcept OSError as error:\n    network = str(error)"
    )
    async with Sandbox(isolation="strict", warm=0) as sandbox, sandbox.template(setup=setup) as template:
        seen = (await run(template.repl(), "print(found, network)")).stdout
    assert seen.startswith("(False, False)")
    assert "refused" not in seen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"setup": 5}, "imports is a list"),
        ({"imports": "numpy"}, "imports is a list"),
        ({"imports": [5]}, "imports is a list"),
        ({"setup": "#" * 40_000}, "setup is longer than"),
        ({"timeout_s": -1}, "give a positive number"),
        ({"timeout_s": "5"}, "give a positive number"),
        ({"warm": -3}, "warm is a number"),
    ],
)
async def test_what_is_no_template_is_refused(given: dict[str, Any], said: str) -> None:
    async with Sandbox(warm=0) as sandbox:
        with pytest.raises(ConfigurationError, match=said):
            sandbox.template(**given)
        with pytest.raises(ContextRefused):
            async with sandbox.template({1, 2}):
                pass
        with pytest.raises(SandboxFailed, match="the template is not open"):
            sandbox.template().repl()
    with pytest.raises(SandboxFailed, match="the sandbox is not open"):
        sandbox.template()


async def test_copies_of_what_is_shared_are_counted_while_siblings_share_it() -> None:
    """Each of the REPL's processes takes a copy of its own, by reference counts; its siblings and their inits do not."""
    setup = "texts = [str(number) * 3 for number in range(1_200_000)]"
    code = (
        "import os\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        kept = [text for text in texts]\n"
        "        import time; time.sleep(30); os._exit(0)\n"
        "import time; time.sleep(30)"
    )
    limits = Limits(memory_bytes=150 << 20, block_timeout_s=60)
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
