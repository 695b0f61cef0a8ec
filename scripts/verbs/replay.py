"""`replay`: acceptance of drafts over recorded traces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.brief import counted
from ...validate.runs.judging_asked import ReplayRun
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.counting.draft_counts import DraftReplay


@verb(ReplayRun)
def replay(settings: ReplayRun) -> "tuple[reports.DraftReplay, ...]":
    """Count exactly how many tokens of each draft the target would have accepted on traces.

    Example:
        >>> bf16, int4 = dq.replay(["DRAFT", "OUT"], "TRACES", num_draft_tokens=3)
        >>> 1 < int4.counts.mean_acceptance_length <= 4
        True
        >>> len(int4.prompts) == len(bf16.prompts)
        True

    Returns:
        One `DraftReplay` for each draft, in their order. Acceptance lengths count the target's own
        token: they lie between 1 and `num_draft_tokens` + 1.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, do not fit each other, or do not fit
            in memory.
    """
    from ...validate.runs.replay_run import replay_asked

    return replay_asked(settings)


def _mapping(replays: "Sequence[DraftReplay]", settings: ReplayRun) -> list[Any]:
    from ...validate.comparison.sources import ReplayedDraft

    base, dtype = settings.rope_theta, settings.dtype
    forms = settings.served_forms(len(replays))
    return [
        ReplayedDraft.of(draft, rope_theta=base, dtype=dtype, served=form).to_mapping()
        for draft, form in zip(replays, forms, strict=True)
    ]


def _show(replays: "Sequence[DraftReplay]", settings: ReplayRun) -> None:
    print_replays(replays)
    if (base := settings.rope_theta) is not None:
        stdout().line(f"the RoPE base is {base:g} instead of that of config.json")


def print_replays(replays: "Sequence[DraftReplay]") -> None:
    """Print one row per draft."""
    from ...validate.judging.figures import draft_figures

    first = draft_figures(replays[0])
    num_draft_tokens = replays[0].num_draft_tokens
    positions = [f"pos {i + 1}" for i in range(num_draft_tokens)]
    numbers = ("acceptance length", "change", "verify steps", "accepted", *positions, "agreement")
    traces = replays[0].traces
    drawn = f" at temperature {traces.temperature:g} (proposals: {replays[0].draft_sampling})"
    drawn = "" if traces.sampling is None else drawn
    prompts = replays[0].prompts
    short = sum(not prompt.counts.num_steps for prompt in prompts)
    left_out = f" ({short} too short for a verify step)" if short else ""
    rows = table(
        f"Replay, K = {num_draft_tokens}, {counted(len(prompts), 'prompt')}{left_out}{drawn},"
        f" {traces.repeated_8gram_share:.1%} of the 8-grams are repeats",
        "draft",
        *numbers,
        spare=("accepted", "verify steps"),
    )
    for draft in replays:
        figures = draft_figures(draft)
        change = figures.mean_acceptance_length / first.mean_acceptance_length - 1
        rows.row(
            draft.name,
            f"{figures.mean_acceptance_length:.4f}",
            "" if draft is replays[0] else f"{change:+.2%}",
            _number(figures.num_steps),
            _number(draft.counts.num_accepted_draft_tokens),
            *(f"{share:.3f}" for share in figures.survival),
            f"{draft.first_step.share:.2%}",
        )
    print_table(rows)
    _print_context_bins(replays)


def _print_context_bins(replays: "Sequence[DraftReplay]") -> None:
    from ...validate.counting.draft_counts import by_context

    by_draft = [by_context(draft.prompts) for draft in replays]
    bins = tuple(by_draft[0])
    if len(bins) < 2:
        return
    rows = table("Acceptance length by tokens before the verify step", "draft", *bins)
    for draft, lengths in zip(replays, by_draft, strict=True):
        known = {name: f"{counts.mean_acceptance_length:.4f}" for name, counts in lengths.items()}
        rows.row(draft.name, *(known.get(name, "") for name in bins))
    print_table(rows)


def _number(steps: float) -> str:
    """Counted steps are whole, expected ones are not."""
    return f"{steps:,}" if isinstance(steps, int) else f"{steps:,.1f}"


COMMAND = Command(replay, _show, _mapping)
