"""Training of an EAGLE-3 draft on the shards, by the trainer of the shipped pairs."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from draftquant.scripts.dev.training.draft import (
    Draft,
    distillation_loss,
    fresh_draft,
    scored_rows,
    ship_draft,
)
from draftquant.scripts.dev.training.draft_kinds import EAGLE3_LLAMA
from draftquant.scripts.dev.training.optimisation import Schedule, minimise
from draftquant.scripts.dev.training.target import TargetSize, Traces
from safetensors.torch import load_file
from states import AUX_LAYERS, DRAFT_VOCABULARY, PER_SHARD
from torch import Tensor
from transformers import AutoModelForCausalLM

NUM_DRAFT_TOKENS, DECAY = 3, 0.8
SIZE = TargetSize(vocab_size=262_144, hidden_size=640, max_position_embeddings=32_768)
_CANDIDATES, _LIKELY = 2_048, 4
"""Rows of the head that a training step looks at; the tokens of a position among them."""


def _config(target: TargetSize) -> dict[str, Any]:
    return {
        **EAGLE3_LLAMA.config(target),
        "intermediate_size": 1536,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX_LAYERS],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_aux_hidden_state": True,
        },
    }


KIND = replace(EAGLE3_LLAMA, config=_config, ships_tables=False)


def train(target: Path, states: Path, out: Path, schedule: Schedule, *, seed: int) -> None:
    """Train for a schedule, and write `out`/draft; a killed run goes on from `out`/state.pt.

    The head is the target's rows of the draft vocabulary, and the norm before it begins as the
    target's; neither embedding nor head is trained. Of every channel of the features the draft
    trains on what is left when the root mean square is divided out, which `fc` takes in at the end:
    some channels of this target are a thousand times larger than others.
    """
    torch.manual_seed(seed)
    draft = begun(target, states)
    scale = feature_scale(states)
    sample = sampler(states, scale, schedule.batch_size)
    head = draft.weights["lm_head.weight"]

    def batch_loss() -> Tensor:
        traces = sample()
        with torch.autocast("cpu", torch.bfloat16):
            likely = traces.final_hidden.flatten(0, 1)[::4] @ head.T
            rows = candidates(likely.topk(_LIKELY).indices)
            return distillation_loss(
                replace(draft, weights={**draft.weights, "lm_head.weight": head[rows]}),
                traces,
                scored_rows(traces, NUM_DRAFT_TOKENS),
                lambda hidden: hidden @ head[rows].T,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                decay=DECAY,
            )

    kept = out / "state.pt"
    losses = minimise(batch_loss, draft.weights.values(), schedule, label="draft", kept=kept)
    write(draft, scale, out / "draft")
    report = {"schedule": asdict(schedule), "losses": losses}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def begun(target: Path, states: Path) -> Draft:
    """A draft with the target's final norm, and its head over the draft vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocabulary = load_file(states / "vocabulary.safetensors")["vocabulary"]
    draft = fresh_draft(KIND, model, SIZE, vocabulary)
    with torch.no_grad():  # Gemma's norms multiply by 1 + weight
        draft.weights["norm.weight"].copy_(1 + model.base_model.norm.weight)
    return draft


def feature_scale(states: Path) -> Tensor:
    """[features] float32: root mean squares over the first shard, the first token left out."""
    features = load_file(states / "000.safetensors")["features"][:, 1:]
    return features.float().square().mean((0, 1)).sqrt()


def sampler(states: Path, scale: Tensor, batch_size: int) -> Callable[[], Traces]:
    """Draws texts of the shards that there are, by torch's random numbers."""

    def sample() -> Traces:
        paths = sorted(states.glob("???.safetensors"))
        generator = random.Random(int(torch.randint(2**31, ()).item()))
        shards = [load_file(generator.choice(paths)) for _ in range(batch_size)]
        texts = [generator.randrange(PER_SHARD) for _ in shards]
        ids, features, final = (
            torch.stack([shard[name][i] for shard, i in zip(shards, texts, strict=True)])
            for name in ("token_ids", "features", "final_hidden")
        )
        return Traces(ids.long(), features.float() / scale, final.float(), prompt_length=1)

    return sample


def candidates(likely: Tensor) -> Tensor:
    """[`_CANDIDATES`] int64 draft ids: the likely ones, then any others at random."""
    often, counts = likely.flatten().unique(return_counts=True)
    often = often[counts.argsort(descending=True)][: _CANDIDATES * 3 // 4]
    drawn = torch.randperm(DRAFT_VOCABULARY)
    return torch.cat((often, drawn[~torch.isin(drawn, often)]))[:_CANDIDATES]


def write(draft: Draft, scale: Tensor, folder: Path) -> None:
    """The draft as it ships, over features as the target gives them."""
    own = {**draft.weights, "fc.weight": draft.weights["fc.weight"].detach() / scale}
    shutil.rmtree(folder, ignore_errors=True)
    ship_draft(replace(draft, weights=own), _config(SIZE), folder)
