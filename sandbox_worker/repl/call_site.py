"""What a call of model code's says between its parentheses, read from the source of its block."""

import ast
import itertools
import linecache
from types import FrameType

BLOCK = "<block "
"""Begins the name of the file that a block's code seems to come from."""


def argument(caller: FrameType, function: str) -> ast.expr | None:
    """Return the one argument of the call `function(argument)` that `caller` is in, by place or by name.

    Returns:
        None where that cannot be known: the code is of no block, its source is gone, it calls something else (such as
        `map`, which calls the function), or with `*args`.
    """
    source = _source_of_call(caller)
    try:
        call = ast.parse(source, mode="eval").body if source else None
    except (SyntaxError, ValueError):  # ValueError: a null character
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != function:
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]
    return given[0] if len(given) == 1 and not isinstance(given[0], ast.Starred) else None


def _source_of_call(caller: FrameType) -> str:
    """The text of the expression that `caller` evaluates just now; empty if it is not known."""
    code = caller.f_code
    kept = linecache.cache.get(code.co_filename) if code.co_filename.startswith(BLOCK) else None
    place = next(itertools.islice(code.co_positions(), caller.f_lasti // 2, None), None)
    if kept is None or place is None or len(kept) != 4:
        return ""
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [line.encode() for line in kept[2][first - 1 : last]]  # columns are counted in UTF-8
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
