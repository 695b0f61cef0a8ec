"""How to read a dump, settled by a few of its texts. Nothing is taken on trust."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ...recipes.brief import apart
from ...recipes.errors import TraceError
from ...recipes.packages import table_beside
from ..passes.draft_inputs import check_reads_layers, default_aux_layer_ids
from ..traces.manifest import FeatureDtype
from ..traces.prompt_trace import FEATURE_DTYPES
from . import refusal
from .dump_answers import Answer, Answers, HeadFinding, TargetHead
from .dump_evidence import (
    USUAL_DIFFERENCE,
    DraftFinding,
    DraftSteps,
    RecomputedFinding,
    RowCounts,
    TargetFacts,
    recompute,
)
from .dump_layouts import Pending, Sample

MAX_LOOKED_AT = 8  # texts, in memory together
MAX_DRAFTED = 40  # texts, one by one
MAX_ROWS = 2048  # of each, unless its prompt is longer
MIN_OWN = 0.9  # tokens that are the target's argmax, except near ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the user says of a dump; `greedy`: its answers are the target's own at temperature 0."""

    layer_ids: tuple[int, ...] | None = None
    draft: LoadedDraft | None = None
    greedy: bool = False

    def expected_layers(self, target: TargetFacts) -> tuple[int, ...] | None:
        """The layers that the dump should hold, ascending; None = nobody says."""
        if self.layer_ids is not None or self.draft is None:
            return self.layer_ids
        check_reads_layers(self.draft)
        ids = self.draft.geometry.aux_layer_ids
        return tuple(ids or default_aux_layer_ids(target.identity.num_layers))


_FINDINGS: Mapping[str, str] = table_beside(__file__, "findings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How to read the rows of a dump, and how that was settled: row i belongs to token i + shift.

    Either `recomputed` or `draft` settled the layers. `rows` is None before whole texts were read,
    or where the target was not run.
    """

    layer_ids: tuple[int, ...]  # of the aux features, ascending, 0-based, outputs
    shift: int
    last_in_aux: bool  # the last slot of the stored aux tensor is the last state
    recomputed: RecomputedFinding | None
    draft: DraftFinding | None
    not_recomputed: str | None
    head: HeadFinding | None  # None without last states, or the head
    rows: RowCounts | None = None

    def sentences(self) -> Iterator[str]:
        """What was found and why, one sentence each, without a full stop."""
        said, facts = _FINDINGS, {"ids": list(self.layer_ids), "draft": self.draft}
        if self.recomputed:
            yield said["recomputed"].format(found=self.recomputed, **facts)
            if self.rows:
                yield said["rows"].format(rows=self.rows)
            if self.recomputed.own is not None:
                yield said["own"].format(found=self.recomputed)
        if self.draft:
            yield said["draft"].format(not_run=self.not_recomputed, **facts)
        yield said["head" if self.head else "declared"].format(head=self.head)
        if self.shift:
            yield said["shifted"].format(by=-self.shift)
        if self.last_in_aux:
            yield said["last_in_aux"]
        elif self.recomputed and self.layer_ids[-1] == self.recomputed.target.num_layers - 1:
            yield said["last_layer"]

    def doubt(self) -> str | None:
        """Why the dump is perhaps not of this target, without a full stop; None where it is."""
        found = self.recomputed
        if found is None or found.difference <= USUAL_DIFFERENCE:
            return None
        difference = apart(found.difference, USUAL_DIFFERENCE, ".1%")
        return _FINDINGS["doubt"].format(difference=difference, usual=USUAL_DIFFERENCE)


def feature_dtype(sample: Sample) -> FeatureDtype:
    """The dtype of a sample's features, as the manifest names it."""
    return next(name for name, (dtype, _) in FEATURE_DTYPES.items() if dtype == sample.aux.dtype)


def last_states(layout: Layout, sample: Sample, target: TargetFacts) -> Tensor | None:
    """[N, W], what the head or the norm before it reads; None where the dump lacks it."""
    if sample.last is not None:
        return sample.last
    if layout.layer_ids[-1] == target.identity.num_layers - 1:
        return sample.aux[:, -target.width :]
    return None


def no_answer(dump: Path) -> TraceError:
    """The error where none of the texts is usable."""
    what = "no text of the dump has an answer: their loss masks are all 0"
    return TraceError(dump, what, fix="dump conversations with answers of the target")


def split_last(sample: Sample, width: int) -> Sample:
    """Split a stack of layers whose last slot is the last state."""
    return replace(sample, aux=sample.aux[:, :-width], last=sample.aux[:, -width:])


def check_sample(sample: Sample, target: TargetFacts, first: Sample) -> None:
    """Check a sample against the target, and against another of the same dump."""
    vocab_size, width = target.identity.vocab_size, target.width
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= vocab_size:
        raise refusal(sample.file, "other-tokenizer", low=low, high=high, vocab_size=vocab_size)
    wide = sample.aux.shape[1]
    if wide % width or (sample.last is not None and sample.last.shape[1] != width):
        last = "" if sample.last is None else f", last states {sample.last.shape[1]}"
        raise refusal(sample.file, "other-width", wide=wide, last=last, width=width)
    if (found := _form(sample)) != (expected := _form(first)):
        what = f"its aux features {found}, but those of {first.file.name} {expected}"
        raise TraceError(sample.file, what, fix="import dumps of different runs one by one")


def _form(sample: Sample) -> str:
    dtype = str(sample.aux.dtype).removeprefix("torch.")
    rounded = "" if sample.scales is None else ", rounded to FP8,"
    last = "without" if sample.last is None else "with"
    return f"are {sample.aux.shape[1]} wide in {dtype}{rounded} {last} last states"


def check_finite(sample: Sample, stop: int, width: int, layer_ids: Sequence[int]) -> None:
    """Check that the states of the tokens before `stop` are numbers; padding may follow."""
    for what, states in (("aux", sample.aux), ("last", sample.last)):
        if states is None or bool(torch.isfinite(states[:stop]).all()):
            continue
        place, column = (~torch.isfinite(states[:stop])).nonzero()[0].tolist()
        slot = column // width
        of = f"slot {slot} of the aux" if what == "aux" else "the last"
        layer = f" (layer {layer_ids[slot]})" if what == "aux" and slot < len(layer_ids) else ""
        facts = {"place": place, "of": of, "layer": layer, "value": float(states[place, column])}
        raise refusal(sample.file, "not-finite", **facts)


class Settling:
    """Settles how to read a dump, by the first answers of some of its texts."""

    def __init__(
        self,
        dump: Path,
        pendings: Sequence[Pending],
        target: TargetFacts,
        said: Declared,
        find: Answers,
    ) -> None:
        self._dump, self._pendings, self._target = dump, pendings, target
        self._said, self._find = said, find
        self._expected = said.expected_layers(target)
        self._looked = list(self._look(MAX_LOOKED_AT))

    def layout(self) -> Layout:
        """Layers, shift and norm; where nothing settles them, a TraceError says what would."""
        if not self._looked:
            raise no_answer(self._dump)
        first, width = self._looked[0].sample, self._target.width
        for answer in self._looked:
            check_sample(answer.sample, self._target, first)
        for answer in self._looked:
            check_finite(answer.sample, answer.stop, width, self._expected or ())
        if last_in_aux := self._last_in_aux(first):
            self._looked = [replace(a, sample=split_last(a.sample, width)) for a in self._looked]
        recomputed, not_run = self._recomputed()
        steps = None if recomputed else self._draft_steps(last_in_aux, not_run)
        found = recomputed or steps
        layout = Layout(
            layer_ids=self._layers(recomputed),
            shift=found.shift if found else 0,
            last_in_aux=last_in_aux,
            recomputed=recomputed,
            draft=steps,
            not_recomputed=not_run,
            head=None,
        )
        layout = replace(layout, head=self._head(layout))
        self._check_shift(layout)
        return layout

    def _look(self, most: int) -> Iterator[Answer]:
        """First answers of some texts, copied, without rows that are not needed."""
        for pending in self._pendings[:: -(-len(self._pendings) // most)]:
            for answer in list(self._find.of(pending.read()))[:1]:
                rows = min(answer.stop, max(MAX_ROWS, answer.start + MAX_ROWS // 8))
                sample = answer.sample
                cut = replace(
                    sample,
                    token_ids=sample.token_ids[:rows].clone(),
                    aux=sample.aux[:rows].clone(),
                    last=None if sample.last is None else sample.last[:rows].clone(),
                    scales=None if sample.scales is None else sample.scales[:rows].clone(),
                )
                yield replace(answer, sample=cut, stop=rows)

    def _last_in_aux(self, first: Sample) -> bool:
        expected = self._expected
        if expected is None:
            return False
        slots = first.aux.shape[1] // self._target.width
        last_in_aux = first.last is None and slots == len(expected) + 1
        if slots - last_in_aux != len(expected):
            facts = {"slots": slots, "number": len(expected), "expected": list(expected)}
            raise refusal(self._dump, "other-number-of-layers", **facts)
        return last_in_aux

    def _recomputed(self) -> tuple[RecomputedFinding | None, str | None]:
        target = self._target
        if target.not_run:
            return None, target.not_run
        try:
            return recompute(target, self._looked, feature_dtype(self._looked[0].sample)), None
        except TraceError as exc:
            if exc.where != str(target.folder):
                raise
            return None, exc.what

    def _draft_steps(self, last_in_aux: bool, not_run: str | None) -> DraftFinding:
        """What the draft says; it needs more answers than the target, one in memory at a time."""
        if self._said.draft is None or self._expected is None:
            raise refusal(self._dump, "unknown-layers", not_run=not_run)
        steps = DraftSteps(self._said.draft, self._expected)
        for answer in self._look(MAX_DRAFTED):
            cut = split_last(answer.sample, self._target.width) if last_in_aux else answer.sample
            steps.add(replace(answer, sample=cut))
        return steps.finding(self._dump)

    def _layers(self, recomputed: RecomputedFinding | None) -> tuple[int, ...]:
        expected = self._expected
        found = recomputed.layer_ids if recomputed else expected
        assert found is not None
        if list(found) != sorted(set(found)):
            raise refusal(self._dump, "order-of-layers", found=list(found))
        if expected is not None and found != tuple(expected):
            raise refusal(self._dump, "other-layers", found=list(found), expected=list(expected))
        return found

    def _head(self, layout: Layout) -> HeadFinding | None:
        target, recomputed = self._target, layout.recomputed
        lasts = [(one, last_states(layout, one.sample, target)) for one in self._looked]
        with_last = [(answer, last) for answer, last in lasts if last is not None]
        if with_last and target.has_head:
            assert target.tables is not None
            return TargetHead(target.tables.shared()).settle(with_last)
        if recomputed and recomputed.own is not None and recomputed.own < MIN_OWN:
            own = apart(recomputed.own, MIN_OWN, ".0%")
            raise refusal(self._dump, "written-by-another", own=own, least=MIN_OWN)
        if self._said.greedy:
            return None
        lacking = target.without_tables or "no norm.weight"
        missing = f"the target's head and last norm are missing ({lacking})"
        if not with_last:
            missing = "the dump has no last states"
        raise refusal(self._dump, "unmeasured-answers", missing=missing)

    def _check_shift(self, layout: Layout) -> None:
        of_last = layout.head.shift if layout.head else layout.shift
        if of_last != layout.shift:
            raise refusal(self._dump, "two-shifts", shift=layout.shift, of_last=of_last)
        if layout.shift > 0:
            raise refusal(self._dump, "no-first-row")
