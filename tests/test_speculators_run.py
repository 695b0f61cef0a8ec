"""Drafts in the speculators layout: computed, quantized and loaded again.

On drafts that speculators 0.9.0 itself made (random weights, float32, EAGLE-3 and DFlash), this
forward maths differed from the package's own by less than 1.3e-5 in logits of size 1.5.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from draftquant.quantize.drafts.recognition import plain_config
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from plain_attention import softmax_attention
from reference_draft import ReferenceDraft, add_norms, common_config, random_weights, widen
from tiny_speculators import YARN
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

# What is computed


class ReferenceQwen3Draft(ReferenceDraft):
    """See `ReferenceDraft`: attention and MLP are those of `transformers.models.qwen3`."""

    def make_config(self, g: Eagle3Geometry) -> Qwen3Config:  # type: ignore[override]
        return Qwen3Config(
            **common_config(g),
            num_key_value_heads=g.attention.num_key_value_heads,
            head_dim=g.attention.head_dim,
        )

    def make_layer(self, config: Any, index: int) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = modeling_qwen3.Qwen3Attention(config, index)
        layer.mlp = modeling_qwen3.Qwen3MLP(config)
        add_norms(layer, config, index)
        if index == 0:
            widen(layer.self_attn, "q_proj", "k_proj", "v_proj")
        return layer


@pytest.mark.each_value
@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("rope", [{}, YARN], ids=["plain-rope", "yarn"])
@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_forward_equals_the_transformers_modules(
    layer_type: str, rope: dict[str, Any], num_layers: int
) -> None:
    """Tolerance as in test_eagle3_forward.py; two more norms per layer do not change its order."""
    layers = {
        "model_type": layer_type, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 96, "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"} | rope,
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers,
        "norm_before_residual": False,
    }
    family = Eagle3Llama()
    geometry = family.read_geometry(plain_config(config, "config.json"), "config.json")
    weights = random_weights(geometry)
    reference = {"llama": ReferenceDraft, "qwen3": ReferenceQwen3Draft}[layer_type]
    rows = 23
    tokens = torch.randint(96, (2, rows), generator=torch.manual_seed(1))
    hidden = torch.randn(2, rows, 32, dtype=torch.float64)
    with mock.patch.object(modeling_qwen3, "torch", modeling_llama.torch):
        expected, expected_hidden = reference(geometry, weights).extend(tokens, hidden, 0)
    forward = family.forward(geometry, weights, lambda _name, x: x)
    fed = forward.step(tokens, hidden, torch.arange(rows), causal_attention)
    got = forward.logits(fed)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(fed, expected_hidden, rtol=0, atol=1e-10)
    if layer_type == "qwen3":  # the comparison has teeth: a lost norm moves logits
        lost = weights | {"layers.0.self_attn.k_norm.weight": torch.ones(16, dtype=torch.float64)}
        forward = family.forward(geometry, lost, lambda _name, x: x)
        moved = forward.logits(forward.step(tokens, hidden, torch.arange(rows), causal_attention))
        assert (moved - expected).abs().max() > 1e-3


def causal_attention(_layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    rows, total = q.shape[2], k.shape[2]
    visible = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
    return softmax_attention(q, k, v, scale, visible)
