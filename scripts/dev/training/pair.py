"""A pair: one target, one draft, the prompts to judge them on, and the figures they reached.

This module orders the phases and writes the folder; each phase is a module beside it.
"""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .acceptance import repeated_ngram_share, replay
from .corpus import (
    Prompt,
    SourceFile,
    Split,
    held_out_prompts,
    sample_windows,
    token_stream,
    train_tokenizer,
)
from .draft import Draft, fresh_draft, ship_draft, train_draft
from .pattern import PairPlan, Pattern
from .rounding import fp8_per_channel, int4_per_channel, rounded
from .selection import SelectedPrompts, select_prompts
from .target import (
    Traces,
    greedy_continuations,
    output_head,
    record_traces,
    ship_target,
    train_target,
)


class Stopwatch:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under a name."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


def train_pair(
    pattern: Pattern, files: Sequence[SourceFile], out: Path, *, seed: int
) -> Mapping[str, object]:
    """Train a target and its draft and write the pair.

    Args:
        pattern: configs, names and plan.
        files: the corpus, all splits.
        out: folder to create; its parent exists or is created too.
        seed: decides weights, windows and prompts; one seed gives one pair on one machine.

    Returns:
        What training.json holds.

    Raises:
        FileExistsError: `out` exists already.
    """
    plan = pattern.plan
    torch.set_num_threads(plan.num_threads)
    torch.use_deterministic_algorithms(True)
    out.mkdir(parents=True)
    stopwatch = Stopwatch()

    with stopwatch.phase("corpus"):
        tokenizer, stream = _training_text(files, pattern.target.vocab_size)
    with stopwatch.phase("target"):
        target, target_losses = train_target(
            pattern.target,
            stream,
            plan.target_schedule,
            sequence_length=plan.sequence_length,
            seed=seed,
        )
        target = ship_target(target, tokenizer, out / "target")
    with stopwatch.phase("continuations"):
        gate = _held_out(files, "gate", tokenizer, target, plan, seed)
        calibration = _held_out(files, "calibration", tokenizer, target, plan, seed)
        training_token_ids = greedy_continuations(
            target, _training_prompts(plan, stream, seed), num_new_tokens=plan.num_new_tokens
        )
    with stopwatch.phase("draft"):
        training_traces = _traces(pattern, target, training_token_ids)
        draft, draft_losses = _make_draft(pattern, target, training_traces, seed)
        draft = ship_draft(draft, pattern.draft, out / "draft")
    with stopwatch.phase("evaluation"):
        figures = _figures(draft, _traces(pattern, target, gate.token_ids), plan)

    _write_prompts(gate.prompts, out / "prompts.jsonl")
    _write_prompts(calibration.prompts, out / "calibration.jsonl")
    report = {
        "family": pattern.family.name,
        "seed": seed,
        "plan": asdict(plan),
        "versions": _versions(),
        "corpus": _corpus_sizes(files, stream),
        "sizes": _sizes(out, target, draft),
        "losses": {"target": target_losses, "draft": draft_losses},
        "prompts": {"gate": _selection(gate), "calibration": _selection(calibration)},
        "figures": figures,
        "seconds": stopwatch.seconds,
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _training_text(
    files: Sequence[SourceFile], vocab_size: int
) -> tuple[PreTrainedTokenizerFast, Tensor]:
    texts = [file.text for file in files if file.split == "training"]
    tokenizer = train_tokenizer(texts, vocab_size)
    return tokenizer, token_stream(tokenizer, texts)


def _training_prompts(plan: PairPlan, stream: Tensor, seed: int) -> Tensor:
    return sample_windows(
        stream,
        count=plan.num_training_prompts,
        length=plan.prompt_length,
        generator=torch.Generator().manual_seed(seed),
    )


def _make_draft(
    pattern: Pattern, target: PreTrainedModel, traces: Traces, seed: int
) -> tuple[Draft, tuple[float, ...]]:
    torch.manual_seed(seed)
    draft, plan = fresh_draft(pattern, target), pattern.plan
    losses = train_draft(
        draft,
        traces,
        output_head(target),
        plan.draft_schedule,
        num_draft_tokens=plan.num_draft_tokens,
        row_stride=plan.row_stride,
        decay=plan.depth_decay,
        seed=seed,
    )
    return draft, losses


def _held_out(
    files: Sequence[SourceFile],
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    target: PreTrainedModel,
    plan: PairPlan,
    seed: int,
) -> SelectedPrompts:
    count = plan.num_gate_prompts if split == "gate" else plan.num_calibration_prompts
    candidates = held_out_prompts(
        files,
        split,
        tokenizer,
        count=count * plan.num_candidates_per_prompt,
        length=plan.prompt_length,
        seed=seed,
    )
    return select_prompts(
        target,
        candidates,
        count=count,
        num_new_tokens=plan.num_new_tokens,
        max_repeated_8gram_share=plan.max_repeated_8gram_share,
    )


def _write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def _selection(selected: SelectedPrompts) -> dict[str, object]:
    return {
        "num_prompts": len(selected.prompts),
        "num_candidates": selected.num_candidates,
        "candidates_repeated_8gram_share": round(selected.candidates_repeated_8gram_share, 4),
    }


def _traces(pattern: Pattern, target: PreTrainedModel, token_ids: Tensor) -> Traces:
    """The features are those layers that the draft names."""
    return record_traces(
        target,
        token_ids,
        prompt_length=pattern.plan.prompt_length,
        aux_layer_ids=pattern.geometry.aux_layer_ids or (),
    )


def _figures(draft: Draft, traces: Traces, plan: PairPlan) -> dict[str, object]:
    """Acceptance of the shipped draft, and of two roundings of it, on the gate prompts."""
    drafts = {
        "bf16": draft,
        "int4_per_channel_absmax": rounded(draft, int4_per_channel),
        "fp8_per_channel": rounded(draft, fp8_per_channel),
    }
    figures: dict[str, object] = {
        "num_prompts": len(traces.token_ids),
        "num_new_tokens": plan.num_new_tokens,
        "num_draft_tokens": plan.num_draft_tokens,
        "repeated_8gram_share": round(
            repeated_ngram_share(traces.token_ids[:, traces.prompt_length :]), 4
        ),
    }
    for name, scored in drafts.items():
        counts = replay(scored, traces, num_draft_tokens=plan.num_draft_tokens)
        figures[name] = {
            "mean_acceptance_length": round(counts.mean_acceptance_length(), 4),
            "acceptance_rate_by_position": [
                round(rate, 4) for rate in counts.acceptance_rate_by_position()
            ],
            **asdict(counts),
        }
    return figures


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def _corpus_sizes(files: Sequence[SourceFile], stream: Tensor) -> dict[str, object]:
    num_files = {"training": 0, "gate": 0, "calibration": 0}
    for file in files:
        num_files[file.split] += 1
    return {
        "text": f"standard library of Python {platform.python_version()}",
        "num_files": num_files,
        "num_training_tokens": len(stream),
    }


def _sizes(out: Path, target: PreTrainedModel, draft: Draft) -> dict[str, int]:
    return {
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "draft_parameters": sum(weight.numel() for weight in draft.published().values()),
        "target_file_bytes": (out / "target" / "model.safetensors").stat().st_size,
        "draft_file_bytes": (out / "draft" / "model.safetensors").stat().st_size,
    }
