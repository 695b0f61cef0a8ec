"""What a verify step costs an engine, read from the files by which a rule becomes arithmetic.

SGLang 0.5.23 reads a table of its own (`--speculative-dspark-sps-table-path`,
`speculative/dspark_components/dspark_sps.py`), in one of two forms. vLLM 0.33 reads none: it
measures when it starts, and logs its tables at the level debug.
"""

import bisect
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...recipes.errors import reason, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import ReplayError

_MOST_PROBED = 2**63
"""What a tensor of SGLang's probes can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsPerSecond:
    """SGLang's plain table: verify steps per second by tokens of the batch, a step function.

    Attributes:
        sample_batch_tokens: strictly increasing. sample_steps_per_sec: of each.
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def problem(self) -> str:
        """What SGLang refuses, and rates that are none; empty if nothing."""
        probes, rates = self.sample_batch_tokens, self.sample_steps_per_sec
        if found := _problem("sample_batch_tokens", probes, "sample_steps_per_sec", rates):
            return found
        if self.max_batch_tokens < probes[-1]:
            return f"max_batch_tokens: expected at least {probes[-1]}, got {self.max_batch_tokens}"
        if min(rates) <= 0:
            return f"sample_steps_per_sec: expected numbers above 0, got {short(list(rates))}"
        return ""

    @property
    def tells_nothing(self) -> bool:
        """With a single probe SGLang verifies all: `dspark_planner.py:151`, `dspark_sps.py:160`."""
        return len(self.sample_batch_tokens) < 2

    def throughput(self, emitted: Tensor) -> Tensor:
        """Tokens per second of a batch of one request.

        Args:
            emitted: [B + 1] float64, the expected tokens of a step that verifies 0 .. B drafted
                tokens.
        """
        at = torch.arange(1, 1 + len(emitted))
        probe = torch.bucketize(at, torch.tensor(self.sample_batch_tokens), right=True) - 1
        rates = torch.tensor(self.sample_steps_per_sec, dtype=torch.float64)
        return emitted * rates[probe.clamp(0, len(rates) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditiveCost:
    """SGLang's additive table: seconds of a step, by requests and by tokens, interpolated.

    Attributes:
        bias_seconds: of every step, above 0.
        bs_probes: requests, strictly increasing. alpha_seconds: of each.
        m_probes: tokens, strictly increasing. theta_seconds: of each.
    """

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]

    def problem(self) -> str:
        """What SGLang refuses, and steps that take no time; empty if nothing."""
        if self.bias_seconds <= 0:
            return f"bias_seconds: expected more than 0, got {self.bias_seconds}"
        alpha, theta = self.alpha_seconds, self.theta_seconds
        if found := _problem("bs_probes", self.bs_probes, "alpha_seconds", alpha) or _problem(
            "m_probes", self.m_probes, "theta_seconds", theta
        ):
            return found
        least = self.bias_seconds + min(alpha) + min(theta)
        return "" if least > 0 else f"expected steps of more than 0 seconds, got {least:g}"

    @property
    def tells_nothing(self) -> bool:
        """Never: SGLang takes it for a table whatever it holds."""
        return False

    def throughput(self, emitted: Tensor) -> Tensor:
        """As of `StepsPerSecond`. Source: `dspark_planner.py:917`."""
        floor = self.bias_seconds + _interpolated(self.bs_probes, self.alpha_seconds, 1.0)
        seconds = [
            floor + _interpolated(self.m_probes, self.theta_seconds, float(1 + drafted))
            for drafted in range(len(emitted))
        ]
        return emitted / torch.tensor(seconds, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Milliseconds that vLLM measured when it started, of a batch of one request.

    Attributes:
        draft_ms: of drafting a block, at least 0.
        verify_ms: of the target's step over 1, 2, .. tokens, above 0.
    """

    draft_ms: float
    verify_ms: tuple[float, ...]

    def problem(self) -> str:
        """What vLLM never measures; empty if nothing."""
        if self.draft_ms < 0:
            return f"draft_ms: expected at least 0, got {self.draft_ms}"
        if not self.verify_ms or min(self.verify_ms) <= 0:
            return f"verify_ms: expected numbers above 0, got {list(self.verify_ms)}"
        return ""


SGLangTable = StepsPerSecond | AdditiveCost


def read_sglang_table(path: Path) -> SGLangTable:
    """Read the file of `--speculative-dspark-sps-table-path`.

    Raises:
        ReplayError: it cannot be read, or SGLang would refuse it.
    """
    fix = "give the file of SGLang's --speculative-dspark-sps-table-path"
    text = _text(path, fix)
    kind = AdditiveCost if '"bias_seconds"' in text else StepsPerSecond  # as SGLang tells them
    found: SGLangTable = _decoded(kind, text, path, fix)
    return found


def read_measured_costs(path: Path) -> MeasuredCosts:
    """Read what vLLM logged, as {"draft_ms": .., "verify_ms": [of 1 token, of 2, ..]}.

    Raises:
        ReplayError: it cannot be read, or holds no costs.
    """
    fix = 'write {"draft_ms": 0.9, "verify_ms": [of 1 token, of 2, .., of K + 1]} into it'
    found: MeasuredCosts = _decoded(MeasuredCosts, _text(path, fix), path, fix)
    return found


def _text(path: Path, fix: str) -> str:
    try:
        return read_text(path)
    except OSError as exc:
        raise ReplayError(path, f"cannot be read: {reason(exc)}", fix=fix) from exc


def _decoded(kind: type[SGLangTable | MeasuredCosts], text: str, path: Path, fix: str) -> Any:
    try:
        found = decode(kind, parse_object(text))
    except JsonProblem as exc:
        raise ReplayError(path, f"is no table of costs: {exc}", fix=fix) from exc
    if problem := found.problem():
        raise ReplayError(path, problem, fix=fix)
    return found


def _problem(name: str, probes: tuple[int, ...], of: str, values: tuple[float, ...]) -> str:
    if not probes or any(a >= b for a, b in pairwise(probes)):
        return f"{name}: expected strictly increasing numbers, got {list(probes)}"
    if probes[-1] >= _MOST_PROBED or probes[0] <= -_MOST_PROBED:
        return f"{name}: expected numbers below 2**63, got {short(list(probes))}"
    if len(values) != len(probes):
        return f"{of}: expected {len(probes)} numbers, as {name} has, got {len(values)}"
    return ""


def _interpolated(xs: tuple[int, ...], ys: tuple[float, ...], x: float) -> float:
    """Between the probes on a line, outside them as at the nearest."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    high = bisect.bisect_right(xs, x)
    low = high - 1
    return ys[low] + (x - xs[low]) / (xs[high] - xs[low]) * (ys[high] - ys[low])
