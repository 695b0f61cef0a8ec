"""`Keywords`: turns text that names command-line options into the words of a Python call.

Every message is written once, for the command line: `--max-new-tokens`, `record --draft D --fused`.
A caller from Python reads `max_new_tokens=` and `record(draft=D, fused=True)` instead.
Options of engines and of other tools are not changed.
"""

import collections.abc
import functools
import importlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...recipes.python_values import members
from .settings import Form

_OPTION = r"(?<![\w-])(?:--[a-z][a-z0-9-]*|-[a-z])(?![\w-])"
_TOKEN = r"(?:\.\.\.|'[^' ]*'|[^\s;:()'\"]*[^\s,;:()'\".])"
_VALUE = re.compile(r"\.\.\.|[A-Z][A-Z0-9_,]*|-?[0-9.]+\S*|\S*[/=~]\S*|\S+\.[a-z]+|auto|\d[\d,]*")
"""Text after an option that is its value rather than the next word of the sentence."""


class Keyword(NamedTuple):
    """A field of settings: its name in Python, and its possible values: `most` words."""

    name: str
    is_switch: bool
    is_list: bool
    most: int
    choices: tuple[str, ...]

    def argument(self, words: list[str]) -> str:
        """`tp=2`, from the words after the option, from which it takes its value."""
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
    """Turns options into keyword arguments, those of one verb first."""

    def __init__(self, form: Form[Any]) -> None:
        self.verb = form.verb
        self._own = keywords_of(form)
        self._places = {each.place: name for name, each in form.options.items() if each.place}

    def __call__(self, text: str) -> str:
        """The text, with calls and keywords instead of commands and options."""
        if "--" not in text and "draftquant" not in text and " -" not in text:
            return text
        return self._options(_command().sub(self._as_call, self._named(text)))

    def place(self, where: str) -> str:
        """The place of an error: `--tp` of `check` is `check(tp=)`, `--tp x` is `check(tp="x")`."""
        found = re.match(rf"({_OPTION})(?: ({_TOKEN}))?(?=,|$)", where)
        keyword = found and {**_all_keywords(), **self._own}.get(found[1])
        if where in self._places:
            return f"{self.verb}({self._places[where]}=)"
        if not found or not keyword:
            return self(where)
        value = "" if found[2] is None else _literal(found[2])
        return f"{self.verb}({keyword.name}={value}){self(where[found.end() :])}"

    def _named(self, text: str) -> str:
        """Arguments next to each other, or at the end, which a command line takes by position."""
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
        words, known = found["rest"].split(), keywords_of(_verbs()[name].form)
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
    """Turn options in the documentation of a verb into keywords; by then, all verbs exist."""
    function.__doc__ = Keywords(function.form)(function.__doc__)


def keywords_of(form: Form[Any]) -> Mapping[str, Keyword]:
    """A command line's name of an option of this form -> the keyword."""
    hints = typing.get_type_hints(form.record)
    found: dict[str, Keyword] = {}
    for name, option in form.options.items():
        if option.place:
            continue
        kinds = [kind for kind in members(hints[name]) if kind is not type(None)]
        origin = typing.get_origin(kinds[0])
        inner = typing.get_args(kinds[0]) if origin is Literal else ()
        braces = re.fullmatch(r"\{(.*)\}", option.value or "")
        keyword = Keyword(
            name=name,
            is_switch=kinds == [bool],
            is_list=origin in (tuple, collections.abc.Sequence),
            most=option.count if isinstance(option.count, int) else 1,
            choices=(*map(str, inner), *(braces[1].split(",") if braces else ())),
        )
        found |= {one: keyword for one in (option.spelling(name), option.short) if one}
    return found


def _literal(word: str) -> str:
    """A word of a command line as Python writes it; placeholders stay bare."""
    word = word.strip("'")
    bare = re.fullmatch(r"\.\.\.|[A-Z][A-Z0-9_]*|-?[0-9][0-9.e+-]*", word)
    return word if bare else f'"{word}"'


def _verbs() -> Mapping[str, Any]:
    """Every verb by its name in Python; imported when a message needs it, which is rare."""
    api = importlib.import_module(f"{__name__.partition('.')[0]}.api")
    return {name: getattr(api, name) for name in api.VERBS}


@functools.cache
def _all_keywords() -> Mapping[str, Keyword]:
    """The options of all verbs; for equal names, the first."""
    found: dict[str, Keyword] = {}
    for each in _verbs().values():
        found = {**keywords_of(each.form), **found}
    return found


@functools.cache
def _command() -> re.Pattern[str]:
    """Commands, and the words after them that may be their arguments."""
    names = sorted({*_spelled(_verbs())}, key=len, reverse=True)
    verbs = "|".join(map(re.escape, names))
    return re.compile(
        rf"(?<![\w/.-])(?P<lead>draftquant )?(?P<verb>{verbs})(?![\w-])"
        rf"(?:(?P<help> --help)|(?P<rest>(?: {_TOKEN})*))"
    )


def _spelled(names: Sequence[str] | Mapping[str, Any]) -> Iterator[str]:
    """The spelling of a verb on the command line: `parity run-tasks`."""
    for name in names:
        head, _, tail = name.partition("_")
        yield f"{head} {tail.replace('_', '-')}" if tail else head
