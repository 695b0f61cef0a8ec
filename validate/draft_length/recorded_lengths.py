"""What a draft was measured to accept, by how many tokens it drafts: read from files.

A replay counts every number up to its own. A report of the gate and a measurement count one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...recipes.formats import KvCacheDtype, OnlineHead
from ..comparison.replay_file import ReplayedDraft, read_replays
from ..comparison.sources import contestant_of, kind_of, num_draft_tokens_of, replayed_comparison
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.draft_counts import PromptCounts
from ..errors import CompareError
from ..measure.measurement_file import read_measurement
from ..report.document import read_report


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLength:
    """One number of draft tokens.

    Attributes:
        num_draft_tokens: K, verified in a round.
        drafted: proposed in a round: more than K where a block is drafted whole and cut.
    """

    num_draft_tokens: int
    drafted: int
    prompts: tuple[PromptCounts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDraft:
    """One draft.

    Attributes:
        name: that the file has. where: the file.
        recipe: by which it is quantized; None = it is not, or the file does not say.
        text: identity of what was continued.
        family: of the draft; "" = the file does not say.
        vocab_size: of the target; None = the file does not say.
        head_online: what vLLM made of its head while it loaded; None = nothing. kv_cache: the
            format of its KV cache; None = BF16.
        draft_vocab_size: rows of its head. quantized: whether a linear is. None = not said.
    """

    name: str
    where: Path
    recipe: str | None
    text: str
    family: str
    vocab_size: int | None
    lengths: tuple[RecordedLength, ...]
    head_online: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None
    draft_vocab_size: int | None = None
    quantized: bool | None = None

    @property
    def longest(self) -> int:
        """The largest number of draft tokens."""
        return max(one.num_draft_tokens for one in self.lengths)

    def joined(self, other: "RecordedDraft") -> "RecordedDraft":
        """With what another file has of the same draft on the same prompts.

        Raises:
            CompareError: it has other prompts.
        """
        asked = [prompt.identity for prompt in self.lengths[0].prompts]
        if other.text != self.text or any(
            [prompt.identity for prompt in one.prompts] != asked for one in other.lengths
        ):
            raise CompareError(
                other.where,
                f"was counted on other prompts than {self.where}",
                fix="replay every number of draft tokens on the same traces",
            )
        known = {(one.num_draft_tokens, one.drafted): one for one in (*self.lengths,)}
        known |= {(one.num_draft_tokens, one.drafted): one for one in other.lengths}
        return replace(self, lengths=tuple(one for _, one in sorted(known.items())))


def read_recorded(path: Path, *, blocks: bool) -> tuple[RecordedDraft, ...]:
    """The drafts of one file, the unquantized one first.

    Args:
        path: what `replay --json` printed, a report of the gate, or a measurement.
        blocks: the drafts fill blocks: fewer verified tokens are a whole block that is cut.

    Raises:
        CompareError, GateError, MeasureError: it is none of these, or not whole.
    """
    kind = kind_of(path)
    if kind == "replay":
        replays = read_replays(path)
        if not replays:
            raise CompareError(path, "holds no replay", fix="replay a draft")
        return tuple(_of_replay(one, path, blocks=blocks) for one in replays)
    return (_of_measurement(path),) if kind == "measurement" else _of_report(path)


def _of_replay(one: ReplayedDraft, path: Path, *, blocks: bool) -> RecordedDraft:
    k = one.num_draft_tokens
    lengths = [RecordedLength(num_draft_tokens=k, drafted=k, prompts=tuple(one.counted))]
    for depth in range(1, k) if all(len(p.shorter) == k - 1 for p in one.prompts) else ():
        prompts = tuple(
            replace(own, counts=AcceptanceCounts(histogram=told.shorter[depth - 1]), contexts=None)
            for own, told in zip(one.counted, one.prompts, strict=True)
        )
        drafted = k if blocks else depth
        lengths.append(RecordedLength(num_draft_tokens=depth, drafted=drafted, prompts=prompts))
    return RecordedDraft(
        name=one.name,
        where=path,
        recipe=None,
        text=one.traces.sha256,
        family=one.family,
        vocab_size=one.traces.target.vocab_size,
        draft_vocab_size=one.draft_vocab_size,
        quantized=one.quantized,
        lengths=tuple(sorted(lengths, key=lambda one: one.num_draft_tokens)),
        head_online=one.head_online,
        kv_cache=one.kv_cache,
    )


def _of_report(path: Path) -> tuple[RecordedDraft, ...]:
    document = read_report(path)
    found = replayed_comparison(path, document)
    assert found.traces is not None  # see `replayed_comparison`
    drafts = document.header.drafts
    return tuple(
        RecordedDraft(
            name=facts.name,
            where=path,
            recipe=facts.quantization if of_candidate else None,
            text=found.traces.sha256,
            family=facts.family or "",
            vocab_size=found.traces.target.vocab_size,
            lengths=(
                _only(
                    found.num_draft_tokens,
                    [
                        one.counts(found.context_edges, of_candidate=of_candidate)
                        for one in found.prompts
                    ],
                ),
            ),
        )
        for facts, of_candidate in ((drafts.baseline, False), (drafts.candidate, True))
    )


def _of_measurement(path: Path) -> RecordedDraft:
    measurement = read_measurement(path)
    k = num_draft_tokens_of(measurement)
    return RecordedDraft(
        name=measurement.name,
        where=path,
        recipe=None,
        text=measurement.setup.asked.prompts_sha256,
        family="",
        vocab_size=None,
        lengths=(_only(k, contestant_of(measurement, k).prompts),),
    )


def _only(k: int, prompts: Sequence[PromptCounts]) -> RecordedLength:
    return RecordedLength(num_draft_tokens=k, drafted=k, prompts=tuple(prompts))
