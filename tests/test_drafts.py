"""Reading EAGLE-3 Llama drafts: every name variant, and tensors that must be refused.

Faults in config.json are in test_draft_config.py.
"""

from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.drafts.families import FAMILIES
from draftquant.quantize.drafts.geometry import GroupedAttention
from draftquant.quantize.drafts.rope import RopeConfig
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from tiny import Stored, bf16, change, edit_json, read_tensors, tiny_eagle3_llama

LAYER_ROLES = {
    "self_attn.q_proj.weight": "attention",
    "self_attn.k_proj.weight": "attention",
    "self_attn.v_proj.weight": "attention",
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
Q = "midlayer.self_attn.q_proj.weight"


def read(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


def geometry(folder: Path) -> Eagle3Geometry:
    found = read(folder).geometry
    assert isinstance(found, Eagle3Geometry)
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
    return tiny_eagle3_llama(tmp_path / "draft")


# What is read


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("pruned", [True, False])
def test_name_variants(
    prefix: str, num_layers: int, embed: bool, head: bool, pruned: bool, tmp_path: Path
) -> None:
    folder = tiny_eagle3_llama(
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
    assert {row.canonical: row.role for row in found.rows} == expected
    assert [row.tensor.name for row in found.rows] == sorted(read_tensors(folder))
    q = found.row("layers.0.self_attn.q_proj.weight")
    assert q is not None
    assert q.tensor.name == f"{prefix}self_attn.q_proj.weight"
    assert len(found.fused_groups()) == 2 * num_layers


def test_fused_groups_have_names_on_disk(draft: Path) -> None:
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    groups = {frozenset(group) for group in read(draft).fused_groups()}
    qkv = frozenset(f"{attention}{x}_proj" for x in "qkv")
    assert groups == {qkv, frozenset((f"{mlp}gate_proj", f"{mlp}up_proj"))}


def test_geometry(draft: Path) -> None:
    assert geometry(draft) == Eagle3Geometry(
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_attention_heads=4,
        attention=GroupedAttention(num_key_value_heads=2, head_dim=16, rotary_dim=16),
        vocab_size=96,
        draft_vocab_size=96,
        target_hidden_size=64,
        num_aux_layers=3,
        aux_layer_ids=(1, 3, 4),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0, yarn=None),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", kv_heads=4)
    keys = ("head_dim", "num_key_value_heads", "draft_vocab_size", "eagle_config")
    edit_json(folder / "config.json", **dict.fromkeys(keys))
    found = geometry(folder)
    assert found.attention == GroupedAttention(num_key_value_heads=4, head_dim=16, rotary_dim=16)
    assert found.draft_vocab_size == 96
    assert (found.num_aux_layers, found.aux_layer_ids) == (3, None)


def test_nested_aux_layer_ids_give_the_width_of_fc(draft: Path) -> None:
    edit_json(draft / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 30]})
    refused(draft, "fc.weight: expected shape [64, 128], got [64, 192] (disagrees with target_hid")
    change(draft, fc__weight=bf16(64, 128))
    assert geometry(draft).aux_layer_ids == (2, 30)


@pytest.mark.parametrize("option", ["norm_before_fc", "fc_norm"])
def test_norms_before_fc(option: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{option: True})
    if option == "fc_norm":
        refused(draft, "3 tensor(s) of eagle3-llama are missing: fc_norm.0.weight")
        change(draft, **{f"fc_norm.{i}.weight": bf16(64) for i in range(3)})
    else:
        refused(draft, "1 tensor(s) of eagle3-llama are missing: input_norm.weight")
        change(draft, input_norm__weight=bf16(192))
    assert getattr(geometry(draft), option) is True


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e4},
        {"rope_theta": 50000, "rope_scaling": None},
        {"rope_theta": 50000, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 50000, "rope_type": "default"}},
    ],
    ids=str,
)
def test_plain_rope(keys: dict[str, Any], draft: Path) -> None:
    edit_json(draft / "config.json", **keys)
    assert geometry(draft).rope == RopeConfig(theta=50000.0, yarn=None)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("modern", [True, False])
def test_yarn_rope(kind: str, modern: bool, draft: Path) -> None:
    yarn = {kind: "yarn", "factor": 64, "original_max_position_embeddings": 4096, "mscale": 1}
    if modern:
        parameters = yarn | {"rope_theta": 5e4}
        edit_json(draft / "config.json", rope_theta=None, rope_parameters=parameters)
    else:
        edit_json(draft / "config.json", rope_theta=5e4, rope_scaling=yarn)
    rope = geometry(draft).rope
    assert rope.theta == 50000.0
    assert rope.yarn is not None
    assert (rope.yarn.factor, rope.yarn.original_max_positions) == (64.0, 4096)
    assert (rope.yarn.beta_fast, rope.yarn.mscale, rope.yarn.mscale_all_dim) == (32.0, 1.0, None)


# Tensors


def test_both_spellings_of_a_tensor(draft: Path) -> None:
    change(draft, **{Q.replace("midlayer", "layers.0"): read_tensors(draft)[Q]})
    refused(draft, f"{Q} and layers.0.self_attn.q_proj.weight are the same", "one of the two")


@pytest.mark.parametrize(
    ("name", "shape", "expected", "keys"),
    [
        (Q, (64, 64), [64, 128], "2 x hidden_size"),
        (Q, (32, 128), [64, 128], "num_attention_heads x head_dim"),
        ("midlayer.self_attn.v_proj.weight", (64, 128), [32, 128], "num_key_value_heads x head"),
        ("midlayer.self_attn.o_proj.weight", (64, 32), [64, 64], "num_attention_heads x head_dim"),
        ("midlayer.mlp.up_proj.weight", (95, 64), [96, 64], "intermediate_size"),
        ("midlayer.mlp.down_proj.weight", (64, 95), [64, 96], "intermediate_size"),
        ("embed_tokens.weight", (95, 64), [96, 64], "vocab_size"),
        ("lm_head.weight", (95, 64), [96, 64], "draft_vocab_size"),
        ("norm.weight", (65,), [64], "hidden_size"),
        ("norm.weight", (64, 1), [64], "hidden_size"),
        ("norm.weight", (), [64], "hidden_size"),
        ("fc.weight", (64, 64), [64, 192], "target_hidden_size x aux layer ids"),
    ],
)
def test_shape_that_disagrees_with_the_config(
    name: str, shape: tuple[int, ...], expected: list[int], keys: str, draft: Path
) -> None:
    change(draft, **{name: bf16(*shape)})
    what = f"{name}: expected shape {expected}, got {list(shape)} (disagrees with {keys}"
    refused(draft, what, "use the config.json that belongs to these tensors")


def test_pruned_head_without_draft_vocab_size(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    edit_json(folder / "config.json", draft_vocab_size=None)
    refused(folder, "d2t: expected shape [96], got [48] (disagrees with draft_vocab_size of config")


def test_pruned_vocabulary_needs_its_map(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    change(folder, d2t=None)
    refused(folder, "1 tensor(s) of eagle3-llama are missing: d2t")


@pytest.mark.parametrize("name", ["norm.weight", "midlayer.mlp.up_proj.weight"])
def test_absent_tensor(name: str, draft: Path) -> None:
    change(draft, **{name: None})
    first = name.replace("midlayer", "layers.0")
    refused(draft, f"1 tensor(s) of eagle3-llama are missing: {first}", "export the draft")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("midlayer.self_attn.q_porj.weight", "layers.0.self_attn.q_proj.weight"),
        ("midlayer.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.weight"),
        ("layers.1.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("zzz", "none"),
        ("", "none"),
    ],
)
def test_extra_tensor(name: str, near: str, draft: Path) -> None:
    change(draft, **{name: bf16(64)})
    refused(draft, f"{name}: no tensor of eagle3-llama has this name; nearest: {near}", "remove")


@pytest.mark.parametrize(
    ("name", "dtype", "size", "expected"),
    [
        (Q, "F8_E4M3", 1, "BF16 or F16 or F32"),
        (Q, "I8", 1, "BF16 or F16 or F32"),
        ("norm.weight", "F64", 8, "BF16 or F16 or F32"),
        ("d2t", "F32", 4, "I64 or I32"),
        ("t2d", "U8", 1, "BOOL"),
    ],
)
def test_wrong_dtype(name: str, dtype: str, size: int, expected: str, tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    shape = read_tensors(folder)[name].shape
    count = 1
    for length in shape:
        count *= length
    change(folder, **{name: Stored(dtype, shape, bytes(size * count))})
    refused(folder, f"{name}: expected {expected}, got {dtype}", "floating-point draft")


def test_the_families_page_names_every_family() -> None:
    page = (Path(__file__).parent.parent / "docs/families.md").read_text(encoding="utf-8")
    what, commands = page.partition("\n## Commands\n")[::2]
    for family in FAMILIES:
        assert f"\n| `{family.name}` |" in what
        assert f"`{family.name}`" in commands
