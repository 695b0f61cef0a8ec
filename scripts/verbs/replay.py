"""`replay`: acceptance of drafts over recorded traces."""

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...quantize.files.hub import Reference
from ...recipes.errors import GoldenError
from ...recipes.formats import AS_STORED, ServedForm
from ...recipes.listener import Listener
from ..frame import arguments, reports
from ..frame.console import print_json, print_table, stdout, table
from ..frame.pages import check_golden, write_golden
from ..frame.settings import Argument, Option
from ..frame.verb import verb
from ..loaded_drafts import LoadedForReplay, PassesSettings, load_for_replay

if TYPE_CHECKING:
    import torch

    from ...validate.counting.acceptance_counts import AcceptanceCounts
    from ...validate.counting.draft_counts import DraftReplay
    from ...validate.counting.replay_cache import KnownProposals, ReplayCache


@dataclass(frozen=True)
class OnTracesSettings(PassesSettings):
    """How they are replayed, for `replay`, `gate` and `compare`."""

    _: KW_ONLY
    no_cache: arguments.NoCache = False

    @property
    def ray_address(self) -> str | None:
        """Of the Ray cluster that computes what drafts propose; None = this process does."""
        return None


@dataclass(frozen=True, slots=True)
class ReplaySettings(OnTracesSettings):
    """Of which drafts, along which traces, and how."""

    drafts: Annotated[
        Sequence[Reference], Argument("drafts to replay, the BF16 one first", "DRAFT")
    ]
    traces: Annotated[arguments.AnyPath, Option("trace folder", "TRACES")]
    _: KW_ONLY
    rope_theta: Annotated[
        float | None,
        Option(
            "RoPE base for all drafts instead of config.json's; acceptance is highest"
            " at the base used in training",
            "BASE",
        ),
    ] = None
    head_online: arguments.HeadsOnline = None
    kv_cache_dtype: arguments.KvCaches = "auto"
    ray: arguments.Ray = None
    golden: arguments.GoldenFile = None
    overwrite: arguments.Overwrite = False

    @override
    def check(self) -> None:
        if self.golden is not None and len(self.drafts) != 1:
            raise GoldenError(
                "--golden",
                f"is of one draft, got {len(self.drafts)}",
                fix="replay the draft alone; its BF16 draft is not needed",
            )

    @property
    @override
    def rotary_base(self) -> float | None:
        return self.rope_theta

    @property
    @override
    def ray_address(self) -> str | None:
        return self.ray

    @override
    def served_forms(self, count: int) -> list[ServedForm]:
        # The first of several is the reference.
        as_stored = min(1, count - 1)
        served = arguments.served_form(self.head_online, self.kv_cache_dtype)
        return [AS_STORED] * as_stored + [served] * (count - as_stored)


@verb(ReplaySettings)
def replay(settings: ReplaySettings) -> "tuple[reports.DraftReplay, ...]":
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
    from ...calibration.passes.on_traces import open_traces
    from ..position_limits import position_warnings

    check_golden(settings.golden, overwrite=settings.overwrite)
    traces = open_traces(settings.traces, settings.listener)
    for warning in position_warnings(settings.drafts, traces, settings.listener):
        settings.listener.warning(warning)
    loaded = load_for_replay(settings.drafts, traces, settings)
    replays = replay_loaded(loaded, settings)
    if fault := replays[0].traces.features.fault():
        settings.listener.warning(fault)
    if settings.golden is not None:
        _write_golden(settings, replays[0])
    return replays


def _write_golden(settings: ReplaySettings, replay: "DraftReplay") -> None:
    from ...validate.golden.golden_sources import golden_of_replay
    from .measure import draft_identity

    assert settings.golden is not None  # its caller asks
    own = draft_identity(settings.drafts[0])
    named = dataclasses.replace(replay, name=own.draft)
    golden = golden_of_replay(named, draft_sha256=own.draft_sha256)
    write_golden(settings.golden, golden, overwrite=settings.overwrite)


def replay_loaded(loaded: LoadedForReplay, settings: OnTracesSettings) -> "tuple[DraftReplay, ...]":
    """Replay, and then say what memory it took."""
    cache = replay_cache(settings.listener, no_cache=settings.no_cache)
    replays = replay_beside(loaded, settings, cache)
    note_memory(settings.listener, loaded.device)
    return replays


def replay_beside(
    loaded: LoadedForReplay,
    settings: OnTracesSettings,
    cache: "KnownProposals | None",
) -> "tuple[DraftReplay, ...]":
    """Replay drafts; what the first proposes is asked of `cache` and kept there."""
    from ...calibration.passes.on_traces import chosen_num_draft_tokens
    from ...validate.counting.trace_replay import replay_drafts
    from ..on_ray import replayed_on_ray

    chosen = chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts)
    address = settings.ray_address
    with ExitStack() as shown:
        bar = shown.enter_context(settings.listener.bar("replay", len(loaded.traces), "work"))

        def moved(done: int, total: int) -> None:
            bar.set(done, total)
            if done >= total:  # what the traces say of themselves is no work of drafts
                shown.close()

        return replay_drafts(
            loaded.drafts,
            loaded.traces,
            num_draft_tokens=chosen,
            draft_sampling=settings.draft_sampling,
            batch_size=settings.batch_size,
            max_tokens=loaded.max_tokens,
            cache=cache,
            elsewhere=replayed_on_ray(address, loaded, settings, bar.set) if address else None,
            on_progress=moved,
        )


def note_memory(listener: Listener, device: "torch.device") -> None:
    """Tell the listener how much this process took at its peak, in decimal gigabytes."""
    from ...calibration.passes.memory import peak_bytes

    held = peak_bytes(device) / 1e9
    kind = "of this process" if device.type == "cpu" else f"on {device}"
    listener.note(f"memory {kind}: {held:.2f} GB at its peak")


def replay_cache(listener: Listener, *, no_cache: bool) -> "ReplayCache | None":
    """Where replays of BF16 drafts are kept; None = nowhere. The listener is told what it does."""
    from ...quantize.files.result_cache import user_cache
    from ...validate.counting.replay_cache import ReplayCache

    results = None if no_cache else user_cache(listener.warning)
    return None if results is None else ReplayCache(results=results, on_note=listener.note)


# ---- `draftquant replay`: acceptance length of drafts over recorded traces

VERB = replay


def run(options: argparse.Namespace) -> int:
    """Replay, and print one row per draft."""
    settings = options.settings
    replays = replay.run(settings)
    if options.json:
        from ...validate.comparison.sources import ReplayedDraft

        rope_theta, dtype = settings.rope_theta, settings.dtype
        forms = settings.served_forms(len(replays))
        found = [
            ReplayedDraft.of(one, rope_theta=rope_theta, dtype=dtype, served=form)
            for one, form in zip(replays, forms, strict=True)
        ]
        print_json([one.to_mapping() for one in found])
    else:
        print_replays(replays)
        if settings.rope_theta is not None:
            stdout().line(
                f"the RoPE base is {settings.rope_theta:g} instead of that of config.json"
            )
    return 0


def print_replays(replays: "Sequence[DraftReplay]") -> None:
    """Print one row per draft."""
    from ...validate.judging.figures import draft_figures

    first = draft_figures(replays[0])
    num_draft_tokens = replays[0].num_draft_tokens
    positions = [f"pos {i + 1}" for i in range(num_draft_tokens)]
    numbers = ("acceptance length", "change", "verify steps", "accepted", *positions, "agreement")
    traces = replays[0].traces
    drawn = "" if traces.sampling is None else f" at temperature {traces.temperature:g}"
    found = table(
        f"Replay, K = {num_draft_tokens}, {_prompts(replays[0])}{drawn},"
        f" {traces.repeated_8gram_share:.1%} of the 8-grams are repeats",
        "draft",
        *numbers,
        right=numbers,
        spare=("accepted", "verify steps"),
    )
    for one in replays:
        figures = draft_figures(one)
        change = figures.mean_acceptance_length / first.mean_acceptance_length - 1
        found.row(
            one.name,
            f"{figures.mean_acceptance_length:.4f}",
            "" if one is replays[0] else f"{change:+.2%}",
            _number(figures.num_steps),
            _number(one.counts.num_accepted_draft_tokens),
            *(f"{share:.3f}" for share in figures.survival),
            f"{one.first_step.share:.2%}",
        )
    print_table(found)
    _print_context_bins(replays)


def _print_context_bins(replays: "Sequence[DraftReplay]") -> None:
    """Print the acceptance length by context bin, where the verify steps lie in several."""
    from ...validate.counting.draft_counts import by_context

    by_draft = [by_context(one.prompts) for one in replays]
    bins = tuple(by_draft[0])
    if len(bins) < 2:
        return
    found = table("Acceptance length by tokens before the verify step", "draft", *bins, right=bins)
    for one, lengths in zip(replays, by_draft, strict=True):
        found.row(one.name, *(_length(lengths.get(name)) for name in bins))
    print_table(found)


def _length(counts: "AcceptanceCounts | None") -> str:
    return "" if counts is None else f"{counts.mean_acceptance_length:.4f}"


def _prompts(found: "DraftReplay") -> str:
    """How many, and how many of them count nothing."""
    short = sum(not prompt.counts.num_steps for prompt in found.prompts)
    left_out = f" ({short} too short for a verify step)" if short else ""
    return f"{len(found.prompts)} prompts{left_out}"


def _number(steps: float) -> str:
    """Counted steps are whole, expected ones are not."""
    return f"{steps:,}" if isinstance(steps, int) else f"{steps:,.1f}"
