"""GPTQ folders through every verb that reads: verified, dequantized, transcoded, audited, run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.converting.transcode_draft import plan_transcoding
from draftquant.quantize.engines.excludes import gptq_by_lists, gptq_by_rules
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes.errors import LayoutError
from handmade_gptq import gptq_folder
from tiny import read_tensors, tiny_eagle3_llama, values_of
from verify_cases import edit

UP = "midlayer.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return tiny_eagle3_llama(tmp_path_factory.mktemp("gptq") / "source", **sizes)


KINDS: list[dict[str, Any]] = [
    {},
    {"sym": False, "desc_act": True},
    {"bits": 3, "desc_act": True},
    {"bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
]


@pytest.mark.parametrize("kind", KINDS, ids=["-".join(map(str, kind.values())) for kind in KINDS])
def test_a_sound_folder(kind: dict[str, Any], source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out", **kind)
    assert verify(out, source, foreign=True).faults == ()
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()
    plain = tmp_path / "plain"
    dequantize_draft(DraftSource(folder=out), plain, dtype="F32")
    weights, loaded = read_tensors(plain), load_draft(out).weights
    name = f"{UP}.weight"
    assert np.array_equal(loaded["layers.0.mlp.up_proj.weight"].numpy(), values_of(weights[name]))
    lost = values_of(weights[name]) - values_of(read_tensors(source)[name])
    assert np.abs(lost).max() < np.abs(values_of(weights[name])).max() / (
        2 ** kind.get("bits", 4) - 2
    )


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("qweight", lambda words: np.bitwise_xor.at(words, (0, 0), 4)),
        ("scales", lambda scales: np.multiply(scales, 4, out=scales)),
        ("g_idx", lambda groups: np.copyto(groups, np.roll(groups, 1))),
        ("qzeros", lambda words: np.copyto(words, words[:, ::-1].copy())),
    ],
)
def test_a_damaged_folder(suffix: str, change: Any, source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out", sym=False, desc_act=True)
    tensor = read_tensors(out)[f"{UP}.{suffix}"]
    dtype = {"I32": "<i4", "F16": "<f2"}[tensor.dtype]
    array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape).copy()
    change(array)
    damaged = tensor._replace(data=array.tobytes())
    edit(out, lambda tensors: tensors.update({f"{UP}.{suffix}": damaged}))
    faults = verify(out, source, foreign=True).faults
    assert faults
    assert all(fault.where.startswith(UP) for fault in faults)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (("+:.*up_proj", "-:.*mlp.*"), {"gate_proj", "down_proj"}),
        (("-:.*mlp.*", "+:.*up_proj"), {"up_proj", "gate_proj", "down_proj"}),
    ],
)
def test_the_first_rule_of_dynamic_decides(
    rules: tuple[str, ...], kept: set[str], source: Path, tmp_path: Path
) -> None:
    """As `get_dynamic_override` of GPTQModel and of both engines; what is kept must be no codes."""
    out = gptq_folder(source, tmp_path / "out", dynamic={key: {} for key in rules})
    faults = audit_checkpoint(Checkpoint.open(out)).faults
    assert {fault.where.rpartition(".")[2] for fault in faults} == kept
    asked: Any = SimpleNamespace(keys={"dynamic": {key: {} for key in rules}})
    said = {
        leaf
        for leaf in ("up_proj", "gate_proj", "down_proj", "q_proj")
        if gptq_by_rules(asked, SimpleNamespace(prefix=f"model.layers.0.mlp.{leaf}"))  # type: ignore[arg-type]
    }
    assert said - {"q_proj"} == kept


def test_a_list_names_any_piece_of_a_name() -> None:
    """As `is_layer_gptq_quantized` of vLLM does."""
    listed = {"modules_in_block_to_quantize": [["layers.0.mlp"]]}
    asked: Any = SimpleNamespace(keys=listed, names_of_parts=lambda _: ())
    for leaf, kept in (("mlp.down_proj", False), ("self_attn.o_proj", True)):
        module: Any = SimpleNamespace(prefix=f"model.layers.0.{leaf}")
        assert gptq_by_lists(asked, module) is kept


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ({}, None, "its layout gptq is read, but not written\n  fix: name the layout"),
        ({"sym": False}, "compressed-tensors", "_proj: asymmetric codes: no layout"),
        ({"desc_act": True}, "awq", "_proj: inputs in the order of their activations: no layout"),
        ({"group_size": 16}, "compressed-tensors", "int4 per group of 16: no layout"),
    ],
)
def test_what_no_layout_holds(
    kind: dict[str, Any], layout: Any, message: str, source: Path, tmp_path: Path
) -> None:
    out = gptq_folder(source, tmp_path / "out", **kind)
    with pytest.raises(LayoutError, match=message):
        plan_transcoding(DraftSource(folder=out), layout, target_layers=4)
