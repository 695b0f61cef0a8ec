"""A tiny target and a DFlash draft that is fitted to it in closed form, so that it accepts a lot.

The target is nearly a Markov chain over few tokens. The draft is random but for the last down_proj,
which a ridge regression points from the activations of the mask slots towards the head's rows of
the tokens that the target chose in given traces. It ships a mask embedding and, like the published
drafts, neither embedding nor head.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_config
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.files.checkpoint import Checkpoint
from proposing import draft_proposals
from reference_dflash import random_weights
from safetensors.torch import load_file, save_file
from tiny import edit_json
from tiny_dflash import OWN_KEYS, Kind
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

HIDDEN, VOCAB, NUM_LAYERS, BLOCK_SIZE = 64, 24, 4, 8
TARGET_LAYER_IDS = (0, 1, 3)
MASK_TOKEN_ID = 0
FITTED = "layers.1.mlp.down_proj"
_DFLASH = DFlash()


def save_target(folder: Path) -> Path:
    """Write the target (float32 safetensors)."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config)
    weights = target.state_dict()
    for name, weight in weights.items():
        if "layers" in name and weight.dim() == 2:
            weight.copy_(torch.randn_like(weight) / weight.shape[1] ** 0.5)
    weights["model.embed_tokens.weight"].copy_(torch.randn(VOCAB, HIDDEN) * 2.2)
    head = weights["model.embed_tokens.weight"][torch.randperm(VOCAB)]
    weights["lm_head.weight"].copy_(head + 0.3 * torch.randn_like(head))
    target.save_pretrained(folder)
    return folder


def shared_tables(target: Path) -> dict[str, Tensor]:
    """The target's embedding and head, by the draft's names."""
    tensors = load_file(target / "model.safetensors")
    return {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }


def save_draft(
    folder: Path, target: Path, traces: TraceFolder, family: DFlash = _DFLASH, **config: Any
) -> Path:
    """Write a draft fitted to float64 traces of the target; `config` overrides config.json."""
    nested = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(TARGET_LAYER_IDS)}
    keys = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK_SIZE,
        "dflash_config": nested, "num_target_layers": NUM_LAYERS, "hidden_size": HIDDEN,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, **config,
    }  # fmt: skip
    weights = _draft_weights(keys, shared_tables(target), traces, family)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    mask = {"embedding": weights.pop("mask_embedding"), "mask_token_id": MASK_TOKEN_ID}
    torch.save(mask, folder / "mask_embedding.pt")
    own = {name: w.contiguous() for name, w in weights.items() if name not in shared_tables(target)}
    save_file(own, folder / "model.safetensors")
    return folder


def _draft_weights(
    config: Mapping[str, Any], shared: Mapping[str, Tensor], traces: TraceFolder, family: DFlash
) -> dict[str, Tensor]:
    """Bfloat16 weights; the fit sees the rounded ones."""
    geometry = family.read_geometry(config, "config.json")
    weights = random_weights(geometry, seed=1, family=family)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight")):
            weights[name] *= 0.5
    weights["mask_embedding"] = 0.1 * torch.randn(HIDDEN, generator=torch.manual_seed(2)).double()
    weights = {name: w.bfloat16() for name, w in weights.items()} | dict(shared)

    activations: list[Tensor] = []

    def watch(name: str, x: Tensor) -> Tensor:
        if name == FITTED:
            activations.append(x[:, 1:].flatten(0, 1))
        return x

    exact = {name: w.double() for name, w in weights.items()}
    forward = family.forward(geometry, exact, watch)
    wanted = []
    for trace in traces:
        hidden, first = forward.fuse(trace.features[None])[0], trace.prompt_length - 1
        predicted = draft_proposals(
            forward, hidden, trace.token_ids, first_row=first, num_draft_tokens=BLOCK_SIZE - 1
        ).token_ids
        following = trace.token_ids[trace.prompt_length + 1 :]
        wanted.append(following.unfold(0, BLOCK_SIZE - 1, 1)[: len(predicted)].flatten())
    x = torch.cat(activations)
    towards = 30 * torch.nn.functional.normalize(exact["lm_head.weight"][torch.cat(wanted)])
    ridge = 1e-2 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1], dtype=x.dtype)
    weights[f"{FITTED}.weight"] = torch.linalg.solve(x.T @ x + ridge, x.T @ towards).T.bfloat16()
    return weights


MadeKind = Kind | Literal["dspark"]
AS_NEMOTRON = {
    "markov_head_type": "vanilla", "attention_sink_bias": True, "causal": True, "use_swa": True,
    "swa_window_size": 20,
}  # fmt: skip
"""Keys of dflash_config: sinks, windows and causal blocks."""
_DSPARK = {"projector_type": "dspark", "markov_rank": 16}


def with_own_tensors(plain: Path, out: Path, kind: MadeKind, **own: Any) -> Path:
    """The fitted draft with what its kin has besides, small enough that it goes on fitting."""
    shutil.copytree(plain, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    added = _DSPARK if kind == "dspark" else OWN_KEYS[kind]
    nested = {**config["dflash_config"], **added, **own}
    anchor = {"sample_from_anchor": False} if kind == "dspark" else {}  # as the plain one is fitted
    name = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
    edit_json(out / "config.json", architectures=[name], dflash_config=nested, **anchor)
    family, geometry = read_config(Checkpoint.open(out))
    weights, generator = load_file(out / "model.safetensors"), torch.manual_seed(3)
    if kind == "dspark":  # beside which no engine reads the side file
        table = shared_tables(plain.parent / "target")["embed_tokens.weight"].clone()
        side = out / "mask_embedding.pt"
        table[MASK_TOKEN_ID] = torch.load(side, weights_only=True)["embedding"].float()
        weights["embed_tokens.weight"] = table
        side.unlink()
    for tensor, spec in family.tensor_specs(geometry).items():
        if spec.role in ("proposal", "correction") or tensor.endswith("sink_bias"):
            shape = tuple(dim.size for dim in spec.shape)
            weights[tensor] = 0.2 * torch.randn(shape, generator=generator)
            if tensor.endswith("_codebook"):
                weights[tensor] *= 3
            if "_conv." in tensor:
                weights[tensor] /= 20
            if tensor.endswith("base_kernel"):
                weights[tensor] += torch.tensor([1.0, 0.0])[:, None]
    save_file({n: w.bfloat16().contiguous() for n, w in weights.items()}, out / "model.safetensors")
    return out
