"""The command `draftquant`: parse, run one command, turn errors into exit codes.

Exit codes: 0 done or PASS, 1 verify or gate says no, 2 bad input or usage, 3 INCONCLUSIVE or
ANOMALOUS.
"""

import argparse
import dataclasses
import errno
import importlib
import platform
import signal
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ..quantize.files.hub import command_line
from ..recipes.errors import DeclarationError, DraftQuantError, VerifyError, visible
from .command_table import COMMANDS, EPILOGS, EXAMPLES, GROUPS, SUMMARIES
from .frame.console import OnTerminal, print_error, stderr
from .frame.parsers import COMMON, CommandParser, UsageError, add_common_options, sentence
from .frame.streams import RESULTS, SPEECH, StdoutError, open_streams, speak

_FIXES = {
    errno.EACCES: "change its permissions, or choose another place",
    errno.EROFS: "choose a place on another disk: this one is read-only",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write to another disk",
    errno.ENOENT: "check the path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "give a folder",
    errno.EMFILE: "raise the limit on open files: ulimit -n 4096",
}
"""The fix for an error from the operating system."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    A reader of stdout that goes away, as `head` does, has seen what it wanted: the rest is not
    printed, and the exit code stays that of the command, so that no pipe hides a FAIL.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    open_streams()
    options = argparse.Namespace(**COMMON)
    speak(quiet=False, verbose=False)
    try:
        try:
            return _run(arguments, options)
        finally:
            RESULTS.flush()  # a failure to write is an error of this run, not of its end
    except UsageError as exc:
        if exc.usage:
            stderr().line(exc.usage)
        print_error(exc, as_json="--json" in arguments)
        raise SystemExit(2) from exc
    except (DraftQuantError, OSError, StdoutError) as exc:
        if options.debug:
            raise
        print_error(_told(exc, options), as_json=options.json)
        verdict = isinstance(exc, VerifyError) and not isinstance(exc, DeclarationError)
        return 1 if verdict else 2
    except KeyboardInterrupt:
        stderr().line("interrupted: nothing unfinished was published")
        return 130


def _run(arguments: Sequence[str], options: argparse.Namespace) -> int:
    from .frame.progress import heartbeat

    parser_of(arguments).parse_args(arguments, namespace=options)
    speak(quiet=options.quiet, verbose=options.verbose)
    if SPEECH.verbose:
        from ..recipes.packages import package_version

        packages = ("draftquant", "torch", "transformers", "numpy")
        versions = ", ".join(f"{name} {package_version(name)}" for name in packages)
        stderr().line(f"{versions}, Python {platform.python_version()}")
    # File names need not be Unicode; records in draftquant.json are.
    options.argv = ["draftquant", *map(visible, arguments)]
    if hasattr(options, "settings"):
        options.settings = dataclasses.replace(options.settings, listener=OnTerminal())
        options.form.check(options.settings, lambda name, option: option.spelling(name))
    with _unwinding_signals(), command_line(options.argv), heartbeat(options.command):
        module = _module(options.command)
        if hasattr(module, "run"):
            return int(module.run(options))
        command = getattr(module, "COMMAND", None)
        if command is None:
            command = module.COMMANDS[options.verb or module.DEFAULT]
        if not hasattr(options, "settings"):  # without a verb there are no words of it
            options.settings = command.verb.form.record(listener=OnTerminal())
        return int(command.run(options.settings, as_json=options.json))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".verbs.{name}", __package__)


def _told(
    exc: DraftQuantError | OSError | StdoutError, options: argparse.Namespace
) -> DraftQuantError:
    if isinstance(exc, DraftQuantError):
        return exc
    if isinstance(exc, StdoutError):
        return _unprinted(exc, options)
    fix = _FIXES.get(exc.errno or 0, "see what the system says of it, and run again")
    return DraftQuantError(exc.filename or "the system", exc.strerror or str(exc), fix=fix)


def _unprinted(exc: StdoutError, options: argparse.Namespace) -> DraftQuantError:
    """The error of a run that failed only in printing; results are printed last."""
    given = getattr(options, "settings", options)
    named = (getattr(given, name, None) for name in ("out", "report"))
    done = [f"  {path} is complete and stays" for path in named if path and Path(path).exists()]
    fix = "redirect it to a file or to /dev/null, with space on the disk"
    return DraftQuantError("stdout", f"cannot be written: {exc}", details=done, fix=fix)


def every_parser() -> CommandParser:
    """The parser with the arguments of all commands, for completion and documentation."""
    return parser_of(COMMANDS)


def parser_of(arguments: Container[str]) -> CommandParser:
    """The parser with the arguments of the named commands."""
    parser = CommandParser(
        prog="draftquant",
        description="Quantize speculative-decoding drafts, verify every byte, gate on acceptance.",
        examples=EXAMPLES[""],
        epilog="exit codes: 0 done or PASS, 1 verify or gate says no, 2 bad input, "
        "3 INCONCLUSIVE or ANOMALOUS; help of a command: draftquant help COMMAND",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        sub = _below(commands, name, name)
        if name in arguments:  # the arguments of other commands are not needed
            _add_arguments(sub, name)
    parser.list_commands(GROUPS)
    add_common_options(parser)
    return parser


def _below(parsers: Any, word: str, name: str) -> CommandParser:
    """The parser of a word that belongs to this command, or a command and its verb."""
    summary = SUMMARIES[name]
    parser: CommandParser = parsers.add_parser(
        word,
        help=summary,
        description=sentence(summary),
        examples=EXAMPLES[name],
        epilog=EPILOGS.get(name),
    )
    return parser


def _add_arguments(parser: CommandParser, name: str) -> None:
    """Arguments of a command: those of the verb of its `COMMAND`, or of each of its `COMMANDS`.

    Without a verb, the module's `DEFAULT` runs. `help` adds its own arguments.
    """
    module = _module(name)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
        return
    if command := getattr(module, "COMMAND", None):
        parser.takes(command.verb.form)
        return
    required = not hasattr(module, "DEFAULT")
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=required)
    for word, below in module.COMMANDS.items():
        _below(parsers, word, f"{name} {word}").takes(below.verb.form)


@contextmanager
def _unwinding_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like an exception, so that the staging folder is removed.

    A signal that the parent ignores, as nohup does, stays ignored. If a handler raises while
    safetensors reads, torch raises a ValueError instead: the run then ends as by the signal.
    """
    raised: list[SystemExit] = []

    def unwind(number: int, _frame: FrameType | None) -> None:
        raised.append(SystemExit(128 + number))
        raise raised[-1]

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, unwind)
    try:
        yield
    except Exception as exc:
        if raised:
            raise raised[-1] from exc
        raise
    finally:
        for number in caught:
            signal.signal(number, before[number])


if __name__ == "__main__":
    sys.exit(main())
