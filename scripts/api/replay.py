"""`replay`: acceptance of drafts over recorded traces; loading them within the memory there is."""

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...recipes.served_form import AS_STORED, ServedForm
from ...validate.errors import GoldenError
from . import arguments, reports
from .division import running_division
from .golden_output import check_golden, write_golden
from .listener import Listener
from .opening import shared_tables
from .option import Argument, Option
from .references import Reference, folder_of, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    import torch

    from ...calibration.passes.memory import MemoryEstimate
    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.counting.replay_cache import KnownProposals, ReplayCache


@dataclass(frozen=True)
class PassesSettings(Settings):
    """How drafts run along traces."""

    _: KW_ONLY
    num_draft_tokens: arguments.NumDraftTokens = None
    target: arguments.Target = None
    device: arguments.Device = "auto"
    dtype: arguments.Dtype = "float32"
    draft_sampling: arguments.Sampling = "greedy"
    batch_size: arguments.BatchSize = None

    @property
    def rotary_base(self) -> float | None:
        """Instead of that of config.json."""
        return None

    def served_forms(self, count: int) -> list[ServedForm]:
        """What an engine makes of each of so many drafts."""
        return [AS_STORED] * count


@dataclass(frozen=True)
class OnTracesSettings(PassesSettings):
    """How they are replayed, for `replay`, `gate` and `compare`."""

    _: KW_ONLY
    no_cache: arguments.NoCache = False


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
    from .opened_traces import open_traces
    from .position_limits import position_warnings

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
    from .measured_draft import draft_identity

    assert settings.golden is not None  # its caller asks
    own = draft_identity(settings.drafts[0])
    named = dataclasses.replace(replay, name=own.draft)
    golden = golden_of_replay(named, draft_sha256=own.draft_sha256)
    write_golden(settings.golden, golden, overwrite=settings.overwrite)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedForReplay:
    """Drafts that fit in memory beside what their passes need, and how they are to be run.

    Attributes:
        drafts: the reference first. tables: of the target, for drafts without their own.
        max_tokens: see `replay_drafts`.
    """

    drafts: "list[LoadedDraft]"
    traces: "TraceFolder"
    tables: "SharedTables"
    device: "torch.device"
    max_tokens: int

    @property
    def both(self) -> "tuple[LoadedDraft, LoadedDraft]":
        """Baseline and candidate of a gate, the first two."""
        baseline, candidate, *_ = self.drafts
        return baseline, candidate


def load_for_replay(
    references: Sequence[Reference],
    traces: "TraceFolder",
    settings: PassesSettings,
) -> LoadedForReplay:
    """Say what memory a replay takes, refuse what does not fit, and load the drafts.

    Args:
        references: folders or Hub ids, the reference draft first.
        traces: to replay.
        settings: how; its listener is told what that takes.

    Raises:
        DeviceError: there is no such device, or too little memory.
        CheckpointError, VerifyError: see `load_draft`.
    """
    from ...calibration.passes.devices import resolve_device

    estimate = memory_of(references, traces, settings)
    estimate.check()
    settings.listener.note(estimate.line())
    device = resolve_device(settings.device)
    empty = LoadedForReplay(
        drafts=[],
        traces=traces,
        tables=shared_tables(traces, optional_path(settings.target), device),
        device=device,
        max_tokens=estimate.max_tokens,
    )
    return load_beside(empty, references, settings)


def memory_of(
    references: Sequence[Reference],
    traces: "TraceFolder",
    settings: PassesSettings,
    *,
    in_turn: bool = False,
) -> "MemoryEstimate":
    """What a replay of drafts will take; `in_turn`: see `estimate_replay`."""
    import torch

    from ...calibration.passes.devices import resolve_device
    from ...calibration.passes.memory import estimate_replay

    return estimate_replay(
        [folder_of(reference) for reference in references],
        traces,
        dtype=getattr(torch, settings.dtype),
        device=resolve_device(settings.device),
        num_draft_tokens=settings.num_draft_tokens,
        batch_size=settings.batch_size,
        online_heads=[form.online_head for form in settings.served_forms(len(references))],
        in_turn=in_turn,
    )


def load_beside(
    loaded: LoadedForReplay, references: Sequence[Reference], settings: PassesSettings
) -> LoadedForReplay:
    """What was loaded, and these drafts behind it, which share the first one's equal tensors."""
    import torch

    from ...quantize.stored.loading import load_draft

    drafts = list(loaded.drafts)
    forms = settings.served_forms(len(drafts) + len(references))[len(drafts) :]
    for reference, form in zip(references, forms, strict=True):
        draft = load_draft(
            folder_of(reference),
            dtype=getattr(torch, settings.dtype),
            device=loaded.device,
            compact=True,
            like=drafts[0] if drafts else None,
            shared=loaded.tables,
            rope_theta=settings.rotary_base,
            online_head=form.online_head,
            kv_cache=form.kv_cache,
        )
        drafts.append(draft)
    return dataclasses.replace(loaded, drafts=drafts)


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
    from ...calibration.passes.batches import MAX_TOKENS
    from ...validate.counting.trace_replay import chosen_num_draft_tokens, replay_drafts

    chosen = chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts)
    division = running_division()
    with settings.listener.bar("replay", len(loaded.traces), "work") as bar:
        return replay_drafts(
            loaded.drafts,
            loaded.traces,
            num_draft_tokens=chosen,
            draft_sampling=settings.draft_sampling,
            batch_size=settings.batch_size,
            max_tokens=MAX_TOKENS if division else loaded.max_tokens,
            elsewhere=division.proposals if division else None,
            cache=cache,
            on_progress=bar.set,
        )


def note_memory(listener: Listener, device: "torch.device") -> None:
    """Tell the listener how much this process took at its peak, in decimal gigabytes."""
    from ...calibration.passes.devices import peak_bytes

    held = peak_bytes(device) / 1e9
    kind = "of this process" if device.type == "cpu" else f"on {device}"
    listener.note(f"memory {kind}: {held:.2f} GB at its peak")


def replay_cache(listener: Listener, *, no_cache: bool) -> "ReplayCache | None":
    """Where replays of BF16 drafts are kept; None = nowhere. The listener is told what it does."""
    from ...quantize.files.result_cache import user_cache
    from ...validate.counting.replay_cache import ReplayCache

    results = None if no_cache else user_cache(listener.warning)
    return None if results is None else ReplayCache(results=results, on_note=listener.note)
