"""Mutants: each is one small change of a source that a test ought to notice.

`mutants_of` finds them in Python by its syntax tree, and in tables of TOML by their rows. A change
replaces bytes and keeps the number of lines, so that all other lines stay where they were. Left
alone are annotations, decorators, assertions, texts, and what only a type checker reads.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

EXCHANGED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "**": "*",
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&", "and": "or", "or": "and",
}  # fmt: skip
"""Operator -> what stands in its place."""
_WORD = "|".join(re.escape(symbol) for symbol in sorted(EXCHANGED, key=len, reverse=True))
OPERATOR = re.compile(_WORD.replace(r"\ ", r"\s+").encode())
UNWRAPPED = {"abs", "bool", "float", "frozenset", "int", "list", "reversed", "round", "set"}
UNWRAPPED |= {"dict", "sorted", "str", "tuple"}
"""A call of one of these with one argument may be dropped, and the argument stays."""
DEMANDED = ("encoding", "strict")
"""Keywords that ruff demands (PLW1514, B905): what is dropped there is found without a test."""
Placed = ast.expr | ast.stmt | ast.keyword
Span = tuple[int, int]
Edit = tuple[str, Span, str]
"""Kind of change, the bytes that are replaced, and by what."""


@dataclass(frozen=True, slots=True)
class Place:
    """What of a source a change belongs to.

    Attributes:
        statement: the line on which the statement begins that runs it.
        imported: it runs when the module is imported, or the table read: in no function's body.
        names: what the statement, function and class, or the row and its entry, are called.
        exchanged: parameter of the function -> the next one of the same annotation.
    """

    statement: int = 0
    imported: bool = True
    names: tuple[str, ...] = ()
    exchanged: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change.

    Attributes:
        path: of the source, relative to the root. lines: those that change.
        old, new: these lines before and after, white space as single blanks.
        span, text: the bytes that are replaced, and by what.
    """

    path: str
    operator: str
    lines: range
    old: str
    new: str
    place: Place
    span: Span
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.span[0]] + self.text + source[self.span[1] :]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a source; a few of them are no Python or TOML any more (`is_read`)."""
    tables = path.endswith(".toml")
    edits = _of_tables(source) if tables else Edits(source).below(ast.parse(source), Place())
    for place, (operator, (start, end), new) in edits:
        text = new.encode()
        text += b"\n" * (source.count(b"\n", start, end) - text.count(b"\n"))
        first = source.rfind(b"\n", 0, start) + 1
        last = source.find(b"\n", max(start, end - 1))  # a row ends with its line
        last = len(source) if last < 0 else last
        line = source.count(b"\n", 0, start) + 1
        yield Mutant(
            path=path,
            operator=operator,
            lines=range(line, line + source.count(b"\n", start, end) + 1),
            old=" ".join(source[first:last].decode().split()),
            new=" ".join((source[first:start] + text + source[end:last]).decode().split()),
            place=place,
            span=(start, end),
            text=text,
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


# ---- Python


class Edits:
    """The edits of a source by its tree: a method for each type of node that has any."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def below(self, node: ast.AST, place: Place) -> Iterator[tuple[Place, Edit]]:
        """The edits of a node and of all in it, each with its place."""
        if _untested(node):
            return
        if isinstance(node, ast.stmt):
            names = (*_defined(node), *place.names)
            place = replace(place, statement=node.lineno, names=names)
        for edit in getattr(self, f"_{type(node).__name__.lower()}", _no_edits)(node):
            yield place, edit
        if isinstance(node, ast.Name):
            for edit in self._exchanged(node, place):
                yield place, edit
        inside = place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = replace(place, imported=False, exchanged=tuple(_alike(node.args)))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(value, ast.Tuple) and _counted(node):
                value = value.elts
            if field == "args" and isinstance(node, ast.Call) and _reshapes(node):
                value = [size for size in node.args if ast.unparse(size) != "-1"]
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.below(child, inside if field == "body" else place)

    def span(self, node: Placed) -> Span:
        """Where a node stands, without parentheses around it."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def outer(self, node: Placed) -> Span:
        """Where one of several nodes stands, with parentheses around it."""
        start, end = self.span(node)
        while True:
            before, after = self.source[:start].rstrip(), self.source[end:].lstrip()
            if not (before.endswith(b"(") and after.startswith(b")")):
                return start, end
            start, end = len(before) - 1, len(self.source) - len(after) + 1

    def text(self, node: Placed) -> str:
        """A node as it is written."""
        return self.source[slice(*self.span(node))].decode()

    def each_dropped(self, kind: str, spans: Sequence[Span], separator: bytes) -> Iterator[Edit]:
        """Each of several cut out: with the separator after it, else with the one before."""
        for (_, before), (start, end), (following, _) in zip(
            [(spans[0][0], spans[0][0]), *spans], spans, [*spans[1:], (-1, -1)], strict=False
        ):
            after = re.compile(rb"[^,]*, ?" if following >= 0 else rb"\s*, ?")
            found = after.match(self.source, end) if separator == b"," else None
            if found is not None:
                yield kind, (start, found.end()), ""
            elif following >= 0:
                yield kind, (start, following), ""
            else:
                yield kind, (before, end), ""

    def _operator(self, kind: str, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        """The operator between two operands exchanged."""
        found = OPERATOR.search(self.source, self.span(left)[1], self.span(right)[0])
        assert found is not None
        symbol = " ".join(found[0].decode().split())
        yield kind, found.span(), EXCHANGED[symbol]

    def _compare(self, node: ast.Compare) -> Iterator[Edit]:
        operands = [node.left, *node.comparators]
        for left, right in pairwise(operands):
            yield from self._operator("comparison", left, right)

    def _binop(self, node: ast.BinOp) -> Iterator[Edit]:
        yield from self._arithmetic(node.left, node.op, node.right)

    def _augassign(self, node: ast.AugAssign) -> Iterator[Edit]:
        yield from self._arithmetic(node.target, node.op, node.value)

    def _arithmetic(self, left: ast.expr, op: ast.operator, right: ast.expr) -> Iterator[Edit]:
        for side in (left, right):
            number = isinstance(side, ast.Constant) and isinstance(side.value, int | float)
            joined = ast.Constant | ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple
            if isinstance(side, joined) and not number:
                return  # texts and lists have no difference
        united = isinstance(op, ast.BitOr) and re.search(
            r"(^|\.)([A-Z]\w*|int|float|str)$", self.text(right)
        )
        if not united and not isinstance(op, ast.MatMult):
            yield from self._operator("arithmetic", left, right)

    def _unaryop(self, node: ast.UnaryOp) -> Iterator[Edit]:
        start = self.span(node)[0]
        if isinstance(node.op, ast.Not):
            yield "not", (start, start + 3), ""
        elif isinstance(node.op, ast.USub):
            yield "arithmetic", (start, start + 1), ""

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        if isinstance(node.value, bool):
            yield "boolean", self.span(node), str(not node.value)
        elif isinstance(node.value, int | float):
            yield "constant", self.span(node), repr(node.value + 1)

    def _boolop(self, node: ast.BoolOp) -> Iterator[Edit]:
        yield from self._operator("and/or", *node.values[:2])
        spans = [self.outer(value) for value in node.values]
        yield from self.each_dropped("conjunct dropped", spans, b"")

    def _if(self, node: ast.If | ast.IfExp | ast.While) -> Iterator[Edit]:
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield "not", self.span(node.test), f"not {self.text(node.test)}"

    _ifexp = _while = _if

    def _comprehension(self, node: ast.comprehension) -> Iterator[Edit]:
        for test in node.ifs:
            start, end = self.outer(test)
            yield "conjunct dropped", (self.source.rindex(b"if", 0, start), end), ""

    def _return(self, node: ast.Return) -> Iterator[Edit]:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            yield "return", self.span(node.value), "None"

    def _expr(self, node: ast.Expr) -> Iterator[Edit]:
        if isinstance(node.value, ast.Call):
            yield "call dropped", self.span(node), "pass"

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        place = self.outer if len(node.args) + len(node.keywords) > 1 else self.span
        positional = {place(argument) for argument in node.args}
        spans = sorted([*positional, *map(self.span, node.keywords)])
        dropped = self.each_dropped("keyword dropped", spans, b",") if spans else iter(())
        kept = {self.span(keyword) for keyword in node.keywords if keyword.arg in DEMANDED}
        for span, edit in zip(spans, dropped, strict=True):
            if span not in positional | kept:
                yield edit
        if node.keywords or len(node.args) > 1:
            return
        if isinstance(node.func, ast.Name) and node.func.id in UNWRAPPED and node.args:
            yield "call dropped", self.span(node), f"({self.text(node.args[0])})"
        elif isinstance(node.func, ast.Attribute) and not node.args:
            start = self.source.index(b".", self.span(node.func.value)[1])
            yield "call dropped", (start, self.span(node)[1]), ""

    def _slice(self, node: ast.Slice) -> Iterator[Edit]:
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield "slice", self.span(bound), ""

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Iterator[Edit]:
        if not node.elts or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return
        if len(node.elts) == 1:
            empty = {ast.Tuple: "()", ast.List: "[]", ast.Set: "set()"}[type(node)]
            yield "element", self.span(node), empty
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            for other in node.elts[::-1]:
                yield "element", self.span(node), f"({self.text(other)},)"
        else:
            yield from self.each_dropped("element", [*map(self.outer, node.elts)], b",")

    _list = _set = _tuple

    def _dict(self, node: ast.Dict) -> Iterator[Edit]:
        spans = []
        for key, value in zip(node.keys, node.values, strict=True):
            start, end = self.outer(value)
            start = self.source.rindex(b"**", 0, start) if key is None else self.span(key)[0]
            spans.append((start, end))
        if spans:
            yield from self.each_dropped("element", spans, b",")

    def _break(self, node: ast.Break) -> Iterator[Edit]:
        yield "break/continue", self.span(node), "continue"

    def _continue(self, node: ast.Continue) -> Iterator[Edit]:
        yield "break/continue", self.span(node), "break"

    def _exchanged(self, node: ast.Name, place: Place) -> Iterator[Edit]:
        other = dict(place.exchanged).get(node.id)
        if other is not None and isinstance(node.ctx, ast.Load):
            yield "names exchanged", self.span(node), other
        elif node.id in ("true", "false"):  # of TOML
            yield "boolean", self.span(node), "false" if node.id == "true" else "true"


def _no_edits(_node: ast.AST) -> Iterator[Edit]:
    return iter(())


def _reshapes(node: ast.Call) -> bool:
    """A call whose -1 is no mutant: numpy takes -2 as well."""
    return ast.unparse(node.func).endswith(".reshape")


def _untested(node: ast.AST) -> bool:
    """What is only for type checkers, `import *` or a shell; assertions, and texts with values."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__")
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("cast", "TypeVar", "NewType")
    if isinstance(node, ast.keyword):
        return node.arg in DEMANDED
    return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _counted(node: ast.AST) -> bool:
    """Whether a tuple in it cannot lose an element unnoticed: an index, a type, or unpacked."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Tuple)
    return isinstance(node, ast.Subscript | ast.Return | ast.Yield)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _alike(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    """Each parameter with the next one of its type."""
    names_of: dict[str, list[str]] = {}
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None:
            names_of.setdefault(ast.unparse(argument.annotation), []).append(argument.arg)
    for names in names_of.values():
        if len(names) > 1:
            yield from zip(names, [*names[1:], names[0]], strict=True)


# ---- TOML


def _of_tables(source: bytes) -> Iterator[tuple[Place, Edit]]:
    """Each row and each entry removed, and the edits of numbers and lists, as in Python."""
    rows = list(re.finditer(rb"(?m)^\[+([^\]\n]+)\]+", source))
    for row, end in zip(rows, [*(row.start() for row in rows[1:]), len(source)], strict=False):
        yield Place(names=(_plain(row),)), ("row removed", (row.start(), end), "")
    for key in re.finditer(rb"(?m)^([\w.\"'-]+)[ \t]*=[ \t]*", source):
        row_of = [_plain(row) for row in rows if row.start() < key.start()][-1:]
        place = Place(names=(*row_of, _plain(key)))
        ends = (line.end() for line in re.compile(rb"(?m)$").finditer(source, key.end()))
        end = next((end for end in ends if is_read(".toml", source[key.start() : end])), -1)
        if end < 0:
            continue  # it looks like a key, and stands in a text
        yield place, ("entry removed", (key.start(), end), "")
        value = source[key.end() : end]
        if is_read("", value):
            edits = Edits(value)
            for _, (kind, span, new) in edits.below(ast.parse(value, mode="eval").body, place):
                yield place, (kind, (key.end() + span[0], key.end() + span[1]), new)


def _plain(name: re.Match[bytes]) -> str:
    return name[1].decode().strip(" \"'")
