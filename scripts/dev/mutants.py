"""Mutants: each is one small change of a source that a test ought to notice.

`mutants_of` finds them in Python by its syntax tree, and in tables of TOML by their rows. A change
replaces bytes and keeps the number of lines, so that every other line stays where it was. Left
alone are annotations, decorators, assertions, texts, and what only a type checker reads.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
ARITHMETIC = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "**": "*",
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&",
}  # fmt: skip
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
    ast.BitXor: "^",
}  # fmt: skip
UNWRAPPED = {"abs", "bool", "float", "frozenset", "int", "list", "reversed", "round", "set"}
UNWRAPPED |= {"dict", "sorted", "str", "tuple"}
"""A call of one of these with one argument may be dropped, and the argument stays."""
Placed = ast.expr | ast.stmt | ast.keyword
Span = tuple[int, int]
Edit = tuple[str, Span, str]
"""Operator, the bytes that are replaced, and by what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change.

    Attributes:
        path: of the source, relative to the root. line: the first one that changes.
        old, new: the changed lines before and after, white space as single blanks.
        statement: the line where the statement begins that runs the change.
        imported: it runs when the module is imported, or a table is read; never a function's body.
        names: what the statement, function or row defines, the innermost first.
        span, text: the bytes that are replaced, and by what.
    """

    path: str
    line: int
    operator: str
    old: str
    new: str
    statement: int
    imported: bool
    names: tuple[str, ...]
    span: Span
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.span[0]] + self.text + source[self.span[1] :]

    def lines(self, source: bytes) -> range:
        """The lines that it changes."""
        return range(self.line, self.line + source.count(b"\n", *self.span) + 1)

    def parses(self, source: bytes) -> bool:
        """Whether the mutated source can be read at all."""
        return parses(self.path, self.applied(source))


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a source a node stands."""

    statement: int = 0
    imported: bool = True
    names: tuple[str, ...] = ()
    exchanged: tuple[tuple[str, str], ...] = ()
    """Parameter -> another one of the same annotation."""


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a source; a few of them are no Python or TOML any more."""
    found = _of_table(source) if path.endswith(".toml") else _of_module(source)
    mutants = []
    for place, (operator, (start, end), new) in found:
        padding = source.count(b"\n", start, end) - new.count("\n")
        text = new.encode() + b"\n" * padding
        first = source.rfind(b"\n", 0, start) + 1
        last = source.find(b"\n", max(start, end - 1))  # a row ends with its line
        last = len(source) if last < 0 else last
        mutated = source[:start] + text + source[end:]
        old_lines = source[first:last].decode()
        new_lines = mutated[first : last + len(mutated) - len(source)].decode()
        mutants.append(
            Mutant(
                path=path,
                line=source.count(b"\n", 0, start) + 1,
                operator=operator,
                old=" ".join(old_lines.split()),
                new=" ".join(new_lines.split()),
                statement=place.statement,
                imported=place.imported,
                names=place.names,
                span=(start, end),
                text=text,
            )
        )
    return mutants


def parses(path: str, source: bytes) -> bool:
    """Whether a source is Python, or TOML."""
    try:
        if path.endswith(".toml"):
            tomllib.loads(source.decode())
        else:
            compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, tomllib.TOMLDecodeError):
        return False
    return True


# ---- Python


class Source:
    """Bytes of Python, and where the nodes of its tree stand in them."""

    def __init__(self, source: bytes) -> None:
        self.bytes = source
        lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, lines))]

    def span(self, node: Placed) -> Span:
        """Where a node stands, without parentheses around it."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def outer(self, node: Placed) -> Span:
        """Where a node stands, with parentheses around it."""
        start, end = self.span(node)
        while True:
            before = self.bytes[:start].rstrip()
            after = self.bytes[end:].lstrip()
            if not (before.endswith(b"(") and after.startswith(b")")):
                return start, end
            start, end = len(before) - 1, len(self.bytes) - len(after) + 1

    def text(self, node: Placed) -> str:
        """A node as it is written."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def without(self, siblings: Sequence[Span], number: int, separator: bytes) -> Span:
        """What to cut out to drop one of several: with its separator, else the one before."""
        start, end = siblings[number]
        last = number + 1 == len(siblings)
        if separator == b",":
            after = re.compile(rb"\s*, ?" if last else rb"[^,]*, ?").match(self.bytes, end)
            if after is not None:
                return start, after.end()
        elif not last:
            return start, siblings[number + 1][0]
        return (siblings[number - 1][1] if number else start), end


def _of_module(source: bytes) -> Iterator[tuple[Place, Edit]]:
    yield from _walk(ast.parse(source), Place(), Source(source))


def _walk(node: ast.AST, place: Place, source: Source) -> Iterator[tuple[Place, Edit]]:
    """The edits of a node and of all below it, each with its place."""
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr) or _untested(
        node
    ):
        return
    if isinstance(node, ast.stmt):
        names = tuple(_defined(node)) + place.names
        place = Place(node.lineno, place.imported, names, place.exchanged)
    for edit in EDITS[type(node)](node, place, source) if type(node) in EDITS else ():
        yield place, edit
    inside = place
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = Place(place.statement, False, place.names, tuple(_exchanged(node.args)))
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(value, ast.Tuple) and _counted(node):
            value = value.elts
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, inside if field == "body" else place, source)


def _counted(node: ast.AST) -> bool:
    """Whether a tuple in it cannot lose an element unnoticed: an index, a type, or unpacked."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Tuple)
    return isinstance(node, ast.Subscript | ast.Return | ast.Yield)


def _untested(node: ast.AST) -> bool:
    """What is only for type checkers, `import *` or a shell; assertions, and texts with values."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__")
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("cast", "TypeVar", "NewType")
    return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _exchanged(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    """Each parameter with the next one of its type."""
    alike: dict[str, list[str]] = {}
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None:
            alike.setdefault(ast.unparse(argument.annotation), []).append(argument.arg)
    for names in alike.values():
        if len(names) > 1:
            yield from zip(names, [*names[1:], names[0]], strict=True)


def _symbol(source: Source, left: ast.expr, symbol: str, right: ast.expr) -> Span:
    """Where an operator stands between two operands."""
    start, end = source.span(left)[1], source.span(right)[0]
    pattern = re.escape(symbol.encode()).replace(rb"\ ", rb"\s+")
    found = re.compile(pattern).search(source.bytes, start, end)
    assert found is not None
    return found.span()


def _comparison(node: ast.Compare, _place: Place, source: Source) -> Iterator[Edit]:
    left: ast.expr = node.left
    for operation, right in zip(node.ops, node.comparators, strict=True):
        symbol = SYMBOLS[type(operation)]
        yield "comparison", _symbol(source, left, symbol, right), COMPARISONS[symbol]
        left = right


def _arithmetic(node: ast.BinOp | ast.AugAssign, place: Place, source: Source) -> Iterator[Edit]:
    symbol = SYMBOLS.get(type(node.op))
    left, right = (
        (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    )
    texts = ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
    for side in (left, right):
        if isinstance(side, texts) and not isinstance(getattr(side, "value", 0), int | float):
            return  # texts and lists are joined
    if symbol is None or (symbol == "|" and (place.imported or _is_type(right))):
        return
    yield "arithmetic", _symbol(source, left, symbol, right), ARITHMETIC[symbol]


def _is_type(node: ast.AST) -> bool:
    name = ast.unparse(node).rpartition(".")[2]
    return name[0].isupper() or name in ("None", "bool", "dict", "float", "int", "list", "str")


def _sign_or_not(node: ast.UnaryOp, _place: Place, source: Source) -> Iterator[Edit]:
    start = source.span(node)[0]
    if isinstance(node.op, ast.Not):
        yield "not", (start, start + 3), ""
    elif isinstance(node.op, ast.USub):
        yield "arithmetic", (start, start + 1), ""


def _constant(node: ast.Constant, _place: Place, source: Source) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        yield "boolean", source.span(node), str(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", source.span(node), repr(node.value + 1)


def _and_or(node: ast.BoolOp, _place: Place, source: Source) -> Iterator[Edit]:
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    spans = [source.outer(value) for value in node.values]
    yield "and/or", _symbol(source, node.values[0], old, node.values[1]), new
    for number in range(len(spans)):
        yield "conjunct dropped", source.without(spans, number, old.encode()), ""


def _condition(
    node: ast.If | ast.IfExp | ast.While, _place: Place, source: Source
) -> Iterator[Edit]:
    if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.NamedExpr):
        yield "not", source.span(node.test), f"not ({source.text(node.test)})"


def _filters(node: ast.comprehension, _place: Place, source: Source) -> Iterator[Edit]:
    for test in node.ifs:
        start, end = source.outer(test)
        yield "conjunct dropped", (source.bytes.rindex(b"if", 0, start), end), ""


def _returned(node: ast.Return, _place: Place, source: Source) -> Iterator[Edit]:
    if node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return", source.span(node.value), "None"


def _statement(node: ast.Expr, _place: Place, source: Source) -> Iterator[Edit]:
    if isinstance(node.value, ast.Call):
        yield "call dropped", source.span(node), "pass"


def _call(node: ast.Call, _place: Place, source: Source) -> Iterator[Edit]:
    spans = [source.outer(argument) for argument in node.args] if len(node.args) > 1 else []
    spans += [source.span(argument) for argument in node.args] if not spans else []
    both = sorted([*spans, *map(source.span, node.keywords)])
    for keyword in node.keywords:
        number = both.index(source.span(keyword))
        yield "keyword dropped", source.without(both, number, b","), ""
    if node.keywords or len(node.args) > 1:
        return
    if isinstance(node.func, ast.Name) and node.func.id in UNWRAPPED and node.args:
        yield "call dropped", source.span(node), f"({source.text(node.args[0])})"
    elif isinstance(node.func, ast.Attribute) and not node.args:
        start = source.bytes.index(b".", source.span(node.func.value)[1])
        yield "call dropped", (start, source.span(node)[1]), ""


def _slice(node: ast.Slice, _place: Place, source: Source) -> Iterator[Edit]:
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield "slice", source.span(bound), ""


def _elements(
    node: ast.Tuple | ast.List | ast.Set, _place: Place, source: Source
) -> Iterator[Edit]:
    if not (isinstance(node, ast.Set) or isinstance(node.ctx, ast.Load)):
        return
    only = len(node.elts) == 1
    spans = [(source.span if only else source.outer)(element) for element in node.elts]
    for number in range(len(spans)):
        if only:
            empty = {ast.Tuple: "()", ast.List: "[]", ast.Set: "set()"}[type(node)]
            yield "element", source.span(node), empty
        elif isinstance(node, ast.Tuple) and len(spans) == 2:
            other = node.elts[1 - number]
            yield "element", source.span(node), f"({source.text(other)},)"
        else:
            yield "element", source.without(spans, number, b","), ""


def _items(node: ast.Dict, _place: Place, source: Source) -> Iterator[Edit]:
    spans = []
    for key, value in zip(node.keys, node.values, strict=True):
        end = source.outer(value)[1]
        start = source.bytes.rindex(b"**", 0, end) if key is None else source.span(key)[0]
        spans.append((start, end))
    for number in range(len(spans)):
        yield "element", source.without(spans, number, b","), ""


def _jump(node: ast.Break | ast.Continue, _place: Place, source: Source) -> Iterator[Edit]:
    other = "continue" if isinstance(node, ast.Break) else "break"
    yield "break/continue", source.span(node), other


def _name(node: ast.Name, place: Place, source: Source) -> Iterator[Edit]:
    other = dict(place.exchanged).get(node.id)
    if other is not None and isinstance(node.ctx, ast.Load):
        yield "names exchanged", source.span(node), other
    elif node.id in ("true", "false"):  # of TOML
        yield "boolean", source.span(node), "false" if node.id == "true" else "true"


EDITS: dict[type[ast.AST], Callable[..., Iterator[Edit]]] = {
    ast.Compare: _comparison,
    ast.BinOp: _arithmetic,
    ast.AugAssign: _arithmetic,
    ast.UnaryOp: _sign_or_not,
    ast.Constant: _constant,
    ast.BoolOp: _and_or,
    ast.If: _condition,
    ast.IfExp: _condition,
    ast.While: _condition,
    ast.comprehension: _filters,
    ast.Return: _returned,
    ast.Expr: _statement,
    ast.Call: _call,
    ast.Slice: _slice,
    ast.Tuple: _elements,
    ast.List: _elements,
    ast.Set: _elements,
    ast.Dict: _items,
    ast.Break: _jump,
    ast.Continue: _jump,
    ast.Name: _name,
}


# ---- TOML


def _of_table(source: bytes) -> Iterator[tuple[Place, Edit]]:
    """Each row and each entry removed, and the edits of numbers and lists, as in Python."""
    headers = list(re.finditer(rb"(?m)^\[+([^\]\n]+)\]+", source))
    ends = [*(header.start() for header in headers[1:]), len(source)]
    for header, end in zip(headers, ends, strict=False):
        yield Place(names=(_plain(header[1]),)), ("row removed", (header.start(), end), "")
    for key in re.finditer(rb"(?m)^([\w.\"'-]+)[ \t]*=[ \t]*", source):
        row = [header for header in headers if header.start() < key.start()][-1:]
        place = Place(names=tuple(_plain(part[1]) for part in (key, *row)))
        ends = (line.end() for line in re.compile(rb"(?m)$").finditer(source, key.end()))
        end = next((end for end in ends if parses(".toml", source[key.start() : end])), None)
        if end is None:
            continue  # it looks like a key, and stands in a text
        yield place, ("entry removed", (key.start(), end), "")
        value = source[key.end() : end]
        try:
            tree = ast.parse(value, mode="eval").body
        except SyntaxError:
            continue
        for _, (operator, (first, last), new) in _walk(tree, place, Source(value)):
            yield place, (operator, (key.end() + first, key.end() + last), new)


def _plain(name: bytes) -> str:
    return name.decode().strip(" \"'")
