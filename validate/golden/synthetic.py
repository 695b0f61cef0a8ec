"""Golden acceptance as engines simulate it: load tests without a draft's weights, or on any text.

Engines run draft and verification as usual, and then overrule what is accepted: their text is not
the target's, and neither quality nor acceptance may be measured on that server.
"""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..measure.measurement import EngineName
from .golden_acceptance import GoldenCategory

_DIGITS = 6  # of rates and lengths: far below what a load test resolves


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How to make an engine accept like golden: a line for a shell, and what to know."""

    line: str
    notes: tuple[str, ...]


def simulation(golden: GoldenCategory, engine: EngineName) -> Simulation:
    """The settings of an engine that accept like these prompts."""
    return _ENGINES[engine](golden)


def _vllm(golden: GoldenCategory) -> Simulation:
    # Unconditional rates (config/speculative.py of 0.32 and 0.33), which the sampler divides.
    rates = [round(rate, _DIGITS) for rate in golden.acceptance_rates]
    config = {
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    return Simulation(
        line=f"--speculative-config {shlex.quote(json.dumps(config))}",
        notes=(
            "put these keys beside method and model of the draft, as 'draftquant check DRAFT"
            " --engine vllm' prints them",
            'with "draft_load_config": {"load_format": "dummy"} among them, vLLM reads the'
            " config.json of the draft alone, and needs no weights",
        ),
    )


def _sglang(golden: GoldenCategory) -> Simulation:
    # srt/speculative/spec_utils.py, sample_simulated_acc_len: the default mode repeats one token.
    return Simulation(
        line=f"SGLANG_SIMULATE_ACC_LEN={golden.mean_acceptance_length:.{_DIGITS}g}"
        " SGLANG_SIMULATE_ACC_METHOD=match-expected"
        " SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
        notes=(
            "put these variables before the launch line, with --speculative-num-draft-tokens"
            f" {len(golden.accepted_at) + 1} (K + 1)",
            "SGLang simulates the mean alone: every step of a batch accepts the same number of"
            " tokens, one of the two whole numbers beside it",
        ),
    )


def _tensorrt_llm(golden: GoldenCategory) -> Simulation:
    # It reads a whole number before pull request 14438, and with a draft in an engine of its own.
    accepted = golden.mean_acceptance_length - 1
    near = max(1, math.floor(accepted + 0.5))
    return Simulation(
        line=f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={accepted:.{_DIGITS}g}",
        notes=(
            "put this variable before the launch line, with max_draft_len"
            f" {len(golden.accepted_at)}; it counts draft tokens, without the target's own",
            "a TensorRT-LLM that reads a whole number ignores a fraction with a warning, and"
            f" accepts what the draft deserves: give {near} there",
        ),
    )


_ENGINES: Mapping[EngineName, Callable[[GoldenCategory], Simulation]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
}
