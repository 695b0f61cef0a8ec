"""Tokens per CPU second of recording beside those of transformers' `generate`, in one process.

    python -m benchmarks.record WORKDIR [--rounds 3] [--dtype float32] [--json]

Each target, of random weights, continues prompts of equal length, of as many lengths as there are
prompts, and of lengths and answers as people chat (log-normal). `generate` gets them sorted by
length, as many together, padded on the left, and records nothing; it also stops each text where
recording does. Rounds take turns, and the median of their ratios counts.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftquant.scripts.frame.console import stderr

from .command_line import benchmark_parser, run_benchmark

if TYPE_CHECKING:
    from draftquant.calibration.prompts.prompt_file import Prompt

VOCAB = 8192
BATCH_SIZE = 32
TARGETS = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts of random text: tokens of each, and of its answer."""

    name: str
    lengths: tuple[int, ...]
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return sum(self.lengths) + sum(self.answers)

    def prompts(self) -> "list[Prompt]":
        """The same for every target."""
        import torch
        from draftquant.calibration.prompts.prompt_file import Prompt

        stream = torch.Generator().manual_seed(0)
        return [
            Prompt(
                id=f"p{i}",
                category="all",
                token_ids=tuple(torch.randint(1, VOCAB, (length,), generator=stream).tolist()),
            )
            for i, length in enumerate(self.lengths)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one target took for one load, the median of all rounds.

    Attributes:
        generate, record: tokens per CPU second. ratio: of the two, the median of the rounds' own.
        ratios: of every round.
    """

    target: str
    load: str
    tokens: int
    generate: float
    record: float
    ratio: float
    ratios: tuple[float, ...]


def loads(num_prompts: int) -> list[Load]:
    """Equal, ragged around the shipped prompts' 48 tokens, and as people chat."""
    from statistics import NormalDist

    def chat(median: float, spread: float, low: int, high: int, step: int) -> tuple[int, ...]:
        """Quantiles of a log-normal law, in an order unrelated to their size."""
        normal = NormalDist(math.log(median), spread)
        quantiles = [normal.inv_cdf((i + 0.5) / num_prompts) for i in range(num_prompts)]
        found = [min(high, max(low, round(math.exp(one)))) for one in quantiles]
        return tuple(found[i * step % num_prompts] for i in range(num_prompts))

    ragged = tuple(48 - 16 + i * 32 // num_prompts for i in range(num_prompts))
    return [
        Load(name="equal", lengths=(48,) * num_prompts, answers=(64,) * num_prompts),
        Load(name="ragged", lengths=ragged, answers=(64,) * num_prompts),
        Load(name="chat", lengths=chat(150, 1.1, 16, 1024, 5), answers=chat(80, 0.9, 8, 256, 7)),
    ]


def make_target(folder: Path, shape: dict[str, int]) -> Path:
    """A Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape["hidden_size"] // 64
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **shape,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
    }
    config = LlamaConfig(bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def generate_all(model: Any, prompts: "Sequence[Prompt]", limits: Sequence[int]) -> None:
    """Continue the prompts with `generate`, sorted by length."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLimits(StoppingCriteria):
        """Every text ends at its own limit."""

        def __init__(self, ends: torch.Tensor) -> None:
            self._ends = ends

        def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
            return self._ends <= input_ids.shape[1]

    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].token_ids))
    for start in range(0, len(order), BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        longest = len(prompts[batch[0]].token_ids)
        rows = [prompts[i].token_ids for i in batch]
        token_ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        ends = torch.tensor([longest + limits[i] for i in batch], device=model.device)
        model.generate(
            token_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(limits[i] for i in batch),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([AtLimits(ends)]),
        )


def record_all(
    model: Any, target: Path, prompts: "Sequence[Prompt]", limits: Sequence[int], dtype: Any
) -> None:
    """Record the prompts, up to a finished folder."""
    from draftquant.calibration.recording.decoding import GREEDY
    from draftquant.calibration.recording.record_traces import FixedBatch, record_into
    from draftquant.calibration.recording.target_model import (
        OpenedTarget,
        RecordedTarget,
        decoder_layers,
        shape_of,
    )
    from draftquant.calibration.recording.target_shape import feature_spec
    from draftquant.calibration.traces.manifest import TargetIdentity
    from draftquant.calibration.traces.writer import trace_output

    layers = decoder_layers(model, target)
    shape = shape_of(model.config, len(layers))
    identity = TargetIdentity(
        name="random",
        config_sha256=None,
        weights_sha256=None,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
    )
    ids = tuple(sorted({0, shape.num_layers // 2 - 1, shape.num_layers - 1}))
    features = feature_spec(shape, ids, None, dtype)
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as scratch,
        trace_output(Path(scratch) / "traces", GREEDY.manifest(identity, features)) as out,
        RecordedTarget(model, layers, ids, last_state=False) as recorded,
    ):
        opened = OpenedTarget(recorded=recorded, identity=identity, features=features, fuse=None)
        batch = FixedBatch(first=0, prompts=prompts)
        record_into(out, opened, batch, limits, GREEDY, batch_size=BATCH_SIZE, all_together=False)


def measure(name: str, target: Path, load: Load, chosen: argparse.Namespace) -> Measurement:
    """Measure both, in turns."""
    import torch
    from draftquant.calibration.passes.devices import resolve_device
    from transformers import AutoModelForCausalLM

    device = resolve_device(chosen.device)
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, chosen.dtype))
    model = loaded.eval().to(device)
    prompts = load.prompts()

    def seconds(run: Callable[[], None]) -> float:
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        start = clock()
        run()
        return clock() - start

    rounds = [
        (
            seconds(lambda: generate_all(model, prompts, load.answers)),
            seconds(lambda: record_all(model, target, prompts, load.answers, chosen.dtype)),
        )
        for _ in range(chosen.rounds + 1)
    ][1:]  # the first one warms up
    ratios = tuple(generated / recorded for generated, recorded in rounds)
    return Measurement(
        target=name,
        load=load.name,
        tokens=load.tokens,
        generate=load.tokens / statistics.median(generated for generated, _ in rounds),
        record=load.tokens / statistics.median(recorded for _, recorded in rounds),
        ratio=statistics.median(ratios),
        ratios=ratios,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = benchmark_parser("record", "Time recording beside transformers' generate.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--load", action="append", choices=("equal", "ragged", "chat"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:I")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return run_benchmark(parser, arguments, _measure_all, _columns)


def _measure_all(asked: argparse.Namespace) -> list[Measurement]:
    """Targets are made once and stay in the folder: 0.5 GB."""
    measurements = []
    for name in asked.target or TARGETS:
        target = asked.workdir / f"target-{name}"
        if not target.exists():
            make_target(target, TARGETS[name])
        for load in loads(asked.prompts):
            if asked.load is None or load.name in asked.load:
                stderr().line(f"{name}, {load.name}")
                measurements.append(measure(name, target, load, asked))
    return measurements


def _columns(row: Measurement) -> dict[str, str]:
    return {
        "target and prompts": f"{row.target} {row.load}",
        "tokens": f"{row.tokens:,}",
        "generate tokens/CPU s": f"{row.generate:,.0f}",
        "record tokens/CPU s": f"{row.record:,.0f}",
        "record / generate": f"{row.ratio:.2f}",
    }


if __name__ == "__main__":
    sys.exit(main())
