"""A tiny target and a draft that is tied to it by construction, so that it accepts something.

The target is nearly a Markov chain: its logits depend mostly on the current token's embedding, a
little on the context through random layers. The draft reads the embedding of the token that it is
given through an attention that looks at its own row, cancels most of its hidden state, and has the
target's head; so it is right about as often as the target's context does not matter.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import corpus
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from recorded import record_traces
from reference_draft import transformers_in_float64
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCAB, NUM_LAYERS = 64, 96, 8
AUX_LAYER_IDS = (1, 3, 4)  # the default rule for 8 layers


def save_target(folder: Path, *, eos_token_id: int | None = None, seed: int = 0) -> Path:
    """Write the target (float32 safetensors)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config)
    weights = target.state_dict()
    for name, weight in weights.items():
        if "layers" in name and weight.dim() == 2:
            weight.copy_(torch.randn_like(weight) * 1.35 / weight.shape[1] ** 0.5)
    weights["model.embed_tokens.weight"].copy_(torch.randn(VOCAB, HIDDEN) * 2.2)
    head = weights["model.embed_tokens.weight"][torch.randperm(VOCAB)]
    weights["lm_head.weight"].copy_(head + 0.3 * torch.randn_like(head))
    target.save_pretrained(folder)
    return folder


def save_draft(folder: Path, target: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write a Llama draft of the target (bfloat16 safetensors); `config` overrides config.json."""
    model = LlamaForCausalLM.from_pretrained(target)
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        **DRAFT_KEYS,
        **config,
    }
    return write_layers(folder, keys, model, seed, _attention_weights, _later_attention_weights)


DRAFT_KEYS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "rope_theta": 1e6,
    "norm_before_residual": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS)},
}
Noise = Callable[..., Tensor]
"""Shape -> normal values of deviation 0.5 / sqrt(columns)."""


def layer_weights(prefix: str, index: int, noise: Noise) -> dict[str, Tensor]:
    """MLP and norms of a layer."""
    names = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    return {
        f"{prefix}mlp.gate_proj.weight": noise(48, HIDDEN),
        f"{prefix}mlp.up_proj.weight": noise(48, HIDDEN),
        f"{prefix}mlp.down_proj.weight": noise(HIDDEN, 48),
    } | {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in names[: 3 if index == 0 else 2]}


def write_layers(
    folder: Path,
    keys: dict[str, Any],
    target: LlamaForCausalLM,
    seed: int,
    first: Callable[[Noise], dict[str, Tensor]],
    later: Callable[[Noise], dict[str, Tensor]],
) -> Path:
    """A draft whose layers' attention has the weights `first`, and after the first one `later`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.5 / shape[-1] ** 0.5

    weights: dict[str, Tensor] = {
        "embed_tokens.weight": target.model.embed_tokens.weight,
        "fc.weight": noise(HIDDEN, 3 * HIDDEN) * 2,
        "norm.weight": target.model.norm.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    for i in range(keys["num_hidden_layers"]):
        prefix = "midlayer." if i == 0 else f"layers.{i}."
        attention = first(noise) if i == 0 else later(noise)
        weights |= {f"{prefix}self_attn.{name}.weight": w for name, w in attention.items()}
        weights |= layer_weights(prefix, i, noise)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    stored = {name: w.detach().to(torch.bfloat16).clone() for name, w in weights.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def _attention_weights(noise: Noise) -> dict[str, Tensor]:
    eye, zero = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    return {
        # Query and key are the embedding: a row attends to itself (and to equal tokens).
        "q_proj": torch.cat([torch.cat([0.7 * eye, zero], 1), torch.cat([0.7 * eye, zero], 1)])
        + noise(2 * HIDDEN, 2 * HIDDEN),
        "k_proj": torch.cat([eye, zero], 1) + noise(HIDDEN, 2 * HIDDEN),
        # The value adds the embedding and removes most of the residual.
        "v_proj": torch.cat([eye, -0.75 * eye], 1) + noise(HIDDEN, 2 * HIDDEN),
        "o_proj": torch.cat([0.5 * eye, 0.5 * eye], 1) + noise(HIDDEN, 2 * HIDDEN),
    }


def _later_attention_weights(noise: Noise) -> dict[str, Tensor]:
    """Random: the layer disturbs what layer 0 knows, so that some of it is accepted no more."""
    return {
        "q_proj": noise(2 * HIDDEN, HIDDEN) * 2,
        "k_proj": noise(HIDDEN, HIDDEN) * 2,
        "v_proj": noise(HIDDEN, HIDDEN),
        "o_proj": noise(HIDDEN, 2 * HIDDEN) * 16,
    }


def prompt_tokens(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts; token 0 is left out."""
    ids = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
    return [tuple(row) for row in ids.tolist()]


def prompts_of(token_ids: Iterable[tuple[int, ...]]) -> list[Prompt]:
    return [Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(token_ids)]


def tied(*, float64: bool = False) -> Path:
    """Target, draft and traces of it, which tests read and never change.

    Four prompts of 9 tokens and 24 behind each; in float64 three of 12 and one of a token, and 48.
    """
    asked = [*prompt_tokens(3, 12), *prompt_tokens(1, 1)] if float64 else prompt_tokens(4, 9)

    def make(folder: Path) -> None:
        save_draft(folder / "draft", save_target(folder / "target"))
        with transformers_in_float64() if float64 else nullcontext():
            record_traces(
                folder / "target", prompts_of(asked), folder / "traces",
                max_new_tokens=48 if float64 else 24, dtype="float64" if float64 else "float32",
            )  # fmt: skip

    return corpus.made("tied-float64" if float64 else "tied", make)
