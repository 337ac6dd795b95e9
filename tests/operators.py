"""Standard mutation operators: small changes of a definition, each of which some test should notice."""

import ast
import collections
import functools
import re
from collections.abc import Iterator

OPERATORS = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.Pow: [ast.Mult],
    ast.FloorDiv: [ast.Mult], ast.Mod: [ast.FloorDiv], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd],
    ast.And: [ast.Or], ast.Or: [ast.And], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.GtE], ast.Gt: [ast.GtE, ast.Lt], ast.GtE: [ast.Gt, ast.LtE],
}
PAIRS = "min max, minimum maximum, amin amax, argmin argmax, any all, sum mean, real imag, triu tril, cos sin"
NAMES = dict(pair.split() for pair in PAIRS.split(", "))
NAMES |= {new: old for old, new in NAMES.items()} | {"float64": "float32", "complex128": "complex64"}
DROPPED = {"conj", "mT", "T", "transpose", "abs", "sqrt", "square", "double"}  # methods and attributes
LOOKS = """alpha clip_on cmap color fill figsize layout linestyle linewidth markersize shrink squeeze
           desc leave total unit unit_scale metavar help description formatter_class"""
NO_MATTER = {"strict", "device", "fused", "verbose", *LOOKS.split()}  # keyword arguments; tests are of a CPU
# what calls show, and how it looks, is no fault that tests are about
SHOWING = re.compile(r"(.+\.)?(print|say)|.+\.(tick_params|subplots|suptitle)|axis\.set|bar\.update")
SKIPPED = ast.JoinedStr | ast.Raise | ast.Assert  # messages; errors are not what the rows are about
LIBRARIES = {"torch", "np", "math", "functional"}
SYMMETRIC = {"transpose", "equal", "min", "max", "minimum", "maximum"}  # in their first arguments


def names_of(node: ast.AST) -> set[str | None]:
    """The names that a node defines: of a function, a class or an assignment; None for other nodes."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return {getattr(target, "name", getattr(target, "id", None)) for target in targets}


@functools.cache
def definitions(source: bytes) -> dict[str | None, list[ast.AST]]:
    """The nodes of a file that define a name: functions, classes, assignments."""
    found = collections.defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        for name in names_of(node):
            found[name].append(node)
    return found


def edits(source: bytes, name: str) -> Iterator[tuple[int, int, str]]:
    """(start, stop, new text) of every change of the functions, classes and constants called `name`."""
    lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]
    for node in definitions(source)[name]:
        for old, new in (change for part in parts(node) for change in (*changes(part), *dropped(part))):
            start, stop = lines[old.lineno - 1] + old.col_offset, lines[old.end_lineno - 1]
            if ast.unparse(new) != ast.unparse(old):
                yield start, stop + old.end_col_offset, ast.unparse(new)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a definition, without annotations, decorators and what is skipped."""
    if isinstance(node, SKIPPED) or isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        return
    called = getattr(getattr(node, "value", node), "func", None)
    if called and SHOWING.fullmatch(ast.unparse(called)):
        return
    if isinstance(node, ast.keyword) and node.arg in NO_MATTER:
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                yield from parts(child) if isinstance(child, ast.AST) else ()


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(part, replacement) of operators, conditions, names, numbers and arguments."""
    match node:
        case ast.BinOp(left, ast.MatMult() as op, right):
            yield node, ast.BinOp(right, op, left)
        case ast.BinOp(left, op, right):
            yield from ((node, ast.BinOp(left, new(), right)) for new in OPERATORS.get(type(op), ()))
        case ast.AugAssign(target, op, value):
            yield from ((node, ast.AugAssign(target, new(), value)) for new in OPERATORS.get(type(op), ()))
        case ast.BoolOp(op, values):
            yield from ((node, ast.BoolOp(new(), values)) for new in OPERATORS[type(op)])
        case ast.Compare(left, [op], right):
            yield from ((node, ast.Compare(left, [new()], right)) for new in OPERATORS[type(op)])
        case ast.If(test) | ast.IfExp(test) if isinstance(test, ast.Name | ast.Call | ast.Attribute):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Name(name) if name in NAMES:
            yield node, ast.Name(NAMES[name])
        case ast.Attribute(value, name) if name in NAMES:
            yield node, ast.Attribute(value, NAMES[name])
        case ast.Constant(value):
            yield from ((node, ast.Constant(new)) for new in constants(value))
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)) if name in SYMMETRIC:
            return
        case ast.Call(function, values, keywords):
            for index in range(2, len(values) + 1):
                swapped = [*values[: index - 2], *values[index - 2 : index][::-1], *values[index:]]
                yield node, ast.Call(function, swapped, keywords)


def constants(value) -> list:
    """Flags, numbers (axes, too) one less and one more or doubled, roots of tolerances, axes of einsum."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value - 1, value + 1][value == 0 :] if value < 10 else [value // 2, value * 2]
        case float():
            return [value**0.5 if 0 < value < 1e-3 else 2 * value or 1.0]
        case str() if re.search(r"->.*\w\w$", value):
            return [value[:-2] + value[:-3:-1]]
    return []


def dropped(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(part, what is left of it) without a sign, transpose, end of a slice, keyword argument or statement."""
    match node:
        case ast.UnaryOp(_, operand):
            yield node, operand
        case ast.Attribute(value, "T" | "mT"):
            yield node, value
        case ast.Slice(lower, upper, step):
            yield from ((node, ast.Slice(*new, step)) for new in ((None, upper), (lower, None)))
        case ast.Call(function, values, keywords):
            if isinstance(function, ast.Attribute) and function.attr in DROPPED:
                if getattr(function.value, "id", None) not in LIBRARIES:
                    yield node, function.value
            for keyword in keywords:
                if keyword.arg not in NO_MATTER:
                    yield node, ast.Call(function, values, [other for other in keywords if other != keyword])
        case ast.Expr(value) if not isinstance(value, ast.Constant):
            yield node, ast.Pass()
        case ast.AugAssign() | ast.Break() | ast.Continue():
            yield node, ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
        case ast.Assign([ast.Name(name)], value):  # the name had a value before
            if name in {getattr(part, "id", None) for part in ast.walk(value)}:
                yield node, ast.Pass()
