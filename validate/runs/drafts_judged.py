"""What the gate knows of two drafts beside their counts, replayed on traces or only named."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...calibration.passes.position_limits import open_for_drafts
from ...calibration.traces.trace_folder import TraceFolder, file_sha256
from ...calibration.traces.trace_info import head_agreement
from ...quantize.files.checkpoint import CONFIG_FILE
from ...quantize.files.hub import folder_of
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.formats import ServedForm
from ...recipes.library import aliases, calibrated
from ...recipes.regular_file import AnyPath, optional_path
from ..counting.draft_counts import DraftReplay
from ..counting.loaded_drafts import load_for_replay
from ..counting.replaying import replay_loaded
from ..judging.advice import Background
from ..judging.candidate_origin import (
    DraftFolder,
    check_folders,
    check_held_out,
    check_held_out_measured,
    check_loaded,
)
from .judging_asked import GateRun
from .measured_pair import Measured

_GPUS: Mapping[str, str] = MappingProxyType({"mi3": "mi325x", "blackwell": "b200"})
"""How names of recipes begin -> the GPU whose FP8 recipe is that of the same GPUs."""
_MEASURE_AGAIN = (
    "Measure each server with draftquant measure --draft, which records whose tensors it runs; or"
    " give traces of the target too (--traces), on which both drafts are replayed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsJudged:
    """Two drafts, and what was looked at before they are judged.

    Attributes:
        folders: baseline and candidate; none where none are named.
        replays: of both; none where no traces were given.
    """

    folders: Sequence[DraftFolder]
    background: Background
    replays: Sequence[DraftReplay] = ()


def replayed(asked: GateRun, policy: str) -> DraftsJudged:
    """Both drafts, replayed along the traces that are asked for; `policy` is a name."""
    assert asked.traces is not None  # nothing else is replayed
    unrelated, folders = asked.unrelated, [folder_of(name) for name in asked.references]
    baseline, candidate = map(DraftFolder.read, folders)
    same = asked.served.changes and candidate.sha256 == baseline.sha256
    warnings = check_folders(baseline, candidate, unrelated=unrelated, same=same)
    traces, _, of_traces = open_for_drafts(asked.traces, folders, asked.listener)
    warnings += of_traces
    warnings += check_held_out(candidate.quantized_by, traces, candidate.cuts)
    loaded = load_for_replay(folders, traces, asked)
    warnings += check_loaded(*loaded.both, candidate, unrelated=unrelated)
    warnings += _target_warnings(asked.target, traces) + _text_warnings(traces)
    warnings += _policy_warnings(candidate.quantized_by, policy) + _served_warnings(asked.served)
    replays = replay_loaded(loaded, asked)
    background = dataclasses.replace(
        _background(asked, baseline, candidate, warnings),
        head_agreement=head_agreement(traces, loaded.tables),
        unrecorded=not unrelated and not same and not candidate.is_recorded,
        algorithm_to_try=_algorithm_to_try(candidate.quantized_by),
    )
    return DraftsJudged(folders=(baseline, candidate), background=background, replays=replays)


def named(asked: GateRun, measured: Measured, policy: str) -> DraftsJudged:
    """Both drafts where servers alone were measured, as far as any are named."""
    if not asked.references:
        background = Background(expected_baseline=asked.expect_baseline, unrelated=asked.unrelated)
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
    """A candidate does not choose its own judge, but the reader learns what its recipe asks for."""
    if candidate is None or policy in (candidate.recipe.gate.policy, "custom"):
        return ()
    asked = candidate.recipe.gate.policy
    return (f"the candidate's recipe asks for the policy {asked!r}, but {policy!r} was used",)


def _served_warnings(form: ServedForm) -> tuple[str, ...]:
    """The folder alone is not what was judged."""
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
    """What may round the candidate's four bits better than it was done."""
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.number.is_fp8 else "gptq"


def _recipes_to_try(candidate: QuantizedProvenance | None) -> tuple[str, ...]:
    """Built-in recipes with which the candidate may lose less: its own calibrated, then FP8."""
    if candidate is None or candidate.recipe.weights.number.is_fp8:
        return ()
    name = candidate.recipe.name
    gpu = next((gpu for start, gpu in _GPUS.items() if name.startswith(start)), "h200")
    return tuple(filter(None, (calibrated(name), aliases()[gpu])))


def _text_warnings(traces: TraceFolder) -> tuple[str, ...]:
    """Text that no user is served."""
    if not traces.manifest.ignore_eos:
        return ()
    return (
        "the traces continue after the target's end of text (record --ignore-eos); text there often"
        " repeats itself, and a draft guesses it more easily than answers",
    )


def _target_warnings(given: AnyPath | None, traces: TraceFolder) -> tuple[str, ...]:
    """The tables of a target that was not recorded make another draft of both."""
    target, recorded = optional_path(given), traces.manifest.target
    if target is None or file_sha256(target / CONFIG_FILE) == recorded.config_sha256:
        return ()
    if recorded.config_sha256 is None:
        return (
            f"the traces do not record the {CONFIG_FILE} of their target {recorded.name}, so"
            f" nothing shows whether --target {target.name} is that target",
        )
    return (
        f"--target {target.name} has another {CONFIG_FILE} than the recorded target"
        f" {recorded.name}: its embedding and head may be another target's",
    )
