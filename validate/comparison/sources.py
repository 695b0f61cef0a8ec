"""Where compared counts come from: replays of this run or of a file, reports, measurements."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.drafts.draft_cache import CacheScaleOrigin
from ...recipes.decode import encode
from ...recipes.errors import CompareError
from ...recipes.formats import AS_STORED, FP8_CACHE, KvCacheDtype, OnlineHead, ServedForm
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, decode, parse_json
from ..counting.acceptance_counts import AcceptanceCounts, DraftSampling, PromptKey, estimand
from ..counting.draft_counts import (
    DraftReplay,
    PromptCounts,
    PromptReplay,
    TraceFigures,
    context_edges,
)
from ..foreign.foreign_formats import foreign_format, read_foreign
from ..foreign.foreign_measurement import ForeignMeasurement
from ..judging.figures import (
    MOST_DRAFT_TOKENS,
    DraftFigures,
    context_bins_problem,
    draft_figures,
    is_histogram,
)
from ..judging.judgement import GateReport
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..report.document import Document, read_report
from ..served.common_steps import whole_counts
from ..served.foreign_gate import incomparability, not_compared, paired, warnings_of
from ..served.joint_report import JointReport
from ..served.measurement_pair import pair_measurements
from .scopes import Contestant, CountedDrafts, count_drafts

_OF_A_REPLAY = ("num_draft_tokens", "draft_sampling", "traces", "family", "draft_vocab_size",
                "quantized", "cache_scales")  # fmt: skip
_LEFT = ("confidence_head", "shortened")
"""Keys of 0.2 that change no count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPrompt(PromptKey):
    """One prompt; `num_steps` is the sum of `histogram`, which has K + 1 columns.

    Attributes:
        shorter: [K - 1] the histograms where fewer proposals are verified, of 2, 3, .. K columns.
        context_bins: [bins, K + 1] the histogram by context bin, without the empty bins at the end.
    """

    num_steps: float
    histogram: tuple[float, ...]
    cluster: str = ""
    shorter: tuple[tuple[float, ...], ...] = ()
    context_bins: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, prompt: PromptReplay) -> "ReplayedPrompt":
        """Of a replay."""
        return cls(
            id=prompt.id,
            category=prompt.category,
            prompt_sha256=prompt.prompt_sha256,
            num_steps=prompt.counts.num_steps,
            histogram=prompt.counts.histogram,
            cluster=prompt.cluster,
            shorter=tuple(one.histogram for one in prompt.shorter),
            context_bins=prompt.contexts.histograms if prompt.contexts else (),
        )

    def counted(self, context_edges: Sequence[int]) -> PromptCounts:
        """What was counted of it."""
        counts = AcceptanceCounts(histogram=self.histogram)
        bins = self.context_bins
        return PromptCounts.of(self, counts, self.cluster, bins=bins, edges=context_edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft(DraftFigures):
    """One draft: an item of the list that `replay --json` prints; 0.2 printed no defaults.

    Attributes:
        rope_theta, dtype: that it was replayed with; None = as its config.json has it.
        head_online: what vLLM made of its head while it loaded; None = the head is the folder's.
        kv_cache: None = BF16. cache_scales: whether its scales are the folder's, or 1.
    """

    estimand: str
    num_draft_tokens: int
    draft_sampling: DraftSampling
    traces: TraceFigures
    first_step_agreement: float
    prompts: tuple[ReplayedPrompt, ...]
    rope_theta: float | None
    dtype: str
    family: str = ""
    draft_vocab_size: int | None = None
    quantized: bool | None = None
    head_online: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None
    cache_scales: CacheScaleOrigin | None = None
    context_edges: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        replay: DraftReplay,
        *,
        rope_theta: float | None,
        dtype: str,
        served: ServedForm = AS_STORED,
    ) -> "ReplayedDraft":
        """Of a replay that was made with these settings."""
        traces = replay.traces
        return cls(
            **dataclasses.asdict(draft_figures(replay)),
            estimand=estimand(traces.temperature, traces.sampling, replay.draft_sampling),
            **{name: getattr(replay, name) for name in _OF_A_REPLAY},
            first_step_agreement=replay.first_step.share,
            prompts=tuple(map(ReplayedPrompt.of, replay.prompts)),
            rope_theta=rope_theta,
            dtype=dtype,
            head_online=served.online_head,
            kv_cache=None if replay.cache_scales is None else FP8_CACHE,
            context_edges=context_edges(replay.prompts),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON; a prompt says its cluster where it has one."""
        plain = dataclasses.asdict(self) | {"prompts": [encode(one) for one in self.prompts]}
        plain["traces"]["features"] = encode(self.traces.features)
        return plain

    @property
    def counted(self) -> list[PromptCounts]:
        """What was counted of each prompt."""
        return [prompt.counted(self.context_edges) for prompt in self.prompts]

    def problem(self) -> str:
        """What no replay says; empty for what one may say."""
        depth = self.num_draft_tokens
        if not 1 <= depth <= MOST_DRAFT_TOKENS:
            return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {depth}"
        for prompt in self.prompts:
            if prompt.num_steps and not is_histogram(prompt.histogram, depth):
                return f"prompts: {prompt.id!r}: expected {depth + 1} counts of verify steps"
            problem = context_bins_problem(
                prompt.histogram, prompt.context_bins, self.context_edges, add_up=True
            )
            if problem:
                return f"prompts: {prompt.id!r}: context_bins: {problem}"
            if prompt.shorter and not _are_shorter(prompt, depth):
                return (
                    f"prompts: {prompt.id!r}: shorter: expected histograms for K = 1 .. {depth - 1}"
                )
        return ""


def _are_shorter(prompt: ReplayedPrompt, depth: int) -> bool:
    columns = [len(one) for one in prompt.shorter]
    if columns != list(range(2, depth + 1)):
        return False
    steps = [histogram for histogram in prompt.shorter if sum(histogram)]
    return all(is_histogram(one, len(one) - 1) for one in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replays:
    replays: tuple[ReplayedDraft, ...]


def read_replays(path: Path) -> tuple[ReplayedDraft, ...]:
    """What `replay --json` printed, else CompareError."""
    try:
        plain = parse_json(read_text(path))
        found: _Replays = decode(_Replays, {"replays": _without_left(plain)})
    except (OSError, JsonProblem) as exc:
        what = f"is no list of replays: {exc}"
        raise CompareError(path, what, fix="give what 'draftquant replay --json' printed") from exc
    return found.replays


def _without_left(replays: object) -> object:
    if not isinstance(replays, list):
        return replays
    return [
        {key: value for key, value in one.items() if key not in _LEFT}
        if isinstance(one, dict)
        else one
        for one in replays
    ]


_MEASUREMENT = "draftquant measurement"
_MOST_OF_A_LINE = 1 << 20  # bytes: a setup is shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Drafts, and how they were counted, in words; warnings without a full stop."""

    drafts: CountedDrafts
    num_draft_tokens: int
    counted_by: str
    warnings: tuple[str, ...] = ()


def of_replays(
    replays: Sequence[DraftReplay], digests: Sequence[str], warnings: tuple[str, ...] = ()
) -> Counted:
    """Replays of one call, the baseline first, with the sha256 of the tensors of each draft."""
    first = replays[0]
    contestants = [
        Contestant(name=one.name, sha256=digest, prompts=one.prompts)
        for one, digest in zip(replays, digests, strict=True)
    ]
    fault = first.traces.text.fault
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=estimand(first.traces.temperature, first.traces.sampling, first.draft_sampling),
        warnings=warnings if fault is None else (*warnings, fault),
    )


def of_files(paths: Sequence[Path]) -> Counted:
    """Reports of the gate, replays, or measurements: all of one kind, the baseline first."""
    kinds = [kind_of(path) for path in paths]
    if len(set(kinds)) > 1:
        other = next(place for place, kind in enumerate(kinds) if kind != kinds[0])
        what = f"is a {kinds[other]}, and {paths[0]} is a {kinds[0]}: they count different things"
        fix = "give reports of the gate, replays or measurements, all of one kind"
        raise CompareError(paths[other], what, fix=fix)
    if kinds[0] == "foreign measurement":
        return _of_foreign([read_foreign(path) for path in paths])
    if kinds[0] == "measurement":
        return _of_measurements([read_measurement(path) for path in paths])
    return _of_replayed(paths) if kinds[0] == "replay" else _of_reports(paths)


def kind_of(path: Path) -> str:
    """A "measurement", "foreign measurement", "replay" or "report", by its content."""
    try:
        with open_stream(path) as stream:
            line = stream.readline(_MOST_OF_A_LINE)
        if foreign_format(path) is not None:
            return "foreign measurement"
        if line.lstrip().startswith(b"["):
            return "replay"
        found = parse_json(line.decode("utf-8"))
    except OSError as exc:
        raise CompareError(
            path,
            f"cannot be read: {exc}",
            fix="add --traces T to compare drafts; without it, give reports of the gate, replays"
            " or measurements",
        ) from exc
    except (UnicodeDecodeError, JsonProblem):
        return "report"
    is_measurement = isinstance(found, dict) and found.get("format") == _MEASUREMENT
    return "measurement" if is_measurement else "report"


def _of_replayed(paths: Sequence[Path]) -> Counted:
    found = [(path, replay) for path in paths for replay in read_replays(path)]
    first_path, first = found[0]
    drafts = [first]
    for path, replay in found[1:]:
        if what := _differing(first, replay):
            raise CompareError(
                path,
                f"has {what} than {first_path}",
                fix="replay both drafts with the same options",
            )
        if all((replay.name, replay.prompts) != (one.name, one.prompts) for one in drafts):
            drafts.append(replay)  # the reference of several files is one draft
    return Counted(
        drafts=count_drafts(
            [Contestant(name=one.name, sha256=None, prompts=one.counted) for one in drafts]
        ),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=first.estimand,
    )


def _differing(one: ReplayedDraft, other: ReplayedDraft) -> str:
    """What must be equal and is not; empty if nothing."""
    if one.traces.sha256 != other.traces.sha256:
        return "other traces"
    if one.num_draft_tokens != other.num_draft_tokens:
        return f"another K ({other.num_draft_tokens}, not {one.num_draft_tokens})"
    if (one.draft_sampling, one.dtype) != (other.draft_sampling, other.dtype):
        return "another --draft-sampling or --dtype"
    return ""


def _of_reports(paths: Sequence[Path]) -> Counted:
    found = [
        (path, document := read_report(path), replayed_comparison(path, document)) for path in paths
    ]
    first_path, first, baseline = found[0]
    for path, _, comparison in found[1:]:
        if what := _difference(baseline, comparison):
            raise CompareError(
                path,
                f"has {what} than {first_path}",
                fix="run the gate of both drafts with the same options",
            )
    contestants = [
        Contestant(
            name=first.header.drafts.baseline.name,
            sha256=baseline.background.baseline_sha256,
            prompts=[
                one.counts(baseline.context_edges, of_candidate=False) for one in baseline.prompts
            ],
        )
    ]
    for _, document, comparison in found:
        contestants.append(
            Contestant(
                name=document.header.drafts.candidate.name,
                sha256=comparison.background.candidate_sha256,
                prompts=[
                    one.counts(comparison.context_edges, of_candidate=True)
                    for one in comparison.prompts
                ],
            )
        )
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=baseline.num_draft_tokens,
        counted_by=baseline.estimand,
    )


def replayed_comparison(path: Path, document: Document) -> GateReport:
    """The comparison of two replays; CompareError: the report compares servers, or no prompts."""
    judgement = document.judgement
    found = judgement.replayed if isinstance(judgement, JointReport) else judgement
    if found is None or found.traces is None:
        what = "compares servers, whose texts differ from draft to draft"
        raise CompareError(path, what, fix="give the measurements themselves")
    if not found.prompts:
        raise CompareError(
            path, f"compares no prompts: it is {found.verdict}", fix="give a report that does"
        )
    return found


def _difference(one: GateReport, other: GateReport) -> str:
    assert one.traces is not None  # see `replayed_comparison`
    assert other.traces is not None
    if one.traces.sha256 != other.traces.sha256:
        return "other traces"
    if one.num_draft_tokens != other.num_draft_tokens:
        return f"another K ({other.num_draft_tokens}, not {one.num_draft_tokens})"
    if one.draft_sampling != other.draft_sampling:
        return "another --draft-sampling"
    if one.background.baseline_sha256 != other.background.baseline_sha256:
        return "another baseline"
    counts = [[prompt.baseline for prompt in each.prompts] for each in (one, other)]
    return "" if counts[0] == counts[1] else "other counts of the same baseline"


def _of_measurements(measurements: Sequence[Measurement]) -> Counted:
    first = measurements[0]
    depth = num_draft_tokens_of(first)
    for other in measurements[1:]:
        num_draft_tokens_of(other)
        if unequal := pair_measurements(first, other).incomparable:
            what = f"cannot be compared with {first.name}: {unequal}"
            raise CompareError(other.name, what, fix="measure all drafts with the same settings")
    server = first.setup.server
    return Counted(
        drafts=count_drafts([contestant_of(one, depth) for one in measurements]),
        num_draft_tokens=depth,
        counted_by=f"all verify steps of whole outputs of {server.engine} {server.version}",
    )


def _of_foreign(runs: Sequence[ForeignMeasurement]) -> Counted:
    first = runs[0]
    others = [paired(first, one) for one in runs[1:]]
    for other in others:
        if unequal := incomparability(first, other):
            raise CompareError(
                other.name,
                f"cannot be compared with {first.name}: {unequal}",
                fix="measure all drafts with one tool, on the same prompts, with the same settings",
            )
    contestants = [
        Contestant(name=one.name, sha256=None, prompts=[request.prompt for request in one.requests])
        for one in (first, *others)
    ]
    missing = [what for other in others for what, _ in not_compared(first, other)]
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=f"all verify steps of whole outputs, measured by {first.tool}",
        warnings=(
            *warnings_of(first),
            *(f"not compared: {what}" for what in dict.fromkeys(missing)),
        ),
    )


def num_draft_tokens_of(measurement: Measurement) -> int:
    """K of a server that drafts, else CompareError."""
    speculation = measurement.setup.speculation
    if speculation is None:
        raise CompareError(
            measurement.name, "its server used no draft", fix="give measurements with a draft"
        )
    return speculation.num_draft_tokens


def contestant_of(measurement: Measurement, num_draft_tokens: int) -> Contestant:
    """The draft of a server, by whole rounds."""
    speculation = measurement.setup.speculation
    assert speculation is not None  # see `num_draft_tokens_of`
    prompts = tuple(
        PromptCounts.of(record, whole_counts(record, num_draft_tokens), record.cluster or "")
        for record in measurement.records
    )
    return Contestant(name=measurement.name, sha256=speculation.draft_sha256, prompts=prompts)
