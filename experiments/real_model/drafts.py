"""Training of drafts on the shards, by the trainer of the shipped pairs."""

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
from draftquant.scripts.dev.training.draft_kinds import DFLASH, EAGLE3_LLAMA, EAGLE3_MLA
from draftquant.scripts.dev.training.optimisation import Schedule, minimise
from draftquant.scripts.dev.training.target import TargetSize, Traces
from safetensors.torch import load_file
from states import AUX_LAYERS, DRAFT_VOCABULARY, PER_SHARD
from torch import Tensor
from trained import Trained
from transformers import AutoModelForCausalLM

SIZE = TargetSize(
    vocab_size=262_144, hidden_size=640, max_position_embeddings=32_768, num_hidden_layers=18
)
_CANDIDATES, _LIKELY = 2_048, 4
"""Rows of the head that a training step looks at; the tokens of a position among them."""
_BEGUN = 1 / 3
"""Of the target's last norm that a draft begins with: its logits would be wild with all of it."""
_MASK_ID = 4
"""Gemma's `<mask>`."""
_EAGLE3 = {
    "intermediate_size": 1536,
    "num_attention_heads": 4,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX_LAYERS],
}
_IDS = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}


DRAFTS = {
    "eagle3": Trained(
        kind=EAGLE3_LLAMA,
        own={**_EAGLE3, "num_key_value_heads": 2, "head_dim": 128, "eagle_config": _IDS},
    ),
    "mla": Trained(
        kind=EAGLE3_MLA,
        own={
            **_EAGLE3,
            "num_key_value_heads": 4,
            "q_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "eagle_config": _IDS,
        },
    ),
    "dflash": Trained(
        kind=DFLASH,
        own={
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "max_window_layers": 2,
            "intermediate_size": 1536,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "dflash_config": {"mask_token_id": _MASK_ID, "target_layer_ids": list(AUX_LAYERS)},
        },
        num_draft_tokens=7,
        decay=0.7,
        row_stride=16,
        batch_size=24,
    ),
}


def has_vocabulary(trained: Trained) -> bool:
    """Whether its kind proposes from a draft vocabulary."""
    return "draft_vocab_size" in trained.kind.config(SIZE)


def untied(trained: Trained) -> dict[str, Any]:
    """Its config.json, with a head over the draft vocabulary where the kind ships one."""
    smaller = {"draft_vocab_size": DRAFT_VOCABULARY} if has_vocabulary(trained) else {}
    return {**trained.config(SIZE), **smaller}


def train(name: str, target: Path, states: Path, out: Path, num_steps: int, *, seed: int) -> None:
    """Train for so many steps, and write `out`/draft; a killed run goes on from `out`/state.pt.

    The head is the target's rows of the draft vocabulary, and the norm before it begins as a share
    of the target's; neither embedding nor head is trained. Of every channel of the features the
    draft trains on what is left when the root mean square is divided out, which `fc` takes in at
    the end: some channels of this target are a thousand times larger than others.
    """
    trained = DRAFTS[name]
    schedule = Schedule(num_steps=num_steps, batch_size=trained.batch_size, max_learning_rate=1e-3)
    torch.manual_seed(seed)
    draft = begun(trained, target, states)
    scale = feature_scale(states)
    sample = sampler(states, scale, schedule.batch_size)
    head = draft.weights["lm_head.weight"]

    def batch_loss() -> Tensor:
        traces = sample()
        first = int(torch.randint(trained.row_stride, ()).item())
        with torch.autocast("cpu", torch.bfloat16):
            likely = traces.final_hidden.flatten(0, 1)[::4] @ head.T
            rows = candidates(likely.topk(_LIKELY).indices)
            return distillation_loss(
                replace(draft, weights={**draft.weights, "lm_head.weight": head[rows]}),
                traces,
                scored_rows(traces, trained.num_draft_tokens)[first :: trained.row_stride],
                lambda hidden: hidden @ head[rows].T,
                num_draft_tokens=trained.num_draft_tokens,
                decay=trained.decay,
            )

    out.mkdir(exist_ok=True)
    kept = out / "state.pt"
    losses = minimise(batch_loss, draft.weights.values(), schedule, label=name, kept=kept)
    write(trained, draft, scale, out)
    report = {"schedule": asdict(schedule), "losses": losses}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def begun(trained: Trained, target: Path, states: Path) -> Draft:
    """A draft over the draft vocabulary, its last norm a share of the target's."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocabulary = load_file(states / "vocabulary.safetensors")["vocabulary"]
    kind = replace(trained.kind, config=lambda _size: untied(trained), ships_tables=False)
    draft = fresh_draft(kind, model, SIZE, vocabulary)
    with torch.no_grad():  # Gemma's norms multiply by 1 + weight
        draft.weights["norm.weight"].copy_(_BEGUN * (1 + model.base_model.norm.weight))
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


def write(trained: Trained, draft: Draft, scale: Tensor, out: Path) -> None:
    """`out`/draft as it ships, over features as the target gives them.

    Where that has a draft vocabulary, `out`-whole/draft has the same layer and the target's head.
    """
    own = {**draft.weights, "fc.weight": draft.weights["fc.weight"].detach() / scale}
    whole = {name: weight for name, weight in own.items() if name not in ("d2t", "lm_head.weight")}
    folders = [(out, untied(trained), own if has_vocabulary(trained) else whole)]
    if has_vocabulary(trained):
        folders.append((out.with_name(f"{out.name}-whole"), trained.config(SIZE), whole))
    for pair, config, weights in folders:
        pair.mkdir(exist_ok=True)
        shutil.rmtree(pair / "draft", ignore_errors=True)
        ship_draft(replace(draft, weights=weights), config, pair / "draft")
