"""Golden acceptance from counts: a replay, a measured server, a report of the gate."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...quantize.drafts import FAMILIES
from ...recipes.errors import GoldenError
from ...recipes.packages import package_version
from ..counting.acceptance_counts import CONTEXT_BINS, ContextCounts, estimand
from ..counting.draft_counts import DraftReplay, PromptCounts, context_edges
from ..judging.judgement import GateReport
from ..measure.measurement import Measurement, RequestRecord, prompts_sha256
from ..report.document import Document
from ..served.served_gate import served_estimand
from .golden_acceptance import Golden, GoldenPrompt

_METHODS = {family.name: family.engine_traits.vllm.served_as for family in FAMILIES}


def golden_of_replay(replay: DraftReplay, *, draft_sha256: str | None) -> Golden:
    """Golden acceptance of one replayed draft; GoldenError without a verify step."""
    traces = replay.traces
    return _golden(
        replay.prompts,
        replay.name,
        draft_sha256=draft_sha256,
        method=_METHODS.get(replay.family),
        target=traces.target.name,
        source="replay",
        source_version=package_version("draftquant"),
        num_draft_tokens=replay.num_draft_tokens,
        temperature=traces.temperature,
        estimand=estimand(traces.temperature, traces.sampling, replay.draft_sampling),
    )


def golden_of_measurement(measurement: Measurement) -> Golden:
    """Golden acceptance of one measured server: all its verify steps, by its own counters."""
    setup = measurement.setup
    if setup.speculation is None:
        raise GoldenError(
            measurement.name,
            "the server drafted nothing, so that nothing was accepted",
            fix="give a measurement of a server that drafts",
        )
    prompts = [
        replace(
            PromptCounts.of(record, record.counts, record.cluster or ""),
            contexts=_contexts(record, setup.speculation.num_draft_tokens),
        )
        for record in measurement.records
        if record.counts is not None
    ]
    draft = setup.speculation.draft or measurement.name
    return _golden(
        prompts,
        draft,
        draft_sha256=setup.speculation.draft_sha256,
        method=(setup.speculation.method or "").lower() or None,
        target=setup.server.model,
        source=setup.server.engine,
        source_version=setup.server.version,
        num_draft_tokens=setup.speculation.num_draft_tokens,
        temperature=setup.asked.temperature,
        estimand=served_estimand(measurement),
    )


def _contexts(record: RequestRecord, num_draft_tokens: int) -> ContextCounts | None:
    """Its verify steps by context bin, where the engine reports each of them in order."""
    if record.accepted is None:
        return None
    return ContextCounts.of_steps(
        record.accepted, record.num_prompt_tokens + 1, num_draft_tokens, CONTEXT_BINS
    )


def golden_of_report(document: Document) -> Golden:
    """Golden acceptance of a report's replayed candidate; GoldenError if there is no step."""
    report = _replayed(document)
    traces, candidate = report.traces, document.header.drafts.candidate
    assert traces is not None  # see `_replayed`
    prompts = (prompt.counts(report.context_edges, of_candidate=True) for prompt in report.prompts)
    return _golden(
        prompts,
        candidate.name,
        draft_sha256=candidate.sha256,
        method=_METHODS.get(candidate.family or ""),
        target=traces.target.name,
        source="replay",
        source_version=document.header.draftquant,
        num_draft_tokens=report.num_draft_tokens,
        temperature=traces.temperature,
        estimand=report.estimand,
    )


def _replayed(document: Document) -> GateReport:
    reports = [report for _, report in document.comparisons if report.traces and not report.served]
    tools = [r.served.tool for _, r in document.comparisons if r.served and r.served.tool]
    if not reports and tools:
        raise GoldenError(
            "golden acceptance",
            f"the report is of measurements by {tools[0]}, which do not record whose acceptance"
            " they hold",
            fix="draftquant measure --draft QUANT --golden G.json, of a server with the candidate;"
            " or replay QUANT --traces T --golden G.json",
        )
    if not reports:
        raise GoldenError(
            "golden acceptance",
            "the report is of measured servers, and keeps their verify steps weighted for the"
            " comparison, not as they were counted",
            fix="draftquant measure --show B.jsonl --golden G.json, of the candidate's measurement",
        )
    return reports[0]


def _golden(prompts: Iterable[PromptCounts], draft: str, **known: Any) -> Golden:
    """Of the prompts with a verify step, their clusters numbered; GoldenError without one."""
    counted = [prompt for prompt in prompts if prompt.counts.num_steps]
    if not counted:
        raise GoldenError(
            "golden acceptance",
            f"no prompt of {draft} has a verify step that was counted",
            fix="see the verdict and its reason, or record longer continuations",
        )
    numbers: dict[str, int] = {}
    return Golden(
        draftquant=package_version("draftquant"),
        draft=draft,
        prompts_sha256=prompts_sha256((p.id, p.category, p.prompt_sha256) for p in counted),
        context_edges=context_edges(counted),
        prompts=tuple(
            GoldenPrompt(
                category=prompt.category,
                cluster=numbers.setdefault(prompt.counted_with, len(numbers)),
                histogram=prompt.counts.histogram,
                context_bins=() if prompt.contexts is None else prompt.contexts.histograms,
            )
            for prompt in counted
        ),
        **known,
    )
