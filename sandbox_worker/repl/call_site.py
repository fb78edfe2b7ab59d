"""Source of a call in model code: the expression between its parentheses, read from the source of its block."""

import ast
import itertools
import linecache
from types import FrameType

BLOCK = "<block "
"""Beginning of the file name under which a block's code is compiled, such as "<block 3>"."""


def argument(caller: FrameType, function: str) -> ast.expr | None:
    """Return the expression of the only argument of the call `function(argument)` that `caller` evaluates.

    Args:
        caller: Frame of the code that made the call.
        function: Name of the called function.

    Returns:
        The expression, given by position or by name. None if it is unknown: the code belongs to no block, its source is
        gone, the call is of another function (such as `map`, which calls this one), or it has `*args`.
    """
    source = _source_of_call(caller)
    try:
        call = ast.parse(source, mode="eval").body if source else None
    except (SyntaxError, ValueError):  # ValueError is raised for a null character
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != function:
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]
    return given[0] if len(given) == 1 and not isinstance(given[0], ast.Starred) else None


def _source_of_call(caller: FrameType) -> str:
    """Return the source of the expression that `caller` evaluates just now; "" if it is unknown.

    Positions of instructions come from PEP 657. An instruction takes two bytes, so half of `f_lasti` is its index.
    """
    code = caller.f_code
    kept = linecache.cache.get(code.co_filename) if code.co_filename.startswith(BLOCK) else None
    place = next(itertools.islice(code.co_positions(), caller.f_lasti // 2, None), None)
    if kept is None or place is None or len(kept) != 4:
        return ""
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [line.encode() for line in kept[2][first - 1 : last]]  # columns count bytes of UTF-8
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
