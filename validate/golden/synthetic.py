"""Acceptance as engines simulate it: load tests without a draft's weights, or on any text.

Engines run draft and verification as usual, and then overrule what is accepted: their text is not
the target's, and neither quality nor acceptance may be measured on that server.
"""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from itertools import pairwise

from .profile import DIGITS, Accepted

_MOST_OF_DYNAMO = 5
Simulation = tuple[str, tuple[str, ...]]
"""How to make an engine accept like the draft: a line for a shell, and what to know."""


def simulation(accepted: Accepted, draft_tokens: int, engine: str) -> Simulation | None:
    """The settings of an engine that accept alike; None: it needs rates, and they are not known."""
    if engine in ("vllm", "dynamo") and not accepted.rates:
        return None
    return _ENGINES[engine](accepted, draft_tokens)


def _vllm(accepted: Accepted, draft_tokens: int) -> Simulation:
    # Unconditional rates (config/speculative.py of 0.32 and 0.33), which the sampler divides.
    config = {
        "num_speculative_tokens": draft_tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, DIGITS) for rate in accepted.rates],
    }
    return (
        f"--speculative-config {shlex.quote(json.dumps(config))}",
        (
            "put these keys beside method and model of the draft, as 'draftquant check DRAFT"
            " --engine vllm' prints them",
            'with "draft_load_config": {"load_format": "dummy"} among them, vLLM reads the'
            " config.json of the draft alone, and needs no weights",
        ),
    )


def _dynamo(accepted: Accepted, draft_tokens: int) -> Simulation:
    # Its help, and ai-dynamo/dynamo#10197: 1 to 5 tokens, each rate given that all before held.
    pairs = pairwise((1.0, *accepted.rates[:_MOST_OF_DYNAMO]))
    told = [f"{after / before if before else 0:.{DIGITS}g}" for before, after in pairs]
    return (
        f"--aic-nextn {len(told)} --aic-nextn-accept-rates {','.join(told)}",
        (
            f"put these arguments after 'python -m dynamo.mocker', which drafts {_MOST_OF_DYNAMO}"
            f" of {draft_tokens} tokens at most; newer ones call them --ais-nextn, and take these",
        ),
    )


def _sglang(accepted: Accepted, draft_tokens: int) -> Simulation:
    # srt/speculative/spec_utils.py, sample_simulated_acc_len: the default mode repeats one token.
    return (
        f"SGLANG_SIMULATE_ACC_LEN={accepted.mean:.{DIGITS}g}"
        " SGLANG_SIMULATE_ACC_METHOD=match-expected"
        " SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
        (
            "put these variables before the launch line, with --speculative-num-draft-tokens"
            f" {draft_tokens + 1} (K + 1)",
            "SGLang simulates the mean alone: every step of a batch accepts the same number of"
            " tokens, one of the two whole numbers beside it",
        ),
    )


def _tensorrt_llm(accepted: Accepted, draft_tokens: int) -> Simulation:
    # It reads a whole number before pull request 14438, and with a draft in an engine of its own.
    drafted = accepted.mean - 1
    near = max(1, math.floor(drafted + 0.5))
    return (
        f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={drafted:.{DIGITS}g}",
        (
            f"put this variable before the launch line, with max_draft_len {draft_tokens}; it"
            " counts draft tokens, without the target's own",
            "a TensorRT-LLM that reads a whole number ignores a fraction with a warning, and"
            f" accepts what the draft deserves: give {near} there",
        ),
    )


_ENGINES: Mapping[str, Callable[[Accepted, int], Simulation]] = {
    "vllm": _vllm,
    "dynamo": _dynamo,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
}
