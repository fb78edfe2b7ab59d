"""Fork servers that have something ready: what their REPLs find, what they cannot change, and when they go."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context import StoredContext, store
from rlm_broker.errors import ConfigurationError, ContextRefused, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox import template as templates
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.types import Block
from tests.processes import living_below, living_parents_below

LARGE = {str(number): {"n": number, "text": "x" * 40} for number in range(40_000)}


async def run(repl: Any, code: str) -> Block:
    async with repl as opened:
        block: Block = await opened.aexecute(code)
        return block


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def loaded(sandbox: Sandbox) -> int:
    assert sandbox._loaded is not None
    return len(sandbox._loaded._loaded)


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


async def test_set_up_code_is_behind_walls_too() -> None:
    setup = (
        "import os, socket\nfound = os.listdir('/'), os.path.exists('/etc/shadow')\n"
        "try:\n    socket.create_connection(('127.0.0.1', 1))\nexcept OSError as error:\n    network = str(error)"
    )
    async with Sandbox(isolation="strict", warm=0) as sandbox, sandbox.template(setup=setup) as template:
        seen = (await run(template.repl(), "print(found, network)")).stdout
    assert "'home'" not in seen
    assert ", False)" in seen
    assert "refused" not in seen


@pytest.mark.parametrize("given", [{"setup": 5}, {"imports": "numpy"}, {"imports": [5]}])
async def test_what_is_no_template_is_refused(given: dict[str, Any]) -> None:
    async with Sandbox(warm=0) as sandbox:
        with pytest.raises(ConfigurationError, match="imports is a list"):
            sandbox.template(**given)
        with pytest.raises(ContextRefused):
            async with sandbox.template({1, 2}):
                pass
        with pytest.raises(SandboxFailed, match="the template is not open"):
            sandbox.template().repl()
    with pytest.raises(SandboxFailed, match="the sandbox is not open"):
        sandbox.template()


# -- contexts that are used again


async def test_a_large_context_of_objects_is_loaded_once_when_it_is_used_again() -> None:
    async with Sandbox(warm=0) as sandbox:
        with store(LARGE) as context:
            for number in range(3):
                assert (await run(sandbox.repl(context), "print(len(context), context['7'])")).stdout == (
                    f"40000 {LARGE['7']}\n"
                )
                assert loaded(sandbox) == (number > 0)
            parents = len(living_parents_below())
            async with sandbox.repl(context) as repl:
                await repl.aexecute("context.clear(); import os; os.kill(os.getpid(), 9)")
                assert (await repl.aexecute("print(len(context))")).stdout == "40000\n"
            assert len(living_parents_below()) == parents
        with store(LARGE) as another:
            await run(sandbox.repl(another), "1")
            assert loaded(sandbox) == 1
    assert living_below() == set()


async def test_many_at_once_wait_for_the_one_that_loads_it() -> None:
    async with Sandbox(warm=0) as sandbox:
        with store(LARGE) as context:
            blocks = await asyncio.gather(*(run(sandbox.repl(context), "print(len(context))") for _ in range(12)))
        assert {block.stdout for block in blocks} == {"40000\n"}
        assert loaded(sandbox) == 1


@pytest.mark.parametrize("context", ["x" * 5_000_000, {"small": 1}])
async def test_texts_and_small_contexts_need_none(context: Any) -> None:
    async with Sandbox(warm=0) as sandbox:
        with store(context) as stored:
            for _ in range(3):
                await run(sandbox.repl(stored), "1")
        assert loaded(sandbox) == 0


async def test_what_was_used_longest_ago_goes_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [store({**LARGE, "own": number}) for number in range(3)]
    size = contexts[0].info.form.size_bytes * templates.EACH_BYTE

    async def use(context: StoredContext) -> None:
        for _ in range(2):
            assert (await run(sandbox.repl(context), "print('own' in context)")).stdout == "True\n"

    async with Sandbox(warm=0) as sandbox:
        assert sandbox._loaded is not None
        monkeypatch.setattr(sandbox._loaded, "_max_bytes", int(2.5 * size))
        await use(contexts[0])
        await use(contexts[1])
        await use(contexts[0])
        await use(contexts[2])
        kept = [Path(f"/proc/self/fd/{each._context.fd}").stat().st_ino for each in sandbox._loaded._loaded.values()]
        assert kept == [Path(f"/proc/self/fd/{contexts[number].fd}").stat().st_ino for number in (0, 2)]
        async with sandbox.repl(contexts[0]), sandbox.repl(contexts[2]):
            await use(contexts[1])  # the others are in use: it is loaded for each REPL
            assert loaded(sandbox) == 2
    for context in contexts:
        context.close()


async def test_a_context_that_cannot_be_kept_loaded_is_loaded_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sandbox(warm=0) as sandbox:
        assert sandbox._loaded is not None
        monkeypatch.setattr(sandbox._loaded, "_max_bytes", 1)
        with store(LARGE) as context:
            for _ in range(3):
                assert (await run(sandbox.repl(context), "print(len(context))")).stdout == "40000\n"
        assert loaded(sandbox) == 0
