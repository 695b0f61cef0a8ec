"""Every option of every command arrives in the record of its verb, and something reads it there.

Both are derived from the records: a new option needs no row here. What its reader does with it is
tested elsewhere.
"""

import argparse
import ast
import collections.abc
import dataclasses
import functools
import itertools
import math
import re
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
from draftquant import api as dq
from draftquant.recipes.python_values import are_paths, members
from draftquant.scripts.cli import every_parser
from draftquant.scripts.frame.arguments import Option
from draftquant.scripts.frame.settings import Form
from draftquant.validate.counting import replaying
from draftquant.validate.runs.judging_asked import ReplayRun
from test_packaging import MODULES, ROOT, parsed

MISSING = dataclasses.MISSING
PARSER = every_parser()
FORMS: dict[str, Form[Any]] = {name: getattr(dq, name).form for name in dq.VERBS}
READ = {"share": ("25%", 0.25), "shares by category": ("a=b=1", {"a=b": 1.0}),
        "hours": ("24", 24.0), "assignment": ("a-b=[1]", {"a_b": [1]})}  # fmt: skip
"""How words are written that are read in a way of their own, and what is read."""


def kinds_of(form: Form[Any], name: str) -> list[Any]:
    hints = typing.get_type_hints(form.record)
    return [kind for kind in members(hints[name]) if kind is not type(None)]


def given(option: Option, kinds: list[Any], default: object) -> tuple[list[str], object]:
    """Words for an option, and the value that they say, which is not the default."""
    kind, origin = kinds[0], typing.get_origin(kinds[0])
    if kinds == [bool]:
        return [], True
    if option.reads is not None:
        word, value = READ[option.reads.__name__.strip("_").replace("_", " ")]
        return [word], value
    if origin in (tuple, collections.abc.Sequence):
        count = option.count if isinstance(option.count, int) else 2
        inner = list(members(typing.get_args(kind)[0]))
        word, value = given(dataclasses.replace(option, several="words", count="+"), inner, None)
        words = word * (1 if option.several == "repeated" else count)
        return [",".join(words)] if option.several == "commas" else words, (value,) * len(words)
    if choices := [kind for kind in kinds if typing.get_origin(kind) is Literal]:
        chosen = next(one for one in typing.get_args(choices[0]) if one != default)
        return [str(chosen)], chosen
    if int in kinds or float in kinds:
        number = kind(3 if int in kinds else 0.625)
        return [str(number)], number
    return ["other"], Path("other") if are_paths(tuple(kinds)) else "other"


def settings(verb: str, words: Mapping[str, list[str]]) -> Any:
    """The record that a command line makes; field -> its words."""
    form, line = FORMS[verb], list[str]()
    options = {name: form.options[name] for name in words}
    for name, option in sorted(options.items(), key=lambda one: not one[1].place):
        line += [] if option.place else [option.spelling(name)]
        line += words[name]
    head, _, tail = verb.partition("_")
    command = [head, *([tail.replace("_", "-")] if tail else [])]
    return PARSER.parse_args([*command, *line], namespace=argparse.Namespace()).settings


@pytest.mark.parametrize("verb", FORMS)
def test_options_arrive_in_their_fields_and_in_no_other(verb: str) -> None:
    form = FORMS[verb]
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(form.record)
    }
    needed = [name for name in form.options if defaults[name] is MISSING]
    for name in form.options:
        others = [*needed, *([] if name in form.one_of else form.one_of[:1])]
        if form.options[name].place:  # it stands behind those before it
            others += list(itertools.takewhile(name.__ne__, form.options))
        beside = {one: given(form.options[one], kinds_of(form, one), None)[0] for one in others}
        words, value = given(form.options[name], kinds_of(form, name), defaults[name])
        made = settings(verb, {**beside, name: words})
        assert getattr(made, name) == value != defaults[name]
        for other in defaults.keys() - {name, *beside, "listener"}:
            assert getattr(made, other) == defaults[other], f"--{name} changes {other}"


BOUNDED = [(v, n) for v, form in FORMS.items() for n, o in form.options.items() if o.bounds]


@pytest.mark.parametrize(("verb", "name"), BOUNDED)
def test_a_number_beyond_its_bounds_is_refused_where_it_stands(verb: str, name: str) -> None:
    """Bounds stand in the table alone: what takes these numbers does not check them again."""
    form, bounds = FORMS[verb], FORMS[verb].options[name].bounds
    assert bounds is not None
    given: Any = SimpleNamespace(**dict.fromkeys(form.options), check=lambda: None)
    form.check(given, lambda one, _: one)
    below = bounds.above if bounds.least is None else bounds.least - 1
    above = bounds.below if bounds.most is None else bounds.most + 1
    for beyond in (below, above, math.nan, math.inf):
        if beyond is not None:
            setattr(given, name, beyond)
            with pytest.raises(dq.DraftQuantError, match=rf"^{name}: expected "):
                form.check(given, lambda one, _: one)


# ---- what reads a field: an attribute of a parameter that is annotated with its record, or a base

Reads = dict[str, set[str]]
"""Class -> attributes that a function reads of a parameter of this class; * = any, by getattr."""


def names_of(annotation: ast.AST | None) -> Iterator[str]:
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip():
            yield from names_of(ast.parse(node.value, mode="eval"))
        elif isinstance(node, ast.Name):
            yield node.id


def reads_of(node: ast.Module | ast.ClassDef, reads: Reads) -> None:
    """What functions read, but for methods that only check a record."""
    owner = node.name if isinstance(node, ast.ClassDef) else ""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            reads_of(child, reads)
        elif isinstance(child, ast.FunctionDef) and not (owner and child.name == "check"):
            arguments = [*child.args.args, *child.args.kwonlyargs]
            kinds = {each.arg: [*names_of(each.annotation)] for each in arguments}
            kinds |= {"self": [owner]}
            for name, attribute in attributes(child):
                for kind in kinds.get(name, ()):
                    reads[kind].add(attribute)


def attributes(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            first = node.args[0] if node.args else None
            if node.func.id == "getattr" and isinstance(first, ast.Name):
                yield first.id, "*"


def all_reads() -> Reads:
    """Of the modules that name a record of a verb, or a base of one."""
    reads: Reads = defaultdict(set)
    records = {cls.__name__ for form in FORMS.values() for cls in form.record.__mro__[:-1]}
    named = re.compile(rf"\b({'|'.join(records)})\b")
    for module in MODULES:
        if named.search((ROOT / module).read_text(encoding="utf-8")):
            reads_of(parsed(module), reads)
    return reads


def test_every_option_is_read() -> None:
    reads = all_reads()
    assert len(reads) > 50
    for verb, form in FORMS.items():
        read = set().union(*(reads[cls.__name__] for cls in form.record.__mro__))
        for cls in filter(dataclasses.is_dataclass, form.record.__mro__):
            if "*" in reads[cls.__name__]:
                read |= {field.name for field in dataclasses.fields(cls)}
        assert form.options.keys() - read == set(), f"{verb} forgets them"


def test_how_drafts_are_replayed_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both options are read elsewhere too, so that the finder of readers misses nothing."""
    spy = MagicMock()
    monkeypatch.setattr(replaying, "replay_drafts", spy)
    how = ReplayRun((), "", num_draft_tokens=5, batch_size=7, draft_sampling="probabilistic")
    replaying._beside(MagicMock(), how, MagicMock())
    asked = spy.call_args.kwargs
    assert (asked["batch_size"], asked["draft_sampling"]) == (7, "probabilistic")


# ---- what the command line calls `--num-draft-tokens` is `num_draft_tokens=` for who calls Python


PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")


@pytest.mark.parametrize("verb", FORMS)
def test_help_names_the_other_options_as_its_reader_does(verb: str) -> None:
    """A marker `$max_gap` is `--max-gap` of the verb on the command line, `max_gap=` in Python."""
    options = FORMS[verb].options
    flags = {name: option.spelling(name) for name, option in options.items()}
    python = getattr(dq, verb).__doc__
    told = re.sub(r"'[a-z]+\s+--[^']*'", "", python)  # a whole command is a command everywhere
    assert not {*FLAG.findall(told)} & {*flags.values()}
    head, _, tail = verb.partition("_")
    words = [head, *([tail.replace("_", "-")] if tail else [])]
    leaf = functools.reduce(type(PARSER).below, words, PARSER)
    helps = {action.dest: str(action.help) for action in leaf._actions}
    for name, option in options.items():
        for other in re.findall(r"\$(\w+)", option.help):
            assert flags[other] in helps[name]
            assert f"{other}=" in python


def test_errors_of_every_verb_name_their_argument() -> None:
    for call in (
        lambda: dq.record(PAIR / "target", PAIR / "prompts.jsonl"),
        lambda: dq.record(PAIR / "target", PAIR / "prompts.jsonl", "x", fused=True),
        lambda: dq.check(PAIR / "draft", "vllm", tp=0),
        lambda: dq.check(PAIR / "draft", "vllm", gpu="rtx"),
        lambda: dq.gate(),
        lambda: dq.gate(measured=["a", "b"], target="t"),
        lambda: dq.card(PAIR / "draft", overwrite=True),
        lambda: dq.compare([PAIR / "draft"], target="t"),
        lambda: dq.estimate(PAIR / "draft", gpus=["gtx"]),
        lambda: dq.estimate(PAIR / "draft", efficiency=2),
        lambda: dq.estimate(PAIR.with_name("dflash") / "draft", num_draft_tokens=99),
        lambda: dq.traces_import("d", PAIR / "target", "x", written_by="vllm", table_ids=(1,)),
        lambda: dq.measure(),
        lambda: dq.plan(PAIR / "draft", "fp8-ptpc", algorithm="awq"),
        lambda: dq.quantize(PAIR / "draft", "blackwell-fp8", "x"),
        lambda: dq.quantize(PAIR / "draft", "fp8-ptpc", "x", vocab_size=8),
        lambda: dq.recipes_list(family="gpt"),
        lambda: dq.verify("x"),
        lambda: dq.traces_split("t", ["a", "b"], fraction=2, categories=()),
        lambda: dq.traces_split("t", ["a", "b"], fraction=0.5, count=0),
        lambda: dq.vocab(PAIR / "draft", size=8, curve=False, traces="t"),
        lambda: dq.parity_sampled("a", "b", "p"),
    ):
        with pytest.raises(dq.DraftQuantError) as caught:
            call()
        assert str(caught.value).startswith(f"{caught.value.where}: {caught.value.what}")
