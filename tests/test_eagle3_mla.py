"""Reading EAGLE-3 MLA drafts: every name variant, ModelOpt's export, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.drafts.geometry import LatentAttention
from draftquant.quantize.drafts.rope import RopeConfig, Yarn
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from tiny import bf16, change, edit_json, read_tensors, tiny_eagle3_llama
from tiny_mla import MODELOPT_EXTRAS, tiny_eagle3_mla

LAYER_ROLES = {
    "self_attn.q_a_proj.weight": "attention",
    "self_attn.q_a_layernorm.weight": "norm",
    "self_attn.q_b_proj.weight": "attention",
    "self_attn.kv_a_proj_with_mqa.weight": "attention",
    "self_attn.kv_a_layernorm.weight": "norm",
    "self_attn.kv_b_proj.weight": "kv_up",
    "self_attn.o_proj.weight": "attention",
    "mlp.gate_proj.weight": "mlp",
    "mlp.up_proj.weight": "mlp",
    "mlp.down_proj.weight": "mlp",
    "input_layernorm.weight": "norm",
    "post_attention_layernorm.weight": "norm",
}
SHARED_ROLES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "fc.weight": "fusion",
    "norm.weight": "norm",
    "d2t": "vocabulary_map",
    "t2d": "vocabulary_map",
}
RANKS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


def geometry(folder: Path) -> Eagle3Geometry:
    found = read(folder).geometry
    assert isinstance(found, Eagle3Geometry)
    return found


def refused(folder: Path, what: str, fix: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.where.startswith(str(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_mla(tmp_path / "draft")


# What is read


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("embed", "head", "pruned"), [(True, True, False), (False, False, True)])
def test_name_variants(
    prefix: str, num_layers: int, embed: bool, head: bool, pruned: bool, tmp_path: Path
) -> None:
    folder = tiny_eagle3_mla(
        tmp_path / "draft",
        prefix=prefix,
        num_layers=num_layers,
        embed=embed,
        head=head,
        pruned_vocabulary=pruned,
    )
    found = read(folder)
    expected = {name: role for name, role in SHARED_ROLES.items() if "2" not in name or pruned}
    if not embed:
        del expected["embed_tokens.weight"]
    if not head:
        del expected["lm_head.weight"]
    for i in range(num_layers):
        expected |= {f"layers.{i}.{name}": role for name, role in LAYER_ROLES.items()}
    expected["layers.0.hidden_norm.weight"] = "norm"
    assert found.family.name == "eagle3-mla"
    assert {row.canonical: row.role for row in found.rows} == expected
    assert [row.tensor.name for row in found.rows] == sorted(read_tensors(folder))
    q = found.row("layers.0.self_attn.q_a_proj.weight")
    assert q is not None
    assert q.tensor.name == f"{prefix}self_attn.q_a_proj.weight"
    assert len(found.fused_groups()) == 2 * num_layers


@pytest.mark.parametrize("version", ["V2", "V3"])
def test_both_architectures_of_vllm(version: str, tmp_path: Path) -> None:
    name = f"Eagle3Deepseek{version}ForCausalLM"
    folder = tiny_eagle3_mla(tmp_path / "draft", architecture=name)
    assert read(folder).family.name == "eagle3-mla"
    assert len(read(folder).rows) == 17


def test_geometry(draft: Path) -> None:
    yarn = Yarn(
        factor=64.0,
        original_max_positions=4096,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        attention_factor=None,
    )
    assert geometry(draft) == Eagle3Geometry(
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_attention_heads=4,
        attention=LatentAttention(
            q_lora_rank=48,
            kv_lora_rank=136,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=32,
            rope_interleave=True,
        ),
        vocab_size=96,
        draft_vocab_size=96,
        target_hidden_size=64,
        num_aux_layers=3,
        aux_layer_ids=(1, 3, 4),
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0, yarn=yarn),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


def test_an_export_of_modelopt(tmp_path: Path) -> None:
    """No embed_tokens, no `draft_vocab_size`; experts that are in the config alone."""
    folder = tiny_eagle3_mla(tmp_path / "draft", modelopt=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "draft_vocab_size" not in config
    assert MODELOPT_EXTRAS.items() <= config.items()
    found = read(folder)
    assert (found.family.name, len(found.rows)) == ("eagle3-mla", 16)
    assert found.geometry.draft_vocab_size == found.geometry.vocab_size == 96
    assert found.row("embed_tokens.weight") is None
    assert all(row.tensor.name == row.canonical for row in found.rows)


def test_a_pruned_export_of_modelopt_has_d2t_alone(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(tmp_path / "draft", modelopt=True, pruned_vocabulary=True)
    refused(folder, "d2t: expected shape [96], got [48] (disagrees with draft_vocab_size", "config")
    edit_json(folder / "config.json", draft_vocab_size=48)
    assert read(folder).geometry.draft_vocab_size == 48
    assert read(folder).row("t2d") is None


def test_options_of_eagle_3_1(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(
        tmp_path / "draft", fc_norm=True, norm_output=True, norm_before_fc=True
    )
    found = geometry(folder)
    assert (found.fc_norm, found.norm_output, found.norm_before_fc) == (True, True, True)
    assert found.norm_before_residual is False
    assert len(read(folder).rows) == 17 + 3 + 1
    edit_json(folder / "config.json", fc_norm=None)
    refused(folder, "fc_norm.0.weight: no tensor of eagle3-mla has this name", "remove")


def test_fused_groups_have_names_on_disk(draft: Path) -> None:
    groups = {frozenset(group) for group in read(draft).fused_groups()}
    assert groups == {
        frozenset({"midlayer.self_attn.q_a_proj", "midlayer.self_attn.kv_a_proj_with_mqa"}),
        frozenset({"midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"}),
    }


# What is refused


@pytest.mark.parametrize("key", RANKS)
def test_missing_rank(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: None})
    refused(draft, f"{key}: missing key", f"add '{key}' as the draft was trained with it")


@pytest.mark.parametrize("key", RANKS)
@pytest.mark.parametrize("value", [0, -1, 16.0, "16", True])
def test_rank_of_the_wrong_type(key: str, value: Any, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: value})
    refused(draft, f"{key}: expected a positive whole number, got {value!r}", f"correct '{key}'")


def test_odd_rotary_width(draft: Path) -> None:
    edit_json(draft / "config.json", qk_rope_head_dim=15)
    refused(draft, "qk_rope_head_dim: expected an even number, got 15", "correct 'qk_rope")


def test_rope_interleave_of_the_wrong_type(draft: Path) -> None:
    edit_json(draft / "config.json", rope_interleave="yes")
    refused(draft, "rope_interleave: expected true or false, got 'yes'", "correct 'rope_inter")
    edit_json(draft / "config.json", rope_interleave=False)
    assert geometry(draft).attention.rope_interleave is False


def test_attention_factor_that_engines_read_differently(draft: Path) -> None:
    scaling = json.loads((draft / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
    edit_json(draft / "config.json", rope_scaling=scaling | {"attention_factor": 1.0})
    with pytest.raises(CheckpointError, match="attention_factor: expected none, as engines dis"):
        load_draft(draft)  # alone: to read, plan and quantize it nothing is rotated
    assert geometry(draft).rope.yarn is None
    edit_json(draft / "config.json", rope_scaling=scaling | {"attention_factor": None})
    assert geometry(draft).rope.yarn is not None


@pytest.mark.parametrize("value", [-1.0, "1", [], True])
def test_mscale_all_dim_is_a_number_or_0_for_none(value: Any, draft: Path) -> None:
    scaling = json.loads((draft / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
    edit_json(draft / "config.json", rope_scaling=scaling | {"mscale_all_dim": 0})
    found = geometry(draft).rope.yarn
    assert found is not None
    assert found.mscale_all_dim is None
    edit_json(draft / "config.json", rope_scaling=scaling | {"mscale_all_dim": value})
    refused(draft, f"mscale_all_dim: expected a positive number, got {value!r}", "correct 'mscale")


SHAPES = [
    ("q_a_proj", (48, 64), [48, 128], "2 x hidden_size"),
    ("q_a_proj", (47, 128), [48, 128], "q_lora_rank"),
    ("q_a_layernorm", (47,), [48], "q_lora_rank"),
    ("q_b_proj", (128, 48), [160, 48], "num_attention_heads x (qk_nope_head_dim + qk_rope_head_d"),
    ("q_b_proj", (160, 64), [160, 48], "q_lora_rank"),
    ("kv_a_proj_with_mqa", (136, 128), [152, 128], "kv_lora_rank + qk_rope_head_dim"),
    ("kv_a_proj_with_mqa", (152, 64), [152, 128], "2 x hidden_size"),
    ("kv_a_layernorm", (152,), [136], "kv_lora_rank"),
    ("kv_b_proj", (160, 136), [224, 136], "num_attention_heads x (qk_nope_head_dim + v_head_dim)"),
    ("kv_b_proj", (224, 152), [224, 136], "kv_lora_rank"),
    ("o_proj", (64, 160), [64, 128], "num_attention_heads x v_head_dim"),
]


@pytest.mark.parametrize(("name", "shape", "expected", "keys"), SHAPES)
def test_shape_that_disagrees_with_the_config(
    name: str, shape: tuple[int, ...], expected: list[int], keys: str, draft: Path
) -> None:
    name = f"midlayer.self_attn.{name}.weight"
    change(draft, **{name: bf16(*shape)})
    what = f"{name}: expected shape {expected}, got {list(shape)} (disagrees with {keys}"
    refused(draft, what, "use the config.json that belongs to these tensors")


def test_later_layers_read_rows_of_the_draft_alone(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(tmp_path / "draft", num_layers=2)
    name = "layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert read_tensors(folder)[name].shape == (152, 64)
    change(folder, **{name: bf16(152, 128)})
    refused(folder, f"{name}: expected shape [152, 64], got [152, 128]", "use the config.json")


@pytest.mark.parametrize("name", LAYER_ROLES)
def test_absent_tensor(name: str, draft: Path) -> None:
    change(draft, **{f"midlayer.{name}": None})
    refused(draft, f"1 tensor(s) of eagle3-mla are missing: layers.0.{name}", "export the")


def test_tensors_of_another_family_than_the_config(draft: Path, tmp_path: Path) -> None:
    edit_json(draft / "config.json", architectures=["LlamaForCausalLMEagle3"])
    refused(
        draft,
        "declares eagle3-llama, but the tensors are those of eagle3-mla",
        "set architectures to Eagle3DeepseekV2ForCausalLM, whose tensors these are",
    )
    llama = tiny_eagle3_llama(tmp_path / "llama")
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    (llama / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(llama, "declares eagle3-mla, but the tensors are those of eagle3-llama", "use the")


def test_two_families_in_one_folder(draft: Path, tmp_path: Path) -> None:
    llama = read_tensors(tiny_eagle3_llama(tmp_path / "llama"))
    change(draft, **{name: tensor for name, tensor in llama.items() if "self_attn" in name})
    refused(draft, "the tensors are those of eagle3-llama and eagle3-mla", "move the others out")
