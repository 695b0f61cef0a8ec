"""An estimate of a draft and of what recipes make of it, ready to be printed or stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ...recipes.formats import KvCacheDtype, OnlineHead
from ..drafts.family import Draft
from ..errors import EstimateError
from ..quantization_plan import Plan
from .draft_round import draft_round
from .forms import Form, plain_forms, with_other_heads
from .passes import part_of
from .target import Target
from .work import Machine, Part, Round, break_even_loss

SHARED_PARTS: tuple[Part, ...] = ("embedding", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """What the source holds of one part; `parameters` does not count vocabulary maps."""

    part: Part
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """The draft in one form.

    Attributes:
        form: what it is.
        round: what its drafting reads and computes.
    """

    form: Form
    round: Round

    @property
    def name(self) -> str:
        """Of the recipe; of the draft as it is, the dtype of its norms; and of its head."""
        return self.form.name

    @property
    def stored_bytes(self) -> int:
        """Of all its tensors."""
        return self.form.stored_bytes

    @property
    def hypothetical(self) -> bool:
        """Of its head or its cache something is said that no recipe that is compared does."""
        form = self.form
        return (form.rows, form.head, form.kv_cache) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One candidate on one machine at one concurrency beside a target; times in seconds.

    Attributes:
        loss: see `break_even_loss`.
    """

    concurrency: int
    verify_seconds: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The draft as it is first, then the candidates; all with the same settings.

    Attributes:
        parts: of the source, the largest first.
        dropped_bytes: of embed_tokens, which engines share with the target; 0 if there is none.
    """

    draft: Draft
    num_draft_tokens: int
    context: int
    tp: int
    parts: tuple[StoredPart, ...]
    dropped_bytes: int
    candidates: tuple[Candidate, ...]

    @property
    def baseline(self) -> Candidate:
        """The draft as it is."""
        return self.candidates[0]

    @property
    def parameters(self) -> int:
        """Of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def shared_share(self) -> float:
        """Share of the parameters that embedding and head are, in [0, 1)."""
        shared = sum(p.parameters for p in self.parts if p.part in SHARED_PARTS)
        return shared / self.parameters

    @property
    def reads_shared_head(self) -> bool:
        """True if the head that the draft reads is the target's."""
        return all(row.role != "head" for row in self.draft.rows)

    def break_even(
        self,
        candidate: Candidate,
        machine: Machine,
        target: Target,
        concurrencies: Sequence[int],
    ) -> tuple[BreakEven, ...]:
        """What the candidate may lose, at every concurrency for which the target's step is known.

        Args:
            candidate: one of `candidates`.
            machine: that serves draft and target.
            target: whose verify step ends a round.
            concurrencies: sequences at once.
        """
        found = []
        for concurrency in concurrencies:
            verify = target.verify_seconds(machine, concurrency)
            if verify is None:
                continue
            ours, theirs = (
                machine.round_seconds(one.round, concurrency) for one in (self.baseline, candidate)
            )
            loss = break_even_loss(ours, theirs, verify)
            found.append(BreakEven(concurrency=concurrency, verify_seconds=verify, loss=loss))
        return tuple(found)


def make_estimate(
    draft: Draft,
    plans: Sequence[Plan],
    *,
    num_draft_tokens: int,
    context: int,
    tp: int,
    vocab_sizes: Sequence[int] = (),
    heads: Sequence[OnlineHead] = (),
    kv_cache: KvCacheDtype | None = None,
) -> Estimate:
    """Estimate a draft as it is, under plans of it, and as it is and by the least with other heads.

    Args:
        draft: whose headers were read.
        plans: of this draft.
        num_draft_tokens: K.
        context: positions in each sequence's KV cache.
        tp: tensor-parallel shards, of draft and target alike.
        vocab_sizes: kept rows of cut heads.
        heads: what heads are quantized to; nothing = FP8 where the draft has its own.
        kv_cache: the format of a KV cache to compare besides.

    Raises:
        EstimateError: two recipes have one name, or the draft has experts or several modules; see
            also `draft_round`.
    """
    if draft.geometry.num_modules > 1:
        raise EstimateError(
            draft.checkpoint.folder,
            "the draft has a module for each draft token, and this kind of step is not estimated",
            fix="measure it ('draftquant measure')",
        )
    if any(row.role == "router" for row in draft.rows):
        raise EstimateError(
            draft.checkpoint.folder,
            "the draft is a mixture of experts, and how many experts a step reads"
            " depends on routing",
            fix="measure it ('draftquant measure')",
        )

    def candidate(form: Form) -> Candidate:
        whole = draft_round(
            form.draft,
            form.weights,
            num_draft_tokens=num_draft_tokens,
            context=context,
            tp=tp,
            kv_cache=form.cache,
        )
        return Candidate(form=form, round=whole)

    candidates = [candidate(form) for form in plain_forms(draft, plans)]
    if not heads and any(row.role == "head" for row in draft.rows):
        heads = ("fp8",)
    least = min(candidates, key=lambda one: one.round.nbytes(1))
    for form in dict.fromkeys((candidates[0].form.name, least.form.name)):
        chosen = next(one.form for one in candidates if one.name == form)
        candidates += [candidate(other) for other in with_other_heads(chosen, vocab_sizes, heads)]
        if kv_cache is not None and chosen.cache is None:
            candidates.append(candidate(replace(chosen, kv_cache=kv_cache)))
    embedding = (row.tensor.nbytes for row in draft.rows if row.role == "embedding")
    return Estimate(
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        context=context,
        tp=tp,
        parts=_stored_parts(draft),
        dropped_bytes=sum(embedding),
        candidates=tuple(candidates),
    )


def checked_efficiency(share: float) -> float:
    """The share itself.

    Raises:
        EstimateError: not in (0, 1].
    """
    if not 0 < share <= 1:
        raise EstimateError(
            "--efficiency",
            f"expected a share in (0, 1], got {share:g}",
            fix="give the share of the data sheet's figures that kernels reach, such as 0.75",
        )
    return share


def checked_launch(microseconds: float) -> float:
    """The seconds that a kernel takes beside what it reads and computes.

    Raises:
        EstimateError: below zero, or no number.
    """
    if not 0 <= microseconds < inf:
        raise EstimateError(
            "--launch-us",
            f"expected 0 or more, got {microseconds:g}",
            fix="give the microseconds of a kernel launch, such as 5",
        )
    return microseconds / 1e6


def checked_concurrencies(asked: Sequence[int]) -> tuple[int, ...]:
    """The numbers in ascending order, each once.

    Raises:
        EstimateError: one is below 1.
    """
    if min(asked) < 1:
        raise EstimateError(
            "--concurrency", f"expected at least 1, got {min(asked)}", fix="such as 1,8,64"
        )
    return tuple(sorted(set(asked)))


def _stored_parts(draft: Draft) -> tuple[StoredPart, ...]:
    held: Mapping[Part, list[int]] = {part_of(row): [0, 0] for row in draft.rows}
    for row in draft.rows:
        sums = held[part_of(row)]
        sums[0] += 0 if row.role == "vocabulary_map" else row.tensor.numel
        sums[1] += row.tensor.nbytes
    parts = (StoredPart(part=part, parameters=n, nbytes=b) for part, (n, b) in held.items())
    return tuple(sorted(parts, key=lambda one: (-one.nbytes, one.part)))
