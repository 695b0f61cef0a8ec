"""What an import found out about a dump, and what it made of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from ...recipes.brief import Brief
from ..traces.trace_folder import TraceFolder
from .draft_steps import DraftFinding
from .head import HeadFinding
from .recomputed import RecomputedFinding
from .whole_texts import RowCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the rows of a dump are to be read, and how that was settled.

    Attributes:
        layer_ids: of the aux features, ascending, 0-based, outputs.
        shift: row i belongs to token i + shift: 0 or -1.
        last_in_aux: the last slot of what the dump stores as aux is the last state, and no aux one.
        recomputed, draft: which of the two settled the layers; the other is None.
        rows: what whole texts showed; None before they were read, or where the target was not run.
        not_recomputed: why the target was not run; None where it was.
        head: None where the dump has no last state, or the head is not at hand.
    """

    layer_ids: tuple[int, ...]
    shift: int
    last_in_aux: bool
    recomputed: RecomputedFinding | None
    draft: DraftFinding | None
    not_recomputed: str | None
    head: HeadFinding | None
    rows: RowCounts | None = None

    def sentences(self) -> Iterator[str]:
        """What was found and why, a sentence each, without a full stop."""
        ids = list(self.layer_ids)
        if self.recomputed:
            yield (
                f"the dump holds layers {ids}, counted after the layer: recomputed by the"
                f" target, they differ by at most {self.recomputed.difference:.1%} in the median"
            )
            if rows := self.rows:
                yield (
                    f"{rows.num_texts:,} of {rows.num_seen:,} texts were recomputed whole:"
                    f" {rows.num_other:,} of their {rows.num_positions:,} positions hold other rows"
                )
            if self.recomputed.own is not None:
                yield f"{self.recomputed.own:.1%} of the checked tokens are the target's argmax"
        if self.draft:
            yield (
                f"the dump holds layers {ids} in this order: the draft's first step is"
                f" accepted {self.draft.accepted:.1%} of the time over"
                f" {self.draft.positions:,} positions, and {self.draft.next_best:.1%} in the"
                f" next best order. The target was not run: {self.not_recomputed}"
            )
        if self.head:
            yield (
                f"the last states are those {self.head.norm}: from them, the target's head"
                f" predicts {self.head.share:.1%} of the checked tokens"
            )
        else:
            yield ("that the target wrote the answers itself was declared (--greedy), not measured")
        if self.shift:
            yield (
                f"the rows were shifted by {-self.shift} against their tokens, and were moved back"
            )
        if self.last_in_aux:
            yield (
                "the last slot holds the last layer, which the draft does not read, and was"
                " left out"
            )
        elif self.recomputed and self.layer_ids[-1] == self.recomputed.target.num_layers - 1:
            yield (
                "the last layer is among them: if the draft does not read it, name the"
                " draft (--draft)"
            )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImportReport(Brief):
    """Traces that were made of a dump.

    Attributes:
        traces: the folder that was written, opened.
        layout: how the dump was read.
        num_samples: number of texts in the dump.
        num_without_answer: texts without any token to count.
        num_off_policy: texts that were left out because the target would have answered differently.
    """

    traces: TraceFolder
    layout: Layout
    num_samples: int
    num_without_answer: int
    num_off_policy: int

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "traces": self.traces.folder,
            "prompts": f"{len(self.traces)} of {self.num_samples} texts",
            "without an answer": self.num_without_answer or None,
            "left out as not the target's own": self.num_off_policy or None,
        }
