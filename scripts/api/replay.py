"""`replay`: acceptance of drafts over recorded traces; loading them within the memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...validate.counting.estimand import DraftSampling
from .opening import Reference, folder_of, optional_path, shared_tables
from .watch import SILENT, Watch

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.counting.draft_replay import DraftReplay

ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How drafts run along traces.

    Attributes:
        num_draft_tokens: K, as served; None = 3, or a block draft's whole block.
        draft_sampling: how proposals are chosen for traces with a temperature: the most likely
            token, or drawn at that temperature.
        target: folder, for drafts without embedding or head where the traces carry neither.
        device: "auto", "cpu", "cuda" or "cuda:I".
        dtype: what drafts compute in: float32 is the reference, engines do bfloat16.
        batch_size: prompts that go through a draft together; None = as many as are of use and fit.
        rope_theta: rotary base instead of that of config.json.
    """

    num_draft_tokens: int | None = None
    draft_sampling: DraftSampling = "greedy"
    target: Path | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    batch_size: int | None = None
    rope_theta: float | None = None


def replay(
    drafts: Sequence[Reference],
    traces: str | Path,
    *,
    num_draft_tokens: int | None = None,
    draft_sampling: DraftSampling = "greedy",
    target: str | Path | None = None,
    device: str = "auto",
    dtype: ComputeDtype = "float32",
    batch_size: int | None = None,
    rope_theta: float | None = None,
    watch: Watch = SILENT,
) -> "tuple[DraftReplay, ...]":
    """Count what drafts would have had accepted on recorded traces, exactly.

    Example:
        >>> bf16, int4 = draftquant.replay(["DRAFT", "OUT"], "TRACES", num_draft_tokens=3)
        >>> 1 < int4.counts.mean_acceptance_length <= 4
        True
        >>> len(int4.prompts) == len(bf16.prompts)
        True

    Args:
        drafts: folders or Hub ids, the reference (BF16) first.
        traces: folder that `record` or `traces import` wrote.
        num_draft_tokens: see `ReplaySettings`, as all that follow.
        draft_sampling: likewise.
        target: likewise.
        device: likewise.
        dtype: likewise.
        batch_size: likewise.
        rope_theta: likewise.
        watch: sees how far the run is.

    Returns:
        One for each draft, in their order.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, do not fit each other, or do not fit
            in memory.
    """
    from ...calibration.traces.trace_folder import TraceFolder

    settings = ReplaySettings(
        num_draft_tokens=num_draft_tokens,
        draft_sampling=draft_sampling,
        target=optional_path(target),
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        rope_theta=rope_theta,
    )
    loaded = load_for_replay(drafts, TraceFolder.open(Path(traces)), settings, watch)
    return replay_loaded(loaded, settings, watch)


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
    settings: ReplaySettings,
    watch: Watch = SILENT,
) -> LoadedForReplay:
    """Say what memory a replay takes, refuse what does not fit, and load the drafts.

    Args:
        references: folders or Hub ids, the reference draft first.
        traces: to replay.
        settings: how.
        watch: is told what it takes.

    Raises:
        DeviceError: there is no such device, or too little memory.
        ReplayError: a batch size below 1.
        CheckpointError, VerifyError: see `load_draft`.
    """
    import torch

    from ...calibration.passes.devices import resolve_device
    from ...calibration.passes.memory import estimate_replay
    from ...quantize.stored.loading import load_draft
    from ...validate.errors import ReplayError

    if settings.batch_size is not None and settings.batch_size < 1:
        raise ReplayError(
            "--batch-size", f"expected at least 1, got {settings.batch_size}", fix="leave it out"
        )
    device, dtype = resolve_device(settings.device), getattr(torch, settings.dtype)
    folders = [folder_of(reference) for reference in references]
    estimate = estimate_replay(
        folders,
        traces,
        dtype=dtype,
        device=device,
        num_draft_tokens=settings.num_draft_tokens,
        batch_size=settings.batch_size,
    )
    estimate.check()
    watch.note(estimate.line())
    tables = shared_tables(traces, settings.target, device)
    drafts: list[LoadedDraft] = []
    for folder in folders:
        draft = load_draft(
            folder,
            dtype=dtype,
            device=device,
            compact=True,
            like=drafts[0] if drafts else None,
            shared=tables,
            rope_theta=settings.rope_theta,
        )
        drafts.append(draft)
    return LoadedForReplay(
        drafts=drafts,
        traces=traces,
        tables=tables,
        device=device,
        max_tokens=estimate.max_tokens,
    )


def replay_loaded(
    loaded: LoadedForReplay, settings: ReplaySettings, watch: Watch = SILENT
) -> "tuple[DraftReplay, ...]":
    """Replay, and then say what memory it took."""
    from ...calibration.passes.devices import peak_bytes
    from ...validate.counting.trace_replay import chosen_num_draft_tokens, replay_drafts

    chosen = chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts)
    with watch.bar("replay", len(loaded.traces)) as bar:
        replays = replay_drafts(
            loaded.drafts,
            loaded.traces,
            num_draft_tokens=chosen,
            draft_sampling=settings.draft_sampling,
            batch_size=settings.batch_size,
            max_tokens=loaded.max_tokens,
            on_progress=bar.set,
        )
    held = peak_bytes(loaded.device) / 1e9
    kind = "of this process" if loaded.device.type == "cpu" else f"on {loaded.device}"
    watch.note(f"memory {kind}: {held:.2f} GB at its peak")
    return tuple(replays)
