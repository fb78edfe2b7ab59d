"""Reads the prose of this repository: docstrings, comments, error messages and documents.

`python -m tests.support.prose PATH...` prints each sentence that breaks a rule, and the rate of indefinite pronouns.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRONOUNS = re.compile(
    r"\b(nobody|somebody|anybody|everybody|no one|whoever|whomever|whatever|nothing)\b", re.IGNORECASE
)
"""Indefinite pronouns. As subjects, they hide which process or person acts. They make up 1.1 of 1,000 words of trio's
prose, 0.5 of h11's, 0.1 of websockets' and 0.3 of structlog's."""
FORBIDDEN = re.compile(r"(?:\b|_)(nobody|somebody|anybody|everybody|whoever|whomever)(?:\b|_)", re.IGNORECASE)
"""Pronouns that name no actor, allowed nowhere: neither in prose nor in names."""
OPENINGS = ("Of", "What", "Who", "Whom", "Whose", "It", "Told", "Kept", "For", "In", "Where", "Nothing", "How")
"""Words with which no docstring begins: its first sentence would not stand alone."""
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """A piece of prose.

    Attributes:
        path: File, relative to the repository.
        line: Line of its beginning, from 1.
        kind: "docstring", "comment", "error", "name" (of a function or class) or "document".
        text: Words, without quotes and comment signs.
    """

    path: str
    line: int
    kind: str
    text: str

    def words(self) -> int:
        """Return the number of words."""
        return len(re.findall(r"[A-Za-z][A-Za-z'-]*", self.text))


def passages(path: Path, root: Path = ROOT) -> Iterator[Passage]:
    """Yield the prose of one Python or Markdown file."""
    name = str(path.relative_to(root))
    text = path.read_text()
    if path.suffix == ".md":
        plain = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        for line, each in enumerate(plain.split("\n"), 1):
            if each.strip():
                yield Passage(name, line, "document", re.sub(r"`[^`]*`", "`", each))
        return
    for line, kind, each in [*_strings(ast.parse(text)), *_comments(text)]:
        yield Passage(name, line, kind, re.sub(r"`[^`]*`", "`", each))


def files(*folders: str) -> list[Path]:
    """Return the Python and Markdown files below `folders` of the repository, or these files themselves."""
    found = []
    for folder in folders:
        path = ROOT / folder
        found += [path] if path.is_file() else [each for each in path.rglob("*") if each.suffix in (".py", ".md")]
    return sorted(each for each in found if "__pycache__" not in each.parts)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield docstrings of modules, classes, functions and attributes, names, and the texts of what is raised."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, "docstring", each.value.value
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, "name", node.name
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, "error", part.value


def _comments(text: str) -> Iterator[tuple[int, str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("#: ")


def faults(passage: Passage) -> list[str]:
    """Return what is wrong with one passage: forbidden pronouns and openings."""
    found = [f"says {word[1]!r}: name the actor" for word in FORBIDDEN.finditer(passage.text)]
    first = re.match(r"\s*([A-Za-z]+)", passage.text)
    if passage.kind == "docstring" and first and first[1] in OPENINGS:
        found.append(f"begins with {first[1]!r}: begin with a verb (functions) or a noun (all else)")
    return found


def rate(found: list[Passage]) -> float:
    """Return indefinite pronouns per 1,000 words."""
    pronouns = sum(len(PRONOUNS.findall(each.text)) for each in found)
    return 1000 * pronouns / max(1, sum(each.words() for each in found))


if __name__ == "__main__":
    read = [each for path in files(*sys.argv[1:]) for each in passages(path)]
    for passage in read:
        for fault in faults(passage):
            print(f"{passage.path}:{passage.line}: {fault}: {passage.text.strip().splitlines()[0][:90]}")
        for pronoun in PRONOUNS.finditer(passage.text):
            if not FORBIDDEN.fullmatch(pronoun[0]):
                start = passage.text[max(0, pronoun.start() - 40) : pronoun.end() + 40]
                print(f"{passage.path}:{passage.line}: pronoun {pronoun[0]!r}: ...{' '.join(start.split())}...")
    print(f"{rate(read):.2f} indefinite pronouns per 1,000 words of {sum(each.words() for each in read):,}")
