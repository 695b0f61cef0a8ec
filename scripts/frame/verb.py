"""`verb`: the Python function of a verb, made from its settings and its implementation.

The command runs it with decoded settings (`Command`). The function decodes its arguments. Messages
are the same for both, but for the place of an error that is an argument.
"""

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar

from ...recipes.errors import DraftQuantError
from ...recipes.listener import Heard
from .arguments import Option, meant, options_for
from .console import print_json
from .ears import Ears, usual_listener, with_warnings
from .settings import CallError, Form

P = ParamSpec("P")
S = TypeVar("S", bound=Heard)
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Verb(Protocol[P, R_co]):
    """A function that takes the fields of its settings as arguments."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Decode the arguments and run."""

    @property
    def form(self) -> Form[Any]:
        """Its settings; the command's parser is made from them."""

    @property
    def run(self) -> "Callable[[Any], R_co]":
        """Its implementation, for decoded settings."""


def verb(
    settings: Callable[P, S],
    *,
    exclusive: Sequence[str] = (),
    one_of: Sequence[str] = (),
    figures: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[[S], R]], Verb[P, R]]:
    """The decorator that turns `run(settings)` into a function with the fields as arguments.

    Its name, module and first words are those of `run`; signature and arguments are the settings'.

    Args:
        settings: a record that is `Heard`.
        exclusive: fields of which at most one is given. one_of: fields of which exactly one is.
        figures: name -> its value in help texts.
    """
    cls = typing.cast("type[S]", settings)

    def made(run: Callable[[S], R]) -> Verb[P, R]:
        signature = inspect.signature(cls)
        name = run.__name__
        options = options_for(name, cls, figures)
        form = Form(verb=name, record=cls, options=options, exclusive=exclusive, one_of=one_of)

        @functools.wraps(run)
        def heard(settings: S) -> R:
            ears = Ears(settings.listener)
            return with_warnings(run(dataclasses.replace(settings, listener=ears)), ears.warnings)

        def function(*args: Any, **kwargs: Any) -> R:
            given = {"listener": usual_listener()} | _bound(name, signature, args, kwargs)
            try:
                settings = form.from_arguments(given)
                _check_operands(settings)
                ears = Ears(settings.listener)
                report = run(dataclasses.replace(settings, listener=ears))
            except DraftQuantError as exc:
                exc.move(form.in_call(exc.where))
                raise
            for text in getattr(report, "warnings", ()):
                ears.warning(text)
            return with_warnings(report, ears.warnings)

        returns = run.__annotations__["return"]
        kinds = typing.get_type_hints(cls)
        parameters = [
            each.replace(annotation=kinds[each.name]) for each in signature.parameters.values()
        ]
        parameters.sort(key=lambda each: each.name == "listener")  # comes after what is asked for
        function.__name__, function.__qualname__, function.__module__ = name, name, run.__module__
        function.__doc__ = documented(run, options)
        function.__annotations__ = {
            **{each.name: each.annotation for each in parameters},
            "return": returns,
        }
        wrapper: Any = function
        wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
        wrapper.__wrapped__ = run  # the module in which its return annotation is found
        wrapper.form, wrapper.run = form, heard
        return typing.cast("Verb[P, R]", wrapper)

    return made


def _check_operands(settings: Heard) -> None:
    """No verb takes a draft for its target, or begins with the two swapped."""
    target = getattr(settings, "target", None)
    if target is None:
        return
    from ...quantize.pairing.target import check_operands

    drafts = (getattr(settings, field, None) for field in ("draft", "baseline", "layer"))
    check_operands(target, next(filter(None, drafts), None))


def _to_mapping(report: Any, _settings: Any) -> Any:
    method = getattr(report, "to_mapping", None)
    return dataclasses.asdict(report) if method is None else method()


def _exit_code(report: Any) -> int:
    return int(getattr(report, "exit_code", 0))


@dataclasses.dataclass(frozen=True)
class Command:
    """How the command line shows what a verb returns.

    Attributes:
        show: prints the report; it is given the settings too, as `mapping` is.
        mapping: the report for JSON.
        beside: prints on stderr what a reader must know, even where JSON is printed.
        run_whole: runs instead of the verb, where the command shows more than the function
            returns.
    """

    verb: Verb[..., Any]
    show: Callable[[Any, Any], None]
    mapping: Callable[[Any, Any], Any] = _to_mapping
    exit_code: Callable[[Any], int] = _exit_code
    beside: Callable[[Any, Any], None] | None = None
    run_whole: Callable[[Any], Any] | None = None

    def run(self, settings: Any, *, as_json: bool) -> int:
        """Run the verb and print what it returns; the exit code."""
        _check_operands(settings)
        report = (self.run_whole or self.verb.run)(settings)
        self.tell(report, settings, as_json=as_json)
        return self.exit_code(report)

    def tell(self, report: Any, settings: Any, *, as_json: bool) -> None:
        """Print the report."""
        if as_json:
            print_json(self.mapping(report, settings))
        else:
            self.show(report, settings)
        if self.beside is not None:
            self.beside(report, settings)


def _bound(
    verb: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Field -> value of a call; an error where one is missing, unknown, or superfluous."""
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


def documented(run: Callable[..., object], options: Mapping[str, Option]) -> str:
    """The documentation of `run` with that of its arguments, before what it returns."""
    text = inspect.getdoc(run) or ""
    lines, names = [], {name: f"{name}=" for name in options}
    for name, option in options.items():
        bounds = f" ({option.bounds})" if option.bounds is not None else ""
        meaning = f"{name}: {option.explained(names)}{bounds}."
        filled = textwrap.fill(meaning, 92, subsequent_indent="    ")
        lines.append(textwrap.indent(filled, "    "))
    arguments = "\n".join(("Args:", *lines, "    listener: sees how far the run is."))
    head, mark, tail = text.partition("\nReturns:")
    return f"{head.rstrip()}\n\n{arguments}\n{mark and mark + tail}".rstrip() + "\n"
