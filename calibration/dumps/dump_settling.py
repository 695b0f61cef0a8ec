"""How to read a dump, settled by a few of its texts. Nothing is taken on trust."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ...recipes.brief import apart
from ...recipes.errors import TraceError
from ..passes.draft_inputs import check_reads_layers, default_aux_layer_ids
from ..traces.manifest import FeatureDtype
from ..traces.prompt_trace import FEATURE_DTYPES
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
class DeclaredDump:
    """What the user says of a dump; `greedy`: its answers are the target's own at temperature 0."""

    layer_ids: tuple[int, ...] | None
    draft: LoadedDraft | None
    greedy: bool

    def expected_layers(self, target: TargetFacts) -> tuple[int, ...] | None:
        """The layers that the dump should hold, ascending; None = nobody says."""
        if self.layer_ids is not None or self.draft is None:
            return self.layer_ids
        check_reads_layers(self.draft)
        ids = self.draft.geometry.aux_layer_ids
        return tuple(ids or default_aux_layer_ids(target.identity.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReading:
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
        if self.recomputed:
            yield (
                f"the dump holds layers {list(self.layer_ids)}, counted after the layer:"
                " recomputed by the target, they differ by at most"
                f" {self.recomputed.difference:.1%} in the median"
            )
            if self.rows:
                yield (
                    f"{self.rows.num_texts:,} of {self.rows.num_seen:,} texts were recomputed"
                    f" whole: {self.rows.num_other:,} of their {self.rows.num_positions:,}"
                    " positions hold other rows"
                )
            if self.recomputed.own is not None:
                yield f"{self.recomputed.own:.1%} of the checked tokens are the target's argmax"
        if self.draft:
            yield (
                f"the dump holds layers {list(self.layer_ids)} in this order: the draft's first"
                f" step is accepted {self.draft.accepted:.1%} of the time over"
                f" {self.draft.positions:,} positions, and {self.draft.next_best:.1%} in the next"
                f" best order. The target was not run: {self.not_recomputed}"
            )
        if self.head:
            yield (
                f"the last states are those {self.head.norm}: from them, the target's head"
                f" predicts {self.head.share:.1%} of the checked tokens"
            )
        else:
            yield "that the target wrote the answers itself was declared (--greedy), not measured"
        if self.shift:
            yield (
                f"the rows were shifted by {-self.shift} against their tokens, and were moved back"
            )
        if self.last_in_aux:
            yield (
                "the last slot holds the last layer, which the draft does not read, and was left"
                " out"
            )
        elif self.recomputed and self.layer_ids[-1] == self.recomputed.target.num_layers - 1:
            yield (
                "the last layer is among them: if the draft does not read it, name the draft"
                " (--draft)"
            )

    def doubt(self) -> str | None:
        """Why the dump is perhaps not of this target, without a full stop; None where it is."""
        recomputed = self.recomputed
        if recomputed is None or recomputed.difference <= USUAL_DIFFERENCE:
            return None
        difference = apart(recomputed.difference, USUAL_DIFFERENCE, ".1%")
        return (
            f"its hidden states differ from what the target computes by {difference} in the"
            f" median, those of one target in two engines by less than {USUAL_DIFFERENCE:.0%}:"
            " probably the target was dumped with other weights, such as quantized ones. Traces"
            " stand for the target that wrote them, so give --target the one that was dumped"
        )


def feature_dtype(sample: Sample) -> FeatureDtype:
    """The dtype of a sample's features, as the manifest names it."""
    return next(name for name, (dtype, _) in FEATURE_DTYPES.items() if dtype == sample.aux.dtype)


def last_states(layout: DumpReading, sample: Sample, target: TargetFacts) -> Tensor | None:
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
        raise TraceError(
            sample.file,
            f"its token ids go from {low} to {high}, but the target's vocabulary has {vocab_size}"
            " tokens: another tokenizer wrote them",
            fix="give the target that was dumped",
        )
    wide = sample.aux.shape[1]
    if wide % width or (sample.last is not None and sample.last.shape[1] != width):
        last = "" if sample.last is None else f", last states {sample.last.shape[1]}"
        raise TraceError(
            sample.file,
            f"its aux features are {wide} wide{last}; the target's hidden states are {width} wide",
            fix="give the target that was dumped",
        )
    if (form := _form(sample)) != (expected := _form(first)):
        what = f"its aux features {form}, but those of {first.file.name} {expected}"
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
        raise TraceError(
            sample.file,
            f"position {place}: {of} hidden states{layer}: expected finite numbers, got"
            f" {float(states[place, column])}",
            fix="dump this text again, in BF16 if F16 overflows, or leave its file out",
        )


class Settling:
    """Settles how to read a dump, by the first answers of some of its texts."""

    def __init__(
        self,
        dump: Path,
        pendings: Sequence[Pending],
        target: TargetFacts,
        declared: DeclaredDump,
        find: Answers,
    ) -> None:
        self._dump, self._pendings, self._target = dump, pendings, target
        self._said, self._find = declared, find
        self._expected = declared.expected_layers(target)
        self._looked = list(self._look(MAX_LOOKED_AT))

    def layout(self) -> DumpReading:
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
        finding = recomputed or steps
        layout = DumpReading(
            layer_ids=self._layers(recomputed),
            shift=finding.shift if finding else 0,
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
            raise TraceError(
                self._dump,
                f"its aux features hold {slots} layers, expected {len(expected)}: {list(expected)}",
                fix="give the draft and the layers that the dump was made for",
            )
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
            raise TraceError(
                self._dump,
                "it is unknown which layers the dump holds: the target cannot be run here"
                f" ({not_run}), and no draft is given",
                fix="give the target's whole folder, or the draft that reads these features:"
                " --draft D",
            )
        steps = DraftSteps(self._said.draft, self._expected)
        for answer in self._look(MAX_DRAFTED):
            cut = split_last(answer.sample, self._target.width) if last_in_aux else answer.sample
            steps.add(replace(answer, sample=cut))
        return steps.finding(self._dump)

    def _layers(self, recomputed: RecomputedFinding | None) -> tuple[int, ...]:
        expected = self._expected
        layers = recomputed.layer_ids if recomputed else expected
        assert layers is not None
        if list(layers) != sorted(set(layers)):
            raise TraceError(
                self._dump,
                f"the dump holds the layers in the order {list(layers)}, expected ascending order",
                fix="dump the layers in ascending order, as engines hand them to drafts",
            )
        if expected is not None and layers != tuple(expected):
            raise TraceError(
                self._dump,
                f"the dump holds the outputs of layers {list(layers)}, expected {list(expected)}."
                " These ids are counted after the layer; an id that is counted before the layer is"
                " one larger",
                fix="dump the layers that the draft reads, or name the layers of the dump:"
                " --aux-layers",
            )
        return layers

    def _head(self, layout: DumpReading) -> HeadFinding | None:
        target, recomputed = self._target, layout.recomputed
        lasts = [(answer, last_states(layout, answer.sample, target)) for answer in self._looked]
        with_last = [(answer, last) for answer, last in lasts if last is not None]
        if with_last and target.has_head:
            assert target.tables is not None
            return TargetHead(target.tables.shared()).settle(with_last)
        if recomputed and recomputed.own is not None and recomputed.own < MIN_OWN:
            share = apart(recomputed.own, MIN_OWN, ".0%")
            raise TraceError(
                self._dump,
                f"{share} of the checked tokens are the target's argmax, expected {MIN_OWN:.0%}:"
                " another model wrote these answers, or the target sampled them",
                fix="dump the target's own greedy answers",
            )
        if self._said.greedy:
            return None
        lacking = target.without_tables or "no norm.weight"
        missing = f"the target's head and last norm are missing ({lacking})"
        if not with_last:
            missing = "the dump has no last states"
        raise TraceError(
            self._dump,
            f"it cannot be measured whether the target wrote these answers: {missing}",
            fix="dump the last hidden states too and give the target's head, or declare with"
            " --greedy that the target wrote the answers at temperature 0",
        )

    def _check_shift(self, layout: DumpReading) -> None:
        of_last = layout.head.shift if layout.head else layout.shift
        if of_last != layout.shift:
            raise TraceError(
                self._dump,
                f"the aux features are shifted by {layout.shift:+d} against their tokens, the last"
                f" states by {of_last:+d}",
                fix="dump both at the same positions",
            )
        if layout.shift > 0:
            raise TraceError(
                self._dump,
                "each row of hidden states belongs to the token after it, so the first token has"
                " no features",
                fix="dump the first position too",
            )
