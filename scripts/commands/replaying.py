"""Arguments of `replay`, `gate` and whatever else runs drafts along traces."""

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..api import replay as api
from ..api.arguments import ComputeDtype
from ..console import OnTerminal
from .common import add_device, add_draft_sampling, add_num_draft_tokens, add_target

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder

DTYPES = typing.get_args(ComputeDtype)


def add_replay_arguments(parser: argparse.ArgumentParser, *, traces_required: bool = True) -> None:
    """`add_trace_arguments`, how tokens are drafted, and batch size."""
    add_trace_arguments(parser, traces_required=traces_required)
    add_draft_sampling(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="PROMPTS",
        help="prompts that go through a draft together (default: as many as are of use and fit)",
    )


def add_trace_arguments(parser: argparse.ArgumentParser, *, traces_required: bool = True) -> None:
    """Traces, how many tokens are drafted, the target; device and dtype."""
    parser.add_argument(
        "--traces", required=traces_required, type=Path, metavar="TRACES", help="trace folder"
    )
    add_num_draft_tokens(parser)
    add_target(parser)
    add_device(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="what drafts compute in: float32, the reference (default), or bfloat16 as engines do",
    )


def load_for_replay(
    references: Sequence[str], traces: "TraceFolder", options: argparse.Namespace
) -> api.LoadedForReplay:
    """Load drafts by `add_trace_arguments`, and say on stderr what memory that takes."""
    return api.load_for_replay(references, traces, settings_of(options))


def settings_of(options: argparse.Namespace) -> api.OnTracesSettings:
    """Of `add_replay_arguments`, or of `add_trace_arguments` alone."""
    return api.OnTracesSettings(
        watch=OnTerminal(),
        num_draft_tokens=options.num_draft_tokens,
        draft_sampling=getattr(options, "draft_sampling", "greedy"),
        target=options.target,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
    )
