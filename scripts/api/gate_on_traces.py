"""Two drafts replayed on the same traces and judged: what `gate` does with traces."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...quantize.files.checkpoint import CONFIG_FILE
from ...recipes.library import aliases, calibrated
from ...recipes.served_form import AS_STORED, ServedForm
from . import arguments
from .loaded_drafts import load_for_replay
from .option import Argument, Option
from .references import Reference, folder_of, optional_path
from .replay import OnTracesSettings, replay_loaded

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.files.provenance import QuantizedProvenance
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.interim_analysis import Look
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy


_GPUS: Mapping[str, str] = MappingProxyType({"mi3": "mi325x", "blackwell": "b200"})
"""How names of recipes begin -> the GPU whose FP8 recipe is that of the same GPUs."""


@dataclass(frozen=True)
class GateOnTracesSettings(OnTracesSettings):
    """Who is judged on which traces, and what is known of them."""

    baseline: Annotated[
        Reference | None, Argument("the BF16 draft: a folder or a Hub id", "BF16")
    ] = None
    candidate: Annotated[
        Reference | None, Argument("the quantized draft: a folder or a Hub id", "QUANT")
    ] = None
    traces: Annotated[arguments.AnyPath | None, Option("trace folder", "TRACES")] = None
    _: KW_ONLY
    unrelated: Annotated[bool, Option("allow a QUANT that was not quantized from BF16")] = False
    expect_baseline: Annotated[
        float | None,
        Option(
            "known acceptance length of BF16 with this K; confirms a baseline that looks anomalous",
            "AL",
        ),
    ] = None

    head_online: arguments.HeadOnline = None
    kv_cache_dtype: arguments.KvCache = "auto"
    ray: arguments.Ray = None

    @property
    @override
    def ray_address(self) -> str | None:
        return self.ray

    @override
    def served_forms(self, count: int) -> list[ServedForm]:
        return [AS_STORED, self.served]

    @property
    def served(self) -> ServedForm:
        """What an engine makes of the candidate."""
        return arguments.served_form(self.head_online, self.kv_cache_dtype)

    @property
    def references(self) -> list[Reference]:
        """Baseline and candidate, as far as they were given."""
        return [name for name in (self.baseline, self.candidate) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTraces:
    """What the replays gave; `background` is what they were judged with.

    Attributes:
        folders: baseline and candidate.
    """

    replays: "Sequence[DraftReplay]"
    report: "GateReport"
    background: "Background"
    folders: "tuple[DraftFolder, ...]"


def judge_on_traces(
    settings: GateOnTracesSettings, policy: "Policy", look: "Look | None"
) -> OnTraces:
    """Replay both drafts, and judge the candidate.

    Raises:
        DraftQuantError: see `gate`.
    """
    from ...calibration.traces.head_agreement import head_agreement
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
    from ...validate.judging.held_out import check_held_out
    from ...validate.judging.judgement import judge
    from .opened_traces import open_with_warnings
    from .position_limits import position_warnings

    assert settings.traces is not None  # nothing else is replayed
    unrelated, drafts = settings.unrelated, settings.references
    baseline, candidate = (DraftFolder.read(folder_of(name)) for name in drafts)
    same = settings.served.changes and candidate.sha256 == baseline.sha256
    warnings = check_folders(baseline, candidate, unrelated=unrelated, same=same)
    traces, of_traces = open_with_warnings(settings.traces, settings.listener)
    warnings += of_traces + position_warnings(drafts, traces, settings.listener)
    warnings += check_held_out(candidate.quantized_by, traces, candidate.cuts)
    loaded = load_for_replay(drafts, traces, settings)
    warnings += check_loaded(*loaded.both, candidate, unrelated=unrelated)
    warnings += _target_warnings(optional_path(settings.target), traces) + _text_warnings(traces)
    warnings += other_policy_warnings(candidate.quantized_by, policy.name)
    warnings += _served_warnings(settings.served)
    replays = replay_loaded(loaded, settings)
    background = Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        head_agreement=head_agreement(traces, loaded.tables),
        expected_baseline=settings.expect_baseline,
        unrelated=unrelated,
        unrecorded=not unrelated and not same and not candidate.is_recorded,
        algorithm_to_try=algorithm_to_try(candidate.quantized_by),
        recipes_to_try=recipes_to_try(candidate.quantized_by),
        cut=bool(candidate.cuts),
        quantized=candidate.quantized or not candidate.cuts,
        warnings=warnings,
    )
    report = judge(replays[0], replays[1], policy, look=look, background=background)
    folders = (baseline, candidate)
    return OnTraces(replays=replays, report=report, background=background, folders=folders)


def other_policy_warnings(candidate: "QuantizedProvenance | None", policy: str) -> tuple[str, ...]:
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


def algorithm_to_try(candidate: "QuantizedProvenance | None") -> str | None:
    """What may round the candidate's four bits better than it was done."""
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.number.is_fp8 else "gptq"


def recipes_to_try(candidate: "QuantizedProvenance | None") -> tuple[str, ...]:
    """Built-in recipes with which the candidate may lose less: its own calibrated, then FP8."""
    if candidate is None or candidate.recipe.weights.number.is_fp8:
        return ()
    name = candidate.recipe.name
    gpu = next((gpu for start, gpu in _GPUS.items() if name.startswith(start)), "h200")
    return tuple(filter(None, (calibrated(name), aliases()[gpu])))


def _text_warnings(traces: "TraceFolder") -> tuple[str, ...]:
    """Text that no user is served."""
    if not traces.manifest.ignore_eos:
        return ()
    return (
        "the traces continue after the target's end of text (record --ignore-eos); text there often"
        " repeats itself, and a draft guesses it more easily than answers",
    )


def _target_warnings(target: Path | None, traces: "TraceFolder") -> tuple[str, ...]:
    """The tables of a target that was not recorded make another draft of both."""
    from ...calibration.traces.trace_folder import file_sha256

    recorded = traces.manifest.target
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
