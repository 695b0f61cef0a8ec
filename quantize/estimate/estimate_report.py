"""`EstimateReport`: an estimate under the settings by which it is read, as plain data too.

Every assumption that a figure rests on is one of `assumptions`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from typing_extensions import override

from ...recipes.brief import Brief, counted
from ..gpus import Gpu
from .context_lengths import AtContext
from .draft_length import LengthAdvice, for_tensorrt_llm, for_vllm, schedule
from .step_estimate import BreakEven, Candidate, Estimate
from .target import MeasuredStep, Target
from .work import Machine, Part, Pass, Round

PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Who serves one form on one GPU.

    Attributes:
        folder: engines that load a folder in this form, by `check`.
        online: vLLM makes its head while it loads the draft without it.
        online_problem: why vLLM does not; None where it does, or where no head is in fewer bits.
    """

    folder: Sequence[str] = ()
    online: bool = False
    online_problem: str | None = None

    @property
    def engines(self) -> Sequence[str]:
        """All of them, each once."""
        return tuple(dict.fromkeys((*self.folder, *(("vllm",) if self.online else ()))))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EstimateReport(Brief):
    """An estimate, with the settings that it was made for.

    Attributes:
        estimate: bytes and operations of the unquantized draft and of every candidate.
        serving: name of a form -> GPU -> who serves it there; not of the draft as it is.
        refused: name of a built-in recipe that does not fit this draft -> the reason.
        machines: the GPUs, with the share of their data sheet that kernels reach.
        concurrencies: how many sequences are served at once, one estimate for each.
        target: the time of the target's verify step; None where it is not known.
        allowed_drop: the relative loss of acceptance length that the gate's release policy allows.
        context_by_config: the context is shorter than usual, because a config.json allows no more.
        lengths: how many tokens to draft, where acceptance was measured.
    """

    estimate: Estimate
    serving: Mapping[str, Mapping[str, Serving]]
    refused: Mapping[str, str]
    machines: tuple[Machine, ...]
    concurrencies: tuple[int, ...]
    target: Target | None
    allowed_drop: float
    context_by_config: bool = False
    by_context: tuple[AtContext, ...] = ()
    lengths: tuple[LengthAdvice, ...] = ()

    @property
    def loaded_by(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """Name of a recipe -> GPU -> the engines that load its result there."""
        return {
            one.name: {gpu: each.folder for gpu, each in self.serving[one.name].items()}
            for one in self.estimate.candidates[1:]
            if not one.hypothetical
        }

    def break_even(self, candidate: Candidate, machine: Machine) -> tuple[BreakEven, ...]:
        """Of a candidate on a machine; nothing where the target is not known."""
        if self.target is None:
            return ()
        return self.estimate.break_even(candidate, machine, self.target, self.concurrencies)

    def lengths_of(self, candidate: Candidate, gpu: Gpu) -> tuple[LengthAdvice, ...]:
        """How many tokens a candidate should draft on a GPU, by concurrency."""
        asked = candidate.name, gpu.name
        return tuple(one for one in self.lengths if (one.form, one.gpu) == asked)

    def engines(self, candidate: Candidate, gpu: Gpu) -> Sequence[str]:
        """The engines that serve it there."""
        return self.serving.get(candidate.name, {}).get(gpu.name, Serving()).engines

    @override
    def brief(self) -> Mapping[str, object]:
        recipes = counted(len(self.loaded_by), "recipe")
        return {
            "recipes": f"{recipes} on {counted(len(self.machines), 'GPU')}",
            "K": self.estimate.num_draft_tokens,
            "do not fit": len(self.refused) or None,
            "target": "known" if self.target else "not known: no break-even acceptance",
        }


def multiplied_as(whole: Round) -> str:
    """What the linears of the MLP are multiplied as; those of the attention may be kept besides."""
    return ", ".join(dict.fromkeys(w.precision for w in whole.step.works if w.part == "mlp"))


def online_heads(report: EstimateReport) -> Iterator[str]:
    """What vLLM makes of each head that is asked for while it loads the draft, a sentence each."""
    uncut = [one for one in report.estimate.candidates if one.form.rows is None]
    for head in dict.fromkeys(one.form.head for one in uncut if one.form.head):
        found = [report.serving[one.name] for one in uncut if one.form.head == head]
        problems = dict.fromkeys(
            each.online_problem or f"vLLM 0.33 serves it on {gpu} (draft_lm_head_quantization)"
            for of_one in found
            for gpu, each in of_one.items()
        )
        yield f"{head.upper()} head made while loading: " + "; ".join(
            (*problems, "SGLang 0.5.23 makes none")
        )


def assumptions(report: EstimateReport) -> Iterator[str]:
    """All that the figures rest on, a sentence each."""
    estimate, share = report.estimate, report.machines[0].efficiency
    k = estimate.num_draft_tokens
    if estimate.draft.geometry.block_size is None:
        yield (
            f"drafting is, for each verify step, fc and a first step over the {k + 1} positions of"
            f" each sequence that were verified, then {k - 1} steps over one position; the head"
            " proposes one token a step"
        )
    else:
        yield (
            f"drafting is, for each verify step, fc and the keys and values of the {k + 1}"
            " positions of each sequence that were verified, then one pass over a block of"
            f" {k + 1}, and the head reads {k} of them"
        )
        if any(one.round.launches for one in estimate.candidates):
            yield _apart(report)
    yield (
        "weights are read once per step for all sequences, with scales and zero points, and nothing"
        " stays in a cache on chip"
    )
    if estimate.reads_shared_head:
        yield "the head is the target's, in BF16"
    by = ", as many as config.json allows" if report.context_by_config else ""
    yield (
        f"the KV cache is BF16{_in_fp8(report)}, {estimate.context:,} positions of each"
        f" sequence{by}; reading it counts, writing it does not"
    )
    yield (
        f"each linear takes the longer of bytes / bandwidth and FLOP / dense peak, at {share:.0%}"
        " of the data sheet (--efficiency)"
    )
    yield (
        "weights whose inputs stay in 16 bits, and formats that a GPU has no unit for, are widened"
        " as they are read and multiplied as bf16; but FP4 without a unit on AMD is emulated: its"
        " weights are written out in 16 bits and read again"
    )
    if estimate.tp > 1:
        yield (
            f"{estimate.tp} GPUs share draft and target; fc, norms, latent projections and MLA's"
            " cache are on each of them, and what they say to each other takes no time"
        )
    yield (
        "launches, sampling and scheduling cost every draft alike: measured, they are part of"
        " --target-step-ms"
    )
    if report.target is not None:
        yield f"the target: {report.target}; speed is acceptance length / (drafting + verify step)"
        yield (
            f"gate --policy release lets {report.allowed_drop:.2%} be lost: below that break-even,"
            " a PASS alone does not prove a gain"
        )
    if report.lengths:
        yield (
            "acceptance is as measured (--acceptance); a form without counts of its own is taken to"
            f" accept what {estimate.baseline.name} does, about the most it can; bounds are"
            " one-sided ones at 95%, over prompts, of acceptance alone"
        )
        if isinstance(report.target, MeasuredStep):
            yield (
                "the verify step is as measured for every K, though it verifies K + 1 tokens: the"
                " advice leans to a larger K; --target or --target-bytes follow K"
            )
    for machine in report.machines:
        gpu = machine.gpu
        peaks = ", ".join(f"{name} {peak / 1e12:,.0f}" for name, peak in gpu.peaks.items())
        yield f"{gpu.name}: {gpu.bandwidth / 1e12:g} TB/s; TFLOPS {peaks} ({gpu.source})"


def _in_fp8(report: EstimateReport) -> str:
    """Whose cache is not in BF16."""
    names = [one.name for one in report.estimate.candidates if one.form.cache is not None]
    return f" (in FP8: {'; '.join(names)})" if names else ""


def _apart(report: EstimateReport) -> str:
    """What quantized q, k and v cost a block draft beside the block."""
    most = max(one.round.launches for one in report.estimate.candidates)
    microseconds = 1e6 * report.machines[0].launch_seconds
    priced = f"each takes {microseconds:g} µs" if microseconds else "they are not priced"
    return (
        "keys and values of the verified positions: in floats, k and v of all layers in one"
        " multiplication; quantized, q, k and v of each layer whole, as vLLM 0.33 and SGLang 0.5.23"
        f" fall back, with up to {most} kernels more in vLLM ({priced}: --launch-us) and more in"
        " SGLang, which norms and rotates layer by layer then"
    )


def to_mapping(report: EstimateReport) -> dict[str, Any]:
    """The estimate as plain data: bytes, seconds, shares."""
    estimate = report.estimate
    return {
        "draft": str(estimate.draft.checkpoint.folder),
        "family": estimate.draft.family.name,
        "num_draft_tokens": estimate.num_draft_tokens,
        "context": estimate.context,
        "tp": estimate.tp,
        "efficiency": report.machines[0].efficiency,
        "launch_seconds": report.machines[0].launch_seconds,
        "parameters": estimate.parameters,
        "parts": [
            {"part": one.part, "parameters": one.parameters, "stored_bytes": one.nbytes}
            for one in estimate.parts
        ],
        "embedding_and_head_share": estimate.shared_share,
        "dropped_embedding_bytes": estimate.dropped_bytes,
        "drafts": [_candidate_mapping(report, one) for one in estimate.candidates],
        "not_planned": dict(report.refused),
        "target": None if report.target is None else str(report.target),
        "gpus": [
            {
                "name": machine.gpu.name,
                "bandwidth_bytes_per_second": machine.gpu.bandwidth,
                "peak_flop_per_second": dict(machine.gpu.peaks),
                "source": machine.gpu.source,
            }
            for machine in report.machines
        ],
        "draft_length": [
            _lengths_mapping(one, machine, report)
            for machine in report.machines
            for one in estimate.candidates
            if report.lengths_of(one, machine.gpu)
        ],
        "by_context": [
            asdict(one) | {"gpu": report.machines[0].gpu.name} for one in report.by_context
        ],
        "assumptions": list(assumptions(report)),
    }


def _lengths_mapping(
    candidate: Candidate, machine: Machine, report: EstimateReport
) -> dict[str, Any]:
    advised = report.lengths_of(candidate, machine.gpu)
    ranges = schedule(advised)
    return {
        "gpu": machine.gpu.name,
        "draft": candidate.name,
        "own_acceptance": advised[0].own,
        "by_concurrency": [
            {
                "concurrency": one.concurrency,
                "num_draft_tokens": one.best.num_draft_tokens,
                "within_bounds": list(one.within),
                "points": [
                    {**asdict(point), "tokens_per_second": point.tokens_per_second}
                    for point in one.points
                ],
            }
            for one in advised
        ],
        "vllm": for_vllm(ranges),
        "tensorrt_llm": for_tensorrt_llm(ranges),
    }


def _candidate_mapping(report: EstimateReport, one: Candidate) -> dict[str, Any]:
    return {
        "name": one.name,
        "hypothetical": one.hypothetical,
        "stored_bytes": one.stored_bytes,
        "multiplied_as": multiplied_as(one.round),
        "engines": {m.gpu.name: list(report.engines(one, m.gpu)) for m in report.machines}
        if one.name in report.serving
        else None,
        "vocab_size": one.form.rows,
        "kv_cache": one.form.cache,
        "head": one.form.head,
        "online_head": {
            name: {"served": each.online, "why_not": each.online_problem}
            for name, each in report.serving.get(one.name, {}).items()
        }
        if one.form.head
        else None,
        "step_bytes": _by_part(one.round.step),
        "round_bytes": _by_part(one.round),
        "extra_launches": one.round.launches,
        "times": [
            {
                "gpu": machine.gpu.name,
                "concurrency": concurrency,
                "step_seconds": machine.pass_seconds(one.round.step, concurrency),
                "round_seconds": machine.round_seconds(one.round, concurrency),
            }
            for machine in report.machines
            for concurrency in report.concurrencies
        ],
        "break_even": [
            {
                "gpu": machine.gpu.name,
                "concurrency": point.concurrency,
                "verify_seconds": point.verify_seconds,
                "loss": point.loss,
            }
            for machine in report.machines
            for point in report.break_even(one, machine)
        ],
    }


def _by_part(read: Pass | Round) -> dict[str, int]:
    """Bytes at concurrency 1, of every part that is read at all."""
    found = {part: read.nbytes(1, part) for part in PARTS}
    return {part: nbytes for part, nbytes in found.items() if nbytes}
