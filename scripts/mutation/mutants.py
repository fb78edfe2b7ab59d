"""Small faults that are put into a module, one at a time: its tests have to notice each."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_REMOVED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        where: The function that it is in, with its classes; empty at the module's own level.
        line: Counts from 1.
        was: The source that is replaced, on one line.
        becomes: What replaces it.
        number: Counts those of one function that replace the same by the same, from 1.
        source: The whole module with the fault.
    """

    where: str
    line: int
    was: str
    becomes: str
    number: int
    source: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Its name, for as long as its function does not change."""
        return self.where, self.was, self.becomes, self.number


def mutants_of(source: str) -> list[Mutant]:
    """List all faults that can be put into a module, in its order."""
    data, found, seen = source.encode(), [], dict[tuple[str, str, str], int]()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for where, node, becomes in _of_statements(ast.parse(source).body, ""):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        was = " ".join(data[start:end].decode().split())
        seen[where, was, becomes] = number = seen.get((where, was, becomes), 0) + 1
        mutated = (data[:start] + becomes.encode() + data[end:]).decode()
        found.append(Mutant(where, node.lineno, was, becomes, number, mutated))
    return found


def sampled(mutants: Sequence[Mutant], most: int | None, seed: int) -> list[Mutant]:
    """Draw so many of them, kept in order; all of them for None."""
    if most is None or most >= len(mutants):
        return list(mutants)
    chosen = sorted(random.Random(seed).sample(range(len(mutants)), most))
    return [mutants[index] for index in chosen]


_Found = Iterator[tuple[str, ast.AST, str]]


def _of_statements(body: Sequence[ast.stmt], where: str) -> _Found:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{where}.{statement.name}".lstrip(".")
            if not isinstance(statement, ast.ClassDef):
                for default in [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]:
                    yield from _of_expression(default, inner)
            yield from _of_statements(statement.body, inner)
        else:
            yield from _of_statement(statement, where)


def _of_statement(statement: ast.stmt, where: str) -> _Found:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert) or _is_for_type_checkers(statement):
        return
    if _may_go(statement):
        yield where, statement, "pass"
    if isinstance(statement, ast.Return) and not _is_none(statement.value):
        yield where, statement, "return None"
    for name, value in ast.iter_fields(statement):
        for part in value if isinstance(value, list) else [value]:
            yield from _of_part(name, part, where)
    if isinstance(statement, ast.If | ast.While) and isinstance(statement.test, ast.Name | ast.Attribute | ast.Call):
        yield where, statement.test, f"(not {ast.unparse(statement.test)})"


def _of_part(name: str, part: object, where: str) -> _Found:
    """The faults in one part of a statement, which has it under this name."""
    match part:
        case ast.stmt():
            yield from _of_statements([part], where)
        case ast.ExceptHandler():
            yield from _of_statements(part.body, where)
        case ast.match_case():
            yield from _of_expression(part.guard, where)
            yield from _of_statements(part.body, where)
        case ast.withitem():
            yield from _of_expression(part.context_expr, where)
        case ast.expr() if name == "annotation":  # calls in it are more than types
            for call in [inner for inner in ast.walk(part) if isinstance(inner, ast.Call)]:
                yield from _of_expression(call, where)
        case ast.expr() if not _is_text(part):
            yield from _of_expression(part, where)


def _of_expression(node: ast.AST | None, where: str) -> _Found:
    if node is None or isinstance(node, ast.JoinedStr):  # the places of what is in one are not known before 3.12
        return
    for becomes in _instead(node):
        yield where, node, becomes
    if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield where, node.test, f"(not {ast.unparse(node.test)})"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            yield from (each for part in [child.iter, *child.ifs] for each in _of_expression(part, where))
        elif isinstance(child, ast.keyword):
            yield from _of_expression(child.value, where)
        elif isinstance(child, ast.expr):
            yield from _of_expression(child, where)


def _instead(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare():
            yield from _compared_otherwise(node)
        case ast.BoolOp(op=joined, values=values):
            yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(joined, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Await(value=value):
            yield f"({ast.unparse(value)})"
        case ast.Constant(value=bool(truth)):
            yield repr(not truth)
        case ast.Constant(value=int() | float() as number):
            yield f"({number + 1!r})"
            yield f"({number - 1!r})"
        case ast.BinOp(left=left, op=computed, right=right) if type(computed) in _COMPUTED and not _is_text(left):
            yield f"({ast.unparse(ast.BinOp(left, _COMPUTED[type(computed)](), right))})"
        case ast.Call():
            yield from _called_otherwise(node)


def _compared_otherwise(node: ast.Compare) -> Iterator[str]:
    for at, op in enumerate(node.ops):
        for other in _COMPARED[type(op)]:
            changed = [*node.ops[:at], other(), *node.ops[at + 1 :]]
            yield f"({ast.unparse(ast.Compare(node.left, changed, node.comparators))})"


def _called_otherwise(node: ast.Call) -> Iterator[str]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        yield ast.unparse(ast.Call(ast.Name(_CALLED[node.func.id]), node.args, node.keywords))
    elif len(node.args) > 1 and not _is_starred(*node.args[:2]):
        first, second, *rest = node.args
        if ast.dump(first) == ast.dump(second):
            return
        yield ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))


def _may_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await)
    return isinstance(statement, _REMOVED)


def _is_for_type_checkers(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_text(value: ast.AST) -> bool:
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str | bytes)
    )


def _is_starred(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)
