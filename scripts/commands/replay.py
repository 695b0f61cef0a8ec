"""`draftquant replay`: acceptance length of drafts over recorded traces."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..api import replay as api
from ..console import OnTerminal, print_json, print_table, stdout, table
from .replaying import add_replay_arguments

if TYPE_CHECKING:
    from ...validate.counting.draft_replay import DraftReplay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`replay DRAFT... --traces T`."""
    parser.add_argument("drafts", nargs="+", metavar="DRAFT", help="the reference (BF16) first")
    add_replay_arguments(parser)
    parser.add_argument(
        "--rope-theta",
        type=float,
        metavar="BASE",
        help="rotary base for all drafts instead of their config's: with the base that a draft was"
        " trained with it accepts most",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with counts per prompt")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    replays = api.replay(
        options.drafts,
        options.traces,
        num_draft_tokens=options.num_draft_tokens,
        draft_sampling=options.draft_sampling,
        target=options.target,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
        rope_theta=options.rope_theta,
        watch=OnTerminal(),
    )
    if options.json:
        from ...validate.comparison.replay_file import ReplayedDraft

        rope_theta, dtype = options.rope_theta, options.dtype
        found = [ReplayedDraft.of(one, rope_theta=rope_theta, dtype=dtype) for one in replays]
        print_json([one.to_mapping() for one in found])
    else:
        print_replays(replays)
        if fault := replays[0].traces.features.fault():
            stdout().line(f"warning: {fault}")
        if options.rope_theta is not None:
            stdout().line(f"with rotary base {options.rope_theta:g}, not that of config.json")
    return 0


def print_replays(replays: "Sequence[DraftReplay]") -> None:
    """Print one row per draft."""
    from ...validate.judging.figures import draft_figures

    first = draft_figures(replays[0])
    num_draft_tokens = replays[0].num_draft_tokens
    positions = [f"pos {i + 1}" for i in range(num_draft_tokens)]
    numbers = ("acceptance length", "change", "steps", "accepted", *positions, "agreement")
    traces = replays[0].traces
    drawn = "" if traces.sampling is None else f" at temperature {traces.temperature:g}"
    found = table(
        f"Replay, K = {num_draft_tokens}, {len(replays[0].prompts)} prompts{drawn},"
        f" {traces.repeated_8gram_share:.1%} of the 8-grams are repeats",
        "draft",
        *numbers,
        right=numbers,
        spare=("accepted", "steps"),
    )
    for replay in replays:
        figures = draft_figures(replay)
        change = figures.mean_acceptance_length / first.mean_acceptance_length - 1
        found.row(
            replay.name,
            f"{figures.mean_acceptance_length:.4f}",
            "" if replay is replays[0] else f"{change:+.2%}",
            _number(figures.num_steps),
            _number(replay.counts.num_accepted_draft_tokens),
            *(f"{share:.3f}" for share in figures.survival),
            f"{replay.first_step.share:.2%}",
        )
    print_table(found)


def _number(steps: float) -> str:
    """Counted steps are whole, expected ones are not."""
    return f"{steps:,}" if isinstance(steps, int) else f"{steps:,.1f}"
