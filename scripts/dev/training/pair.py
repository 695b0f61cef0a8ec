"""A pair: one target, one draft, the prompts to judge them on, and the figures they reached.

This module orders the phases and writes the folder; each phase is a module beside it.
"""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ....validate.counting.acceptance_counts import repeated_ngram_share
from .acceptance import replay
from .corpus import (
    Prompt,
    SourceFile,
    Split,
    held_out_prompts,
    sample_windows,
    token_stream,
    train_tokenizer,
)
from .draft import Draft, DraftKind, fresh_draft, ship_draft, train_draft
from .optimisation import Schedule
from .selection import SelectedPrompts, select_prompts
from .target import (
    TargetKind,
    TargetSize,
    Traces,
    copied_target,
    greedy_continuations,
    output_head,
    record_traces,
    ship_target,
    train_target,
)

TARGET_SCHEDULE = Schedule(num_steps=800, batch_size=8, max_learning_rate=3e-3)
DRAFT_SCHEDULE = Schedule(num_steps=550, batch_size=16, max_learning_rate=2e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Sizes and lengths of everything; the defaults made the shipped EAGLE-3 pairs.

    Attributes:
        sequence_length: tokens per training window of the target.
        prompt_length: tokens of every prompt, in training and held out.
        num_new_tokens: greedy tokens after every prompt.
        num_training_prompts: prompts cut from training text, whose continuations train the draft.
        num_gate_prompts: held-out prompts that the figures are measured on.
        num_calibration_prompts: held-out prompts from other files, not used here.
        num_candidates_per_prompt: held-out prompts drawn for each one that is kept.
        max_repeated_8gram_share: limit on how much a held-out prompt's continuation may loop.
        num_draft_tokens: draft tokens per step, in training and measurement.
        row_stride: distance of the rows that one training step of the draft takes of a sequence.
        depth_decay: weight of each draft step in the loss relative to the one before.
        num_threads: torch threads; part of the plan because sums depend on it.
    """

    target: TargetSize = field(default_factory=TargetSize)
    target_schedule: Schedule = TARGET_SCHEDULE
    sequence_length: int = 256
    prompt_length: int = 48
    num_new_tokens: int = 128
    num_training_prompts: int = 2048
    draft_schedule: Schedule = DRAFT_SCHEDULE
    num_gate_prompts: int = 96
    num_calibration_prompts: int = 48
    num_candidates_per_prompt: int = 4
    max_repeated_8gram_share: float = 0.25
    num_draft_tokens: int = 3
    row_stride: int = 1
    depth_decay: float = 0.8
    num_threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A draft family that can be trained.

    Attributes:
        target_kind: architecture of the target it is trained over.
        draft_kind: names, maths and published form of the draft.
        plan: what made the shipped pair.
        variant: what a family's other kind of draft is called; "" = it has one kind.
    """

    target_kind: TargetKind
    draft_kind: DraftKind
    plan: PairPlan = field(default_factory=PairPlan)
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the family, or of the variant of it."""
        return self.variant or self.draft_kind.family.name


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
    family: Family,
    plan: PairPlan,
    files: Sequence[SourceFile],
    out: Path,
    *,
    seed: int,
    shipped_target: Path | None = None,
) -> Mapping[str, object]:
    """Train a target and its draft and write the pair; returns what training.json holds.

    One seed gives one pair on one machine.

    Args:
        shipped_target: the target/ of another pair of the same plan; None = train one.

    Raises:
        ValueError: the draft reads the target's last layer.
    """
    _check_layers(family, plan.target)
    torch.set_num_threads(plan.num_threads)
    torch.use_deterministic_algorithms(True)
    out.mkdir(parents=True)
    stopwatch = Stopwatch()

    with stopwatch.phase("corpus"):
        tokenizer, stream = _training_text(files, plan)
    with stopwatch.phase("target"):
        target, target_losses = (
            _make_target(family.target_kind, plan, tokenizer, stream, out / "target", seed)
            if shipped_target is None
            else (copied_target(shipped_target, out / "target"), ())
        )
    with stopwatch.phase("continuations"):
        gate = _held_out(files, "gate", tokenizer, target, plan, seed)
        calibration = _held_out(files, "calibration", tokenizer, target, plan, seed)
        training_token_ids = greedy_continuations(
            target, _training_prompts(plan, stream, seed), num_new_tokens=plan.num_new_tokens
        )
    with stopwatch.phase("draft"):
        training_traces = _traces(family, plan, target, training_token_ids)
        draft, draft_losses = _make_draft(family, plan, target, training_traces, seed)
        draft = ship_draft(draft, family.draft_kind.config(plan.target), out / "draft")
    with stopwatch.phase("evaluation"):
        figures = _figures(draft, _traces(family, plan, target, gate.token_ids), plan)

    _write_prompts(gate.prompts, out / "prompts.jsonl")
    _write_prompts(calibration.prompts, out / "calibration.jsonl")
    report = {
        "family": family.name,
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
    files: Sequence[SourceFile], plan: PairPlan
) -> tuple[PreTrainedTokenizerFast, Tensor]:
    texts = [file.text for file in files if file.split == "training"]
    tokenizer = train_tokenizer(texts, plan.target.vocab_size)
    return tokenizer, token_stream(tokenizer, texts)


def _make_target(
    kind: TargetKind,
    plan: PairPlan,
    tokenizer: PreTrainedTokenizerFast,
    stream: Tensor,
    folder: Path,
    seed: int,
) -> tuple[PreTrainedModel, tuple[float, ...]]:
    trained, losses = train_target(
        kind,
        plan.target,
        stream,
        plan.target_schedule,
        sequence_length=plan.sequence_length,
        seed=seed,
    )
    return ship_target(trained, tokenizer, folder), losses


def _training_prompts(plan: PairPlan, stream: Tensor, seed: int) -> Tensor:
    return sample_windows(
        stream,
        count=plan.num_training_prompts,
        length=plan.prompt_length,
        generator=torch.Generator().manual_seed(seed),
    )


def _make_draft(
    family: Family, plan: PairPlan, target: PreTrainedModel, traces: Traces, seed: int
) -> tuple[Draft, tuple[float, ...]]:
    torch.manual_seed(seed)
    draft = fresh_draft(family.draft_kind, target, plan.target)
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


def _check_layers(family: Family, target: TargetSize) -> None:
    last, read = target.num_hidden_layers - 1, family.draft_kind.geometry(target).aux_layer_ids
    if read and max(read) >= last:
        raise ValueError(
            f"family {family.name}: the draft reads layers {list(read)}, expected layers before "
            f"{last}, the target's last, whose output transformers normalizes and engines do not\n"
            f"  fix: give the target {max(read) + 2} layers, or let the draft read earlier ones"
        )


def _traces(family: Family, plan: PairPlan, target: PreTrainedModel, token_ids: Tensor) -> Traces:
    """The features are those layers that the draft names, else the target's last hidden state."""
    return record_traces(
        target,
        token_ids,
        prompt_length=plan.prompt_length,
        aux_layer_ids=family.draft_kind.geometry(plan.target).aux_layer_ids,
    )


def _figures(draft: Draft, traces: Traces, plan: PairPlan) -> dict[str, object]:
    """Acceptance of the shipped draft on the gate prompts."""
    counts = replay(draft, traces, num_draft_tokens=plan.num_draft_tokens)
    rates = counts.acceptance_rate_by_position()
    return {
        "num_prompts": len(traces.token_ids),
        "num_new_tokens": plan.num_new_tokens,
        "num_draft_tokens": plan.num_draft_tokens,
        "repeated_8gram_share": round(
            repeated_ngram_share(traces.token_ids[:, traces.prompt_length :].tolist()), 4
        ),
        "bf16": {
            "mean_acceptance_length": round(counts.mean_acceptance_length(), 4),
            "acceptance_rate_by_position": [round(rate, 4) for rate in rates],
            **asdict(counts),
        },
    }


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
