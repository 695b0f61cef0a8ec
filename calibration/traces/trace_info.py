"""What is in a trace folder, found in one pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from .feature_evidence import FeatureEvidence, FeatureTally
from .head_agreement import head_agreement
from .related_prompts import (
    num_near_duplicates,
    prompt_text,
    related_groups,
    suggested_clusters,
)
from .trace_folder import TraceFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryInfo:
    """The traces of one category."""

    category: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    shortest: int  # continuation, in tokens
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TraceInfo(Brief):
    """What a trace folder holds.

    Attributes:
        traces: the opened folder.
        categories: the categories by name, each with its counts.
        nbytes: bytes of the folder's files.
        num_copies: prompts with the same token ids as an earlier one.
        num_later_turns: prompts that continue a conversation.
        num_near_duplicates: prompts that share most of their text with an earlier one.
        num_independent: groups of related prompts; a split keeps each group together.
        largest_group: prompts of the largest group.
        num_clusters: groups of prompts that the prompt file declares.
        suggested_clusters: groups that ids or categories suggest and that are not declared, in
            one sentence; empty if there are none.
        known_top1: share of the prompts' positions whose most likely token is known.
        features: whether the hidden states belong to their tokens.
        head_agreement: share of the tokens that the target's head, applied to the recorded hidden
            states, gives again; None where the traces do not hold what this needs.
    """

    traces: TraceFolder
    categories: Sequence[CategoryInfo]
    nbytes: int
    num_copies: int
    num_later_turns: int
    num_near_duplicates: int
    num_independent: int
    largest_group: int
    num_clusters: int
    suggested_clusters: str
    known_top1: float
    features: FeatureEvidence
    head_agreement: float | None

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "traces": self.traces.folder,
            "prompts": len(self.traces),
            "categories": len(self.categories),
            "size": megabytes(self.nbytes),
            "copies": self.num_copies or None,
            "independent groups": self.num_independent,
        }


def trace_info(traces: TraceFolder) -> TraceInfo:
    """Read every trace once."""
    texts, evidence = [], FeatureTally()
    known = positions = 0
    for trace in traces:
        texts.append(prompt_text(trace))
        evidence.add(trace)
        top1 = trace.target_top1[: trace.prompt_length - 1]
        known, positions = known + int((top1 >= 0).sum()), positions + len(top1)
    groups = related_groups(texts)
    files = [shard.nbytes for shard in traces.manifest.shards]
    tables = traces.manifest.tables
    return TraceInfo(
        traces=traces,
        categories=tuple(_categories(traces)),
        nbytes=sum(files) + (tables.nbytes if tables else 0),
        num_copies=len(texts) - len({text.prompt for text in texts}),
        num_later_turns=sum(e.conversation_sha256 is not None for e in traces.manifest.prompts),
        num_near_duplicates=num_near_duplicates(texts),
        num_independent=len(groups),
        largest_group=max(map(len, groups)),
        num_clusters=len({entry.cluster for entry in traces.manifest.prompts if entry.cluster}),
        suggested_clusters=suggested_clusters(
            [(e.id, e.category) for e in traces.manifest.prompts if e.cluster is None]
        ),
        known_top1=known / max(1, positions),
        features=evidence.evidence(),
        head_agreement=head_agreement(traces, traces.tables()),
    )


def _categories(traces: TraceFolder) -> Iterator[CategoryInfo]:
    prompts = traces.manifest.prompts
    for category in sorted({entry.category for entry in prompts}):
        entries = [entry for entry in prompts if entry.category == category]
        new = [entry.num_tokens - entry.prompt_length for entry in entries]
        yield CategoryInfo(
            category=category,
            num_prompts=len(entries),
            prompt_tokens=sum(entry.prompt_length for entry in entries),
            new_tokens=sum(new),
            shortest=min(new),
            longest=max(new),
        )
