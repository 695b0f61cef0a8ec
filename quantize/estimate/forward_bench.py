"""Times that `vllm bench forward` measured, which `estimate` uses instead of its roofline.

One run times cases: exact batches as one CUDA graph each. `--output-json` lists them with their
median; with `--exclude-drafter` that is the target's forward pass; otherwise all drafting follows
it, with every drafted token accepted. Neither includes sampling and rejection, so the difference of
two runs is the drafting of one verify step. Source: vLLM 0.33 `benchmarks/forward/main.py:227-290`,
`capture.py:137-170`, `speculator.py`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import EstimateError, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_json, reading
from .work import VerifyStep

TARGET = "target"
"""The name of the run without a drafter, beside the names of recipes."""
_AGAIN = "give what 'vllm bench forward --output-json FILE' of vLLM 0.33 wrote"
_LENGTHS_DIFFER = 0.1
"""Share by which the mean KV length of a case may differ from the context asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """One batch of a run.

    Attributes:
        requests: query length, KV length and drafted tokens of each sequence.
        seconds: median over all replays; spread: of the samples' medians, as a share of it.
        drafts: whether the drafter's passes are included.
    """

    name: str
    requests: tuple[tuple[int, int, int], ...]
    seconds: float
    spread: float
    drafts: bool

    @property
    def mean_context(self) -> float:
        """KV positions of a sequence before the step, on average."""
        return sum(kv - query for query, kv, _ in self.requests) / len(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Times on one GPU: of the target's verify step, and of drafting with each form of the draft.

    Attributes:
        target: the verify step. runs: name of a recipe, or the draft's dtype -> with its drafting.
    """

    target: TimedCase
    runs: Mapping[str, TimedCase]

    def drafting(self, name: str) -> float | None:
        """Seconds of drafting for one verify step; None = this form was not timed."""
        run = self.runs.get(name)
        return None if run is None else run.seconds - self.target.seconds

    def in_words(self) -> Iterator[str]:
        """What was measured, one sentence each."""
        yield (
            f"measured by vllm bench forward: a verify step of {1e6 * self.target.seconds:,.1f} µs,"
            f" {self.target.mean_context:,.0f} positions per sequence on average; CUDA graphs,"
            " every drafted token accepted, sampling not included"
        )
        for name, run in self.runs.items():
            spread = max(run.spread, self.target.spread)
            yield (
                f"{name}: measured {1e6 * run.seconds:,.1f} µs with its drafting, medians of"
                f" samples spread {spread:.2%}; a single draft step stays a roofline"
            )


def read_measured(
    given: Sequence[str], names: Collection[str], served: VerifyStep
) -> MeasuredTimes | None:
    """The times in the files of `NAME=FILE`, for the estimated verify step; None = no files.

    Raises:
        EstimateError: a name that is not a form of this draft; a file that is not an output of the
            benchmark, or has not exactly one case of this shape; times of other batches than the
            target's; drafting that takes no time.
    """
    runs: dict[str, TimedCase] = {}
    for each in given:
        name, _, path = each.partition("=")
        if name not in (TARGET, *names) or not path:
            known = ", ".join((TARGET, *names))
            what = f"expected NAME=FILE with a name of {known}, got {short(each)}"
            raise EstimateError("--forward", what, fix=f"call the run without a drafter {TARGET}")
        if name in runs:
            raise EstimateError("--forward", f"{name} is given twice", fix="leave one out")
        drafts = name != TARGET
        cases = [case for case in _cases(Path(path)) if case.drafts == drafts]
        runs[name] = _chosen(Path(path), cases, served, drafts=drafts)
    if not runs:
        return None
    if TARGET not in runs:
        fix = f"add {TARGET}=FILE of a run with --exclude-drafter"
        raise EstimateError("--forward", "no run of the target alone", fix=fix)
    target = runs.pop(TARGET)
    for name, run in runs.items():
        if run.requests != target.requests:
            what = f"{name} was timed with other KV lengths than the {TARGET}"
            raise EstimateError("--forward", what, fix="run both with one --case and one --seed")
        if run.seconds <= target.seconds:
            what = (
                f"{name} with its drafting took {1e6 * run.seconds:,.1f} µs, the {TARGET} alone"
                f" {1e6 * target.seconds:,.1f} µs"
            )
            raise EstimateError("--forward", what, fix="time both on one idle GPU")
    return MeasuredTimes(target=target, runs=runs)


def _chosen(
    path: Path, cases: Sequence[TimedCase], served: VerifyStep, *, drafts: bool
) -> TimedCase:
    """The one case with this many sequences, which verify K drafted tokens each."""
    k, context, _, concurrency = served
    wanted = [(k + 1, k)] * concurrency
    found = [case for case in cases if [(q, d) for q, _, d in case.requests] == wanted]
    shape = f"NAME={concurrency}*{k + 1}@{context + k + 1}:{k}"
    if len(found) != 1:
        scope = "with a drafter" if drafts else "with --exclude-drafter"
        what = (
            f"expected one case {scope} of {concurrency} sequences with {k} drafted tokens each,"
            f" got {len(found)} of {len(cases)}"
        )
        raise EstimateError(path, what, fix=f"time --case {shape}")
    mean = found[0].mean_context
    if abs(mean - context) > _LENGTHS_DIFFER * context:
        what = f"its sequences have {mean:,.0f} positions on average, and {context:,} are estimated"
        raise EstimateError(path, what, fix=f"give --context {mean:.0f}, or time --case {shape}")
    return found[0]


def _cases(path: Path) -> list[TimedCase]:
    with reading(path, EstimateError, _AGAIN):
        value = parse_json(read_text(path))
    try:
        return [_case(each) for each in value]
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        what = f"it is no output of vllm bench forward: {type(exc).__name__}: {exc}"
        raise EstimateError(path, what, fix=_AGAIN) from exc


def _case(value: Any) -> TimedCase:
    rank = value["ranks"][0]
    scopes = {"target_only": False, "target_and_drafter": True}
    requests = tuple(
        (_whole(one["query_len"]), _whole(one["kv_len"]), _whole(one["num_draft_tokens"], 0))
        for one in value["requests"]
    )
    if not requests or any(kv < query for query, kv, _ in requests):
        raise ValueError("a case without sequences, or with a KV length below its query's")
    return TimedCase(
        name=str(value["case"]),
        requests=requests,
        seconds=_above_0(value["median_us"]) / 1e6,
        spread=float(rank["latency_us"]["sample_spread_pct"]) / 100,
        drafts=scopes[rank["timing_scope"]],
    )


def _whole(value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"expected a whole number of at least {least}, got {short(value)}")
    return value


def _above_0(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"expected microseconds above 0, got {short(value)}")
    return float(value)
