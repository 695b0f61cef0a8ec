"""What `replay` and `gate` share: loading drafts within the memory that there is, running them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from ..console import note, progress_bar
from .common import (
    add_device,
    add_draft_sampling,
    add_num_draft_tokens,
    add_target,
    shared_tables,
)

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.folder import TraceFolder
    from ...calibration.traces.target_tables import SharedTables
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.draft_replay import DraftReplay

DTYPES = ("float32", "bfloat16")


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
    references: Sequence[str],
    traces: "TraceFolder",
    options: argparse.Namespace,
    *,
    rope_theta: float | None = None,
) -> LoadedForReplay:
    """Say on stderr what memory a replay takes, refuse what does not fit, and load the drafts.

    Args:
        references: folders or Hub ids, the reference draft first.
        traces: to replay.
        options: of `add_replay_arguments`.
        rope_theta: see `load_draft`.

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

    if options.batch_size is not None and options.batch_size < 1:
        raise ReplayError(
            "--batch-size", f"expected at least 1, got {options.batch_size}", fix="leave it out"
        )
    device, dtype = resolve_device(options.device), getattr(torch, options.dtype)
    folders = [resolve_draft(reference).folder for reference in references]
    estimate = estimate_replay(
        folders,
        traces,
        dtype=dtype,
        device=device,
        num_draft_tokens=options.num_draft_tokens,
        batch_size=options.batch_size,
    )
    estimate.check()
    note(estimate.line())
    tables = shared_tables(traces, options.target, device)
    drafts: list[LoadedDraft] = []
    for folder in folders:
        draft = load_draft(
            folder,
            dtype=dtype,
            device=device,
            compact=True,
            like=drafts[0] if drafts else None,
            shared=tables,
            rope_theta=rope_theta,
        )
        drafts.append(draft)
    return LoadedForReplay(
        drafts=drafts,
        traces=traces,
        tables=tables,
        device=device,
        max_tokens=estimate.max_tokens,
    )


def replay_loaded(loaded: LoadedForReplay, options: argparse.Namespace) -> "Sequence[DraftReplay]":
    """Replay with a progress bar; then say on stderr what memory it took."""
    from ...calibration.passes.devices import peak_bytes
    from ...validate.replay import chosen_num_draft_tokens, replay_drafts

    chosen = chosen_num_draft_tokens(options.num_draft_tokens, loaded.drafts)
    with progress_bar("replay", len(loaded.traces)) as bar:
        replays = replay_drafts(
            loaded.drafts,
            loaded.traces,
            num_draft_tokens=chosen,
            draft_sampling=options.draft_sampling,
            batch_size=options.batch_size,
            max_tokens=loaded.max_tokens,
            on_progress=bar.set,
        )
    held = peak_bytes(loaded.device) / 1e9
    kind = "of this process" if loaded.device.type == "cpu" else f"on {loaded.device}"
    note(f"memory {kind}: {held:.2f} GB at its peak")
    return replays
