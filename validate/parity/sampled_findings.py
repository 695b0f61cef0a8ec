"""Whether drawn output is the target's own distribution: how likely it is to the target.

Texts that are drawn differ from run to run, but speculation must not change how likely the target
finds them on average. One that accepts too much writes unlikely tokens; one that verifies greedily
whatever the temperature (SGLang on ROCm does by default) writes too likely ones. So the mean
log-probability per token, prompt by prompt, may change in neither direction.
"""

import dataclasses
from collections.abc import Sequence

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.traces.prompt_trace import prompt_sha256
from ..counting.jackknife import pooled_mean
from ..errors import ParityError
from ..measure.measurement import Measurement, RequestRecord, differences
from .finding import Finding
from .limits import MIN_PROMPTS, Limits, judged
from .text_scores import Scores, Text

SCORED_AS_SERVED = 0.25
"""Nats, per token on average: a target that is run elsewhere scores a text as its server did within
this. A shipped pair served by vLLM 0.32 and scored by transformers in float32: 0.007."""


def texts_of(run: Measurement, prompts: Sequence[Prompt]) -> list[Text]:
    """What a run was given and wrote, of the prompts that got any output.

    Args:
        prompts: that it was measured with, in any order.

    Raises:
        ParityError: a prompt of the run is not there.
    """
    by_hash = {prompt_sha256(prompt.token_ids): prompt.token_ids for prompt in prompts}
    lacking = [record.id for record in run.records if record.prompt_sha256 not in by_hash]
    if lacking:
        raise ParityError(
            run.name,
            f"{len(lacking)} of its prompts are not in the prompt file, such as {lacking[0]}",
            fix="give the --prompts that it was measured with, and its --tokenizer",
        )
    return [
        Text(id=record.id, prompt=by_hash[record.prompt_sha256], output=record.token_ids)
        for record in run.records
        if record.token_ids
    ]


def check_sampled(plain: Measurement, speculative: Measurement) -> None:
    """Check, before anything is scored, that two runs can be compared.

    Raises:
        ParityError: they were not asked the same, greedily, or not with and without a draft.
    """
    where = f"{plain.name}, {speculative.name}"
    found = differences(plain.setup, speculative.setup)
    if found:
        raise ParityError(where, f"were measured with different settings: {'; '.join(found)}",
                          fix="measure the same prompts, target, engine and sampling")  # fmt: skip
    if plain.setup.asked.temperature == 0:
        raise ParityError(where, "outputs were chosen greedily",
                          fix="measure at a --temperature, or use 'parity divergence'")  # fmt: skip
    if plain.setup.speculation is not None or speculative.setup.speculation is None:
        drafts = plain if plain.setup.speculation else speculative
        what = "uses a draft, but stands first" if drafts is plain else "drafts nothing"
        raise ParityError(drafts.name, what, fix="give PLAIN, then SPECULATIVE")


def sampled_finding(
    plain: Measurement,
    speculative: Measurement,
    scores: tuple[Sequence[Scores], Sequence[Scores]],
    *,
    max_logprob_drop: Limits,
    confidence: float,
    min_prompts: int = MIN_PROMPTS,
) -> Finding:
    """Judge the change of the mean log-probability per token, paired by prompt.

    Args:
        plain: without a draft.
        scores: of the texts of each, in the order of `texts_of`.
        max_logprob_drop: nats per token, in both directions.

    Raises:
        ParityError: fewer than one prompt got output from both.
    """
    ours, theirs = (
        _means(run, some) for run, some in zip((plain, speculative), scores, strict=True)
    )
    common = [sha256 for sha256 in ours if sha256 in theirs]
    if not common:
        raise ParityError(speculative.name, "no prompt has output in both runs",
                          fix="measure with a larger --max-new-tokens")  # fmt: skip
    found = pooled_mean(
        [theirs[sha256] - ours[sha256] for sha256 in common],
        [1.0] * len(common),
        confidence=confidence,
    )
    doubt = _doubt(plain, scores[0])
    lossy = speculative.setup.speculation.lossy if speculative.setup.speculation else ()
    if lossy and not doubt:
        doubt = f"the server accepts lossily ({', '.join(lossy)})"
    finding = judged(
        "sampled",
        f"{speculative.name}: change of log-probability per token",
        found,
        max_logprob_drop,
        min_clusters=min_prompts,
        details=[
            {
                "plain": sum(ours[sha256] for sha256 in common) / len(common),
                "speculative": sum(theirs[sha256] for sha256 in common) / len(common),
                "prompts": len(common),
                "temperature": plain.setup.asked.temperature,
            }
        ],
    )
    return finding if not doubt else _anomalous(finding, doubt)


def _means(run: Measurement, scores: Sequence[Scores]) -> dict[str, float]:
    """Of each distinct prompt: the mean over its tokens, and over its copies."""
    found: dict[str, list[float]] = {}
    for record, own in zip(_with_output(run), scores, strict=True):
        found.setdefault(record.prompt_sha256, []).append(sum(own) / len(own))
    return {sha256: sum(means) / len(means) for sha256, means in found.items()}


def _doubt(plain: Measurement, scores: Sequence[Scores]) -> str:
    """Where the server's log-probabilities are of the same distribution, they must be the same."""
    asked = plain.setup.asked
    if (asked.temperature, asked.top_p, asked.top_k) != (1, 1, 0):
        return ""
    apart: list[float] = []
    for record, own in zip(_with_output(plain), scores, strict=True):
        apart += [abs(a - b) for a, b in zip(record.token_logprob or (), own, strict=False)]
    mean = sum(apart) / len(apart) if apart else 0.0
    if mean <= SCORED_AS_SERVED:
        return ""
    return (
        f"the scores of the plain run's tokens differ by {mean:.2f} nats on average from those that"
        " its own server reported: they come from another target, or from a very different dtype"
    )


def _anomalous(finding: Finding, doubt: str) -> Finding:
    reason = f"{doubt[0].upper()}{doubt[1:]}; {finding.reason}"
    return dataclasses.replace(finding, verdict="ANOMALOUS", reason=reason)


def _with_output(run: Measurement) -> list[RequestRecord]:
    return [record for record in run.records if record.token_ids]
