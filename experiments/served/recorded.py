"""One trace folder beside another: tokens, features and log-probabilities, and what replay says."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.trace_info import feature_evidence
from draftquant.scripts.cli import main as draftquant


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """Of one layer's outputs, over the positions whose tokens are the same up to there.

    Attributes:
        largest: absolute.
        relative: root of the mean square of the difference over that of the second folder.
    """

    layer: int
    largest: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What `compare` finds.

    Attributes:
        num_equal: prompts with the same tokens. num_prompts: all.
        num_positions: that were compared.
        layers: in order.
        logprob: mean absolute difference of the emitted tokens' log-probabilities.
        evidence: share of the features' variance that the token beside them explains, of both.
        acceptance_length: of the BF16 draft, replayed on both.
    """

    num_equal: int
    num_prompts: int
    num_positions: int
    layers: tuple[LayerDifference, ...]
    logprob: float
    evidence: tuple[float, float]
    acceptance_length: tuple[float, float]


def compare(first: TraceFolder, second: TraceFolder, draft: Path) -> Compared:
    """Hold two recordings of the same prompts against each other.

    Args:
        first, second: with log-probabilities.
        draft: to replay.
    """
    ids = second.manifest.features.aux_layer_ids
    assert first.manifest.features == second.manifest.features
    assert first.manifest.target == second.manifest.target
    errors, powers = torch.zeros(len(ids), dtype=torch.float64), torch.zeros(len(ids))
    largest = torch.zeros(len(ids))
    logprobs: list[torch.Tensor] = []
    num_equal = num_positions = 0
    for one, other in zip(first, second, strict=True):
        assert one.id == other.id
        num_equal += torch.equal(one.token_ids, other.token_ids)
        common = _common(one.token_ids, other.token_ids)
        rows = min(common, one.num_tokens - 1, other.num_tokens - 1)
        num_positions += rows
        pair = [
            trace.features[:rows].float().unflatten(1, (len(ids), -1)) for trace in (one, other)
        ]
        difference = pair[0] - pair[1]
        errors += difference.square().sum((0, 2))
        powers += pair[1].square().sum((0, 2))
        largest = largest.maximum(difference.abs().amax((0, 2)))
        assert one.token_logprob is not None
        assert other.token_logprob is not None
        emitted = common - one.prompt_length
        logprobs.append((one.token_logprob[:emitted] - other.token_logprob[:emitted]).abs())
    return Compared(
        num_equal=num_equal,
        num_prompts=len(second),
        num_positions=num_positions,
        layers=tuple(
            LayerDifference(
                layer=layer, largest=float(largest[i]), relative=float((errors / powers)[i] ** 0.5)
            )
            for i, layer in enumerate(ids)
        ),
        logprob=float(torch.cat(logprobs).mean()),
        evidence=(_evidence(first), _evidence(second)),
        acceptance_length=(replayed(draft, first), replayed(draft, second)),
    )


def replayed(draft: Path, traces: TraceFolder) -> float:
    """The draft's acceptance length over the traces."""
    said = StringIO()
    with redirect_stdout(said):
        code = draftquant(["replay", str(draft), "--traces", str(traces.folder), "--json"])
    assert code == 0
    found = json.loads(said.getvalue())
    return float(found[0]["mean_acceptance_length"])


def compared_row(family: str, dtype: str, found: Compared) -> str:
    """For the first table of `document`."""
    layers = "; ".join(
        f"{layer.layer}: {layer.largest:.2g}, {layer.relative:.3%}" for layer in found.layers
    )
    return _row(
        family,
        dtype,
        f"{found.num_equal} of {found.num_prompts}",
        f"{found.num_positions:,}",
        layers,
        f"{found.logprob:.1e}",
        "{:.3f}, {:.3f}".format(*found.evidence),
        "{:.3f}, {:.3f}".format(*found.acceptance_length),
    )


def document(lines: Sequence[str], *, gate: int, new: int) -> str:
    """RECORDED.md: the rows of `compared_row`, of `gate` prompts with `new` new tokens each."""
    columns = (
        *("target", "dtype", "equal texts", "positions"),
        "layer: largest difference, relative",
        *("log-probability", "evidence", "acceptance length"),
    )
    return f"""# Recorded by a real vLLM, beside transformers

Written by `experiments/run served`: {gate} gate prompts of
each shipped pair and {new} tokens, greedy, by vLLM on a CPU (`engine.txt`) and by transformers in
the same dtype.

{_table(columns, lines)}

**Equal texts** are prompts whose tokens are all the same; the others diverge at a near tie.
Differences cover the positions up to there, relative as root mean squares; for log-probabilities of
the emitted tokens they are the mean. The first of two figures is vLLM's. **Evidence** is the share
of the features' variance that their own tokens explain, and **acceptance length** is that of the
BF16 draft in replay.

A server that was started with the command of `--print-server-args` records the same bytes as the
offline engine. If it is killed during a run and started again, it records what is missing.
"""


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([_row(*columns), "|---" * len(columns) + "|", *rows])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """Tokens before the first that differs."""
    shorter = min(len(one), len(other))
    different = (one[:shorter] != other[:shorter]).nonzero()
    return int(different[0]) if len(different) else shorter


def _evidence(traces: TraceFolder) -> float:
    found = feature_evidence(traces)
    assert found.fault() is None
    return found.share[0]
