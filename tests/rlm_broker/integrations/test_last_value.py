"""The value of a block's last statement."""

import ast
from typing import Any

import pytest

from rlm_broker.integrations.last_value import with_last_value

VALUES: dict[str, Any] = {
    "a = 3": 3,
    "a = b = (1 + 2)": 3,
    "a, b = 1, 2": (1, 2),
    "x: int = 5  # typed": 5,
    "x = 1; x += 4": 5,
    "x = 1\nx += (\n 1 +\n 2)": 4,
    "d = {}\nd['é'] = 'ü'": "ü",
    "d = {1: 2}\nd[1] += 4": 6,
    "d = {}\nd.setdefault('k', [])[:] = [1]": [1],
    "for i in range(3): i; x = i * 2": 4,
    "for i in []: x = 1": None,
    "if 0:\n  (1)\nelse:\n  b = 1; b += 1\n  # the end": 2,
    "while i := globals().pop('n', 2) - 1:\n  if 'é': x = i; n = 1": 1,
    "with open('/dev/null') as f:\n    y = 'é'; z = y * 2": "éé",
    "try:\n  1 / 0\nexcept ArithmeticError:\n  q = 'ok'": "ok",
    "match 3:\n  case 3: r = 9": 9,
    "s = '''a\x0cb\u2028c'''\nt = s\r\n": "a\x0cb\u2028c",
}
"""Code -> its value."""
AS_THEY_ARE = (
    "1 + 1",
    "a = 1\na",
    "def f(): pass",
    "import os",
    "a = 1\ndel a",
    "",
    "(",
    "a\0",
    "d[f()] += 1",
    "x: int",
    "while 1:\n  x = 1\n  break",
)


@pytest.mark.parametrize("code", VALUES)
def test_last_statement_has_a_value_and_leaves_no_name(code: str) -> None:
    body = ast.parse(with_last_value(code)).body
    last = body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), "", "exec"), names)
    assert eval(compile(ast.Expression(last.value), "", "eval"), names) == VALUES[code]
    assert not [name for name in names if name.startswith("_last")]
    assert last.lineno == len(code.splitlines()) + 1 or "\u2028" in code


@pytest.mark.parametrize("code", AS_THEY_ARE)
def test_code_without_such_a_statement_is_not_changed(code: str) -> None:
    assert with_last_value(code) == code
