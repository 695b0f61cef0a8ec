"""Traces that are longer than a draft is made for, or than its layers look back.

Replay computes the angles of any position, so it measures such traces; an engine may not serve
them, and then a figure is of text that no user of that engine gets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...quantize.drafts import Draft
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import Reference, folder_of
from ...quantize.pairing.serving_limits import LONGER
from ...quantize.pairing.target import Rotation
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes.listener import Listener
from ...recipes.regular_file import AnyPath
from ..traces.trace_folder import TraceFolder
from .on_traces import open_with_warnings


def open_for_drafts(
    traces: AnyPath, drafts: Iterable[Reference], listener: Listener
) -> tuple[TraceFolder, list[Path], tuple[str, ...]]:
    """Open traces and find drafts that run on them.

    Returns:
        The traces, the folders, and sentences to warn of: what figures of these drafts are not.
    """
    opened, warnings = open_with_warnings(traces, listener)
    folders = [folder_of(draft) for draft in drafts]
    return opened, folders, warnings + position_warnings(folders, opened, listener)


def position_warnings(
    folders: Iterable[Path], traces: TraceFolder, listener: Listener
) -> tuple[str, ...]:
    """What to warn of, where drafts are made for fewer positions than traces have.

    Each sentence is one of all drafts that it is true of.
    """
    longest = max((prompt.num_tokens for prompt in traces.manifest.prompts), default=0)
    drafts: dict[Positions, list[str]] = {}
    for folder in folders:
        found = Positions.of(StoredDraft.read(Checkpoint.open(folder)).draft)
        names = drafts.setdefault(found, [])
        names += [folder.name] * (folder.name not in names)
    for found, names in drafts.items():
        if note := found.note(names, longest):
            listener.note(note)
    warnings = (found.warning(names, longest) for found, names in drafts.items())
    return tuple(warning for warning in warnings if warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """How far a draft reaches.

    Attributes:
        rotation: how it rotates positions, and for how many it is made; None for a draft in its
            target's folder, which is made for as many as the target, and for one that rotates none.
        whole_model: it is an ordinary language model.
        windows: of each layer, the positions that it sees; None = all.
    """

    rotation: Rotation | None
    whole_model: bool
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, draft: Draft) -> "Positions":
        """By its config.json."""
        g = draft.geometry
        inside = draft.checkpoint.subtree is not None
        return cls(
            rotation=None if inside or g.rope is None else Rotation.of(draft.layer_config),
            whole_model=draft.family.engine_traits.whole_model,
            windows=tuple(g.window_of(layer) for layer in range(g.num_layers)),
        )

    def warning(self, names: Sequence[str], longest: int) -> str | None:
        """What engines do with a context of so many positions; None where they do nothing."""
        rotation = self.rotation
        if rotation is None:
            return None
        engines = []
        if rotation.in_vllm is not None and rotation.in_vllm < longest:
            engines.append(self._in_vllm(rotation, rotation.in_vllm))
        if rotation.in_sglang is not None and rotation.in_sglang < longest:
            engines.append(f"SGLang ends with an error, unless {LONGER} is set")
        if not engines:
            return None
        return (
            f"the traces reach {longest:,} positions, and max_position_embeddings of"
            f" {_listed(names)} is {rotation.positions:,}: replay goes on behind them, but where so"
            f" many are served, {' and '.join(engines)}"
        )

    def note(self, names: Sequence[str], longest: int) -> str | None:
        """Which layers look back less far than so many positions; None where none does."""
        windows = [window for window in self.windows if window is not None and window < longest]
        if not windows:
            return None
        seen = " or ".join(f"{window:,}" for window in sorted(set(windows)))
        return (
            f"{len(windows)} of {len(self.windows)} layers of {_listed(names)} see the last {seen}"
            f" positions of up to {longest:,} in the traces, in replay as in engines"
        )

    def _in_vllm(self, rotation: Rotation, made: int) -> str:
        if rotation.only_sizes_a_table and not self.whole_model:
            return "vLLM lets the draft propose at positions that it was not trained on"
        return f"vLLM serves {made:,} positions of the target too"


def _listed(names: Sequence[str]) -> str:
    """A few of them, and how many more there are."""
    most = 3
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
