"""Prose is plain: no pronouns that name no actor, docstrings that stand alone, narrow tables."""

import ast
import re
import tokenize
from collections.abc import Iterator

from scripts.lint.project import CODE, DOCUMENTS, FUNCTIONS, Finding, Project, Source, is_text

PRONOUNS = re.compile(
    r"\b(nobody|somebody|anybody|everybody|no one|whoever|whomever|whatever|nothing)\b", re.IGNORECASE
)
"""Indefinite pronouns. As subjects, they hide which process or person acts. They make up 1.1 of 1,000 words of trio's
prose, 0.5 of h11's, 0.1 of websockets' and 0.3 of structlog's."""
FORBIDDEN = re.compile(r"(?:\b|_)(nobody|somebody|anybody|everybody|whoever|whomever)(?:\b|_)", re.IGNORECASE)
"""Pronouns that name no actor, allowed nowhere: neither in prose nor in names."""
OPENINGS = ("Of", "What", "Who", "Whom", "Whose", "It", "Told", "Kept", "For", "In", "Where", "Nothing", "How")
"""Words with which no docstring begins: its first sentence would not stand alone."""
MOST_PER_1000 = 1.0
"""Indefinite pronouns per 1,000 words: the rate of trio's prose, the highest of four codebases measured."""
WIDEST_CELL = 120
"""Characters of a table's cell. Longer text is a list or a section."""
NAMES = re.compile(r"\w+(?:, \w+)+")
"""A list of names, such as the packages of a room. It may be longer."""
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def rules(project: Project) -> Iterator[Finding]:
    """Yield forbidden words and openings, folders with too many pronouns, and wide cells of tables."""
    for folder in (*CODE, *DOCUMENTS):
        words = pronouns = 0
        for source in project.sources[folder]:
            for line, kind, text in passages(source):
                words += len(WORD.findall(text))
                pronouns += len(PRONOUNS.findall(text))
                yield from (Finding(source.path, line, fault) for fault in faults(kind, text))
        if (rate := 1000 * pronouns / max(1, words)) > MOST_PER_1000:
            yield Finding(folder, 1, f"has {rate:.2f} indefinite pronouns in 1,000 words: name the actors")
    for source in project.documents():
        for line, row in enumerate(source.text.split("\n"), 1):
            cells = row.replace("\\|", "").split("|") if row.startswith("|") else []
            if any(len(cell.strip()) > WIDEST_CELL and not NAMES.fullmatch(cell.strip()) for cell in cells):
                yield Finding(source.path, line, f"a cell has more than {WIDEST_CELL} characters: write a list")


def passages(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each docstring, comment, error, name of a definition, or line of a document."""
    if source.path.endswith(".md"):
        plain = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), source.text)
        found: Iterator[tuple[int, str, str]] = (
            (line, "document", each) for line, each in enumerate(plain.split("\n"), 1)
        )
    else:
        found = _of_code(source)
    yield from ((line, kind, re.sub(r"`[^`]*`", "`", text)) for line, kind, text in found)


def faults(kind: str, text: str) -> Iterator[str]:
    """Yield what is wrong with one passage: forbidden pronouns and openings."""
    yield from (f"says {word[1]!r}: name the actor" for word in FORBIDDEN.finditer(text))
    first = re.match(r"\s*([A-Za-z]+)", text)
    if kind == "docstring" and first and first[1] in OPENINGS:
        yield f"begins with {first[1]!r}: begin with a verb (functions) or a noun (all else)"


def _of_code(source: Source) -> Iterator[tuple[int, str, str]]:
    for each in source.docstrings:
        yield each.lineno, "docstring", ast.literal_eval(each.value)
    for node in source.nodes:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.lineno, "name", node.name
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from ((each.lineno, "error", each.value) for each in ast.walk(node.exc) if is_text(each))  # type: ignore[attr-defined]
    for token in source.tokens:
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("#: ")
