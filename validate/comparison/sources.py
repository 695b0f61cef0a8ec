"""Where compared counts come from: replays of this run or from a file, reports, measurements."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibration.passes import DraftSampling
from ...quantize.drafts.draft_cache import CacheScaleOrigin
from ...recipes.decode import encode
from ...recipes.errors import CompareError
from ...recipes.formats import AS_STORED, FP8_CACHE, KvCacheDtype, OnlineHead, ServedForm
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, decode, parse_json
from ..counting.acceptance_counts import AcceptanceCounts, PromptKey, estimand
from ..counting.draft_counts import (
    DraftReplay,
    PromptCounts,
    PromptReplay,
    TraceFigures,
    context_edges,
)
from ..foreign.foreign_formats import foreign_format, read_foreign
from ..judging.figures import (
    MOST_DRAFT_TOKENS,
    DraftFigures,
    context_bins_problem,
    draft_figures,
    is_histogram,
)
from ..judging.judgement import GateReport, counted
from ..measure.measurement import Measurement, Speculation
from ..measure.measurement_file import read_measurement
from ..report.document import Document, read_report
from ..served.common_steps import whole_counts
from ..served.foreign_gate import incomparability, not_compared, paired, warnings_of
from ..served.joint_report import JointReport
from ..served.measurement_pair import pair_measurements
from .scopes import Contestant, Counted, count_drafts

_OF_A_REPLAY = ("num_draft_tokens", "draft_sampling", "traces", "family", "draft_vocab_size",
                "quantized", "cache_scales")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPrompt(PromptKey):
    """One prompt; `num_steps` is the sum of `histogram`, which has K + 1 columns.

    `shorter` are K - 1 histograms of 2, 3, .. K columns; `context_bins` [bins, K + 1], without the
    empty bins at the end.
    """

    num_steps: float
    histogram: tuple[float, ...]
    cluster: str = ""
    shorter: tuple[tuple[float, ...], ...] = ()
    context_bins: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, prompt: PromptReplay) -> "ReplayedPrompt":
        """The prompt of a replay."""
        return cls(
            id=prompt.id,
            category=prompt.category,
            prompt_sha256=prompt.prompt_sha256,
            num_steps=prompt.counts.num_steps,
            histogram=prompt.counts.histogram,
            cluster=prompt.cluster,
            shorter=tuple(counts.histogram for counts in prompt.shorter),
            context_bins=prompt.contexts.histograms if prompt.contexts else (),
        )

    def counted(self, context_edges: Sequence[int]) -> PromptCounts:
        """The counts of the prompt."""
        counts = AcceptanceCounts(histogram=self.histogram)
        bins = self.context_bins
        return PromptCounts.of(self, counts, self.cluster, bins=bins, edges=context_edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft(DraftFigures):
    """One draft: an item of the list that `replay --json` prints; earlier builds omitted defaults.

    Attributes:
        rope_theta, dtype: settings of its replay; None = as in its config.json.
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
        """The draft of a replay that was made with these settings."""
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
        """Plain data for JSON; a prompt has its cluster if there is one."""
        plain = dataclasses.asdict(self) | {"prompts": [encode(prompt) for prompt in self.prompts]}
        plain["traces"]["features"] = encode(self.traces.features)
        return plain

    @property
    def counted(self) -> list[PromptCounts]:
        """The counts of each prompt."""
        return [prompt.counted(self.context_edges) for prompt in self.prompts]

    def problem(self) -> str:
        """What no replay can have printed; empty if there is nothing."""
        depth = self.num_draft_tokens
        if not 1 <= depth <= MOST_DRAFT_TOKENS:
            return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {depth}"
        for prompt in self.prompts:
            problem, edges = "", self.context_edges
            if prompt.num_steps and not is_histogram(prompt.histogram, depth):
                problem = f"expected {depth + 1} counts of verify steps"
            elif bins := context_bins_problem(
                prompt.histogram, prompt.context_bins, edges, add_up=True
            ):
                problem = f"context_bins: {bins}"
            elif prompt.shorter and not _are_shorter(prompt, depth):
                problem = f"shorter: expected histograms for K = 1 .. {depth - 1}"
            if problem:
                return f"prompts: {prompt.id!r}: {problem}"
        return ""


def _are_shorter(prompt: ReplayedPrompt, depth: int) -> bool:
    columns = [len(histogram) for histogram in prompt.shorter]
    if columns != list(range(2, depth + 1)):
        return False
    steps = [histogram for histogram in prompt.shorter if sum(histogram)]
    return all(is_histogram(histogram, len(histogram) - 1) for histogram in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replays:
    replays: tuple[ReplayedDraft, ...]


def read_replays(path: Path) -> tuple[ReplayedDraft, ...]:
    """What `replay --json` printed, else CompareError."""
    try:
        document: _Replays = decode(_Replays, {"replays": parse_json(read_text(path))})
    except (OSError, JsonProblem) as exc:
        raise CompareError(
            path,
            f"is no list of replays: {exc}",
            fix="give what 'draftquant replay --json' printed",
        ) from exc
    return document.replays


_MEASUREMENT = "draftquant measurement"
_MOST_OF_A_LINE = 1 << 20  # bytes: a setup is shorter


def of_replays(
    replays: Sequence[DraftReplay], digests: Sequence[str], warnings: tuple[str, ...]
) -> Counted:
    """Replays of one call, the baseline first, with the sha256 of the tensors of each draft."""
    first, fault = replays[0], replays[0].traces.text.fault
    contestants = [
        Contestant(name=replay.name, sha256=digest, prompts=replay.prompts)
        for replay, digest in zip(replays, digests, strict=True)
    ]
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
    counters = {
        "foreign measurement": _of_foreign,
        "measurement": _of_measurements,
        "replay": _of_replayed,
        "report": _of_reports,
    }
    return counters[kinds[0]](paths)


def kind_of(path: Path) -> str:
    """A "measurement", "foreign measurement", "replay" or "report", by its content."""
    try:
        with open_stream(path) as stream:
            line = stream.readline(_MOST_OF_A_LINE)
        if foreign_format(path) is not None:
            return "foreign measurement"
        if line.lstrip().startswith(b"["):
            return "replay"
        document = parse_json(line.decode("utf-8"))
    except OSError as exc:
        raise CompareError(
            path,
            f"cannot be read: {exc}",
            fix="add --traces T to compare drafts; without it, give reports of the gate, replays"
            " or measurements",
        ) from exc
    except (UnicodeDecodeError, JsonProblem):
        return "report"
    is_measurement = isinstance(document, dict) and document.get("format") == _MEASUREMENT
    return "measurement" if is_measurement else "report"


def _of_replayed(paths: Sequence[Path]) -> Counted:
    replays = [(path, replay) for path in paths for replay in read_replays(path)]
    first_path, first = replays[0]
    drafts = [first]
    for path, replay in replays[1:]:
        sampling = (first.draft_sampling, first.dtype) != (replay.draft_sampling, replay.dtype)
        differing = (sampling, "another --draft-sampling or --dtype")
        _check_alike((first_path, first, path, replay), "replay both drafts", differing)
        if all((replay.name, replay.prompts) != (known.name, known.prompts) for known in drafts):
            drafts.append(replay)  # the shared reference of several files counts once
    contestants = [Contestant(name=r.name, sha256=None, prompts=r.counted) for r in drafts]
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=first.estimand,
    )


def _of_reports(paths: Sequence[Path]) -> Counted:
    documents = [read_report(path) for path in paths]
    reports = list(map(replayed_comparison, paths, documents))
    first, drafts = reports[0], documents[0].header.drafts
    known, before = first.background, counted(first, of_candidate=False)
    contestants = [
        Contestant(name=drafts.baseline.name, sha256=known.baseline_sha256, prompts=before)
    ]
    for path, document, report in zip(paths, documents, reports, strict=True):
        facts = report.background
        counts = [[prompt.baseline for prompt in each.prompts] for each in (first, report)]
        _check_alike(
            (paths[0], first, path, report),
            "run the gate of both drafts",
            (first.draft_sampling != report.draft_sampling, "another --draft-sampling"),
            (known.baseline_sha256 != facts.baseline_sha256, "another baseline"),
            (counts[0] != counts[1], "other counts of the same baseline"),
        )
        name, prompts = document.header.drafts.candidate.name, counted(report, of_candidate=True)
        contestants.append(Contestant(name=name, sha256=facts.candidate_sha256, prompts=prompts))
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=first.estimand,
    )


Compared = tuple[Path, ReplayedDraft | GateReport, Path, ReplayedDraft | GateReport]


def _check_alike(compared: Compared, verb: str, *further: tuple[bool, str]) -> None:
    first_path, first, path, other = compared
    assert first.traces is not None  # see `replayed_comparison`
    assert other.traces is not None
    depths = other.num_draft_tokens, first.num_draft_tokens
    differing = (
        (first.traces.sha256 != other.traces.sha256, "other traces"),
        (depths[0] != depths[1], f"another K ({depths[0]}, not {depths[1]})"),
        *further,
    )
    for differs, what in differing:
        if differs:
            fix = f"{verb} with the same options"
            raise CompareError(path, f"has {what} than {first_path}", fix=fix)


def replayed_comparison(path: Path, document: Document) -> GateReport:
    """The comparison of two replays; CompareError: the report compares servers, or no prompts."""
    judgement = document.judgement
    report = judgement.replayed if isinstance(judgement, JointReport) else judgement
    if report is None or report.traces is None or report.served is not None:
        raise CompareError(
            path,
            "compares servers, whose texts differ from draft to draft",
            fix="give the measurements themselves",
        )
    if not report.prompts:
        raise CompareError(
            path,
            f"compares no prompts: it is {report.verdict}",
            fix="give a report that does",
        )
    return report


def _of_measurements(paths: Sequence[Path]) -> Counted:
    measurements = [read_measurement(path) for path in paths]
    first = measurements[0]
    server, depth = first.setup.server, _speculation(first).num_draft_tokens
    contestants = []
    for run in measurements:
        digest = _speculation(run).draft_sha256
        if run is not first and (unequal := pair_measurements(first, run).incomparable):
            what = f"cannot be compared with {first.name}: {unequal}"
            raise CompareError(run.name, what, fix="measure all drafts with the same settings")
        prompts = [
            PromptCounts.of(record, whole_counts(record, depth), record.cluster or "")
            for record in run.records
        ]
        contestants.append(Contestant(name=run.name, sha256=digest, prompts=prompts))
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=depth,
        counted_by=f"all verify steps of whole outputs of {server.engine} {server.version}",
    )


def _speculation(measurement: Measurement) -> Speculation:
    if measurement.setup.speculation is None:
        raise CompareError(
            measurement.name,
            "its server used no draft",
            fix="give measurements with a draft",
        )
    return measurement.setup.speculation


def _of_foreign(paths: Sequence[Path]) -> Counted:
    first, *runs = [read_foreign(path) for path in paths]
    others = [paired(first, run) for run in runs]
    for other in others:
        if unequal := incomparability(first, other):
            what = f"cannot be compared with {first.name}: {unequal}"
            fix = "measure all drafts with one tool, on the same prompts, with the same settings"
            raise CompareError(other.name, what, fix=fix)
    contestants = [
        Contestant(name=run.name, sha256=None, prompts=[request.prompt for request in run.requests])
        for run in (first, *others)
    ]
    missing = dict.fromkeys(what for other in others for what, _ in not_compared(first, other))
    return Counted(
        drafts=count_drafts(contestants),
        num_draft_tokens=first.num_draft_tokens,
        counted_by=f"all verify steps of whole outputs, measured by {first.tool}",
        warnings=(*warnings_of(first), *(f"not compared: {what}" for what in missing)),
    )
