"""Drafts in the speculators layout: computed, quantized and loaded again; see test_speculators.py.

On drafts that speculators 0.9.0 itself made (random weights, float32, EAGLE-3 and DFlash), this
forward maths differed from the package's own by less than 1.3e-5 in logits of size 1.5.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from data_free import DATA_FREE
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from draftquant.quantize.drafts.recognition import plain_config
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from plain_attention import softmax_attention
from reference_draft import ReferenceDraft, add_norms, common_config, random_weights, widen
from tiny import edit_json
from tiny_speculators import BUILD, SMALL, WIDE, YARN, tiny_speculators_eagle3
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


# What is written


@pytest.mark.each_value
@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("recipe", DATA_FREE)
def test_every_recipe_is_written_verified_and_loaded(
    recipe: str, build: str, tmp_path: Path
) -> None:
    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    sizes = WIDE if chosen.weights.group_size else SMALL
    source, out = BUILD[build](tmp_path / "draft", sizes=sizes), tmp_path / "out"
    plan = make_plan(chosen, read_draft(Checkpoint.open(source)))
    scales = dict[str, float]()
    if plan.recipe.needs_input_scales:
        scales = {s.row.tensor.name.removesuffix(".weight"): 0.25 for s in plan.quantized}
    report = quantize_draft(
        plan, out, source=DraftSource(folder=source), measured=Measured(input_scales=scales)
    )
    assert report.verification.ok
    assert verify(out, source).ok

    before, after = (
        json.loads((f / "config.json").read_text(encoding="utf-8")) for f in (source, out)
    )
    assert after.pop("quantization_config")
    assert after == before

    exact, draft = load_draft(source), load_draft(out)
    assert draft.quantized
    assert draft.geometry == exact.geometry
    assert {*draft.quantized} - {"lm_head"} <= {*draft.linears} == {*exact.linears}
    for name, weight in exact.weights.items():
        error = (draft.weights[name].float() - weight.float()).norm() / weight.float().norm()
        # INT4 steps are a row's largest value / 7: for normal values, at most 3.6 sigma in a row of
        # 64 to 128, the error is 3.6 / 7 / sqrt(12) = 0.15 sigma. FP8 is closer.
        assert error < 0.15 if name.removesuffix(".weight") in draft.quantized else error == 0


def test_a_changed_layer_config_does_not_verify(tmp_path: Path) -> None:
    source, out = tiny_speculators_eagle3(tmp_path / "draft"), tmp_path / "out"
    plan = make_plan(load_recipe("fp8-ptpc"), read_draft(Checkpoint.open(source)))
    quantize_draft(plan, out, source=DraftSource(folder=source))
    layers = json.loads((out / "config.json").read_text(encoding="utf-8"))[
        "transformer_layer_config"
    ]
    edit_json(out / "config.json", transformer_layer_config=layers | {"rms_norm_eps": 1e-5})
    found = verify(out, source)
    assert not found.ok
    assert any("transformer_layer_config" in fault.where for fault in found.faults)
