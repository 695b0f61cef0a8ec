"""Reading DFlash drafts: every spelling, and tensors that must be refused.

Faults in config.json are in test_dflash_config.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.drafts.geometry import GroupedAttention
from draftquant.quantize.drafts.rope import RopeConfig
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from tiny import bf16, change, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash

LAYER_ROLES = {
    "self_attn.q_proj.weight": "attention",
    "self_attn.k_proj.weight": "attention",
    "self_attn.v_proj.weight": "attention",
    "self_attn.o_proj.weight": "attention",
    "self_attn.q_norm.weight": "norm",
    "self_attn.k_norm.weight": "norm",
    "mlp.gate_proj.weight": "mlp",
    "mlp.up_proj.weight": "mlp",
    "mlp.down_proj.weight": "mlp",
    "input_layernorm.weight": "norm",
    "post_attention_layernorm.weight": "norm",
}
Q = "layers.0.self_attn.q_proj.weight"


def read(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


def geometry(folder: Path) -> DFlashGeometry:
    found = read(folder).geometry
    assert isinstance(found, DFlashGeometry)
    return found


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.where.startswith(str(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "draft", num_layers=2)


# What is read


@pytest.mark.parametrize(
    "spelling", ["z-lab", "model", "draft_model", "dflash_module", "encoder", "torchspec"]
)
@pytest.mark.parametrize("extra", ["none", "embed-and-head", "pruned"])
def test_name_variants(spelling: Any, extra: str, tmp_path: Path) -> None:
    folder = tiny_dflash(
        tmp_path / "draft",
        spelling=spelling,
        num_layers=3,
        embed=extra == "embed-and-head",
        head=extra == "embed-and-head",
        pruned_vocabulary=extra == "pruned",
    )
    found = read(folder)
    expected = {"fc.weight": "fusion", "hidden_norm.weight": "norm", "norm.weight": "norm"}
    if extra == "embed-and-head":
        expected |= {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    if extra == "pruned":
        expected |= {"lm_head.weight": "head", "d2t": "vocabulary_map", "t2d": "vocabulary_map"}
    for i in range(3):
        expected |= {f"layers.{i}.{name}": role for name, role in LAYER_ROLES.items()}
    assert {row.canonical: row.role for row in found.rows} == expected
    assert [row.tensor.name for row in found.rows] == sorted(read_tensors(folder))
    assert found.geometry.aux_layer_ids == (1, 3, 5)
    assert len(found.fused_groups()) == 2 * 3
    prefix = found.row(Q).tensor.name.removesuffix("q_proj.weight")  # type: ignore[union-attr]
    assert tuple(f"{prefix}{x}_proj" for x in "kqv") in found.fused_groups()


def test_geometry(draft: Path) -> None:
    found = geometry(draft)
    assert found == DFlashGeometry(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_attention_heads=4,
        attention=GroupedAttention(num_key_value_heads=2, head_dim=32, rotary_dim=32, qk_norm=True),
        vocab_size=96,
        draft_vocab_size=96,
        target_hidden_size=64,
        num_aux_layers=3,
        aux_layer_ids=(1, 3, 5),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0, yarn=None),
        block_size=8,
        mask_token_id=95,
        layer_types=("full_attention", "full_attention"),
        sliding_window=None,
        causal=None,
    )


def test_other_target_width(draft: Path) -> None:
    edit_json(draft / "config.json", target_hidden_size=40)
    change(draft, fc__weight=bf16(64, 120))
    assert geometry(draft).target_hidden_size == 40


def test_size_of_the_published_kimi_linear_draft() -> None:
    """451,243,728 parameters, 902,487,456 bytes in BF16, of which 35 linears; 58 tensors."""
    config = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "head_dim": 72,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "block_size": 16,
        "num_target_layers": 27,
        "dflash_config": {"mask_token_id": 163839, "target_layer_ids": [3, 7, 15, 19, 23]},
    }
    specs = DFlash().tensor_specs(DFlash().read_geometry(config, "config.json"))
    shipped = {name: spec for name, spec in specs.items() if not spec.optional}
    parameters = 0
    for spec in shipped.values():
        count = 1
        for dim in spec.shape:
            count *= dim.size
        parameters += count
    assert (len(shipped), parameters) == (58, 451_243_728)
    assert sum(spec.role in ("attention", "mlp") for spec in shipped.values()) == 35


# Faults in the tensors


@pytest.mark.parametrize(
    ("name", "shape", "expected", "keys"),
    [
        (Q, (64, 64), [128, 64], "num_attention_heads x head_dim"),
        ("layers.1.self_attn.k_proj.weight", (128, 64), [64, 64], "num_key_value_heads x head_dim"),
        ("layers.1.self_attn.o_proj.weight", (64, 64), [64, 128], "num_attention_heads x head_dim"),
        ("layers.0.self_attn.q_norm.weight", (128,), [32], "head_dim"),
        ("layers.1.mlp.down_proj.weight", (64, 95), [64, 96], "intermediate_size"),
        ("hidden_norm.weight", (65,), [64], "hidden_size"),
        ("embed_tokens.weight", (95, 64), [96, 64], "vocab_size"),
    ],
)
def test_shape_that_disagrees_with_the_config(
    name: str, shape: tuple[int, ...], expected: list[int], keys: str, draft: Path
) -> None:
    change(draft, **{name: bf16(*shape)})
    refused(draft, f"{name}: expected shape {expected}, got {list(shape)} (disagrees with {keys} ")


def test_absent_tensor(draft: Path) -> None:
    change(draft, **{"layers.1.self_attn.k_norm.weight": None})
    refused(draft, "1 tensor(s) of dflash are missing: layers.1.self_attn.k_norm.weight")


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t"])
def test_pruned_vocabulary_needs_head_and_map(name: str, tmp_path: Path) -> None:
    """The target's head has every row, so it cannot stand in for a pruned one."""
    folder = tiny_dflash(tmp_path / "draft", num_layers=1, pruned_vocabulary=True)
    change(folder, **{name: None})
    refused(folder, f"1 tensor(s) of dflash are missing: {name}", "export the draft")


def test_a_tensor_of_no_known_relative(draft: Path) -> None:
    change(draft, **{"layers.0.self_attn.q_proj.bias": bf16(128)})
    refused(draft, "layers.0.self_attn.q_proj.bias: no tensor of dflash has this name; nearest: la")


def test_config_of_one_family_and_tensors_of_another(draft: Path, tmp_path: Path) -> None:
    eagle = tiny_eagle3_llama(tmp_path / "eagle")
    edit_json(
        eagle / "config.json", **json.loads((draft / "config.json").read_text(encoding="utf-8"))
    )
    refused(eagle, "config.json declares dflash, but the tensors are those of eagle3-llama")
    write_tensors(draft, read_tensors(draft) | read_tensors(eagle))
    refused(draft, "the tensors are those of dflash and eagle3-llama", "keep the tensors of one")
