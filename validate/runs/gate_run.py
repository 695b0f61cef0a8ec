"""The gate, whole: reads its inputs, judges by all of them, and writes the report files.

Measurements must belong to the named drafts. A measurement says which draft its server
ran by the hash of its tensors (`measure --draft`), and a report of parity which drafts it
compared. If nothing says so, two measurements alone do not release a named draft: they could
belong to any other.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import open_for_drafts, origin_warnings
from ...calibration.traces.held_out import check_held_out, check_held_out_measured, seen_target
from ...calibration.traces.trace_info import head_agreement
from ...quantize.files.hub import folder_of, running_argv
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.errors import GateError, GoldenError
from ...recipes.formats import ServedForm
from ...recipes.library import aliases, calibrated
from ..counting.draft_counts import DraftReplay
from ..counting.replaying import replay_loaded
from ..foreign.foreign_formats import read_foreign_pair
from ..foreign.foreign_measurement import ForeignPair
from ..judging.advice import Background
from ..judging.candidate_origin import (
    DraftFolder,
    calibrated_elsewhere,
    check_folders,
    check_loaded,
)
from ..judging.judgement import GateReport, judge
from ..judging.policy import Look, Policy, parse_look, resolve_policy
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..parity.finding import ParityReport, read_parity
from ..report.document import Document, document_of, document_text, parse_report
from ..report.facts import (
    DraftFacts,
    Drafts,
    EngineFacts,
    drafts_of,
    engine_facts,
    measured_facts,
    today,
)
from ..served.joint_report import JointReport, judge_jointly
from ..served.served_gate import draft_sha256
from ..served.target_pair import BesideTarget, check_targets, judge_targets
from .judging_asked import GateRun
from .report_pages import NOTHING, asked_for, golden_file, texts_of, write_pages

# ---- Measurements of servers, and reports of parity


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRuns:
    """What is judged besides traces, or instead of them; `again` is the baseline once more."""

    runs: tuple[Measurement, Measurement] | ForeignPair | None
    again: Measurement | None
    parity: tuple[ParityReport, ...]

    @classmethod
    def read(cls, asked: GateRun) -> "MeasuredRuns":
        """The requested files; GateError if noise is to be judged on another tool's files."""
        runs: tuple[Measurement, Measurement] | ForeignPair | None = None
        again = None
        if asked.measured:
            baseline, candidate = map(Path, asked.measured)
            runs = read_foreign_pair(baseline, candidate)
            runs = runs or (read_measurement(baseline), read_measurement(candidate))
        if asked.baseline_again:
            if not isinstance(runs, tuple):
                raise GateError(
                    "--baseline-again",
                    "shows the server's noise between measurements of 'draftquant measure'; these"
                    " are of another tool",
                    fix="leave it out, or measure all three with 'draftquant measure'",
                )
            again = read_measurement(Path(asked.baseline_again))
        parity = tuple(read_parity(Path(path)) for path in asked.parity)
        return cls(runs=runs, again=again, parity=parity)

    @property
    def nothing(self) -> bool:
        """True if only traces are judged."""
        return self.runs is None and not self.parity

    @property
    def own(self) -> tuple[Measurement, ...]:
        """Baseline and candidate, measured by this package; none of another tool."""
        return self.runs if isinstance(self.runs, tuple) else ()

    @property
    def num_draft_tokens(self) -> int | None:
        """K in serving; None where nothing, or no draft, was served."""
        if self.runs is None:
            return None
        if isinstance(self.runs, tuple):
            speculation = self.runs[0].setup.speculation
            return None if speculation is None else speculation.num_draft_tokens
        return self.runs.baseline.num_draft_tokens

    def not_tied(self) -> Iterator[str]:
        """Measurements that may belong to any draft."""
        if self.runs is None:
            return
        if isinstance(self.runs, tuple):
            names = [one.name for one in self.runs if draft_sha256(one) is None]
        else:
            names = [self.runs.baseline.name, self.runs.candidate.name]
        for name in names:
            yield f"whether the server of {name} ran the draft that is named ({name} does not say)"

    def check_parity(self, folders: Sequence[DraftFolder]) -> tuple[str, ...]:
        """What nothing verifies, in sentences; GateError if a report is about another draft."""
        known = {*map(draft_sha256, self.own), *(folder.sha256 for folder in folders)}
        warnings = []
        for report in self.parity:
            named = [digest for digest in report.drafts_sha256 if digest is not None]
            strange = [digest for digest in named if digest not in known]
            # If a measurement does not say whose it is, and no draft is named, it may be its.
            if strange and (folders or (self.own and None not in known)):
                what = f"is of another draft than those that are judged (tensors {strange[0][:12]})"
                fix = "give what 'draftquant parity --report' wrote of these drafts"
                raise GateError(report.path, what, fix=fix)
            if strange or not named or len(named) < len(report.drafts_sha256):
                warnings.append(
                    f"nothing shows that the findings of {report.path.name} are about the drafts"
                    " that are judged: it, or a measurement, does not record whose it is"
                )
        return tuple(warnings)


# ---- What is known about two drafts besides their counts, replayed on traces or only named

_GPUS: Mapping[str, str] = MappingProxyType({"mi3": "mi325x", "blackwell": "b200"})
"""Prefix of recipes' names -> the GPU whose FP8 recipe is for the same GPUs."""
_MEASURE_AGAIN = (
    "Measure each server with draftquant measure --draft, which records whose tensors it runs; or"
    " give traces of the target too (--traces), on which both drafts are replayed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsJudged:
    """What was checked on two drafts; no folders if none are named, no replays for servers."""

    folders: Sequence[DraftFolder]
    background: Background
    replays: Sequence[DraftReplay] = ()


def replayed(asked: GateRun, policy: str) -> DraftsJudged:
    """Both drafts, replayed along the requested traces; `policy` is a name."""
    assert asked.traces is not None  # nothing else is replayed
    unrelated, folders = asked.unrelated, [folder_of(name) for name in asked.references]
    baseline, candidate = map(DraftFolder.read, folders)
    same = asked.served.changes and candidate.sha256 == baseline.sha256
    warnings = check_folders(baseline, candidate, unrelated=unrelated, same=same)
    traces, _, of_traces = open_for_drafts(asked.traces, folders, asked.listener)
    warnings += of_traces
    held_out = check_held_out(candidate.quantized_by, traces, candidate.cuts)
    other_target, unknown = calibrated_elsewhere(candidate, seen_target(traces))
    warnings += held_out.unknown
    of_text = unknown + origin_warnings(asked.target, traces)
    loaded = load_for_replay(folders, traces, asked)
    warnings += check_loaded(*loaded.both, candidate, unrelated=unrelated) + of_text
    warnings += _policy_warnings(candidate.quantized_by, policy) + _served_warnings(asked.served)
    replays = replay_loaded(loaded, asked)
    background = dataclasses.replace(
        _background(asked, baseline, candidate, warnings),
        head_agreement=head_agreement(traces, loaded.tables),
        other_target=other_target,
        unrecorded=not unrelated and not same and not candidate.is_recorded,
        seen_continuations=held_out.continuations,
        algorithm_to_try=_algorithm_to_try(candidate.quantized_by),
    )
    return DraftsJudged(folders=(baseline, candidate), background=background, replays=replays)


def named(asked: GateRun, measured: MeasuredRuns, policy: str) -> DraftsJudged:
    """Both drafts where only servers were measured, as far as they are named."""
    if not asked.references:
        background = Background(
            expected_baseline=asked.expect_baseline,
            unrelated=asked.unrelated,
            recipes_to_try=_recipes_to_try(None),
        )
        return DraftsJudged(folders=(), background=background)
    baseline, candidate = (DraftFolder.read(folder_of(name)) for name in asked.references)
    warnings = check_folders(baseline, candidate, unrelated=asked.unrelated)
    if not asked.unrelated and not candidate.is_recorded:
        warnings += (
            "without traces the candidate's weights are not compared with the baseline's"
            " (`draftquant verify QUANT --against BF16 --foreign` compares them)",
        )
    warnings += _policy_warnings(candidate.quantized_by, policy)
    if measured.own:
        served = measured.own[1]
        prompts = [(record.id, record.prompt_sha256) for record in served.records]
        warnings += check_held_out_measured(
            candidate.quantized_by, prompts, served.name, candidate.cuts
        )
    untied = tuple(measured.not_tied())
    background = dataclasses.replace(
        _background(asked, baseline, candidate, warnings),
        not_compared=untied,
        to_compare=(_MEASURE_AGAIN,) if untied else (),
    )
    return DraftsJudged(folders=(baseline, candidate), background=background)


def _background(
    asked: GateRun, baseline: DraftFolder, candidate: DraftFolder, warnings: tuple[str, ...]
) -> Background:
    return Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        expected_baseline=asked.expect_baseline,
        unrelated=asked.unrelated,
        unrecorded=not asked.unrelated and not candidate.is_recorded,
        recipes_to_try=_recipes_to_try(candidate.quantized_by),
        cut=bool(candidate.cuts),
        quantized=candidate.quantized or not candidate.cuts,
        warnings=warnings,
    )


def _policy_warnings(candidate: QuantizedProvenance | None, policy: str) -> tuple[str, ...]:
    """A candidate does not choose its own judge, but the reader learns what its recipe wants."""
    if candidate is None or policy in (candidate.recipe.gate.policy, "custom"):
        return ()
    asked = candidate.recipe.gate.policy
    return (f"the candidate's recipe asks for the policy {asked!r}, but {policy!r} was used",)


def _served_warnings(form: ServedForm) -> tuple[str, ...]:
    found = []
    if form.online_head is not None:
        found.append(
            "the candidate was judged with the head that vLLM makes of it while it loads"
            f' ("draft_lm_head_quantization": "{form.online_head}" in --speculative-config): served'
            " without that key, or by SGLang, which has no such option, it is another draft"
        )
    if form.kv_cache is not None:
        found.append(
            f'the candidate was judged with a KV cache in FP8 ("kv_cache_dtype": "{form.kv_cache}"'
            " in vLLM's --speculative-config, --speculative-draft-kv-cache-dtype"
            f" {form.kv_cache} of SGLang): served without that option it is another draft"
        )
    return tuple(found)


def _algorithm_to_try(candidate: QuantizedProvenance | None) -> str | None:
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.number.is_fp8 else "gptq"


def _recipes_to_try(candidate: QuantizedProvenance | None) -> tuple[str, ...]:
    """Built-in recipes with which the candidate may lose less: its own calibrated, then FP8.

    None is wider than FP8 that leaves the head in BF16.
    """
    if candidate is None:
        return (aliases()["h200"],)
    recipe, name = candidate.recipe, candidate.recipe.name
    rounded = {role for rule in recipe.rules if rule.action == "quantize" for role in rule.role}
    if recipe.weights.number.is_fp8 and rounded.isdisjoint(("head", "fusion")):
        return ()
    gpu = next((gpu for start, gpu in _GPUS.items() if name.startswith(start)), "h200")
    return tuple(filter(None, (calibrated(name), aliases()[gpu])))


def beside_targets(asked: GateRun) -> tuple[DraftsJudged, tuple[BesideTarget, BesideTarget]]:
    """One draft, replayed beside its target in two precisions, each with its own tables."""
    folder = folder_of(asked.references[0])
    draft = DraftFolder.read(folder)
    opened = [
        open_for_drafts(traces, [folder], asked.listener)
        for traces in (asked.traces, asked.traces_of_candidate)
        if traces is not None
    ]
    check_targets(opened[0][0], opened[1][0])
    warnings, agreements, sides = tuple[str, ...](), list[float](), list[BesideTarget]()
    seen: dict[str, None] = {}
    for traces, _, of_traces in opened:
        held_out = check_held_out(draft.quantized_by, traces, draft.cuts)
        seen |= dict.fromkeys(held_out.continuations)
        warnings += of_traces + held_out.unknown
        warnings += origin_warnings(None, traces)
        loaded = load_for_replay([folder], traces, asked)
        (replay,) = replay_loaded(loaded, asked)
        sides.append(BesideTarget(replay=replay, traces=traces))
        agreement = head_agreement(traces, loaded.tables)
        agreements += [] if agreement is None else [agreement]
    background = Background(
        baseline_sha256=draft.sha256,
        candidate_sha256=draft.sha256,
        head_agreement=min(agreements, default=None),
        expected_baseline=asked.expect_baseline,
        seen_continuations=tuple(seen),
        warnings=tuple(dict.fromkeys(warnings)),
    )
    both = (sides[0], sides[1])
    return DraftsJudged(folders=(draft, draft), background=background), both


# ---- The verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict, with the replays where traces were given, and the report file's JSON object."""

    report: GateReport | JointReport
    replays: Sequence[DraftReplay]
    document: dict[str, Any]


def judged(asked: GateRun) -> Judged:
    """Judge by all inputs, and write the report files."""
    date = today()
    policy = resolve_policy(
        asked.policy,
        max_relative_drop=asked.max_relative_drop,
        confidence=asked.confidence,
        min_prompts=asked.min_prompts,
        every_category_passes=asked.every_category_passes,
        unrecorded=asked.unrecorded,
    )
    look = parse_look(asked.look, asked.spending)
    measured = MeasuredRuns.read(asked)
    if asked.num_draft_tokens is None:  # traces are replayed with the K that was served
        asked = dataclasses.replace(asked, num_draft_tokens=measured.num_draft_tokens)
    report: GateReport | JointReport
    if asked.traces_of_candidate is not None:
        drafts, sides = beside_targets(asked)
        report = judge_targets(*sides, policy, look=look, background=drafts.background)
    else:
        of_traces = asked.traces is not None
        drafts = replayed(asked, policy.name) if of_traces else named(asked, measured, policy.name)
        report = _judge(drafts, measured, policy, look)
    judged_drafts, engines = _drafts_and_engines(asked, measured, drafts)
    argv = asked_for(running_argv())
    document = document_of(report, argv=argv, drafts=judged_drafts, engines=engines, date=date)
    text = document_text(document)
    if asked.report is not None or asked.wants_pages:
        beside = {} if asked.report is None else {Path(asked.report): text}
        found = parse_report(text, "gate")
        write_pages(asked, found, {**beside, **_golden(asked, found, measured)})
    report = report.with_texts(texts_of(text))
    return Judged(report=report, replays=drafts.replays, document=document)


def _judge(
    drafts: DraftsJudged, measured: MeasuredRuns, policy: Policy, look: Look | None
) -> GateReport | JointReport:
    background, replayed_alone = drafts.background, None
    if drafts.replays:
        baseline, candidate = drafts.replays
        replayed_alone = judge(baseline, candidate, policy, look=look, background=background)
        if measured.nothing:
            return replayed_alone
        background = dataclasses.replace(
            background, head_agreement=None, other_target="", warnings=()
        )
    return judge_jointly(
        measured.runs,
        measured.again,
        replayed_alone,
        tuple(one for report in measured.parity for one in report.findings),
        policy,
        look=look,
        background=background,
        warnings=measured.check_parity(drafts.folders),
    )


def _drafts_and_engines(
    asked: GateRun, measured: MeasuredRuns, drafts: DraftsJudged
) -> tuple[Drafts, tuple[EngineFacts, ...]]:
    if drafts.folders and (drafts.replays or not any(measured.not_tied())):
        names = [str(name) for name in asked.references]
        found = drafts_of(names, drafts.folders, asked.served_forms(len(names)))
        return found, engine_facts(drafts.folders[1].folder, found.candidate.name)
    runs = measured.runs
    assert runs is not None  # or there is nothing to judge
    if isinstance(runs, tuple):
        baseline, candidate = map(measured_facts, runs)
    else:
        both = (runs.baseline, runs.candidate)
        baseline, candidate = (DraftFacts(name=one.name, sha256=None) for one in both)
    return Drafts(baseline=baseline, candidate=candidate), ()


def _golden(asked: GateRun, document: Document, measured: MeasuredRuns) -> Mapping[Path, str]:
    """Golden acceptance of the candidate, served if it was; its failure loses no verdict."""
    try:
        return golden_file(asked, document, measured.own[1] if measured.own else None)
    except GoldenError as exc:
        asked.listener.warning(f"no golden acceptance is written: {exc.what}")
        return NOTHING
