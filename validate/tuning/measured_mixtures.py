"""Mixtures measured: each once, made in full, replayed, and compared with the unquantized draft."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...calibration.passes.batches import MAX_TOKENS
from ...calibration.rounding.proposal_divergence import Agreement, agreements
from ...calibration.rounding.sequences import SequenceReader, run_together, validation_rows
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.forward import checked_at_the_end
from ...quantize.stored.loading import LoadedDraft
from ...recipes.decode import encode
from ...recipes.schema import recipe_sha256
from ...recipes.strict_json import decode
from ..counting.draft_counts import distinct_prompts, recorded_pairs
from ..counting.draft_replay import DraftReplay
from ..counting.paired_change import PairedChange
from ..counting.trace_replay import replay_drafts
from ..errors import TuneError
from ..judging.categories import change_of
from .candidates import Candidates
from .draft_mixture import Mixture, described, is_kept_whole

CONFIDENCE = 0.95
"""Of each bound."""
_BESIDE = ("overlap", "acceptance_length")  # the other numbers are the change


Numbers = Mapping[str, float]
"""What was measured of one mixture, by name; they go through JSON as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Mixtures to measure, of which none waits for another.

    Attributes:
        identities: of each, what recipe makes its draft, and what is measured of it.
        compute: measures those at some positions; the numbers of each do not depend on the others.
    """

    identities: tuple[str, ...]
    compute: Callable[[Sequence[int]], list[Numbers]]


Computing = Callable[[Tasks], Sequence[Numbers]]
"""Gives the numbers of all tasks, in their order: computed here, or by others."""


def compute_here(tasks: Tasks) -> list[Numbers]:
    """The numbers of all tasks."""
    return tasks.compute(range(len(tasks.identities)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An option of a unit, or a whole mixture, that is out of the question."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mixture, measured.

    Attributes:
        nbytes: of all tensors of the draft that it makes.
        overlap: with the proposals of the unquantized draft, mean over rows and depths, in [0, 1].
        acceptance_length: mean, over the prompts that mixtures are judged by.
        change: against the unquantized draft there, with one-sided bounds at 95 %.
        best: no other measured mixture has both fewer bytes and more overlap.
    """

    mixture: Mixture
    nbytes: int
    overlap: float
    acceptance_length: float
    change: PairedChange
    best: bool = True

    @property
    def largest_drop(self) -> float:
        """The share of the acceptance length that may be lost, as far as the prompts can tell."""
        return -math.expm1(self.change.lower)

    @property
    def said_change(self) -> str:
        """The change of the acceptance length in percent, with its bounds."""
        lower, upper = (math.expm1(x) for x in (self.change.lower, self.change.upper))
        return f"{self.change.relative_change:+.2%} ({lower:+.2%}, {upper:+.2%})"


class Measured:
    """The mixtures that were measured so far, and those that are out of the question.

    Args:
        candidates: what makes their drafts.
        baseline: the unquantized draft's replay of `traces`.
        traces: to judge by.
        computing: what measures them.
        on_progress: called with what is measured next.
    """

    def __init__(
        self,
        candidates: Candidates,
        baseline: DraftReplay,
        traces: TraceFolder,
        computing: Computing,
        on_progress: Callable[[str], None],
    ) -> None:
        self._candidates, self._baseline, self._traces = candidates, baseline, traces
        self._computing, self._on_progress = computing, on_progress
        self._points: dict[str, Point] = {}
        self._refused: dict[str, Refused] = {}

    @property
    def points(self) -> list[Point]:
        """Fewest bytes first; those that another one beats in both bytes and overlap are marked."""
        return marked(list(self._points.values()))

    @property
    def refused(self) -> tuple[Refused, ...]:
        """Whole mixtures that cannot be, and why."""
        return tuple(self._refused.values())

    def allowed(self, mixture: Mixture) -> bool:
        """Whether a mixture quantizes something, the layout holds it and the engine loads it."""
        if is_kept_whole(mixture):
            return False  # the draft as it is
        why = self._candidates.problem(mixture)
        if why is not None:
            name = described(mixture)
            self._refused[name] = Refused(what=name, why=why)
        return why is None

    def add(self, mixtures: Iterable[Mixture]) -> None:
        """Measure allowed mixtures that were not measured yet."""
        named = {described(mixture): mixture for mixture in mixtures}
        new = {name: mixture for name, mixture in named.items() if name not in self._points}
        numbers = self._computing(
            tasks_of("acceptance", self._candidates, new, self._measured, self._on_progress)
        )
        for (name, mixture), found in zip(new.items(), numbers, strict=True):
            self._points[name] = Point(
                mixture=mixture,
                nbytes=self._candidates.plan(mixture).bytes_after,
                overlap=found["overlap"],
                acceptance_length=found["acceptance_length"],
                change=decode(PairedChange, {k: found[k] for k in found if k not in _BESIDE}),
            )

    def _measured(self, drafts: Sequence[LoadedDraft]) -> list[Numbers]:
        candidates, k = self._candidates, self._candidates.num_draft_tokens
        replays = replay_drafts(drafts, self._traces, num_draft_tokens=k)
        overlaps = overlaps_of(drafts, candidates.reference, self._traces, k)
        return [self._numbers(*each) for each in zip(replays, overlaps, strict=True)]

    def _numbers(self, replay: DraftReplay, overlap: float) -> Numbers:
        pairs = distinct_prompts(recorded_pairs(self._baseline, replay))
        change = change_of(pairs, CONFIDENCE)
        if change is None:
            raise TuneError(
                self._traces.folder,
                "fewer than two distinct prompts: nothing can be compared",
                fix="record more prompts",
            )
        length = replay.counts.mean_acceptance_length
        return {"overlap": overlap, "acceptance_length": length, **encode(change)}


def tasks_of(
    what: str,
    candidates: Candidates,
    mixtures: Mapping[str, Mixture],
    of_drafts: Callable[[Sequence[LoadedDraft]], list[Numbers]],
    on_progress: Callable[[str], None],
) -> Tasks:
    """Something to measure of the drafts of mixtures, which are known by their recipes.

    Args:
        what: is measured.
        candidates: makes the drafts.
        mixtures: by what they are called.
        of_drafts: measures it.
        on_progress: called with what is measured next.
    """
    recipes = (candidates.plan(mixture).recipe for mixture in mixtures.values())
    names = list(mixtures)

    def compute(positions: Sequence[int]) -> list[Numbers]:
        own = {names[i]: mixtures[names[i]] for i in positions}
        return candidates.measured(own, of_drafts, on_progress)

    identities = tuple(f"{what} {recipe_sha256(recipe)}" for recipe in recipes)
    return Tasks(identities=identities, compute=compute)


def marked(points: Sequence[Point]) -> list[Point]:
    """Fewest bytes first, of equal bytes the better one; `best` is said of each."""
    by_size = sorted(points, key=lambda point: (point.nbytes, -point.overlap))
    found, most = [], -math.inf
    for point in by_size:
        found.append(dataclasses.replace(point, best=point.overlap > most))
        most = max(most, point.overlap)
    return found


def overlaps_of(
    drafts: Sequence[LoadedDraft],
    reference: LoadedDraft,
    traces: TraceFolder,
    num_draft_tokens: int,
) -> list[float]:
    """Mean over rows and depths of the sum of the smaller probabilities, of each draft."""
    per_row = 1 if reference.geometry.block_size is None else 1 + num_draft_tokens
    every = [(x, validation_rows(x, num_draft_tokens, per_row)) for x in traces.manifest.prompts]
    prompts, rows = zip(*((entry, own) for entry, own in every if own), strict=True)
    reader = SequenceReader(reference, traces)
    nothing = Agreement(rows=0, accepted=0, accepted_reference=0, overlap=0.0)
    totals = [nothing] * len(drafts)
    most = MAX_TOKENS if all(draft.rounds_alone for draft in drafts) else 1  # one prompt at least
    for batch in run_together(prompts, rows, max_tokens=most):
        with checked_at_the_end():
            found = agreements(
                [draft.forward for draft in drafts],
                reference.forward,
                reader.read([prompts[i] for i in batch], [rows[i] for i in batch]),
                num_draft_tokens=num_draft_tokens,
            )
        totals = [sum(own, total) for own, total in zip(found, totals, strict=True)]
    return [total.overlap / (total.rows * num_draft_tokens) for total in totals]
