"""What a pair is trained after: configs, names of tensors and plan of one that is shipped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ....quantize.drafts import Family, read_draft
from ....quantize.drafts.geometry import Geometry
from ....quantize.files.checkpoint import Checkpoint
from ....recipes.regular_file import read_text
from .optimisation import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Lengths and numbers of everything.

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

    target_schedule: Schedule
    sequence_length: int
    prompt_length: int
    num_new_tokens: int
    num_training_prompts: int
    draft_schedule: Schedule
    num_gate_prompts: int
    num_calibration_prompts: int
    num_candidates_per_prompt: int
    max_repeated_8gram_share: float
    num_draft_tokens: int
    depth_decay: float
    num_threads: int
    row_stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pair as it is to be, but for its weights.

    Attributes:
        target: the config of the target.
        draft: the config.json of the draft.
        family: shapes and maths of the draft.
        names: canonical name of each tensor that ships -> as it is published. Embedding and head
            are the target's where they are not among them.
        plan: how both are trained.
    """

    target: PreTrainedConfig
    draft: Mapping[str, Any]
    family: Family
    names: Mapping[str, str]
    plan: PairPlan

    @property
    def geometry(self) -> Geometry:
        """What shapes and maths of the draft follow from."""
        return self.family.read_geometry(self.draft, "config.json")


def pattern_of(pair: Path) -> Pattern:
    """That of a shipped pair."""
    draft = read_draft(Checkpoint.open(pair / "draft"))
    plan = json.loads(read_text(pair / "training.json"))["plan"]
    plan.pop("target", None)  # sizes, which older pairs name here too
    for name in ("target_schedule", "draft_schedule"):
        plan[name] = Schedule(**plan[name])
    return Pattern(
        target=AutoConfig.from_pretrained(pair / "target"),
        draft=json.loads(read_text(pair / "draft" / "config.json")),
        family=draft.family,
        names={row.canonical: row.tensor.name for row in draft.rows},
        plan=PairPlan(**plan),
    )
