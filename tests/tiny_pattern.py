"""The shipped pairs as they are to be trained, many times smaller."""

import dataclasses
from pathlib import Path

from draftquant.scripts.dev.training.optimisation import Schedule
from draftquant.scripts.dev.training.pattern import PairPlan, Pattern, pattern_of

PAIRS = Path(__file__).parent / "pairs"
TARGET = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAN = PairPlan(
    target_schedule=Schedule(num_steps=2, batch_size=2, max_learning_rate=1e-3),
    sequence_length=32,
    prompt_length=8,
    num_new_tokens=12,
    num_training_prompts=4,
    draft_schedule=Schedule(num_steps=2, batch_size=2, max_learning_rate=1e-3),
    num_gate_prompts=6,
    num_calibration_prompts=5,
    num_candidates_per_prompt=1,
    max_repeated_8gram_share=1.0,
    num_draft_tokens=3,
    row_stride=1,
    depth_decay=0.8,
    num_threads=1,
)


def tiny_pattern(name: str) -> Pattern:
    """That of a shipped pair, with a narrow target and a short plan."""
    shipped = pattern_of(PAIRS / name)
    sizes = dict(TARGET)
    if shipped.target.model_type == "deepseek_v3":
        sizes |= {"num_key_value_heads": TARGET["num_attention_heads"], "q_lora_rank": 32}
    target = type(shipped.target).from_dict(shipped.target.to_dict() | sizes)
    of_target = {"hidden_size", "vocab_size", "draft_vocab_size"} & shipped.draft.keys()
    draft = {**shipped.draft, **{key: TARGET[key.removeprefix("draft_")] for key in of_target}}
    return dataclasses.replace(shipped, target=target, draft=draft, plan=PLAN)
