"""One draft beside its target in two precisions: the same ladder, prompts paired, texts may part.

Verify steps are weighed by where the two greedy texts part, as those of two servers are.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...calibration.traces.manifest import TraceManifest
from ...calibration.traces.trace_folder import TraceFolder
from ...recipes.brief import apart
from ...recipes.errors import GateError, short
from ...recipes.packages import package_version
from ..counting.acceptance_counts import estimand, pooled
from ..counting.draft_counts import CountedDraft, DraftReplay, PromptCounts, PromptReplay
from ..judging.advice import NO_BACKGROUND, Background
from ..judging.figures import REPLAY, ServedFigures
from ..judging.judgement import GateReport, judge_counts
from ..judging.policy import REPLAYED, Look, OneDraft, Policy
from ..measure.measurement import RequestRecord
from .common_steps import PairedOutputs, pair_outputs
from .measurement_pair import MOST_PARTING_OF_PRECISIONS, CountsPair, figures_of, recounted

TARGETS = dataclasses.replace(
    REPLAYED,
    both_again="Record the same prompts beside both targets, with one tokenizer, engine and"
    " settings.",
    take="Record beside both targets",
    count="draftquant record --target TARGET --draft DRAFT --tables --prompts PROMPTS --out FRESH",
    gate="draftquant gate DRAFT --traces FRESH --traces-of-candidate FRESH2",
    join="Join the traces of each target: draftquant traces merge TRACES FRESH --out ALL",
    gate_joined="draftquant gate DRAFT --traces ALL --traces-of-candidate ALL2",
    one_draft=OneDraft(
        first="beside the first target",
        second="beside the second target",
        cause="the target's precision",
        loses="Quantize the target otherwise, for example with the layers that the draft reads in"
        " BF16 or calibrated on such prompts too, and record its traces again.\nOr train the draft"
        " further on traces of the second target.",
        breaks="Check that this target loads with the right scales, and that its traces hold the"
        " layers that the draft reads (draftquant traces info).",
        gains="Read the second target's continuations: text that repeats itself is easy to draft.",
    ),
)

MOST_REPEATS_MORE = 0.02
"""Share of repeated 8-grams that the second text may have more: such text hides a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideTarget:
    """A draft's replay, and the traces of the target beside which it was replayed."""

    replay: DraftReplay
    traces: TraceFolder

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """What a server would have told of the same steps; greedy replays alone have them.

        Up to K tokens at the end belong to steps whose outcome the traces do not hold.
        """
        texts = zip(self.replay.prompts, self.traces.token_ids(), strict=True)
        return tuple(
            _record(prompt, entry.prompt_length, tokens.tolist())
            for prompt, (entry, tokens) in texts
        )


def _record(prompt: PromptReplay, length: int, token_ids: Sequence[int]) -> RequestRecord:
    return RequestRecord(
        id=prompt.id,
        category=prompt.category,
        prompt_sha256=prompt.prompt_sha256,
        num_prompt_tokens=length,
        token_ids=tuple(token_ids[length:]),
        ended="length",
        histogram=tuple(map(int, prompt.counts.histogram)),
        accepted=prompt.steps,
        num_cut_rounds=1,
        began=0.0,
        time_to_first_token=None,
        latency=0.0,
    )


def check_targets(baseline: TraceFolder, candidate: TraceFolder) -> None:
    """GateError: the traces are of one target, or sampled, so that they say nothing of two."""
    ours, other = baseline.manifest, candidate.manifest
    digest = ours.target.weights_sha256
    if baseline.sha256 == candidate.sha256 or (digest and digest == other.target.weights_sha256):
        sha256 = (digest or "not known")[:12]
        raise GateError(
            candidate.folder,
            f"was recorded from the same target as {baseline.folder} (weights {sha256}), so there"
            " is nothing to compare",
            fix="record the same prompts beside the target in its other precision: draftquant"
            " record --target TARGET2 ...",
        )
    for traces in (baseline, candidate):
        if traces.manifest.sampled:
            temperature = traces.manifest.temperature
            raise GateError(
                traces.folder,
                f"was sampled at temperature {temperature:g}: the texts of two targets that draw"
                " their tokens part at once",
                fix="record both traces greedily (temperature 0)",
            )


def judge_targets(
    baseline: BesideTarget,
    candidate: BesideTarget,
    policy: Policy,
    *,
    look: Look | None = None,
    background: Background = NO_BACKGROUND,
) -> GateReport:
    """Compare one draft beside two targets: is the acceptance beside the second the same?"""
    both = baseline.replay, candidate.replay
    incomparable, outputs = _unlike(baseline, candidate), tuple[PairedOutputs, ...]()
    if not incomparable:
        records = zip(baseline.records, candidate.records, strict=True)
        depth = both[0].num_draft_tokens
        outputs = tuple(pair_outputs(*pair, depth, greedy=True) for pair in records)
        incomparable = _parting(outputs)
    if incomparable:
        outputs = ()
    weighted = [output.weighted() for output in outputs]
    shares = [replay.traces.repeated_8gram_share for replay in both]
    if shares[1] - shares[0] > MOST_REPEATS_MORE:
        repeats = (
            f"text that does not repeat itself ({shares[0]:.1%} of the 8-grams repeat in the first"
            f" target's text and {shares[1]:.1%} in the second's, and repeated text is easy to"
            " draft)"
        )
        how = (
            "Record prompts that were not chosen by one target's text, and read the change by"
            " identical text."
        )
        background = dataclasses.replace(
            background,
            not_compared=(*background.not_compared, repeats),
            to_compare=(*background.to_compare, how),
        )
    report = judge_counts(
        _counted(both[0], weighted, outputs, 0),
        _counted(both[1], weighted, outputs, 1),
        policy,
        incomparable=incomparable,
        estimand=estimand(0.0, None, "greedy"),
        wording=TARGETS,
        look=look,
        background=background,
    )
    confidence = look.adjusted_confidence(policy.confidence) if look else policy.confidence
    return dataclasses.replace(
        report,
        draft_sampling=both[0].draft_sampling,
        traces=both[0].traces,
        served=_figures(both[0], both[1], outputs, confidence),
    )


def _unlike(baseline: BesideTarget, candidate: BesideTarget) -> str:
    both = [_settings(beside.traces.manifest) for beside in (baseline, candidate)]
    differing = [
        f"{key}: {short(value)}, {short(both[1][key])}"
        for key, value in both[0].items()
        if value != both[1][key]
    ]
    if differing:
        return f"the two sets of traces differ in what must be equal ({'; '.join(differing)})"
    prompts = [[p.identity for p in beside.replay.prompts] for beside in (baseline, candidate)]
    if prompts[0] != prompts[1]:
        ids = [[id_ for id_, _ in identities] for identities in prompts]
        if ids[0] == ids[1]:
            return (
                "equal prompts have other tokens in the two sets of traces: another tokenizer or"
                " chat template"
            )
        return "the two sets of traces hold different prompts"
    starts = [
        [(tokens[: entry.prompt_length].tolist()) for entry, tokens in beside.traces.token_ids()]
        for beside in (baseline, candidate)
    ]
    if starts[0] != starts[1]:
        return "later turns hold the targets' own answers, which differ (record first turns alone)"
    if fault := candidate.replay.text.fault:  # the baseline's own is looked at by the ladder
        return f"{fault} in the traces of the second target"
    return ""


def _settings(manifest: TraceManifest) -> dict[str, object]:
    target, features = manifest.target, manifest.features
    return {
        "vocabulary": target.vocab_size,
        "layers": target.num_layers,
        "recorded layers": features.aux_layer_ids,
        "kind of hidden states": features.kind,
        "storage of hidden states": features.storage or "exact",
        "recorded by": manifest.recorded_by or "transformers",
        "ignore_eos": manifest.ignore_eos,
    }


def _parting(outputs: Sequence[PairedOutputs]) -> str:
    """That texts part far too often for two precisions of one target."""
    parted = sum(not output.identical for output in outputs)
    chance = parted / max(1, parted + sum(output.num_common for output in outputs))
    if chance <= MOST_PARTING_OF_PRECISIONS:
        return ""
    told = apart(chance, MOST_PARTING_OF_PRECISIONS, ".1%")
    return (
        f"the two targets differ by more than their precision: greedy texts part at {told} of the"
        f" tokens at which they could, expected {MOST_PARTING_OF_PRECISIONS:.0%} at most"
    )


def _counted(
    replay: DraftReplay, weighted: Sequence[CountsPair], outputs: Sequence[PairedOutputs], side: int
) -> CountedDraft:
    prompts: tuple[PromptCounts, ...] = replay.prompts
    if outputs:
        both = zip(prompts, weighted, outputs, strict=True)
        prompts = tuple(
            dataclasses.replace(
                recounted(prompt, counts[side]),
                contexts=output.contexts and output.contexts[side],
            )
            for prompt, counts, output in both
        )
    k = replay.num_draft_tokens
    return CountedDraft(
        name=_name(replay),
        num_draft_tokens=k,
        prompts=prompts,
        counts=pooled((prompt.counts for prompt in prompts), k),
        text=replay.text,
    )


def _name(replay: DraftReplay) -> str:
    return f"{replay.name} beside {replay.traces.target.name}"


def _figures(
    baseline: DraftReplay,
    candidate: DraftReplay,
    outputs: Sequence[PairedOutputs],
    confidence: float,
) -> ServedFigures:
    target = candidate.traces.target
    return figures_of(
        outputs,
        baseline.prompts,
        confidence,
        engine=REPLAY,
        version=package_version("draftquant"),
        model=f"{target.name} ({(target.weights_sha256 or 'not known')[:12]})",
        concurrency=None,
        estimator="weighted rounds",
        baseline_mean_acceptance_length=baseline.counts.mean_acceptance_length,
        candidate_mean_acceptance_length=candidate.counts.mean_acceptance_length,
        repeated_8gram_share=baseline.traces.repeated_8gram_share,
        mean_token_probability=None,
        num_near_duplicates=baseline.traces.num_near_duplicates,
    )
