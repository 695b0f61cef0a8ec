"""The verbs of `parity`, whole: each reads what it compares, and writes its findings."""

import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...calibration.passes import Passes
from ...calibration.passes.devices import resolve_device
from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import chosen_num_draft_tokens, open_traces
from ...calibration.prompts.prompt_file import PromptEncoder
from ...calibration.prompts.prompt_source import chosen_prompts
from ...calibration.server_client import KEY_VARIABLE
from ...quantize.files.hub import folder_of
from ...recipes.errors import ParityError
from ...recipes.listener import Bar
from ...recipes.regular_file import optional_path
from ..measure.measurement_file import read_measurement
from ..parity.divergence_findings import divergence_findings
from ..parity.draft_findings import check_limits, draft_agreement, draft_findings
from ..parity.finding import MIN_PROMPTS, Findings, limits
from ..parity.sampled_findings import (
    Scores,
    Text,
    check_sampled,
    sampled_finding,
    score_by_server,
    score_by_target,
    texts_of,
)
from ..parity.task_findings import task_findings
from ..parity.task_samples import Directions, read_samples
from ..served.served_gate import draft_sha256
from .parity_asked import DivergenceRun, DraftParityRun, SampledRun, ScoringEngine, TasksRun
from .report_pages import draft_identity

Scorer = Callable[[Sequence[Text]], list[Scores]]


def divergence_found(asked: DivergenceRun) -> Findings:
    """What `parity divergence` finds."""
    again, fewest = asked.plain_again, asked.min_prompts
    speculative = [read_measurement(Path(path)) for path in asked.speculative]
    findings = divergence_findings(
        read_measurement(Path(asked.plain)),
        speculative,
        plain_again=None if again is None else read_measurement(Path(again)),
        max_gap=asked.max_gap,
        max_hazard_ratio=asked.max_hazard_ratio,
        min_prompts=MIN_PROMPTS if fewest is None else fewest,
    )
    return asked.written(findings, lambda: [draft_sha256(run) for run in speculative])


def draft_found(asked: DraftParityRun) -> Findings:
    """What `parity draft` finds."""
    check_limits(asked)
    traces = open_traces(asked.traces, asked.listener)
    how = Passes(
        listener=asked.listener,
        num_draft_tokens=asked.num_draft_tokens,
        target=asked.target,
        device=asked.device,
        dtype=asked.dtype,
        batch_size=1,
    )
    loaded = load_for_replay([folder_of(asked.baseline), folder_of(asked.candidate)], traces, how)
    with asked.listener.bar("compare", len(traces), "work") as bar:
        prompts = draft_agreement(
            *loaded.both,
            traces,
            num_draft_tokens=chosen_num_draft_tokens(asked.num_draft_tokens, loaded.drafts),
            top=asked.top,
            on_progress=bar.set,
        )
    findings = draft_findings(prompts, asked, top=asked.top, confidence=asked.confidence)
    both = (asked.baseline, asked.candidate)
    return asked.written(findings, lambda: [draft_identity(draft).draft_sha256 for draft in both])


def tasks_found(asked: TasksRun) -> Findings:
    """What `parity tasks` finds."""
    findings = task_findings(
        read_samples(Path(asked.first)),
        read_samples(Path(asked.second)),
        max_score_drop=asked.max_score_drop,
        confidence=asked.confidence,
        directions=Directions(higher=asked.higher_is_better, lower=asked.lower_is_better),
    )
    return asked.written(findings)


def sampled_found(asked: SampledRun) -> Findings:
    """What `parity sampled` finds."""
    allowed = limits("--max-logprob-drop", asked.max_logprob_drop, least=-1, most=1)
    plain, speculative = (read_measurement(Path(path)) for path in (asked.plain, asked.speculative))
    check_sampled(plain, speculative)
    engine = asked.score_engine or plain.setup.server.engine
    tokenizer = optional_path(asked.tokenizer) or optional_path(asked.target)
    prompts = chosen_prompts(asked.prompts, PromptEncoder(tokenizer), asked).prompts
    texts = [texts_of(measured, prompts) for measured in (plain, speculative)]
    with asked.listener.bar("score", sum(map(len, texts))) as bar:
        score = _scorer(asked, engine, bar)
        scores = score([*texts[0], *texts[1]])
    half = len(scores) // 2
    finding = sampled_finding(
        plain,
        speculative,
        (scores[:half], scores[half:]),
        max_logprob_drop=allowed,
        confidence=asked.confidence,
    )
    return asked.written([finding], lambda: [draft_sha256(speculative)])


def _scorer(asked: SampledRun, engine: str, bar: Bar) -> Scorer:
    target = optional_path(asked.target)
    if target is not None:
        device, dtype = resolve_device(asked.device), getattr(torch, asked.dtype)
        return lambda texts: score_by_target(
            target, texts, dtype=dtype, device=device, on_progress=bar.set
        )
    server = asked.score_server
    assert server is not None  # see `SampledRun.check`
    if engine not in typing.get_args(ScoringEngine):
        raise ParityError(
            "--score-engine",
            f"{engine} does not score the tokens of a prompt",
            fix="give --target M, or a server of vLLM or SGLang",
        )
    return lambda texts: score_by_server(
        server,
        typing.cast(ScoringEngine, engine),
        texts,
        key=os.environ.get(KEY_VARIABLE) or None,
        concurrency=asked.concurrency,
        on_progress=bar.set,
    )
