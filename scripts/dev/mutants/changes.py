"""Mutants: each is one small change of a source that a test ought to notice.

A part of the syntax tree is written anew, and all other lines stay where they were. Left alone are
annotations, decorators, assertions, texts, and what only a type checker reads.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

_PAIRS = (
    "Lt LtE Gt GtE Eq NotEq In NotIn Is IsNot Add Sub Mult Div LShift RShift BitAnd BitOr And Or"
)
_NAMES = dict(zip(_PAIRS.split()[::2], _PAIRS.split()[1::2], strict=True))
_NAMES |= {new: old for old, new in _NAMES.items()}
_NAMES |= {"FloorDiv": "Div", "Mod": "Mult", "Pow": "Mult", "BitXor": "BitAnd"}
_OTHER: dict[type, Any] = {getattr(ast, old): getattr(ast, new) for old, new in _NAMES.items()}
"""Operator -> what stands in its place."""
_UNWRAPPED = re.compile("abs|bool|dict|float|(frozen)?set|int|list|reversed|round|sorted|str|tuple")
"""A call of one of these with one argument may be dropped, and the argument stays."""
_DEMANDED = ("encoding", "strict")
"""Keywords that ruff demands (PLW1514, B905): what is dropped there is found without a test."""
_COUNTED = ast.Subscript | ast.Return | ast.Yield | ast.Tuple
"""An index or a type, an answer, or unpacked: no tuple there can lose an element unnoticed."""
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """What a change belongs to: the statement that runs it, whether at import, what it is called.

    `alike` has for a parameter of the function the next one of the same annotation.
    """

    statement: int = 0
    imported: bool = True
    names: tuple[str, ...] = ()
    alike: Mapping[str, str] = {}


Change = tuple[str, Any, Any, ast.AST]
"""Operator, a part of the source, what is written anew (it, or what is around it), as what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: of these lines of a file, before and after; of these bytes, by others."""

    path: str
    operator: str
    lines: range
    old: str
    new: str
    place: Place
    span: tuple[int, int]
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.span[0]] + self.text + source[self.span[1] :]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a source; a few of them are no Python or TOML any more (`is_read`)."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    table = path.endswith(".toml")
    for place, (operator, part, whole, new) in (
        _of_table(source) if table else _below(ast.parse(source), Place())
    ):
        (start, end), (first, last) = (
            (starts[n.lineno - 1] + n.col_offset, starts[n.end_lineno - 1] + n.end_col_offset)
            for n in (whole, part)
        )
        text = b"" if table and isinstance(new, ast.Pass) else ast.unparse(new).encode()
        blank = b"\n" * (source.count(b"\n", start, end) - text.count(b"\n"))
        united = isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp)
        united |= bool(blank) and isinstance(new, ast.expr) and not isinstance(new, ast.Slice)
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
            span=(start, end),
            text=b"(%s%s)" % (text, blank) if united and not table else text + blank,
        )


def is_read(path: str, source: bytes) -> bool:
    """Whether a source is Python, or TOML."""
    try:
        if path.endswith(".toml"):
            tomllib.loads(source.decode())
        else:
            compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, tomllib.TOMLDecodeError):
        return False
    return True


def _below(node: Any, place: Place) -> Iterator[tuple[Place, Change]]:
    """The changes of a node and of all in it, each with its place."""
    if _untested(node):
        return
    if isinstance(node, ast.stmt):
        targets = getattr(node, "targets", [getattr(node, "target", ast.Pass())])
        names = [name.id for target in targets for name in ast.walk(target)
                 if isinstance(name, ast.Name)]  # fmt: skip
        names += [node.name] if isinstance(node, _FUNCTION | ast.ClassDef) else []
        place = place._replace(statement=node.lineno, names=(*names, *place.names))
    yield from ((place, change) for change in _changes(node, place.alike))
    inside = place
    if isinstance(node, _FUNCTION):
        inside = place._replace(imported=False, alike=dict(_alike(node.args)))
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        counted = node.targets[0] if isinstance(node, ast.Assign) else node
        if isinstance(value, ast.Tuple) and isinstance(counted, _COUNTED):
            value = value.elts
        if field == "args" and isinstance(node, ast.Call) and isinstance(value, list):
            # numpy reshapes by -2 as by -1
            value = [size for size in value if ast.unparse(size) != "-1"]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
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
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node, node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield "arithmetic", node, node, node.operand
        case ast.Constant(value=bool(value)):
            yield "boolean", node, node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, node, ast.Constant(value + 1)
        case ast.BoolOp(op=op, values=values):
            yield "and/or", node, node, _with(node, op=_OTHER[type(op)]())
            for part, rest in _each_cut(values):
                new = _with(node, values=rest) if len(rest) > 1 else rest[0]
                yield "conjunct dropped", part, node, new
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield "not", test, test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, value, ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            yield "call dropped", node, node, ast.Pass()
        case ast.Call(func=func, args=args, keywords=keywords):
            for part, rest in _each_cut(keywords):
                if part.arg not in _DEMANDED:
                    yield "keyword dropped", part, node, _with(node, keywords=rest)
            if isinstance(func, ast.Name) and len(args) == 1 and _UNWRAPPED.fullmatch(func.id):
                yield "call dropped", node, node, args[0]
            elif isinstance(func, ast.Attribute) and not args and not keywords:
                yield "call dropped", node, node, func.value
        case ast.Slice():
            for field in ("lower", "upper"):
                if (part := getattr(node, field)) is not None:
                    yield "slice", part, node, _with(node, **{field: None})
        case ast.Set() | ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()):
            for part, rest in _each_cut(node.elts):
                yield "element", part, node, _with(node, elts=rest)
        case ast.Dict(keys=keys, values=values):
            for (part, rest), (_, left) in zip(_each_cut(values), _each_cut(keys), strict=True):
                yield "element", part, node, ast.Dict(left, rest)
        case ast.Break() | ast.Continue():
            new = ast.Continue() if isinstance(node, ast.Break) else ast.Break()
            yield "break/continue", node, node, new
        case ast.Name(id="true" | "false" as name):  # of TOML
            yield "boolean", node, node, ast.Name("false" if name == "true" else "true")
        case ast.Name(id=name, ctx=ast.Load()) if name in alike:
            yield "names exchanged", node, node, ast.Name(alike[name])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            loops = node.generators
            for n, loop in enumerate(loops):
                for part, rest in _each_cut(loop.ifs):
                    left = [*loops[:n], _with(loop, ifs=rest), *loops[n + 1 :]]
                    yield "conjunct dropped", part, node, _with(node, generators=left)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _each_cut(parts: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    return ((part, [*parts[:n], *parts[n + 1 :]]) for n, part in enumerate(parts))


def _is_number(node: Any) -> bool:
    """No text, list or type, which have no difference."""
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
    if isinstance(node.op, ast.BitOr):
        return not re.search(r"(^|\.)([A-Z]\w*|int|float|str|None)$", ast.unparse(sides[1]))
    texts = (side.value for side in sides if isinstance(side, ast.Constant))
    joined = ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple
    return not any(isinstance(t, str | bytes) for t in texts) and not any(
        isinstance(side, joined) for side in sides
    )


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


def _alike(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    """Each parameter with the next one of its type."""
    named: dict[str, list[str]] = {}
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None:
            named.setdefault(ast.unparse(argument.annotation), []).append(argument.arg)
    for names in named.values():
        yield from zip(names, [*names[1:], names[0]], strict=True) if len(names) > 1 else ()


def _of_table(source: bytes) -> Iterator[tuple[Place, Change]]:
    """Each row and each entry removed, and the changes of numbers and lists, as in Python."""
    rows = [(row.start(), _plain(row)) for row in re.finditer(rb"(?m)^\[+([^\]\n]+)\]+", source)]
    for (start, name), (end, _) in pairwise([*rows, (len(source), "")]):
        yield Place(names=(name,)), ("row removed", *_removed(source, start, end))
    for key in re.finditer(rb"(?m)^([\w.\"'-]+)[ \t]*=[ \t]*", source):
        ends = (line.end() for line in re.compile(rb"(?m)$").finditer(source, key.end()))
        for end in ends:  # none where it looks like a key, and stands in a text
            if is_read(".toml", source[key.start() : end]):
                row_of = [name for start, name in rows if start < key.start()][-1:]
                place = Place(names=(*row_of, _plain(key)))
                yield place, ("entry removed", *_removed(source, key.start(), end))
                before = b"(" + re.sub(rb"[^\n]", b" ", source[: key.end()])[1:]
                value = before + source[key.end() : end] + b"\n)"
                if is_read("", value):
                    yield from _below(ast.parse(value, mode="eval").body, place)
                break


def _removed(source: bytes, start: int, end: int) -> tuple[ast.Pass, ast.Pass, ast.Pass]:
    gone = ast.Pass(lineno=source.count(b"\n", 0, start) + 1, col_offset=0)
    gone.end_lineno = source.count(b"\n", 0, end) + 1
    gone.end_col_offset = end - source.rfind(b"\n", 0, end) - 1
    return gone, gone, gone


def _plain(name: re.Match[bytes]) -> str:
    return name[1].decode().strip(" \"'")
