"""Mutants: each is one small change of a source that a test ought to notice.

A part of the syntax tree is written anew, and all else stays as it was. Left alone are annotations,
decorators, assertions, texts, and what only a type checker reads.
"""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

_PAIRS = """
    Lt LtE Gt GtE Eq NotEq In NotIn Is IsNot Add Sub Mult Div LShift RShift BitAnd BitOr And Or
    LtE Lt GtE Gt NotEq Eq NotIn In IsNot Is Sub Add Div Mult RShift LShift BitOr BitAnd Or And
    FloorDiv Div Mod Mult Pow Mult BitXor BitAnd
    """.split()  # noqa: SIM905 - one a line would be a page
_OTHER = {getattr(ast, a): getattr(ast, b) for a, b in zip(_PAIRS[::2], _PAIRS[1::2], strict=True)}
"""Operator -> what stands in its place."""
_UNWRAPPED = re.compile("abs|bool|dict|float|(frozen)?set|int|list|reversed|round|sorted|str|tuple")
"""A call of one of these with one argument may be dropped, and the argument stays."""
_DEMANDED = ("encoding", "strict")
"""Keywords that ruff demands (PLW1514, B905): what is dropped there is found without a test."""
_COUNTED = ast.Subscript | ast.Return | ast.Yield | ast.Tuple
"""An index or a type, an answer, or unpacked: no tuple there can lose an element unnoticed."""
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_JOINED = ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple
_TYPE = re.compile(r"(^|\.)([A-Z]\w*|int|float|str|None)$")
_ROW_OR_ENTRY = re.compile(
    rb"""(?m)^(?:\[.*|([\w.\"'-]+[ \t]*=[ \t]*)("{3}[^"]*"{3}|.*(?:\n[ \])].*)*))"""
)


class Place(NamedTuple):
    """The line of a statement, whether it runs at import, and what it belongs to.

    `alike` has for a parameter of the function the next one of the same annotation.
    """

    statement: int = 0
    imported: bool = True
    names: tuple[str, ...] = ()
    alike: Mapping[str, str] = {}


class Mutant(NamedTuple):
    """One change: of these lines of a file, before and after; of these bytes, by others."""

    path: str
    operator: str
    lines: range
    old: str
    new: str
    place: Place
    span: slice
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.span.start] + self.text + source[self.span.stop :]


Change = tuple[str, Any, Any, ast.AST | None]
"""Operator, a part of the source, what is written anew (it, or what is around it), as what."""


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a source; a few of them are no Python or TOML any more (`is_read`)."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    table = path.endswith(".toml")
    changes = _of_table(source) if table else _below(ast.parse(source), Place())
    for place, (operator, part, whole, new) in changes:
        (start, end), (first, last) = (
            (starts[n.lineno - 1] + n.col_offset, starts[n.end_lineno - 1] + n.end_col_offset)
            for n in (whole, part)
        )
        text = b"" if new is None else ast.unparse(new).encode()
        enclosed = isinstance(new, ast.expr) and not isinstance(new, ast.Slice) and not table
        before = source.rfind(b"\n", 0, first) + 1
        after = (source + b"\n").find(b"\n", last - 1)
        shown = source[before:first] + text * (part is whole) + source[last:after]
        yield Mutant(
            path=path,
            operator=operator,
            lines=range(part.lineno, part.end_lineno + 1),
            old=" ".join(source[before:after].decode().split()),
            new=" ".join(shown.decode().split()),
            place=place,
            span=slice(start, end),
            text=b"(%s)" % text if enclosed else text,
        )


def is_read(path: str, source: bytes) -> bool:
    """Whether a source is Python, or TOML."""
    as_python = partial(compile, filename=path, mode="exec", dont_inherit=True)
    try:
        (tomllib.loads if path.endswith(".toml") else as_python)(source.decode())
    except (SyntaxError, tomllib.TOMLDecodeError):
        return False
    return True


def _below(node: Any, place: Place) -> Iterator[tuple[Place, Change]]:
    """The changes of a node and of all in it, each with its place."""
    if _untested(node):
        return
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.stmt):
        targets = getattr(node, "targets", [getattr(node, "target", ast.Pass())])
        parts = (part for target in targets for part in ast.walk(target))
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        names += [node.name] if isinstance(node, _NAMED) else []
        place = place._replace(statement=node.lineno, names=(*names, *place.names))
    yield from ((place, change) for change in _changes(node, place.alike))
    inside = place._replace(imported=False, alike=_alike(node.args)) if function else place
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        counted = node.targets[0] if isinstance(node, ast.Assign) else node
        if isinstance(value, ast.Tuple) and isinstance(counted, _COUNTED):
            value = value.elts
        for child in value if isinstance(value, list) else [value]:
            # numpy reshapes by -2 as by -1
            if isinstance(child, ast.AST) and (field != "args" or ast.unparse(child) != "-1"):
                yield from _below(child, inside if field == "body" else place)


def _changes(node: Any, alike: Mapping[str, str]) -> Iterator[Change]:
    """The table of operators: what of a node may be written otherwise."""
    match node:
        case ast.Compare(ops=ops):
            for n, op in enumerate(ops):
                new = _with(node, ops=[*ops[:n], _OTHER[type(op)](), *ops[n + 1 :]])
                yield "comparison", node, node, new
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OTHER and _is_number(node):
            yield "arithmetic", node, node, _with(node, op=_OTHER[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op):
            yield "not" if isinstance(op, ast.Not) else "arithmetic", node, node, node.operand
        case ast.Constant(value=bool(value)):
            yield "boolean", node, node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, node, ast.Constant(value + 1)
        case ast.BoolOp(op=op):
            yield "and/or", node, node, _with(node, op=_OTHER[type(op)]())
            yield from _cut(node, "conjunct dropped", "values")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield "not", test, test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, value, ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            yield "call dropped", node, node, ast.Pass()
        case ast.Call(func=func, args=args, keywords=keywords):
            dropped = _cut(node, "keyword dropped", "keywords")
            yield from (drop for drop in dropped if drop[1].arg not in _DEMANDED)
            if isinstance(func, ast.Name) and len(args) == 1 and _UNWRAPPED.fullmatch(func.id):
                yield "call dropped", node, node, args[0]
            elif isinstance(func, ast.Attribute) and not args and not keywords:
                yield "call dropped", node, node, func.value
        case ast.Slice():
            for field in ("lower", "upper"):
                if (part := getattr(node, field)) is not None:
                    yield "slice", part, node, _with(node, **{field: None})
        case ast.Set() | ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()):
            yield from _cut(node, "element", "elts")
        case ast.Dict(keys=keys, values=values):
            for n, part in enumerate(values):
                new = ast.Dict([*keys[:n], *keys[n + 1 :]], [*values[:n], *values[n + 1 :]])
                yield "element", part, node, new
        case ast.Break() | ast.Continue():
            new = ast.Continue() if isinstance(node, ast.Break) else ast.Break()
            yield "break/continue", node, node, new
        case ast.Name(id="true" | "false" as name):  # of TOML
            yield "boolean", node, node, ast.Name("false" if name == "true" else "true")
        case ast.Name(id=name, ctx=ast.Load()) if name in alike:
            yield "names exchanged", node, node, ast.Name(alike[name])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for n, loop in enumerate(node.generators):
                for operator, part, _, left in _cut(loop, "conjunct dropped", "ifs"):
                    loops = [*node.generators[:n], left, *node.generators[n + 1 :]]
                    yield operator, part, node, _with(node, generators=loops)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _cut(node: ast.AST, operator: str, field: str) -> Iterator[Change]:
    parts = getattr(node, field)
    for n, part in enumerate(parts):
        yield operator, part, node, _with(node, **{field: [*parts[:n], *parts[n + 1 :]]})


def _is_number(node: Any) -> bool:
    """No text, list or type, which have no difference."""
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
    texts = (isinstance(getattr(side, "value", None), str | bytes) for side in sides)
    a_type = isinstance(node.op, ast.BitOr) and _TYPE.search(ast.unparse(sides[1]))
    return not a_type and not any(texts) and not any(isinstance(side, _JOINED) for side in sides)


def _untested(node: Any) -> bool:
    """What is only for type checkers, `import *` or a shell; assertions, and texts with values."""
    match node:
        case ast.If(test=part):
            return ast.unparse(part) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Assign(targets=[part]) | ast.Call(func=part):
            return ast.unparse(part) in ("__all__", "__slots__", "cast", "TypeVar", "NewType")
        case ast.keyword(arg=arg):
            return arg in _DEMANDED
    return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _alike(arguments: ast.arguments) -> dict[str, str]:
    """Each parameter with the next one of its type."""
    named: dict[str, list[str]] = defaultdict(list)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        named[ast.unparse(argument.annotation or ast.Pass())].append(argument.arg)
    several = (names for kind, names in named.items() if kind != "pass" and len(names) > 1)
    return {name: other for names in several for name, other in pairwise([*names, names[0]])}


def _of_table(source: bytes) -> Iterator[tuple[Place, Change]]:
    """Each row and each entry removed, and the changes of numbers and lists, as in Python."""
    head = ""
    for found in _ROW_OR_ENTRY.finditer(source):
        if found[1] is None:
            head = found[0].decode().partition("]")[0].strip("[")
            end = source.find(b"\n[", found.end()) + 1 or len(source)
            row = _part(source, found.start(), end)
            yield Place(names=(head,)), ("row removed", row, row, None)
            continue
        place = Place(names=(head, found[1].decode().strip("\"'= \t")))
        entry = _part(source, *found.span())
        yield place, ("entry removed", entry, entry, None)
        value = re.sub(rb"[^\n]", b" ", source[: found.start(2)])[1:] + found[2]
        if is_read("", b"(%s\n)" % value):
            yield from _below(ast.parse(b"(%s\n)" % value, mode="eval").body, place)


def _part(source: bytes, start: int, end: int) -> ast.Pass:
    """These bytes, as if they were a statement."""
    first, last = source.count(b"\n", 0, start) + 1, source.count(b"\n", 0, end) + 1
    column = end - source.rfind(b"\n", 0, end) - 1
    return ast.Pass(lineno=first, col_offset=0, end_lineno=last, end_col_offset=column)
