"""The files that the rules read, each read and parsed once."""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("rlm_broker", "sandbox_worker")
CODE = (*PACKAGES, "scripts", "examples", "tests")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule, with one sentence that says what to do."""

    path: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.sentence}"


@dataclass(frozen=True)
class Figure:
    """A number that may only fall.

    Attributes:
        subject: Room, arrow or name; "all" for the whole tree.
        kind: What is counted, a key of `ratchet.KINDS`.
        value: Number of today.
        places: The places that are counted, where they help to lower the number.
    """

    subject: str
    kind: str
    value: int
    places: tuple[str, ...] = ()


class Source:
    """A Python or Markdown file, with its path relative to the project."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text()

    @property
    def name(self) -> str:
        """The dotted name of a module."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def lines(self) -> int:
        """Lines of the file."""
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """The tokens of the file."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """Texts that stand alone: of modules, classes, functions and attributes."""
        bodies = [body for node in self.nodes if isinstance(body := getattr(node, "body", None), list)]
        return [each for body in bodies for each in body if isinstance(each, ast.Expr) and is_text(each.value)]

    @property
    def code(self) -> int:
        """Lines of code, without blank lines, comments and docstrings."""
        found: set[int] = set()
        for token in self.tokens:
            if token.type not in NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
        for each in self.docstrings:
            found.difference_update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
        return len(found)

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Yield each import with the dotted name that it brings, without those of the standard library."""
        hidden: set[ast.AST] = set()
        if self.path == "rlm_broker/__init__.py":  # what it shows to type checkers is loaded by no program
            hidden = {node for block in self.tree.body if isinstance(block, ast.If) for node in ast.walk(block)}
        for node in self.nodes:
            if node in hidden:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from ((node, name) for name in names if name.partition(".")[0] not in sys.stdlib_module_names)


class Project:
    """A work tree: its modules by their names, and its documents."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {folder: list(self._read(folder)) for folder in (*CODE, *DOCUMENTS)}

    def _read(self, folder: str) -> Iterator[Source]:
        path = self.root / folder
        paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".py", ".md"))
        yield from (Source(self.root, each) for each in paths if "__pycache__" not in each.parts)

    @cached_property
    def modules(self) -> dict[str, Source]:
        """The modules of the packages, by their dotted names."""
        return {each.name: each for each in self.python(*PACKAGES)}

    @cached_property
    def folders(self) -> set[str]:
        """The folders directly below a package, by their dotted names."""
        return {".".join(name.split(".")[:2]) for name, source in self.modules.items() if source.path.count("/") > 1}

    def python(self, *folders: str) -> list[Source]:
        """Return the Python files below some folders."""
        return [each for folder in folders for each in self.sources[folder] if each.path.endswith(".py")]

    def documents(self) -> list[Source]:
        """Return the Markdown files."""
        return [each for folder in DOCUMENTS for each in self.sources[folder]]

    def module_of(self, name: str) -> str | None:
        """Return the module that an imported name stands in, or None for one of another project."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name or None


def room_of(module: str) -> str:
    """Return the room of a module: its first folder below the package, or the package for modules at its root."""
    parts = module.split(".")
    return module if len(parts) < 2 else ".".join(parts[:2])


def is_text(node: ast.AST) -> bool:
    """Return whether a node is a literal text."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
