"""Training of drafts on the answers, by the trainer of the shipped pairs."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from answers import AUX_LAYERS
from draftquant.scripts.dev import PAIRS
from draftquant.scripts.dev.training.draft import (
    Draft,
    distillation_loss,
    fresh_draft,
    scored_rows,
    ship_draft,
    shipped_draft,
)
from draftquant.scripts.dev.training.draft_kinds import DFLASH, EAGLE3_LLAMA
from draftquant.scripts.dev.training.optimisation import Schedule, minimise
from draftquant.scripts.dev.training.target import TargetSize, Traces
from safetensors import safe_open
from target import PRODUCTS
from torch import Tensor
from trained import Trained
from transformers import AutoModelForCausalLM

SIZE = TargetSize(
    vocab_size=49_152,
    hidden_size=576,
    num_hidden_layers=30,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
)
_LIKELY, _OTHERS = 4, 512
"""Rows of the head that a training step looks at: each position's likely tokens, and others."""
_ALIKE = 16
"""Lengths are multiples of it, since products of a new shape are compiled first."""
DRAFT_VOCABULARY = 4096
"""Rows of the cut head."""
STARTS = {"eagle3": PAIRS / "smollm2/draft"}
"""A training goes on from what an earlier one shipped."""
_AS_TARGET = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


DRAFTS = {
    "eagle3": Trained(
        kind=EAGLE3_LLAMA,
        own={
            **_AS_TARGET,
            "intermediate_size": 1792,
            "rms_norm_eps": SIZE.rms_norm_eps,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX_LAYERS],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        },
    ),
    "dflash": Trained(
        kind=DFLASH,
        own={
            **_AS_TARGET,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "max_window_layers": 2,
            "intermediate_size": 1536,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(AUX_LAYERS)},
        },
        num_draft_tokens=7,
        decay=0.7,
        row_stride=16,
        batch_size=24,
    ),
}


def train(name: str, target: Path, states: Path, out: Path, schedule: Schedule, seed: int) -> None:
    """Train, and write `out`/draft; a killed run goes on from `out`/state.pt.

    A draft of `STARTS` begins as the one there. Embedding and head are the target's, and the norm
    before the head begins as a third of the target's: its logits would be wild with all of it. Of
    every channel of the features the draft trains on what is left when the root mean square is
    divided out, which `fc` takes in at the end: some channels are a thousand times larger.
    """
    trained = DRAFTS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    kind = replace(trained.kind, config=trained.config, ships_tables=False)
    draft = fresh_draft(kind, model, SIZE)
    with torch.no_grad():
        draft.weights["norm.weight"].copy_(model.base_model.norm.weight / 3)
    sample, scale = sampler(states, schedule.batch_size)
    if name in STARTS:
        _begin_as(draft, STARTS[name], scale)
    head = draft.weights["lm_head.weight"]
    read = head.to(PRODUCTS)

    def batch_loss() -> Tensor:
        traces = sample()
        rows = scored_rows(traces, trained.num_draft_tokens)
        first = int(torch.randint(min(trained.row_stride, len(rows)), ()).item())
        judged = rows[first :: trained.row_stride]
        with torch.no_grad():
            answers = traces.final_hidden[:, traces.prompt_length - 1 :: 2].flatten(0, 1)
            likely = (answers.to(PRODUCTS) @ read.T).topk(_LIKELY).indices.flatten().unique()
        others = torch.randperm(len(head))
        wanted = _up(len(likely) + _OTHERS // 2, _OTHERS) - len(likely)
        scored = torch.cat((likely, others[~torch.isin(others, likely)][:wanted]))
        cut = replace(draft, weights={**draft.weights, "lm_head.weight": head[scored]})
        how = {"num_draft_tokens": trained.num_draft_tokens, "decay": trained.decay}
        with torch.autocast("cpu", PRODUCTS, enabled=PRODUCTS is torch.bfloat16):
            return distillation_loss(
                cut, traces, judged, lambda hidden: (hidden @ head[scored].T).float(), **how
            )

    out.mkdir(exist_ok=True)
    lost = minimise(batch_loss, draft.weights.values(), schedule, label=name, kept=out / "state.pt")
    fused = draft.weights["fc.weight"].detach() / scale
    shipped = replace(draft, weights={**draft.weights, "fc.weight": fused})
    shutil.rmtree(out / "draft", ignore_errors=True)
    ship_draft(shipped, trained.config(SIZE), out / "draft")
    report = {"seed": seed, "schedule": asdict(schedule), "losses": lost}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def _begin_as(draft: Draft, folder: Path, scale: Tensor) -> None:
    """Take the weights of a draft that shipped, but for its cut head; features come divided."""
    for name, weight in shipped_draft(draft, folder).weights.items():
        if name in draft.weights and draft.weights[name].requires_grad:
            draft.weights[name].copy_(weight * scale if name == "fc.weight" else weight)


def sampler(states: Path, batch_size: int) -> tuple[Callable[[], Traces], Tensor]:
    """Draws texts of one shard that end near each other, by torch's random numbers.

    Returns:
        What draws; and what it divides features by, [features] float32: root mean squares over a
        shard, the first token left out.
    """
    with safe_open(min(states.glob("*.safetensors")), "pt") as shard:
        used = shard.get_slice("features")[:, 1:].float()
        used = used[used.any(-1)]
    scale = used.square().mean(0).sqrt()

    def sample() -> Traces:
        paths = sorted(states.glob("*.safetensors"))
        generator = random.Random(int(torch.randint(2**31, ()).item()))
        with safe_open(generator.choice(paths), "pt") as shard:
            starts, ends = shard.get_tensor("starts"), shard.get_tensor("ends")
            by_end = (ends - starts).argsort(stable=True)
            first = generator.randrange(max(1, len(by_end) - batch_size + 1))
            rows = by_end[first : first + batch_size].tolist()
            shortest = int(ends[rows].min()) // (2 * _ALIKE) * (2 * _ALIKE)
            length = max(shortest, _up(int(starts[rows].max()) + 12, _ALIKE))
            begins = length - _up(length - int(starts[rows].min()), _ALIKE)
            ids, features, final = (
                torch.stack([shard.get_slice(name)[i, :length] for i in rows])
                for name in ("token_ids", "features", "final_hidden")
            )
        return Traces(ids.long(), features.float() / scale, final.float(), begins)

    return sample, scale


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
