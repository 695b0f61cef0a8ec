"""Two drafts replayed on the same traces and judged: what `gate` does with traces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ..quantize.files.checkpoint import CONFIG_FILE
from ..quantize.files.hub import Reference, folder_of
from ..recipes.errors import GateError
from ..recipes.formats import AS_STORED, ServedForm
from ..recipes.library import aliases, calibrated
from ..recipes.regular_file import AnyPath, optional_path
from .frame import arguments
from .frame.settings import Argument, Option
from .loaded_drafts import load_for_replay
from .verbs.replay import OnTracesSettings, replay_loaded

if TYPE_CHECKING:
    from ..calibration.traces.trace_folder import TraceFolder
    from ..quantize.files.provenance import QuantizedProvenance
    from ..validate.counting.draft_counts import DraftReplay
    from ..validate.foreign.foreign_measurement import ForeignPair
    from ..validate.judging.advice import Background
    from ..validate.judging.candidate_origin import DraftFolder
    from ..validate.judging.judgement import GateReport
    from ..validate.judging.policy import Look, Policy
    from ..validate.measure.measurement import Measurement
    from ..validate.parity.finding import Finding, ParityReport

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
    from ..calibration.passes.on_traces import open_with_warnings
    from ..calibration.traces.trace_info import head_agreement
    from ..validate.judging.advice import Background
    from ..validate.judging.candidate_origin import (
        DraftFolder,
        check_folders,
        check_held_out,
        check_loaded,
    )
    from ..validate.judging.judgement import judge
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
    from ..calibration.traces.trace_folder import file_sha256

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


# ---- What the gate is given beside traces, or instead of them: measurements of servers, and parity


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is judged beside traces, or instead of them.

    Attributes:
        runs: of the BF16 and of the quantized draft. again: the BF16 draft's, measured once more.
        parity: reports of 'draftquant parity'.
    """

    runs: "tuple[Measurement, Measurement] | ForeignPair | None"
    again: "Measurement | None"
    parity: "tuple[ParityReport, ...]"

    @property
    def nothing(self) -> bool:
        """Traces alone are judged."""
        return self.runs is None and not self.parity

    @property
    def findings(self) -> "tuple[Finding, ...]":
        """Of all reports of parity."""
        return tuple(one for report in self.parity for one in report.findings)

    @property
    def num_draft_tokens(self) -> int | None:
        """K that was served; None where nothing was, or no draft."""
        if self.runs is None:
            return None
        if isinstance(self.runs, tuple):
            speculation = self.runs[0].setup.speculation
            return None if speculation is None else speculation.num_draft_tokens
        return self.runs.baseline.num_draft_tokens


def read_measured(
    measured: Sequence[AnyPath] | None, baseline_again: AnyPath | None, parity: Sequence[AnyPath]
) -> Measured:
    """Read the files that the options of the same names give.

    Raises:
        GateError: a second measurement of the baseline is given beside files of another tool.
        MeasureError: a measurement cannot be read. ParityError: a report of parity cannot.
    """
    from ..validate.foreign.foreign_formats import is_foreign, read_foreign_pair
    from ..validate.measure.measurement_file import read_measurement
    from ..validate.parity.finding import read_parity

    runs: tuple[Measurement, Measurement] | ForeignPair | None = None
    again = None
    if measured:
        baseline, candidate = map(Path, measured)
        if is_foreign(baseline, candidate):
            runs = read_foreign_pair(baseline, candidate)
        else:
            runs = read_measurement(baseline), read_measurement(candidate)
    if baseline_again:
        if not isinstance(runs, tuple):
            raise GateError(
                "--baseline-again",
                "shows the server's noise between measurements of 'draftquant measure'; these are"
                " of another tool",
                fix="leave it out, or measure all three with 'draftquant measure'",
            )
        again = read_measurement(Path(baseline_again))
    reports = tuple(read_parity(Path(path)) for path in parity)
    return Measured(runs=runs, again=again, parity=reports)


# ---- Drafts that are named beside measurements and parity: what was measured has to be of them
#
# A measurement says which draft its server ran by the hash of its tensors (`measure --draft`), and a
# report of parity which drafts it looked at. Where nothing says it, two measurements alone do not
# release a draft that is named: they could be of any other.

_MEASURE_AGAIN = (
    "Measure each server with draftquant measure --draft, which records whose tensors it runs; or"
    " give traces of the target too (--traces), on which both drafts are replayed."
)


def named_folders(settings: GateOnTracesSettings) -> "tuple[DraftFolder, ...]":
    """The two drafts that are named without traces; none where none are.

    Raises:
        DraftQuantError: one of them cannot be read, or was edited after it was written.
    """
    from ..validate.judging.candidate_origin import DraftFolder

    if settings.traces is not None:
        return ()
    return tuple(DraftFolder.read(folder_of(name)) for name in settings.references)


def background_of_named(
    settings: GateOnTracesSettings,
    folders: "Sequence[DraftFolder]",
    measured: Measured,
    policy: str,
) -> "Background":
    """What is known of two drafts that are judged by measurements alone.

    Args:
        settings: which drafts are compared on purpose, and what is expected of the baseline.
        folders: baseline and candidate; none where none are named.
        measured: what their servers did.
        policy: name of the set of limits.

    Raises:
        GateError: the candidate was not quantized from the baseline, or one of the prompts made it.
    """
    from ..validate.judging.advice import Background
    from ..validate.judging.candidate_origin import check_folders, check_held_out_measured

    unrelated = settings.unrelated
    if not folders:
        return Background(expected_baseline=settings.expect_baseline, unrelated=unrelated)
    baseline, candidate = folders
    warnings = check_folders(baseline, candidate, unrelated=unrelated)
    if not unrelated and not candidate.is_recorded:
        warnings += (
            "without traces the candidate's weights are not compared with the baseline's"
            " (`draftquant verify QUANT --against BF16 --foreign` compares them)",
        )
    warnings += other_policy_warnings(candidate.quantized_by, policy)
    if isinstance(measured.runs, tuple):
        prompts = [(record.id, record.prompt_sha256) for record in measured.runs[1].records]
        warnings += check_held_out_measured(
            candidate.quantized_by, prompts, measured.runs[1].name, candidate.cuts
        )
    untied = tuple(not_tied(measured))
    return Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        expected_baseline=settings.expect_baseline,
        unrelated=unrelated,
        unrecorded=not unrelated and not candidate.is_recorded,
        recipes_to_try=recipes_to_try(candidate.quantized_by),
        cut=bool(candidate.cuts),
        quantized=candidate.quantized or not candidate.cuts,
        not_compared=untied,
        to_compare=(_MEASURE_AGAIN,) if untied else (),
        warnings=warnings,
    )


def not_tied(measured: Measured) -> Iterator[str]:
    """Measurements that may be of any draft."""
    from ..validate.served.served_gate import draft_sha256

    if measured.runs is None:
        return
    if isinstance(measured.runs, tuple):
        names = [one.name for one in measured.runs if draft_sha256(one) is None]
    else:
        names = [measured.runs.baseline.name, measured.runs.candidate.name]
    for name in names:
        yield f"whether the server of {name} ran the draft that is named ({name} does not say)"


def check_parity(measured: Measured, folders: "Sequence[DraftFolder]") -> tuple[str, ...]:
    """Each report of parity is of the drafts that are judged.

    Args:
        measured: the reports, and the measurements that are judged.
        folders: that are named: baseline and candidate.

    Returns:
        What nothing verifies, in sentences without a full stop.

    Raises:
        GateError: a report is of another draft.
    """
    from ..validate.served.served_gate import draft_sha256

    runs = measured.runs if isinstance(measured.runs, tuple) else ()
    known = {*map(draft_sha256, runs), *(folder.sha256 for folder in folders)}
    warnings = []
    for report in measured.parity:
        named = [digest for digest in report.drafts_sha256 if digest is not None]
        strange = [
            digest
            for digest in named
            if digest not in known and not any(one.is_identity(digest) for one in folders)
        ]
        # Where a measurement does not say whose it is, and no draft is named, it may be that one's.
        if strange and (folders or (runs and None not in known)):
            raise GateError(
                report.path,
                f"is of another draft than those that are judged (tensors {strange[0][:12]})",
                fix="give what 'draftquant parity --report' wrote of these drafts",
            )
        if strange or not named or len(named) < len(report.drafts_sha256):
            warnings.append(
                f"nothing shows that the findings of {report.path.name} are about the drafts that"
                " are judged: it, or a measurement, does not record whose it is"
            )
    return tuple(warnings)
