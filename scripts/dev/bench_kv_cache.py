"""What an FP8 KV cache costs a draft in accepted tokens, by its scales, on recorded traces.

    python -m draftquant.scripts.dev.bench_kv_cache DRAFT --calibration TRACES --gate TRACES
        [--target TARGET] [--quantized FOLDER ...] [--values 6 8 10] [--keys 6 8] [--json]

The BF16 draft is the baseline of every row. `--values N` measures the same draft written otherwise:
its values (of latent attention, its latents) are 2^N times smaller, and the linear that reads them
2^N times larger. `--keys N` has 2^N times larger keys, and as much smaller queries. With a BF16
cache that is the same draft; unit scales do not keep its values, or its keys.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import print_table, table
from .command_lines import run_benchmark

if TYPE_CHECKING:
    from torch import Tensor

    from ...quantize.stored.loading import LoadedDraft

Octaves = Mapping[str, int]
"""Pattern of a weight's name -> by how many octaves it is changed."""
_LATENT = "self_attn.kv_a_layernorm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One draft with one cache; bounds are one-sided at 95 %."""

    draft: str
    scales: str
    acceptance_length: float
    change: float
    lower: float
    upper: float
    agreement: float


def smaller_values(weights: "Mapping[str, Tensor]", n: int) -> Octaves:
    """What makes values, or latents, n octaves smaller."""
    if any(name.endswith(_LATENT) for name in weights):
        return {r"kv_a_layernorm\.weight$": -n, r"kv_b_proj\.weight$": n}
    return {r"v_proj\.(weight|bias)$": -n, r"self_attn\.o_proj\.weight$": n}


def larger_keys(weights: "Mapping[str, Tensor]", n: int) -> Octaves:
    """What makes keys n octaves larger: the norms of heads where there are any."""
    kind = "norm" if any("self_attn.k_norm" in name for name in weights) else "proj"
    return {rf"self_attn\.k_{kind}\.": n, rf"self_attn\.q_{kind}\.": -n}


def rewritten(draft: "LoadedDraft", name: str, octaves: Octaves) -> "LoadedDraft":
    """The same draft by other weights."""
    weights = {
        tensor: one * 2.0 ** sum(n for pattern, n in octaves.items() if re.search(pattern, tensor))
        if one.is_floating_point()
        else one
        for tensor, one in draft.weights.items()
    }
    forward = draft.family.forward(draft.geometry, weights, lambda _name, x: x)
    return dataclasses.replace(draft, name=name, weights=weights, forward=forward)


class Bench:
    """One draft along the traces of its target."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch

        from ...calibration.traces.trace_folder import TraceFolder
        from ...quantize.stored.loading import load_draft
        from ...validate.counting.trace_replay import chosen_num_draft_tokens
        from ..api.opening import shared_tables

        self._asked = asked
        self._calibration = TraceFolder.open(asked.calibration)
        self._gate = TraceFolder.open(asked.gate)
        self._shared = shared_tables(self._gate, asked.target, torch.device("cpu"))
        self._draft = load_draft(asked.draft, shared=self._shared)
        self._count = chosen_num_draft_tokens(None, [self._draft])

    def rows(self) -> Iterator[Row]:
        """Every draft under every kind of scales."""
        from ...validate.counting.trace_replay import replay_drafts
        from ...validate.judging.judgement import judge
        from ...validate.judging.policy import POLICIES

        named = list(self._drafts())
        replays = replay_drafts(
            [self._draft, *(draft for _, draft in named)], self._gate, num_draft_tokens=self._count
        )
        for (scales, draft), replay in zip(named, replays[1:], strict=True):
            report = judge(replays[0], replay, POLICIES["release"])
            found = report.change
            yield Row(
                draft=draft.name,
                scales=scales,
                acceptance_length=replay.counts.mean_acceptance_length,
                change=math.nan if found is None else found.relative_change,
                lower=math.nan if found is None else math.expm1(found.lower),
                upper=math.nan if found is None else math.expm1(found.upper),
                agreement=replay.first_step.share,
            )

    def _drafts(self) -> Iterator[tuple[str, "LoadedDraft"]]:
        from ...quantize.stored.loading import load_draft

        plain = self._draft
        for how in ("unit", "absmax", "measured"):
            yield how, self._cached(plain, plain, how)
        for folder in self._asked.quantized:
            quantized = load_draft(folder, shared=self._shared)
            yield "BF16", quantized
            yield "measured", self._cached(quantized, plain, "measured")
        changed = [
            (f"values / 2^{n}", smaller_values(plain.weights, n)) for n in self._asked.values
        ]
        changed += [(f"keys * 2^{n}", larger_keys(plain.weights, n)) for n in self._asked.keys]
        for name, octaves in changed:
            other = rewritten(plain, name, octaves)
            yield "BF16", other
            for how in ("unit", "measured"):
                yield how, self._cached(other, other, how)

    def _cached(self, draft: "LoadedDraft", along: "LoadedDraft", how: str) -> "LoadedDraft":
        """With a cache in FP8, its scales as those of `along`."""
        from ...calibration.kv_cache.cache_scales import measure_cache_scales
        from ...quantize.drafts.kv_cache import UNIT, cached_layers

        if how == "unit":
            return draft.with_cache(dict.fromkeys(cached_layers(draft.weights, draft.name), UNIT))
        found = measure_cache_scales(
            along,
            self._calibration,
            how="absmax" if how == "absmax" else "measured",
            num_draft_tokens=self._count,
        )
        return draft.with_cache(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when everything was measured, 2 when something could not be made."""
    parser = argparse.ArgumentParser(prog="bench_kv_cache", description=__doc__)
    parser.add_argument("draft", type=Path, help="in BF16")
    for name in ("--calibration", "--gate"):
        parser.add_argument(name, type=Path, required=True, help="trace folder")
    parser.add_argument("--target", type=Path, help="whose tables the draft shares")
    parser.add_argument("--quantized", type=Path, nargs="*", default=[], help="quantized drafts")
    parser.add_argument("--values", type=int, nargs="*", default=[], help="octaves")
    parser.add_argument("--keys", type=int, nargs="*", default=[], help="octaves")
    return run_benchmark(parser, arguments, lambda asked: list(Bench(asked).rows()), _print)


def _print(_asked: argparse.Namespace, rows: Sequence[Row]) -> None:
    found = table("FP8 KV cache", "draft", "scales", "acceptance length", "change", "agreement")
    for row in rows:
        change = f"{row.change:+.2%} ({row.lower:+.2%}, {row.upper:+.2%})"
        length = f"{row.acceptance_length:.4f}"
        found.row(row.draft, row.scales, length, change, f"{row.agreement:.2%}")
    print_table(found)


if __name__ == "__main__":
    raise SystemExit(main())
