"""Two measurements by another tool under the gate: the same ladder, requests paired by prompts."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from ...recipes.errors import GateError, short
from ..counting.acceptance_counts import pooled
from ..counting.draft_counts import CountedDraft, TextFigures
from ..foreign.foreign_measurement import ForeignMeasurement, ForeignPair, ForeignRequest
from ..judging.advice import Background
from ..judging.figures import ServedFigures
from ..judging.judgement import GateReport, judge_counts
from ..judging.policy import Look, Policy
from .common_steps import common_length, num_missing
from .measurement_pair import num_same_outputs, other_target, unaccounted, unequal
from .served_gate import SERVED, drawn_or_greedy

MOST_NAMED = 5
"""Most different settings of requests that a sentence names."""
FOREIGN = dataclasses.replace(
    SERVED,
    both_again="Measure both drafts on the same prompts, with one tool, engine, K and settings.",
    count="the same tool, with the same options",
    longer="ask for longer outputs, or serve a smaller K",
)


def judge_foreign(
    runs: ForeignPair,
    policy: Policy,
    *,
    look: Look | None,
    background: Background,
) -> GateReport:
    """Compare runs of one tool, with the BF16 draft and the quantized one; GateError: one run."""
    baseline, candidate = runs.baseline, paired(runs.baseline, runs.candidate)
    for run in (baseline, candidate):
        if not any(sum(request.histogram) for request in run.requests):
            raise GateError(run.name, "has no verify step", fix="measure a server that drafts")
    incomparable = incomparability(baseline, candidate)
    if not incomparable and not background.unrelated and _same(baseline, candidate):
        raise GateError(
            candidate.name,
            f"has the same outputs and verify steps as {baseline.name}: it is the same run, or the"
            " same draft was measured twice",
            fix="give the run of the BF16 draft, then that of the quantized draft",
        )
    missing = () if incomparable else tuple(not_compared(baseline, candidate))
    known = dataclasses.replace(
        background,
        not_compared=(*background.not_compared, *(what for what, _ in missing)),
        to_compare=tuple(dict.fromkeys((*background.to_compare, *(how for _, how in missing)))),
        warnings=(*background.warnings, *warnings_of(baseline)),
    )
    report = judge_counts(
        _counted(baseline),
        _counted(candidate),
        policy,
        incomparable=incomparable,
        estimand=_estimand(baseline),
        wording=FOREIGN,
        look=look,
        background=known,
    )
    return dataclasses.replace(report, served=_figures(baseline, candidate, report))


def paired(first: ForeignMeasurement, second: ForeignMeasurement) -> ForeignMeasurement:
    """The second run in the order of the first; unchanged if it has other prompts."""
    firsts, seconds = _numbered(first), _numbered(second)
    if firsts.keys() != seconds.keys():
        return second
    requests = [
        dataclasses.replace(seconds[key], id=r.id, cluster=r.cluster) for key, r in firsts.items()
    ]
    return dataclasses.replace(second, requests=tuple(requests))


def _numbered(run: ForeignMeasurement) -> dict[tuple[str, int], ForeignRequest]:
    seen, numbered = Counter[str](), {}
    for request in run.requests:
        numbered[request.prompt_sha256, seen[request.prompt_sha256]] = request
        seen[request.prompt_sha256] += 1
    return numbered


def incomparability(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> str:
    """Why no draft can be judged by two paired runs; empty if nothing prevents it."""
    # If nothing says that tokens were drawn, outputs must agree like greedy ones.
    greedy = not baseline.temperature and _have_outputs(baseline, candidate)
    return (
        _unlike(baseline, candidate)
        or _unaccounted(baseline, candidate)
        or (other_target(*_parting(baseline, candidate)) if greedy else "")
    )


def _unlike(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> str:
    both = (baseline, candidate)
    sizes = [run.num_draft_tokens for run in both]
    if difference := unequal(sizes, _differing(baseline, candidate)):
        return difference
    counts = [len(run.requests) for run in both]
    if counts[0] != counts[1]:
        return f"the two runs have {counts[0]} and {counts[1]} requests"
    prompts = [[request.prompt_sha256 for request in run.requests] for run in both]
    if prompts[0] != prompts[1]:
        return f"the two runs hold different prompts (paired by {baseline.paired_by})"
    return ""


def _differing(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> Iterator[str]:
    for key in ("tool", "engine", "version", "model"):
        first, second = getattr(baseline, key), getattr(candidate, key)
        if first != second:
            yield f"{key}: {first or 'not said'}, {second or 'not said'}"
    requests = zip(baseline.requests, candidate.requests, strict=False)
    named = (d for first, second in requests for d in _unequal(first.settings, second.settings))
    yield from [*dict.fromkeys(named)][:MOST_NAMED]


def _unequal(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[str]:
    for key in sorted({*first, *second}):
        if first.get(key) != second.get(key):
            yield f"{key}: {short(first.get(key))}, {short(second.get(key))}"


def _unaccounted(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> str:
    """The run whose verify steps do not match its outputs, as far as their lengths are known."""
    both = (baseline, candidate)
    return "" if not all(run.has_lengths for run in both) else unaccounted([
        (run.name, [num_missing(request.num_output_tokens or 0, request.counts, cut=False)
                    for request in run.requests], [request.counts for request in run.requests])
        for run in both
    ])  # fmt: skip


def not_compared(
    baseline: ForeignMeasurement, candidate: ForeignMeasurement
) -> Iterator[tuple[str, str]]:
    """What a verdict needs and these files lack, and how their tool can record it."""
    for run in (baseline, candidate):
        if not run.has_outputs:
            yield (
                f"whether both servers ran one target ({run.name} keeps no texts of outputs)",
                f"Keep the texts of outputs, and measure again: {run.to_keep_outputs}.",
            )
        if not run.has_outputs and run.temperature is None:
            yield (
                f"the temperature ({run.name} does not say it, and has no texts that show it)",
                "Send the temperature with every request, and measure again.",
            )
        if run.has_outputs and run.temperature and not run.model:
            yield (
                f"whether both servers ran one target ({run.name} does not name it, and texts"
                " that were sampled do not show it)",
                "Measure at temperature 0, or with a tool that names the model of the server.",
            )
        if not run.has_lengths:
            yield (
                f"whether verify steps account for the outputs ({run.name} has no numbers of"
                " output tokens)",
                "Let the server report its usage (completion tokens), and measure again.",
            )


def warnings_of(baseline: ForeignMeasurement) -> Iterator[str]:
    """What a reader must know about runs of its tool."""
    tool = baseline.tool
    yield from (
        f"{tool}: no record of which draft was served, nor of its tensors, so nothing shows that"
        " the candidate was quantized from the baseline",
        f"{tool}: no record of the server's acceptance rule, so settings that change the target's"
        " outputs would go unnoticed (see `draftquant parity`)",
        f"requests were paired by {baseline.paired_by}, and whole outputs are compared, with"
        " wider bounds than measurements of 'draftquant measure' have",
    )


def _same(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> bool:
    """True if every request has equal verify steps, and equal text where texts are kept."""
    both = zip(baseline.requests, candidate.requests, strict=True)
    return all(
        (first.histogram, first.output) == (second.histogram, second.output)
        for first, second in both
    )


def _parting(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> tuple[int, float]:
    """Outputs that part, and the tokens before that, of all: the share of common characters."""
    both = list(zip(baseline.requests, candidate.requests, strict=True))
    parted = sum(first.output != second.output for first, second in both)
    return parted, sum(_common_tokens(first, second) for first, second in both)


def _common_tokens(first: ForeignRequest, second: ForeignRequest) -> float:
    texts = [(request.output or "").encode() for request in (first, second)]
    share = common_length(*texts) / max(1, *map(len, texts))
    return share * max(_num_tokens(first), _num_tokens(second))


def _num_tokens(request: ForeignRequest) -> int:
    """Tokens of its output; if they are not counted, those of its verify steps and prefill's."""
    known = request.num_output_tokens
    return 1 + round(request.counts.num_emitted_tokens) if known is None else known


def _have_outputs(baseline: ForeignMeasurement, candidate: ForeignMeasurement) -> bool:
    return baseline.has_outputs and candidate.has_outputs


def _counted(run: ForeignMeasurement) -> CountedDraft:
    prompts = tuple(request.prompt for request in run.requests)
    return CountedDraft(
        name=run.name,
        num_draft_tokens=run.num_draft_tokens,
        prompts=prompts,
        counts=pooled((prompt.counts for prompt in prompts), run.num_draft_tokens),
        text=TextFigures(mean_token_probability=None, num_near_duplicates=_num_same_outputs(run)),
    )


def _num_same_outputs(run: ForeignMeasurement) -> int:
    told = (request for request in run.requests if request.output is not None)
    return num_same_outputs((request.output, request.prompt_sha256) for request in told)


def _figures(
    baseline: ForeignMeasurement, candidate: ForeignMeasurement, report: GateReport
) -> ServedFigures:
    known = report.change is not None and _have_outputs(baseline, candidate)
    parted, common = _parting(baseline, candidate) if known else (0, 0.0)
    tokens = sum(_num_tokens(request) for run in (baseline, candidate) for request in run.requests)
    return ServedFigures(
        engine=baseline.engine,
        version=baseline.version,
        model=baseline.model or "not known",
        tool=baseline.tool,
        concurrency=None,
        estimator="whole outputs",
        identical_share=1 - parted / len(baseline.requests) if known else None,
        common_share=min(1.0, 2 * common / tokens) if known else None,
        baseline_mean_acceptance_length=report.baseline.mean_acceptance_length,
        candidate_mean_acceptance_length=report.candidate.mean_acceptance_length,
        whole_change=report.change,
        common_change=None,
        repeated_8gram_share=None,
        mean_token_probability=None,
        num_near_duplicates=_num_same_outputs(baseline),
    )


def _estimand(run: ForeignMeasurement) -> str:
    where = f"speculative decoding by {' '.join(filter(None, (run.engine, run.version)))}"
    how = f"{where}, measured by {run.tool}"
    if run.temperature is None:
        return f"{how} at a temperature that it does not record"
    return drawn_or_greedy(how, run.temperature)
