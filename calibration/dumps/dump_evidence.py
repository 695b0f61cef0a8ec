"""Which layers a dump holds, in which order, and of which tokens: shown by the target or the draft.

The target, where it can be run here: each slot of the dump is the output of one of its layers, up
to the arithmetic of another engine. Rows that are late by one from the middle of a text on, or that
belong to another text, are wrong only there, so whole texts are counted. Otherwise the draft that
reads the layers shows it by its first step: with another order, or with those of another token, it
predicts next to nothing; the next layer up or down costs it a third.
"""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.drafts.forward import whole_rows
from ...quantize.stored.loading import LoadedDraft
from ...recipes.brief import apart
from ...recipes.errors import CheckpointError, TraceError
from ..passes.proposals import MAX_LOGITS, batch_proposals
from ..recording.target_model import ON_CPU, RecordedTarget, decoder_layers, loaded_target
from ..recording.target_shape import TargetShape, end_token_ids, target_identity
from ..traces import files_raise
from ..traces.manifest import FeatureDtype, TargetIdentity
from ..traces.prompt_trace import FEATURE_DTYPES
from ..traces.target_tables import FINAL_NORM, TargetTables
from .dump_answers import SHIFTS, Answer
from .dump_layouts import TEXT_AGAIN, Pending, Sample

RUNNABLE_SHARE = 0.4  # of the memory: larger weights are not loaded to recompute a few positions
MAX_TEXTS, MAX_TOKENS = 4, 160
MAX_DIFFERENCE = 0.1
"""Relative, median over positions. Engines in BF16 differ by at most 0.02, other layers by 0.2."""
USUAL_DIFFERENCE = 0.04
"""Above, there is a warning. FP8 per token adds 0.02 or so to 0.02; an INT4 target had 0.08."""
CLEARLY = 2.0  # how many times farther the next best layer is
MAX_WORK = 3e13
"""Tokens times bytes of the target's weights: about as many operations in BF16, some five minutes
on two cores. For a dump that needs more, only every n-th text is recomputed."""
MAX_ROW_DIFFERENCE = 0.5
"""Relative, at one position. Rows of other tokens differ by about 1, other arithmetic by 0.02."""
MAX_OTHER_ROWS = 0.001
"""Share of a text's positions, plus one: a target may choose other experts at a few."""
MIN_ACCEPTED = 0.55  # published drafts accept 0.7 and more; with layers one off 0.50 was seen
MIN_POSITIONS = 200
_ALL_ORDERS = 4  # slots; for more, swaps of two and the reverse are tried
ERRORS_APART = 3.0
"""Standard errors by which one order is better, over the positions where two differ."""
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target's folder, which may hold only its config; its weights are not read."""

    folder: Path
    shape: TargetShape
    identity: TargetIdentity
    ends: Collection[int]
    tables: TargetTables | None
    without_tables: str
    not_run: str | None  # why it is not run here; None where it can be

    @property
    def width(self) -> int:
        """Width of its hidden states."""
        return self.shape.hidden_size

    @property
    def has_head(self) -> bool:
        """Whether head and last norm are available."""
        return self.tables is not None and FINAL_NORM in self.tables.shared()


def read_target(folder: Path) -> TargetFacts:
    """Read config.json, headers of weights, and what ends a text."""
    shape = TargetShape.read(folder)
    tables, without_tables = None, ""
    try:
        tables = TargetTables.find(folder)
    except CheckpointError as exc:
        without_tables = f"{exc.where}: {exc.what}"
    with files_raise(TraceError):
        ends = end_token_ids(folder)
    return TargetFacts(
        folder=folder,
        shape=shape,
        identity=target_identity(folder, shape, files=()),
        ends=ends,
        tables=tables,
        without_tables=without_tables,
        not_run=_not_run(folder),
    )


def _not_run(folder: Path) -> str | None:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not sizes:
        return "its folder holds no weights"
    if sum(sizes) > RUNNABLE_SHARE * memory:
        return f"its {sum(sizes) / 1e9:,.0f} GB do not fit into {memory / 1e9:,.0f} GB of memory"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedFinding:
    """What recomputing showed."""

    target: TargetIdentity
    dtype: FeatureDtype
    layer_ids: tuple[int, ...]  # of each slot, 0-based, outputs
    shift: int  # row i belongs to token i + shift
    difference: float  # largest of the slots, relative, median over positions
    own: float | None  # share of the answers' tokens that are the target's argmax; None = no answer


def recompute(
    target: TargetFacts, answers: Sequence[Answer], dtype: FeatureDtype
) -> RecomputedFinding:
    """Run the target on beginnings of texts, and find the dump's slots among its layers.

    Raises:
        TraceError: the target cannot be run; or, at the dump's folder, a slot matches no layer.
    """
    answers = answers[:MAX_TEXTS]
    with _running(target.folder, range(target.shape.num_layers), dtype) as recorded:
        texts = (answer.sample.token_ids[: min(answer.stop, MAX_TOKENS)] for answer in answers)
        computed = [_computed(recorded, token_ids) for token_ids in texts]
    pairs = list(zip(answers, computed, strict=True))
    apart = {
        # The median, since one text with the rows of another must not hide the layers of the rest.
        shift: torch.stack(
            [_apart(a.sample.aux, layers, shift, target.width) for a, (layers, _) in pairs]
        )
        .median(0)
        .values
        for shift in SHIFTS
    }
    shift = min(apart, key=lambda s: float(apart[s].min(dim=1).values.mean()))
    nearest, layer_ids = apart[shift].min(dim=1)
    _check_clear(answers[0].sample.file.parent, apart[shift])
    hits = torch.cat(
        [
            top1[answer.start - 1 : -1] == answer.sample.token_ids[answer.start : len(top1)]
            for answer, (_, top1) in pairs
        ]
    )
    return RecomputedFinding(
        target=target_identity(target.folder, target.shape),
        dtype=dtype,
        layer_ids=tuple(layer_ids.tolist()),
        shift=shift,
        difference=float(nearest.max()),
        own=float(hits.double().mean()) if len(hits) else None,
    )


@contextmanager
def _running(
    target: Path, layer_ids: Sequence[int], dtype: FeatureDtype
) -> Iterator[RecordedTarget]:
    """The target, which returns the outputs of these layers."""
    with (
        loaded_target(target, FEATURE_DTYPES[dtype][0], ON_CPU, beside=target) as model,
        RecordedTarget(
            model, decoder_layers(model, target), layer_ids, last_state=False
        ) as recorded,
    ):
        yield recorded


@torch.inference_mode()
def _computed(target: RecordedTarget, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [N, m * W] and argmax [N] at each token, computed in pieces whose logits fit."""
    from transformers import DynamicCache

    cache = DynamicCache(config=target.model.config)
    pieces = torch.split(token_ids, max(1, MAX_LOGITS // target.config.vocab_size))
    ran = [target.run(some[None], cache, {}) for some in pieces]
    return torch.cat([r.features[0] for r in ran]), torch.cat([r.top1[0] for r in ran])


def _apart(aux: Tensor, computed: Tensor, shift: int, width: int) -> Tensor:
    """[m, layers]: relative difference of each slot and each layer, median over positions."""
    count = len(computed) - abs(shift)
    slots = _slots_of(aux, width)[max(-shift, 0) :][:count].float()
    layers = _slots_of(computed, width)[max(shift, 0) :][:count].float()
    differences = [_difference(slot[:, None], layers) for slot in slots.unbind(1)]
    return torch.stack(differences).median(dim=1).values


def _slots_of(features: Tensor, width: int) -> Tensor:
    """[N, m, W] of [N, m * W]."""
    return features.reshape(len(features), -1, width)


def _difference(slots: Tensor, layers: Tensor) -> Tensor:
    off: Tensor = (slots - layers).norm(dim=2) / layers.norm(dim=2).clamp(min=1e-9)
    return off


def _check_clear(where: Path, apart: Tensor) -> None:
    for slot, differences in enumerate(apart):
        ordered = differences.sort()
        nearest = float(ordered.values[0])
        next_best = float(ordered.values[1]) if len(differences) > 1 else float("inf")
        if not nearest <= MAX_DIFFERENCE or next_best < CLEARLY * nearest:
            raise TraceError(
                where,
                f"slot {slot} of the aux features equals the output of none of the target's"
                f" {len(differences)} layers: layer {int(ordered.indices[0])} is the nearest, and"
                f" differs by {nearest:.0%}; the next one by {next_best:.0%}",
                fix="give the target that was dumped, and a dump of the outputs of its layers",
            )


@dataclass(slots=True)
class RowCounts:
    """`num_texts` of `num_seen` texts were recomputed; `num_other` positions hold other rows."""

    num_seen: int = 0
    num_texts: int = 0
    num_positions: int = 0
    num_other: int = 0


class WholeTexts:
    """Counts positions of the texts as they come; made by `recomputing`."""

    def __init__(self, target: RecordedTarget, finding: RecomputedFinding, every: int) -> None:
        self._target, self._found, self._every = target, finding, every
        self._counts = RowCounts()
        self._refused: list[tuple[Path, str]] = []

    def add(self, sample: Sample, stop: int) -> None:
        """Take in the next text; its tokens before `stop` are used."""
        counts = self._counts
        counts.num_seen += 1
        if (counts.num_seen - 1) % self._every:
            return
        token_ids, shift = sample.token_ids[:stop], self._found.shift
        computed, _ = _computed(self._target, token_ids)
        width = computed.shape[1] // len(self._found.layer_ids)
        slots, layers = (_slots_of(x, width).float() for x in (sample.aux, computed))
        tokens = torch.arange(max(shift, 0), len(token_ids) + min(shift, 0))
        other = _differs(slots[tokens - shift], layers[tokens])
        wrong, which = tokens[other.any(dim=1)], other.any(dim=0)
        counts.num_texts += 1
        counts.num_positions += len(tokens)
        counts.num_other += len(wrong)
        if len(wrong) > 1 + MAX_OTHER_ROWS * len(tokens):
            ids = torch.tensor(self._found.layer_ids)[which].tolist()
            what = (
                f"at {len(wrong)} of {len(tokens)} positions, {int(wrong[0])} to {int(wrong[-1])},"
                f" the hidden states of layers {ids} are not what the target computes there, but"
                f" {_whose(slots[wrong - shift][:, which], layers[:, which], wrong)}"
            )
            self._refused.append((sample.file, what))

    def counts(self) -> RowCounts:
        """Counts over all texts; where some hold other rows, a TraceError names them."""
        if self._refused:
            (file, what), *more = self._refused
            if more:
                names = ", ".join(other.name for other, _ in more[:8])
                what += (
                    f"; and in {len(more)} of the {self._counts.num_texts - 1} other texts that"
                    f" were recomputed: {names}{', ...' if len(more) > 8 else ''}"
                )
            raise TraceError(file, what, fix=TEXT_AGAIN)
        return self._counts


@contextmanager
def recomputing(
    target: Path, finding: RecomputedFinding, pendings: Sequence[Pending], first: Sample
) -> Iterator[WholeTexts]:
    """Load the target to recompute all texts, or every n-th where all are too much."""
    weights = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    sizes = [pending.file.stat().st_size for pending in pendings]
    num_tokens = len(first.token_ids) * sum(sizes) / sizes[0]
    with _running(target, finding.layer_ids, finding.dtype) as recorded:
        every = math.ceil(num_tokens * weights / MAX_WORK)
        yield WholeTexts(recorded, finding, max(every, 1))


def _differs(slots: Tensor, layers: Tensor) -> Tensor:
    return _difference(slots, layers) > MAX_ROW_DIFFERENCE


def _whose(rows: Tensor, layers: Tensor, tokens: Tensor) -> str:
    """Where else the target computes what these rows [n, m, W] hold, in words."""
    for late in (1, 2, -1, -2):
        there = tokens - late
        inside = (there >= 0) & (there < len(layers))
        same = ~_differs(rows[inside], layers[there[inside]]).any(dim=1)
        if int(same.sum()) > 0.9 * len(rows):
            steps = f"{abs(late)} position{'s' if abs(late) > 1 else ''}"
            return f"what it computes {steps} {'earlier' if late > 0 else 'later'}"
    return "zeros" if not bool(rows.any()) else "those of other tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFinding:
    """What the draft's first steps showed."""

    shift: int  # row i belongs to token i + shift
    accepted: float  # share of the answers' tokens that the first step predicts
    positions: int
    next_best: float  # with the best of the other orders, 0 for a single layer


class DraftSteps:
    """Counts of accepted first steps, for each order of the layers and shift, over all answers."""

    def __init__(self, draft: LoadedDraft, layer_ids: tuple[int, ...]) -> None:
        self._draft = draft
        self._layer_ids = layer_ids
        self._as_they_stand = tuple(range(len(layer_ids)))
        self._orders = tuple(dict.fromkeys(_orders(len(layer_ids))))
        self._hits: dict[tuple[Order, int], list[Tensor]] = {
            (order, shift): [] for order in self._orders for shift in (0, -1)
        }

    def add(self, answer: Answer) -> None:
        """Take in one answer."""
        token_ids = answer.sample.token_ids[: answer.stop]
        slots = answer.sample.aux.reshape(len(answer.sample.aux), len(self._layer_ids), -1)
        for (order, shift), hits in self._hits.items():
            features = slots[-shift : -shift + len(token_ids) - 1, order].flatten(1)
            hits.append(self._accepted(features, token_ids[: len(features) + 1], answer.start))

    def finding(self, where: Path) -> DraftFinding:
        """The result of all answers; refused where they are few, hardly accepted, or unclear."""
        hits = {reading: torch.cat(some).double() for reading, some in self._hits.items()}
        best = max(hits, key=lambda reading: float(hits[reading].mean()))
        order, shift = best
        stand = hits[self._as_they_stand, shift]
        others = [hits[other, shift] for other in self._orders if other != self._as_they_stand]
        next_best = max(others, key=lambda other: float(other.mean()), default=0 * stand)
        best_share, stand_share, next_share = (
            apart(float(s.mean()), MIN_ACCEPTED, ".0%") for s in (hits[best], stand, next_best)
        )
        step, whole = f"the first step of {self._draft.name}", "give the target's whole folder"
        fix = f"{whole}, so that the target can recompute its hidden states"
        if len(stand) < MIN_POSITIONS:
            raise TraceError(
                where,
                f"{len(stand)} positions of answers are too few to find out the order of the"
                f" layers, expected at least {MIN_POSITIONS}",
                fix=fix,
            )
        if float(hits[best].mean()) < MIN_ACCEPTED:
            raise TraceError(
                where,
                f"{step} is accepted {best_share} of the time at best, expected"
                f" {MIN_ACCEPTED:.0%}: the dump holds other layers than this draft reads, or the"
                " draft belongs to another target",
                fix=fix,
            )
        if _standard_errors(next_best, stand) > ERRORS_APART:
            ids = [self._layer_ids[order.index(slot)] for slot in self._as_they_stand]
            raise TraceError(
                where,
                f"the dump holds the layers in the order {ids}: read in that order, {step} is"
                f" accepted {best_share} of the time, in ascending order {stand_share}",
                fix="dump the layers in ascending order, as the draft reads them",
            )
        if others and _standard_errors(stand, next_best) < ERRORS_APART:
            raise TraceError(
                where,
                f"the order of the layers remains unclear: {step} is accepted {stand_share} of the"
                f" time in ascending order, and {next_share} in another order",
                fix=fix,
            )
        return DraftFinding(
            shift=shift,
            accepted=float(stand.mean()),
            positions=len(stand),
            next_best=float(next_best.mean()),
        )

    @torch.no_grad()
    def _accepted(self, features: Tensor, token_ids: Tensor, start: int) -> Tensor:
        """[R] bool: whether the draft's first proposal from each row is the recorded token."""
        draft = self._draft
        predicted = batch_proposals(
            draft.forward,
            draft.forward.fuse(features[None].to(draft.weights["fc.weight"])),
            token_ids[None],
            rows=whole_rows(len(token_ids), 1, first_row=start - 1),
            num_draft_tokens=1,
        ).token_ids[0, :, 0]
        return predicted == token_ids[start + 1 :][: len(predicted)]


def _standard_errors(better: Tensor, worse: Tensor) -> float:
    """By how many standard errors hits [R] exceed others at the same positions."""
    gained = better - worse
    return float(gained.sum() / gained.abs().sum().clamp(min=1).sqrt())


def _orders(num_slots: int) -> Iterator[Order]:
    stand = tuple(range(num_slots))
    yield stand
    if num_slots <= _ALL_ORDERS:
        yield from permutations(stand)
        return
    yield stand[::-1]
    for a, b in combinations(stand, 2):
        exchanged = {a: b, b: a}
        yield tuple(exchanged.get(slot, slot) for slot in stand)
