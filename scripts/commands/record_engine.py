"""The part of `draftquant record` that lets a serving engine run the target."""

import argparse
import typing
from contextlib import suppress
from pathlib import Path

from ...recipes.strict_json import JsonProblem, parse_json
from ..api.record_settings import RecordEngine


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--engine` and what belongs to it."""
    parser.add_argument(
        "--engine",
        choices=typing.get_args(RecordEngine),
        default="transformers",
        help="who runs the target (default transformers); vllm: any target and any number of GPUs"
        " that vLLM takes",
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        type=_assignment,
        metavar="NAME=VALUE",
        help="argument of vLLM, such as tensor_parallel_size=8; repeated for more",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="a running vLLM server, started with what --print-server-args prints; its key is read"
        " from DRAFTQUANT_SERVER_KEY",
    )
    parser.add_argument(
        "--shared",
        type=Path,
        metavar="FOLDER",
        help="folder that server and recorder share, for hidden states on their way",
    )
    parser.add_argument(
        "--print-server-args",
        action="store_true",
        help="print the command that starts such a server for these prompts, and end",
    )


def _assignment(text: str) -> tuple[str, object]:
    """NAME=VALUE; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    found: object = value
    with suppress(JsonProblem):
        found = parse_json(value)
    return name.strip().replace("-", "_"), found
