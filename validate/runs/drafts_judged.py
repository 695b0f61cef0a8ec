"""What a gate knows about two drafts besides their counts: replayed on traces, or only named."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import open_for_drafts, origin_warnings
from ...calibration.traces.head_agreement import head_agreement
from ...calibration.traces.held_out import check_held_out, check_held_out_measured, seen_target
from ...quantize.asking.asked_check import answer_about
from ...quantize.files.hub import folder_of
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.formats import ServedForm
from ...recipes.library import aliases, calibrated
from ..counting.draft_counts import DraftReplay
from ..counting.replaying import replay_loaded
from ..judging.advice import Background
from ..judging.candidate_origin import (
    DraftFolder,
    calibrated_elsewhere,
    check_folders,
    check_loaded,
)
from ..served.target_pair import BesideTarget, check_targets
from .judging_asked import GateRun
from .measured_runs import MeasuredRuns

_GPUS: Mapping[str, str] = MappingProxyType({"mi3": "mi325x", "blackwell": "b200"})
"""Prefix of recipes' names -> the GPU whose FP8 recipe is for the same GPUs."""
_MEASURE_AGAIN = (
    "Measure each server with draftquant measure --draft, which records whose tensors it runs; or"
    " give traces of the target too (--traces), on which both drafts are replayed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsJudged:
    """What was checked on two drafts; no folders if none are named, no replays for servers.

    `engine`: what one that was asked answered.
    """

    folders: Sequence[DraftFolder]
    background: Background
    replays: Sequence[DraftReplay] = ()
    engine: str | None = None


def replayed(asked: GateRun, policy: str) -> DraftsJudged:
    """Both drafts, replayed along the requested traces; `policy` is a name."""
    assert asked.traces is not None  # nothing else is replayed
    unrelated, folders = asked.unrelated, [folder_of(name) for name in asked.references]
    baseline, candidate = map(DraftFolder.read, folders)
    engine = _engine(asked, candidate)
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
    both = (baseline, candidate)
    return DraftsJudged(folders=both, background=background, replays=replays, engine=engine)


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
    engine = _engine(asked, candidate)
    return DraftsJudged(folders=(baseline, candidate), background=background, engine=engine)


def _engine(asked: GateRun, candidate: DraftFolder) -> str | None:
    return None if asked.asked is None else answer_about(candidate.sha256, asked.asked)


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
    warnings = []
    if form.online_head is not None:
        warnings.append(
            "the candidate was judged with the head that vLLM makes of it while it loads"
            f' ("draft_lm_head_quantization": "{form.online_head}" in --speculative-config): served'
            " without that key, or by SGLang, which has no such option, it is another draft"
        )
    if form.kv_cache is not None:
        warnings.append(
            f'the candidate was judged with a KV cache in FP8 ("kv_cache_dtype": "{form.kv_cache}"'
            " in vLLM's --speculative-config, --speculative-draft-kv-cache-dtype"
            f" {form.kv_cache} of SGLang): served without that option it is another draft"
        )
    return tuple(warnings)


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
