"""`Keywords`: text that names options as a command line does, in the words of a Python call.

Every message is written once, for the command line: `--max-new-tokens`, `record --draft D --fused`.
Who calls a verb from Python reads `max_new_tokens=` and `record(draft=D, fused=True)` instead.
Options of engines and of other tools stay as they are.
"""

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from typing_extensions import override

from ...recipes.errors import DraftQuantError
from ...recipes.listener import Bar, Listener, Unit
from .listener import usual_listener
from .option_words import meant
from .settings import Argument, CallError, Settings, members, options_of, spelling

# ---- `Ears`: hears what a run says on its way to who listens, and keeps the warnings of it

ReportT = TypeVar("ReportT")


class Ears(Listener):
    """Passes everything on to another listener, and keeps the warnings.

    Args:
        listener: who listens.
        words: puts a text into the words of who called; None = as it is.

    Attributes:
        warnings: all that were said, each once.
    """

    def __init__(self, listener: Listener, words: Callable[[str], str] | None = None) -> None:
        self._listener = listener
        self._words = words
        self.warnings: tuple[str, ...] = ()

    @override
    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        with self._listener.bar(label, total, unit) as bar:
            yield bar

    @override
    def stage(self, name: str) -> None:
        self._listener.stage(name)

    @override
    def line(self, text: str) -> None:
        self._listener.line(self._said(text))

    @override
    def warning(self, text: str) -> None:
        said = self._said(text)
        if said not in self.warnings:
            self.warnings += (said,)
            self._listener.warning(said)

    @override
    def note(self, text: str) -> None:
        self._listener.note(self._said(text))

    def _said(self, text: str) -> str:
        return text if self._words is None else self._words(text)


def with_warnings(report: ReportT, warnings: Sequence[str]) -> ReportT:
    """A report that holds what was warned of, where it has a place for it and none in it."""
    if not warnings or getattr(report, "warnings", None) != ():
        return report
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        has_field = "warnings" in {each.name for each in dataclasses.fields(report)}
        return dataclasses.replace(report, warnings=tuple(warnings)) if has_field else report
    report.warnings = tuple(warnings)  # type: ignore[attr-defined] # of an opened folder
    return report


_OPTION = r"(?<![\w-])(?:--[a-z][a-z0-9-]*|-[a-z])(?![\w-])"
_TOKEN = r"(?:\.\.\.|'[^' ]*'|[^\s;:()'\"]*[^\s,;:()'\".])"
_VALUE = re.compile(r"\.\.\.|[A-Z][A-Z0-9_,]*|-?[0-9.]+\S*|\S*[/=~]\S*|\S+\.[a-z]+|auto|\d[\d,]*")
"""What stands behind an option and is its value rather than the next word of the sentence."""


class Keyword(NamedTuple):
    """A field of settings: its name in Python, and what its value may be.

    Attributes:
        most: so many words are its value.
    """

    name: str
    is_switch: bool
    is_list: bool
    most: int
    choices: tuple[str, ...]

    def argument(self, words: list[str]) -> str:
        """`tp=2`, of the words behind the option, from which it takes its value."""
        if self.is_switch:
            return f"{self.name}=True"
        taken = list[str]()
        while words and len(taken) < self.most and self._takes(words[0]):
            taken.append(words.pop(0))
        if not taken:
            return f"{self.name}=..."
        if not self.is_list:
            return f"{self.name}={_literal(taken[0])}"
        each = [word for one in taken for word in one.split(",")]
        return f"{self.name}=[{', '.join(map(_literal, each))}]"

    def _takes(self, word: str) -> bool:
        return word in self.choices or bool(_VALUE.fullmatch(word.strip("'")))


class Keywords:
    """Says options as the keyword arguments that they are.

    Args:
        verb: whose options come first, where another verb has some of the same name.
        settings: of that verb.
    """

    def __init__(self, verb: str, settings: type[Settings]) -> None:
        self.verb = verb
        self._own = keywords_of(settings)
        self._places = {
            option.metavar: name
            for name, option in options_of(settings).items()
            if isinstance(option, Argument) and option.metavar
        }

    def __call__(self, text: str) -> str:
        """The text, with calls and keywords in the place of commands and options."""
        if "--" not in text and "draftquant" not in text and " -" not in text:
            return text
        return self._options(_command().sub(self._as_call, self._named(text)))

    def place(self, where: str) -> str:
        """Where an error is: `--tp` of `check` is `check(tp=)`, `--tp x` is `check(tp="x")`."""
        found = re.match(rf"({_OPTION})(?: ({_TOKEN}))?(?=,|$)", where)
        keyword = found and {**_all_keywords(), **self._own}.get(found[1])
        if where in self._places:
            return f"{self.verb}({self._places[where]}=)"
        if not found or not keyword:
            return self(where)
        value = "" if found[2] is None else _literal(found[2])
        return f"{self.verb}({keyword.name}={value}){self(where[found.end() :])}"

    def _named(self, text: str) -> str:
        """Arguments side by side, or at the end, which a command line takes by their places."""
        names = "|".join(map(re.escape, self._places))
        if len(self._places) < 2:
            return text
        return re.sub(
            rf"\b(?:{names})(?:(?:,? (?:{names}))+\b|(?=, --|$))",
            lambda found: re.sub(names, lambda one: f"{self._places[one[0]]}=", found[0]),
            text,
        )

    def _options(self, text: str) -> str:
        """Options in running text: `--out` is `out=`, `--tp 2` is `tp=2`."""
        known = {**_all_keywords(), **self._own}

        def said(found: re.Match[str]) -> str:
            keyword = known.get(found["option"])
            if keyword is None:
                return found[0]
            words = found["behind"].split()
            given = keyword.argument(words)
            return " ".join((given.removesuffix("..."), *words))

        return re.sub(rf"(?P<option>{_OPTION})(?P<behind>(?:[ =](?!-){_TOKEN})*)", said, text)

    def _as_call(self, found: re.Match[str]) -> str:
        """`draftquant record --draft D --fused` is `record(draft=D, fused=True)`."""
        name = found["verb"].replace(" ", "_").replace("-", "_")
        if found["help"]:
            return f"help({name})"
        words, known = found["rest"].split(), keywords_of(_verbs()[name].settings)
        arguments = []
        options = [place for place, word in enumerate(words) if word in known]
        places = words[: options[0]] if options else []
        if not found["lead"] and not (options and all(map(_VALUE.fullmatch, places))):
            return found[0]
        if len(places) > 2:
            places = []
        arguments = [_literal(words.pop(0)) for _ in places]
        while words and (words[0] in known or _VALUE.fullmatch(words[0])):
            word = words.pop(0)
            arguments.append(known[word].argument(words) if word in known else _literal(word))
        return " ".join((f"{name}({', '.join(arguments)})", *words))


def explain(function: Any) -> None:
    """Say in the documentation of a verb, too, options as keywords; all verbs are there by then."""
    function.__doc__ = Keywords(function.__name__, function.settings)(function.__doc__)


def keywords_of(settings: type[Settings]) -> Mapping[str, Keyword]:
    """What a command line calls an option of these settings -> the keyword that it is."""
    hints = typing.get_type_hints(settings)
    found: dict[str, Keyword] = {}
    for name, option in options_of(settings).items():
        if isinstance(option, Argument):
            continue
        kinds = [kind for kind in members(hints[name]) if kind is not type(None)]
        origin = typing.get_origin(kinds[0])
        inner = typing.get_args(kinds[0]) if origin is Literal else ()
        braces = re.fullmatch(r"\{(.*)\}", option.metavar or "")
        keyword = Keyword(
            name=name,
            is_switch=kinds == [bool],
            is_list=origin in (tuple, collections.abc.Sequence),
            most=option.count if isinstance(option.count, int) else 1,
            choices=(*map(str, inner), *(braces[1].split(",") if braces else ())),
        )
        found |= {one: keyword for one in (spelling(name, option), option.short) if one}
    return found


def _literal(word: str) -> str:
    """A word of a command line as Python writes it; names of what is to be given stay bare."""
    word = word.strip("'")
    bare = re.fullmatch(r"\.\.\.|[A-Z][A-Z0-9_]*|-?[0-9][0-9.e+-]*", word)
    return word if bare else f'"{word}"'


def _verbs() -> Mapping[str, Any]:
    """Every verb by its name in Python; imported when something is said, which is seldom."""
    api = importlib.import_module(f"{__name__.partition('.')[0]}.api")
    return {name: getattr(api, name) for name in api.VERBS}


@functools.cache
def _all_keywords() -> Mapping[str, Keyword]:
    """The options of all verbs; of one name the first."""
    found: dict[str, Keyword] = {}
    for each in _verbs().values():
        found = {**keywords_of(each.settings), **found}
    return found


@functools.cache
def _command() -> re.Pattern[str]:
    """Commands, and the words behind them that may be their arguments."""
    names = sorted({*_spelled(_verbs())}, key=len, reverse=True)
    verbs = "|".join(map(re.escape, names))
    return re.compile(
        rf"(?<![\w/.-])(?P<lead>draftquant )?(?P<verb>{verbs})(?![\w-])"
        rf"(?:(?P<help> --help)|(?P<rest>(?: {_TOKEN})*))"
    )


def _spelled(names: Sequence[str] | Mapping[str, Any]) -> Iterator[str]:
    """As a command line spells a verb: `parity run-tasks`."""
    for name in names:
        head, _, tail = name.partition("_")
        yield f"{head} {tail.replace('_', '-')}" if tail else head


# ---- `verb`: the Python function of a verb, made from its settings and from what it does
#
# Commands call `run` with settings that are decoded already. The function decodes its arguments,
# and says errors and warnings in the words of a Python call.

P = ParamSpec("P")
S = TypeVar("S", bound=Settings)
S_co = TypeVar("S_co", bound=Settings, covariant=True)
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Verb(Protocol[P, S_co, R_co]):
    """A function that takes the fields of its settings as arguments."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Decode the arguments and run."""

    @property
    def settings(self) -> type[S_co]:
        """The settings, of which the parser of the command is made."""

    @property
    def run(self) -> "Callable[[Any], R_co]":
        """What it does, by settings that are made already."""


def verb(settings: Callable[P, S]) -> Callable[[Callable[[S], R]], Verb[P, S, R]]:
    """The decorator that makes of `run(settings)` a function with the fields as arguments.

    Its name, home and first words are those of `run`; signature and arguments are the settings'.
    """
    cls = typing.cast("type[S]", settings)

    def made(run: Callable[[S], R]) -> Verb[P, S, R]:
        signature = inspect.signature(cls)
        name = run.__name__

        @functools.wraps(run)
        def heard(settings: S) -> R:
            ears = Ears(settings.listener)
            return with_warnings(run(dataclasses.replace(settings, listener=ears)), ears.warnings)

        def function(*args: Any, **kwargs: Any) -> R:
            given = {"listener": usual_listener()} | _bound(name, signature, args, kwargs)
            words = Keywords(name, cls)
            try:
                settings = cls.from_arguments(name, given)
                ears = Ears(settings.listener, words)
                report = run(dataclasses.replace(settings, listener=ears))
            except DraftQuantError as exc:
                exc.reword(words, words.place)
                raise
            for text in getattr(report, "warnings", ()):
                ears.warning(text)
            return with_warnings(report, ears.warnings)

        returns = run.__annotations__["return"]
        kinds = typing.get_type_hints(cls)
        parameters = [
            each.replace(annotation=kinds[each.name]) for each in signature.parameters.values()
        ]
        parameters.sort(key=lambda each: each.name == "listener")  # stands behind what is asked for
        function.__name__, function.__qualname__, function.__module__ = name, name, run.__module__
        function.__doc__ = documented(run, cls)
        function.__annotations__ = {
            **{each.name: each.annotation for each in parameters},
            "return": returns,
        }
        found: Any = function
        found.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
        found.__wrapped__ = run  # in whose module the annotation of what it returns is found
        found.settings, found.run = cls, heard
        return typing.cast("Verb[P, S, R]", found)

    return made


def _bound(
    verb: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Field -> value, of a call.

    Raises:
        CallError: an argument is missing, unknown, or one too many.
    """
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as exc:
        missing = re.fullmatch(r"missing a required .*'(\w+)'", str(exc))
        where, what = (f"{verb}({missing[1]}=)", "it is missing") if missing else (verb, str(exc))
        unknown = re.fullmatch(r"got an unexpected keyword argument '(\w+)'", what)
        fields = [each.replace("_", "-") for each in signature.parameters]
        named = meant(unknown[1], fields) if unknown else None
        fix = f"help(dq.{verb}) explains the arguments"
        fix = f"did you mean {named.replace('-', '_')}=?" if named else fix
        raise CallError(where, what, fix=fix) from exc


def documented(run: Callable[..., object], settings: type[Settings]) -> str:
    """The documentation of `run` with that of its arguments, before what it returns."""
    own = inspect.getdoc(run) or ""
    lines = []
    for name, option in options_of(settings).items():
        bounds = f" ({option.bounds})" if option.bounds is not None else ""
        meaning = f"{name}: {option.help.replace('%%', '%')}{bounds}."
        filled = textwrap.fill(meaning, 92, subsequent_indent="    ")
        lines.append(textwrap.indent(filled, "    "))
    arguments = "\n".join(("Args:", *lines, "    listener: sees how far the run is."))
    head, mark, tail = own.partition("\nReturns:")
    return f"{head.rstrip()}\n\n{arguments}\n{mark and mark + tail}".rstrip() + "\n"
