"""Laguna's DFlash: its maths against an independent draft and vLLM's own class, and its way."""

from pathlib import Path
from typing import Any

import draftquant.api as dq
import laguna_draft
import pytest
import torch
from asked_pairs import check_draft
from block_pair import VOCAB, save_draft
from by_recipe import draft_of, quantized
from draftquant.quantize.drafts.families.laguna_dflash import FAMILY, rope_of_class
from draftquant.quantize.drafts.rope import read_rope
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CheckpointError
from k3_draft import SHAPE
from reference_dflash import ReferenceLaguna, random_weights
from reference_draft import assert_close
from replay_proof import assert_fitted_draft_is_the_engine, assert_logits_of_engines, block_logits
from rounding_pairs import shared_pair
from tiny import edit_json, read_tensors
from tiny_dflash import tiny_laguna

TOLD = ("check_draft",)
K = 5
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "draft_vocab_size": 96, "gating": "per-head", "sliding_window": 7,
    "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {
        "block_size": K + 1, "mask_token_id": 95, "target_layer_ids": [1, 3, 5], "causal": True,
    },
}  # fmt: skip
CASES = {case: own for case, own in laguna_draft.CASES.items() if "dflash_config" not in own}


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("case", CASES)
def test_block_equals_modules_with_parts_gates_and_norms_spelled_out(case: str) -> None:
    geometry = FAMILY.read_geometry(CONFIG | CASES[case], "config.json")
    weights = random_weights(geometry, family=FAMILY)
    forward: Any = FAMILY.forward(geometry, weights, lambda _name, x: x)
    reference = ReferenceLaguna(geometry, weights)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn((1, 17, 96), generator=generator, dtype=torch.float64)
    reference.extend(features[:, :9])
    reference.extend(features[:, 9:])
    assert_close(block_logits(forward, features, [17] + [0] * K), reference.propose(17, K))


@pytest.mark.parametrize("case", laguna_draft.CASES)
def test_logits_are_those_of_vllms_own_class(case: str, tmp_path: Path) -> None:
    folder = laguna_draft.write_draft(tmp_path / "d", case)
    assert_logits_of_engines(folder, "laguna_maths", case, 2e-5)


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["mi325x-w4a8", None])
def test_replay_equals_a_loop_that_decodes(recipe: str | None, tmp_path: Path) -> None:
    """Of a draft that is fitted to its target, so that counts vary."""
    pair, k = shared_pair("dflash"), 6
    few, target = pair.traces.only(pair.traces.manifest.prompts[:4]), pair.folder / "target"
    folder = save_draft(
        tmp_path / "d", target, pair.traces, FAMILY, architectures=["DFlashLagunaForCausalLM"],
        model_type="laguna", draft_vocab_size=VOCAB, gating="per-head", sliding_window=9,
        layer_types=["sliding_attention"] * 2, is_causal=False,
    )  # fmt: skip
    kept = ("q_proj", "k_proj", "v_proj")
    assert_fitted_draft_is_the_engine(folder, target, few, k, recipe, ReferenceLaguna, kept)


def test_it_is_quantized_verified_and_loads_in_both_engines(tmp_path: Path) -> None:
    """Without qkv_proj, which vLLM multiplies contexts by as it is stored, and the gates."""
    source, out = tiny_laguna(tmp_path / "d", **SHAPE, head_dim=64), tmp_path / "q"
    assert draft_of(source).family.name == "laguna-dflash"
    quantized(source, "int4-group128", out, target_layers=8)
    assert verify(out, source).ok
    kept, before = read_tensors(out), read_tensors(source)
    apart = [name for name in before if "qkv_proj" in name or "g_proj" in name]
    assert len(apart) == 4
    assert all(kept[name] == before[name] for name in apart)
    assert sum(name.endswith("weight_packed") for name in kept) == 8
    dequantize_draft(DraftSource(folder=out), tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == before.keys()
    for folder in (source, out):
        for engine in ("vllm", "sglang"):
            said = check_draft(folder, engine=engine, arch="sm90")  # type: ignore[arg-type]
            assert said.verdict == "LOADS", said.error
            assert "dflash" in (said.launch or "").lower()


def test_the_rope_that_vllm_takes_from_its_class_is_written_out(tmp_path: Path) -> None:
    """Executed: without rope_parameters vLLM's class rotates by 10000 whatever rope_theta says."""
    source, out = tiny_laguna(tmp_path / "d"), tmp_path / "q"
    edit_json(source / "config.json", rope_parameters=None, rope_theta=500000.0)
    said = check_draft(source, engine="vllm", arch="sm90")
    assert (said.verdict, "base 10000" in str(said.error)) == ("LOADS BUT WRONG", True)
    assert draft_of(source).geometry.rope == read_rope({"rope_theta": 500000.0}, "")
    assert [lint.name for lint in dq.inspect(source).lints] == ["laguna-rope"]
    quantized(source, "fp8-ptpc", out, fix_config=True)
    assert check_draft(out, engine="vllm", arch="sm90").verdict != "LOADS BUT WRONG"
    for kind, theta in (("sliding_attention", 10000.0), ("full_attention", 500000.0)):
        edit_json(source / "config.json", rope_theta=theta, layer_types=[kind, "full_attention"])
        is_whole = kind == "full_attention"  # of which the class rotates half a head
        assert bool(list(rope_of_class(draft_of(source)))) == is_whole


MIXED = {"layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize("config", [{"draft_vocab_size": None}, MIXED, {"num_experts": None}])
def test_what_vllm_alone_refuses(config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_laguna(tmp_path / "d", **SHAPE, head_dim=64)
    edit_json(folder / "config.json", **config)
    assert check_draft(folder, engine="vllm", arch="sm90").verdict == "REFUSED"
    assert check_draft(folder, engine="sglang", arch="sm90").verdict == "LOADS"


@pytest.mark.parametrize(
    "config",
    [
        {"draft_vocab_size": 48},
        {"gating": "disabled"},
        {"num_attention_heads_per_layer": [4, 8]},
        {"swa_attention_sink_enabled": True},
        {"architectures": ["DFlashDraftModel"]},
    ],
)
def test_what_is_no_laguna_draft_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_laguna(tmp_path / "d", config=config)
    with pytest.raises(CheckpointError):
        draft_of(folder)
