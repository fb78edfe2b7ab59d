"""Runs the examples in the docstrings of a package: each with names of its own, in the folder and process of a page.

An example finds the public names and those of `PREPARED`. A comment behind `print(...)` or behind an expression is what
it prints or returns; `...` matches any text. Lines with `>>>` are run by doctest.
"""

import ast
import asyncio
import contextlib
import doctest
import functools
import importlib
import io
import re
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import rlm_broker
from scripts.lint.project import Source, is_text
from tests.support import page_code
from tests.support.places import PROJECT

ADAPTERS = PROJECT / "rlm_broker/integrations"
NOT_RUN = {"RayCluster": "needs Ray"}
"""Class or function: reason why its example is only compiled. So are those of adapters that require a peer."""
FILES = {
    "logs/payments.log": "09:00 payments failed\n",
    "logs/search.log": "09:05 search failed\n",
    "report.txt": "The pump on deck 2 was repaired.\n",
    "old.log": "09:00 started\n",
}
"""File in the current folder of the examples: its text."""


@dataclass(frozen=True)
class Example:
    """The example of one docstring.

    Attributes:
        owner: Name of its class or function, with its class.
        place: File and line of its code.
        text: Code, with `>>>` before each statement if doctest runs it.
    """

    owner: str
    place: str
    text: str


def examples(package: Path) -> Iterator[Example]:
    """Yield the examples in the docstrings of a package."""
    for path in sorted(package.rglob("*.py")):
        source = Source(PROJECT, path)
        for owner, node in _documented(source.tree, ""):
            text = ast.literal_eval(node)
            places = [(piece.line, piece.text) for piece in page_code.pieces(text) if piece.language == "python"]
            if re.search("^ *>>> ", text, re.MULTILINE):
                places.append((1, text))
            for line, code in places:
                yield Example(owner, f"{source.path}:{node.lineno + line - 1}", code)


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.Constant]]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = each.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and is_text(first.value):
                yield prefix + each.name, first.value
            yield from _documented(each, f"{prefix}{each.name}.")


def faults(package: Path, runner: asyncio.Runner) -> list[str]:
    """Run the examples of a package in the current folder, and return a line or more for each fault."""
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    with contextlib.ExitStack() as stack:
        shared = Shared(stack, runner)
        found = [(each, _fault(each, shared)) for each in examples(package)]
    return [f"{each.place}: {each.owner}: {fault}" for each, fault in found if fault]


@dataclass
class Shared:
    """The objects that all examples share: one sandbox and one `RLM`, which are opened once."""

    stack: contextlib.ExitStack
    runner: asyncio.Runner

    @cached_property
    def sandbox(self) -> rlm_broker.Sandbox:
        """The sandbox of all examples."""
        return self.stack.enter_context(rlm_broker.Sandbox())

    @cached_property
    def rlm(self) -> rlm_broker.RLM:
        """The `RLM` of all examples, whose model answers at once."""
        return self.stack.enter_context(rlm_broker.RLM(rlm_broker.ScriptedClient(_reply), sandbox=self.sandbox))


def _reply(request: rlm_broker.LMRequest) -> str:
    return "```repl\nprint(len(context))\nFINAL('2')\n```" if request.is_loop else "an answer"


async def _answer(query: rlm_broker.Query) -> list[rlm_broker.Slot]:
    return [rlm_broker.Slot("an answer") for _ in query.prompts]


LIBRARY = {"Path": Path, "asyncio": asyncio, "contextlib": contextlib, "warnings": warnings}
"""Names of the standard library that examples use without an import."""
PREPARED: dict[str, Callable[[Shared, contextlib.ExitStack], Any]] = {
    "sandbox": lambda shared, _: shared.sandbox,
    "rlm": lambda shared, _: shared.rlm,
    "repl": lambda shared, own: own.enter_context(shared.sandbox.repl("some text", _answer)),
    "handler": lambda _, own: own.enter_context(rlm_broker.LMHandler(rlm_broker.ScriptedClient(_reply))),
    "items": lambda *_: [{"id": "1", "context": "a", "question": "How many?"}],
    "source": lambda *_: object(),
    "request": lambda *_: rlm_broker.LMRequest((rlm_broker.ChatMessage("user", "How many lines are there?"),)),
}
"""Name that examples find: what makes it, from the shared objects and the end of the example."""


def _fault(example: Example, shared: Shared) -> str | None:
    path = example.place.partition(".py")[0]
    file = PROJECT / f"{path}.py"
    if file.parent == ADAPTERS and "require(" in file.read_text():
        compile(example.text, example.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return None
    own_names = vars(importlib.import_module(path.replace("/", "."))).items()
    names = {name: each for name, each in own_names if getattr(each, "__module__", None) == path.replace("/", ".")}
    names |= LIBRARY | {name: getattr(rlm_broker, name) for name in dir(rlm_broker) if name != "__version__"}
    names["RLM"] = functools.partial(rlm_broker.RLM, sandbox=shared.sandbox)
    if ">>> " in example.text:
        return _doctest(example, names)
    try:
        tree = ast.parse(example.text)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        checked = ast.fix_missing_locations(_Checks(_comments(example.text)).visit(tree))
        code = compile(checked, example.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if example.owner in NOT_RUN:
            return None
        with contextlib.ExitStack() as own, contextlib.redirect_stdout(io.StringIO()):
            names |= {name: make(shared, own) for name, make in PREPARED.items() if name in used}
            names["check"] = check
            result = eval(code, names)
            if result is not None:
                shared.runner.run(result)
    except BaseException:  # noqa: BLE001 - SystemExit is a fault of the example, too
        return traceback.format_exc(limit=-6)
    return None


def _doctest(example: Example, names: dict[str, Any]) -> str | None:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(
        doctest.DocTestParser().get_doctest(example.text, names, example.owner, example.place, 0), out=said.append
    )
    return "".join(said) or None


def _comments(text: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}


class _Checks(ast.NodeTransformer):
    """Replaces a statement that has a comment behind it by a comparison of its value with the comment."""

    def __init__(self, comments: dict[int, str]) -> None:
        self._comments = comments

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        expected = self._comments.get(node.end_lineno or 0)
        if expected is None:
            return node
        call = node.value
        prints = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
        values = call.args if isinstance(call, ast.Call) and prints else [call]
        given = [ast.Constant(expected), ast.Constant(prints), *values]
        return ast.copy_location(ast.Expr(ast.Call(ast.Name("check", ast.Load()), given, [])), node)


def check(expected: str, is_printed: bool, *values: object) -> None:
    """Compare what an example prints or returns with its comment.

    Raises:
        AssertionError: They differ.
    """
    got = " ".join(map(str, values)).strip() if is_printed else repr(values[0])
    pattern = ".*".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(pattern, got, re.DOTALL), f"got {got!r}, and not {expected!r}"
