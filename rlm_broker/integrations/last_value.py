"""The value of a block's last statement, also where that is no expression: interpreters of peers return it."""

import ast
import itertools
from collections.abc import Iterable, Iterator

_numbers = itertools.count(1)
"""A block that fails leaves the variable. No other block may find it."""


def with_last_value(code: str) -> str:
    """Return code whose last line is the value of the last statement: of an assignment, also within an `if` or a loop.

    Text is put into lines, and no line gets another number. Code that ends in an expression, or in a statement without
    a value, is returned as it is. So is code that cannot be compiled.

    Example:
        ```python
        print(repl.execute(with_last_value("a = 1"), value=True).value)  # 1
        ```

    Args:
        code: Python source.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the REPL says what is wrong
        return code
    if not body or isinstance(body[-1], ast.Expr):
        return code
    name = f"_last_value_{next(_numbers)}"
    insertions = sorted(_insertions(body, name), reverse=True)
    if not insertions:
        return code
    lines = code.encode().splitlines(keepends=True)  # `str.splitlines` knows more ends of a line than the compiler
    for line, column, text in insertions:
        whole = lines[line - 1]
        lines[line - 1] = whole[:column] + text.encode() + whole[column:]
    return f"{b''.join(lines).decode()}\nglobals().pop({name!r}, None)"


def _insertions(body: list[ast.stmt], name: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, column in bytes, and text of all that keeps the value of the last statement of a body."""
    match body[-1:]:
        case [(ast.Expr() | ast.Assign()) as last]:
            yield last.lineno, last.col_offset, f"{name} = "
        case [(ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr())) as last]:
            calls = any(isinstance(part, ast.Call | ast.NamedExpr | ast.Await) for part in ast.walk(target))
            if not calls and last.end_lineno is not None and last.end_col_offset is not None:
                yield last.end_lineno, last.end_col_offset, f"; {name} = {ast.unparse(target)}"
        case [(ast.If() | ast.For() | ast.While() | ast.With() | ast.Try() | ast.Match()) as last]:
            for inner in _bodies(last):
                yield from _insertions(inner, name)


def _bodies(statement: ast.stmt) -> Iterable[list[ast.stmt]]:
    for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield getattr(part, "body", [])
        yield getattr(part, "orelse", [])
