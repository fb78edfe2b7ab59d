"""Facts about a text that may be Python, found without running it."""

import ast
import re

MAX_INSPECTED_CHARS = 100_000
"""Characters parsed for one reply. A parser takes about 1 s for 1 MB, and a reply is not trusted."""

_TOKEN = re.compile(r"""\#[^\n]*+|\"{3}|'{3}|"(?:\\[\s\S]|[^"\\\n])*+"?|'(?:\\[\s\S]|[^'\\\n])*+'?""")
"""Comment, triple quotes, or a string on one line. An unclosed string ends with its line."""
_ESCAPE = re.compile(r"\\[^\n]")
"""Backslash and the character behind it, unless that is a line end."""


class Inspector:
    """Parses Python for one reply, within `MAX_INSPECTED_CHARS` for all calls together. Beyond them no text counts as
    Python."""

    def __init__(self) -> None:
        self._left = MAX_INSPECTED_CHARS

    def spend(self, chars: int) -> bool:
        """Take `chars` from the budget; return False, and take none, if fewer are left."""
        if chars > self._left:
            return False
        self._left -= chars
        return True

    def tree(self, code: str) -> ast.Module | None:
        """Return the syntax tree of `code`; None if it is not Python, or too long or too deep to find out. It is for
        its shape only: escapes in string literals are blanked, since the parser would print a warning for each unknown
        one."""
        if not self.spend(len(code)):
            return None
        try:
            return ast.parse(_ESCAPE.sub("__", code))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            # ValueError: NUL characters and lone surrogates. The other two: nested too deeply for the parser.
            return None

    def looks_like_python(self, code: str) -> bool:
        """Whether `code` is Python that does something: a call, an assignment, an import or a definition."""
        tree = self.tree(code)
        return tree is not None and any(_does_something(node) for node in ast.walk(tree))


def _does_something(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return node.value is not None  # `Total: 5` is an annotation to the parser, and a line of text to people
    acts = ast.Call | ast.Assign | ast.AugAssign | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, acts)


class StringScanner:
    """Tells, for ascending line starts of a text with Python from `start` on, whether they are inside a triple-quoted
    string. It looks at each character once, and only up to the position it is asked about."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._at = start
        self._delimiter: str | None = None

    def inside_at(self, position: int) -> bool:
        """Whether a triple-quoted string is open at `position`, the start of a line or the end of the text."""
        while self._at < position:
            if self._delimiter is None:
                self._read_code(position)
            else:
                self._read_string(self._delimiter, position)
        return self._delimiter is not None

    def _read_code(self, position: int) -> None:
        token = _TOKEN.search(self._text, self._at, position)
        self._at = token.end() if token else position
        if token and token[0] in ('"""', "'''"):
            self._delimiter = token[0]

    def _read_string(self, delimiter: str, position: int) -> None:
        found = self._text.find(delimiter, self._at, position)
        if found < 0:
            self._at = position
            return
        before = self._text[self._at : found]
        if (len(before) - len(before.rstrip("\\"))) % 2:  # the first quote is escaped
            self._at = found + 1
        else:
            self._at = found + 3
            self._delimiter = None
