"""Builders of tiny language models, and of the mask that makes an EAGLE-3 draft a P-EAGLE one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, edit_json, read_tensors, store, write_tensors

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def tiny_language_model(folder: Path, *, tied: bool = False, **layers: Any) -> Path:
    """Write a tiny language model, as transformers publishes them.

    Args:
        folder: created; its parent must exist.
        tied: the head is the embedding.
        layers: see `_Builder`.
    """
    config = {"tie_word_embeddings": tied, **(layers.pop("config", None) or {})}
    build = _Builder(config=config, **layers)
    tensors = {
        "model.embed_tokens.weight": build.weight(build.vocab, build.hidden),
        "model.norm.weight": build.norm(build.hidden),
    }
    if not tied:
        tensors["lm_head.weight"] = build.weight(build.vocab, build.hidden)
    body = {f"model.{name}": tensor for name, tensor in build.layers().items()}
    return build.write(folder, tensors | body)


class _Builder:
    """Weights and config.json of `num_layers` layers.

    Args:
        kind: "Llama", "Qwen2" (biased queries, keys and values) or "Qwen3" (normed heads).
        config: overrides of config.json.
    """

    def __init__(
        self,
        *,
        kind: str = "Llama",
        seed: int = 0,
        hidden: int = 64,
        intermediate: int = 96,
        num_layers: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        vocab: int = 96,
        dtype: str = "BF16",
        sharded: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype, self._sharded, self._kind = dtype, sharded, kind
        self.hidden, self.vocab = hidden, vocab
        self.config = {
            "architectures": [f"{kind}ForCausalLM"],
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "max_position_embeddings": 2048,
            "model_type": kind.lower(),
            "num_attention_heads": heads,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": _DTYPES[dtype],
            "vocab_size": vocab,
            **(config or {}),
        }

    def weight(self, *shape: int) -> Stored:
        """A linear or a table."""
        values = self._rng.standard_normal(shape, dtype=np.float32)
        return store(values / shape[-1] ** 0.5, self._dtype)

    def norm(self, width: int) -> Stored:
        """Near one."""
        values = 1 + 0.1 * self._rng.standard_normal(width, dtype=np.float32)
        return store(values, self._dtype)

    def bias(self, width: int) -> Stored:
        """Large enough to be missed."""
        return store(0.5 * self._rng.standard_normal(width, dtype=np.float32), self._dtype)

    def layers(self) -> dict[str, Stored]:
        """All tensors of all layers, by canonical name."""
        c, found = self.config, {}
        heads, inner = c["num_attention_heads"] * c["head_dim"], c["intermediate_size"]
        keys, hidden = c["num_key_value_heads"] * c["head_dim"], self.hidden
        rows = {"q_proj": heads, "k_proj": keys, "v_proj": keys}
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}."
            for name, width in rows.items():
                found[f"{layer}self_attn.{name}.weight"] = self.weight(width, hidden)
                if self._kind == "Qwen2":
                    found[f"{layer}self_attn.{name}.bias"] = self.bias(width)
                if self._kind == "Qwen3" and name != "v_proj":
                    norm = f"{layer}self_attn.{name[0]}_norm.weight"
                    found[norm] = self.norm(c["head_dim"])
            found |= {
                f"{layer}self_attn.o_proj.weight": self.weight(hidden, heads),
                f"{layer}mlp.gate_proj.weight": self.weight(inner, hidden),
                f"{layer}mlp.up_proj.weight": self.weight(inner, hidden),
                f"{layer}mlp.down_proj.weight": self.weight(hidden, inner),
                f"{layer}input_layernorm.weight": self.norm(hidden),
                f"{layer}post_attention_layernorm.weight": self.norm(hidden),
            }
        return found

    def write(self, folder: Path, tensors: Mapping[str, Stored]) -> Path:
        """config.json, weights and two tokenizer files."""
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(self.config, indent=2) + "\n", encoding="utf-8"
        )
        (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
        (folder / "tokenizer_config.json").write_text("{}\n", encoding="utf-8")
        write_tensors(folder, tensors, sharded=self._sharded, metadata={"format": "pt"})
        return folder


def with_mask_hidden(folder: Path, *, num_features: int = 192, seed: int = 5) -> Path:
    """Make an EAGLE-3 draft a P-EAGLE one: a mask beside its tensors, and the mask's token."""
    values = np.random.default_rng(seed).standard_normal((1, 1, num_features), dtype=np.float32)
    write_tensors(folder, {**read_tensors(folder), "mask_hidden": store(values, "BF16")})
    edit_json(folder / "config.json", mask_token_id=7)
    return folder
