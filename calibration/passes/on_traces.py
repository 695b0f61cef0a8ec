"""What runs along traces: opened traces, drafts that run on them, and warnings.

Traces may be longer than a draft is made for, or than its layers look back. Replay computes the
angles of any position, so it measures these traces; an engine may not serve them, and then a
figure describes text that no user of that engine gets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...quantize.drafts import Draft
from ...quantize.drafts.geometry import usual_draft_tokens
from ...quantize.files.checkpoint import CONFIG_FILE, Checkpoint
from ...quantize.files.hub import Reference, folder_of
from ...quantize.pairing.serving_limits import LONGER
from ...quantize.pairing.target import Rotation
from ...quantize.stored.loading import LoadedDraft, load_draft
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes.brief import first_of
from ...recipes.errors import ReplayError
from ...recipes.listener import Listener
from ...recipes.regular_file import AnyPath
from ..traces.target_tables import SharedTables, TargetTables
from ..traces.trace_folder import TraceFolder, file_sha256
from .devices import resolve_device
from .draft_inputs import DraftRun


def open_traces(folder: AnyPath, listener: Listener) -> TraceFolder:
    """Open a trace folder; where its hidden states are not stored exactly, say how they are."""
    traces, warnings = open_with_warnings(folder, listener)
    for warning in warnings:
        listener.warning(warning)
    return traces


def open_with_warnings(folder: AnyPath, listener: Listener) -> tuple[TraceFolder, tuple[str, ...]]:
    """The same for a verb whose report holds the warnings.

    Rounded hidden states give a warning: every figure is then one of a draft with rounded inputs.
    """
    traces = TraceFolder.open(Path(folder))
    storage = traces.manifest.features.storage
    warnings: tuple[str, ...] = ()
    if storage == "fp8-per-token":
        warnings = (
            f"the hidden states of {folder} were rounded to FP8, with a scale for each position:"
            " figures are those of a draft that reads rounded hidden states",
        )
    elif storage == "zstd":
        listener.note(f"the hidden states of {folder} are packed by zstd, without loss")
    return traces, warnings


def chosen_num_draft_tokens(asked: int | None, drafts: Sequence[LoadedDraft]) -> int:
    """K: as asked, or what all the drafts are made for.

    A block draft fills its whole block; a chain has no length of its own, so it gets 3, the usual
    number in serving.
    """
    if asked is not None:
        return asked
    defaults = [usual_draft_tokens(draft.geometry) for draft in drafts]
    if len(set(defaults)) > 1:
        named = ", ".join(f"{d.name} {k}" for d, k in zip(drafts, defaults, strict=True))
        what = f"the drafts propose different numbers of tokens: {named}"
        raise ReplayError("--num-draft-tokens", what, fix="give one number for all: -k K")
    return defaults[0]


def shared_tables(
    traces: TraceFolder, target: AnyPath | None, device: torch.device
) -> SharedTables:
    """Embedding and head, as stored, for drafts without their own: the target's or the traces'."""
    if target:
        return TargetTables.find(Path(target)).shared(None, device)
    return traces.tables(None, device)


def draft_on_traces(
    folder: Path,
    traces: TraceFolder,
    *,
    device: str,
    target: Path | None,
    num_draft_tokens: int | None,
    subtree: str | None,
) -> DraftRun:
    """A draft, or a layer of a target, loaded with the tables that it shares."""
    where = resolve_device(device)
    shared = shared_tables(traces, target, where)
    draft = load_draft(folder, device=where, compact=True, shared=shared, subtree=subtree)
    return DraftRun(draft, traces, chosen_num_draft_tokens(num_draft_tokens, [draft]))


def open_for_drafts(
    traces: AnyPath, drafts: Iterable[Reference], listener: Listener
) -> tuple[TraceFolder, list[Path], tuple[str, ...]]:
    """Open traces and find drafts that run on them, with warnings about their figures."""
    opened, warnings = open_with_warnings(traces, listener)
    folders = [folder_of(draft) for draft in drafts]
    return opened, folders, warnings + position_warnings(folders, opened, listener)


def position_warnings(
    folders: Iterable[Path], traces: TraceFolder, listener: Listener
) -> tuple[str, ...]:
    """Warnings where drafts are made for fewer positions than the traces have.

    Each sentence covers all drafts that it is true for.
    """
    longest = max((prompt.num_tokens for prompt in traces.manifest.prompts), default=0)
    drafts: dict[Positions, list[str]] = {}
    for folder in folders:
        positions = Positions.of(StoredDraft.read(Checkpoint.open(folder)).draft)
        names = drafts.setdefault(positions, [])
        names += [folder.name] * (folder.name not in names)
    for positions, names in drafts.items():
        if note := positions.note(names, longest):
            listener.note(note)
    warnings = (positions.warning(names, longest) for positions, names in drafts.items())
    return tuple(warning for warning in warnings if warning)


def origin_warnings(target: AnyPath | None, traces: TraceFolder) -> tuple[str, ...]:
    """Warnings where tables belong to a target that was not recorded, or text to no user."""
    warnings = _target_warnings(target, traces)
    if traces.manifest.ignore_eos:
        warnings += (
            "the traces continue after the target's end of text (record --ignore-eos); text there"
            " often repeats itself, and a draft guesses it more easily than answers",
        )
    return warnings


def _target_warnings(given: AnyPath | None, traces: TraceFolder) -> tuple[str, ...]:
    """Warn of tables of a target that was not recorded: they turn both drafts into others."""
    recorded = traces.manifest.target
    if given is None or file_sha256(Path(given) / CONFIG_FILE) == recorded.config_sha256:
        return ()
    if recorded.config_sha256 is None:
        return (
            f"the traces do not record the {CONFIG_FILE} of their target {recorded.name}, so"
            f" nothing shows whether --target {Path(given).name} is that target",
        )
    return (
        f"--target {Path(given).name} has another {CONFIG_FILE} than the recorded target"
        f" {recorded.name}: its embedding and head may be another target's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """How far a draft reaches; `windows`: positions that each layer sees, None = all.

    `rotation` is None for a draft in its target's folder, made for as many positions as the target,
    and for one that has no rotary embedding.
    """

    rotation: Rotation | None
    whole_model: bool
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, draft: Draft) -> "Positions":
        """The reach of a draft, from its config.json."""
        g = draft.geometry
        inside = draft.checkpoint.subtree is not None
        return cls(
            rotation=None if inside or g.rope is None else Rotation.of(draft.layer_config),
            whole_model=draft.family.engine_traits.whole_model,
            windows=tuple(g.window_of(layer) for layer in range(g.num_layers)),
        )

    def warning(self, names: Sequence[str], longest: int) -> str | None:
        """What engines do with a context of this many positions; None if nothing."""
        rotation = self.rotation
        if rotation is None:
            return None
        engines = []
        if (made := rotation.positions_in("vllm")) is not None and made < longest:
            engines.append(self._in_vllm(rotation, made))
        if (made := rotation.positions_in("sglang")) is not None and made < longest:
            engines.append(f"SGLang ends with an error, unless {LONGER} is set")
        if not engines:
            return None
        return (
            f"the traces reach {longest:,} positions, and max_position_embeddings of"
            f" {first_of(names)} is {rotation.positions:,}: replay goes on behind them, but where"
            f" so many are served, {' and '.join(engines)}"
        )

    def note(self, names: Sequence[str], longest: int) -> str | None:
        """Which layers do not look back that many positions; None where all do."""
        windows = [window for window in self.windows if window is not None and window < longest]
        if not windows:
            return None
        seen = " or ".join(f"{window:,}" for window in sorted(set(windows)))
        return (
            f"{len(windows)} of {len(self.windows)} layers of {first_of(names)} see the last {seen}"
            f" positions of up to {longest:,} in the traces, in replay as in engines"
        )

    def _in_vllm(self, rotation: Rotation, made: int) -> str:
        if rotation.only_sizes_a_table and not self.whole_model:
            return "vLLM lets the draft propose at positions that it was not trained on"
        return f"vLLM serves {made:,} positions of the target too"
