"""A draft that no family reads: roles by names, `--role`, and every command that needs no maths."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draftquant.api as dq
import numpy as np
import pytest
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, store, tiny_eagle3_llama, write_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, WORDS = 128, 256
Shapes = Mapping[str, tuple[int, ...]]
LAYER = {f"self_attn.{p}_proj.weight": (WIDTH, WIDTH) for p in "qkvo"} | {
    "mlp.gate_proj.weight": (256, WIDTH),
    "mlp.up_proj.weight": (256, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 256),
    "input_layernorm.weight": (WIDTH,),
}
BLOCK = {"linear.weight": (WIDTH, WIDTH), "linear.bias": (WIDTH,)}
MEDUSA: Shapes = {f"{i}.0.{name}": shape for i in range(2) for name, shape in BLOCK.items()} | {
    f"{i}.1.weight": (WORDS, WIDTH) for i in range(2)
}
EAGLE: Shapes = {f"model.layers.0.{name}": shape for name, shape in LAYER.items()} | {
    "model.fc.weight": (WIDTH, 2 * WIDTH),
    "model.embed_tokens.weight": (WORDS, WIDTH),
}
EXPERTS: Shapes = {f"mtp.0.{name}": shape for name, shape in LAYER.items()} | {
    **{f"mtp.0.ffn.experts.{e}.w{i}.weight": (WIDTH, WIDTH) for e in range(2) for i in (1, 2, 3)},
    "mtp.0.ffn.gate.weight": (2, WIDTH),
    "mtp.0.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "mtp.0.step_scale": (3,),
    "mtp.mask_hidden": (1, 3 * WIDTH),
    **{f"mtp.{name}.weight": (WIDTH,) for name in ("head", "embed")},  # vectors are neither
}
V4: Shapes = {
    **{f"mtp.0.attn.{n}.weight": (WIDTH, WIDTH) for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")},
    **{f"mtp.0.ffn.{e}.w1.weight": (WIDTH, WIDTH) for e in ("experts.0", "shared_experts")},
    "mtp.0.ffn.gate.weight": (2, WIDTH),
    "mtp.0.attn.attn_sink": (2,),
    "mtp.0.attn_norm.weight": (WIDTH,),
    "mtp.0.e_proj.weight": (WIDTH, WIDTH),
    "mtp.0.h_proj.weight": (WIDTH, WIDTH),
    "mtp.0.fc_embedding.weight": (WIDTH, WIDTH),
    "mtp.0.hc_head_fn": (4, 4 * WIDTH),
}
EAGLE4: Shapes = {**EAGLE, "fc.linear.weight": (WIDTH, 3 * WIDTH), "lm_head.weight": (WORDS, WIDTH)}
EAGLE4 |= {"model.hidden_norm.weight": (WIDTH,), "efficient_lm_head.weight": (WORDS, 16)}
EAGLE4 |= {"efficient_lm_head_down_proj.weight": (16, WIDTH)}
STRANGE = "model.layers.0.strange.weight"
DRAFTS: Mapping[str, tuple[dict[str, Any], Shapes]] = {
    "medusa": ({"medusa_num_heads": 2}, MEDUSA),
    "eagle": ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, EAGLE),
    "experts": ({"architectures": ["UnheardMTP"]}, EXPERTS),
    "v4": ({"architectures": ["DeepSeekV4MTPModel"]}, V4),
    "eagle4": ({"architectures": ["LlamaForCausalLMEagle4"], "model_type": "llama"}, EAGLE4),
    "strange": ({"architectures": ["UnheardMTP"]}, {**EAGLE, STRANGE: (WIDTH, WIDTH)}),
}
TRACELESS = [
    name
    for name, recipe in ((n, load_recipe(n)) for n in built_in_recipes())
    if recipe.algorithm.rounding == "nearest" and not name.endswith("-head")
]


def draft(kind: str, folder: Path) -> Path:
    config, shapes = DRAFTS[kind]
    sizes = {"hidden_size": WIDTH, "vocab_size": WORDS, "num_attention_heads": 2}
    rng = np.random.default_rng(0)
    tensors: dict[str, Stored] = {
        name: store(rng.normal(0, 0.05, shape), "BF16") for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **sizes}), encoding="utf-8")
    write_tensors(folder, tensors)
    return folder


@pytest.mark.parametrize("kind", ["medusa", "eagle", "experts", "v4", "eagle4"])
def test_every_tensor_has_a_role_and_the_rule_that_gave_it(kind: str, tmp_path: Path) -> None:
    assert main(["inspect", str(draft(kind, tmp_path / "draft"))]) == 0


@pytest.mark.some(2)
@pytest.mark.parametrize("recipe", TRACELESS)
def test_what_needs_no_maths_is_done(recipe: str, tmp_path: Path) -> None:
    by_parts = load_recipe(recipe).layout in ("modelopt", "awq")  # "gate" is part of "gate_proj"
    kind, count = ("eagle", 7) if by_parts else ("experts", 13)
    count = 4 if recipe == "blackwell-nvfp4-weights" else count  # with fc, without attention
    source, out = draft(kind, tmp_path / "draft"), tmp_path / "out"
    static = {"input_scale": 0.25} if load_recipe(recipe).needs_input_scales else {}
    report = dq.quantize(source, recipe, out=out, target_layers=8, **static)  # type: ignore[arg-type]
    assert len(report.plan.quantized) == count
    assert "family unknown" in report.warnings[0]
    assert "family unknown" in (out / "README.md").read_text(encoding="utf-8")
    assert dq.verify(out, against=source).ok
    assert dq.inspect(out).audit.faults == ()  # type: ignore[union-attr]
    dq.dequantize(out, out=tmp_path / "plain")
    plain, before = (dq.inspect(f).to_mapping()["tensors"] for f in (tmp_path / "plain", source))
    assert plain == before


def test_a_transcoded_one_and_its_card(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, out, other = draft("medusa", tmp_path / "draft"), tmp_path / "out", tmp_path / "other"
    dq.quantize(source, "int4-group128", out=out)
    dq.transcode(out, layout="awq", out=other)
    for folder in (out, other):
        caplog.clear()
        with caplog.at_level("INFO", logger="draftquant"):
            assert dq.verify(folder, against=source).ok
        assert "family unknown" in caplog.text
        size = dq.inspect(folder).to_mapping()["bytes"]
        assert f"→ {size:,} bytes" in (folder / "README.md").read_text(encoding="utf-8")
    assert "unknown" in str(dq.card(out, base_model="an/owner", license="mit"))


def test_eagle4_keeps_fc_and_the_head_that_chooses_candidates(tmp_path: Path) -> None:
    """Built in floats by eagle-harness 0.1.3 (`llama_eagle4.py:258,346`), which adds the class."""
    source = draft("eagle4", tmp_path / "draft")
    plan = dq.plan(source, "fp8-ptpc-head").plan
    kept = {step.row.tensor.name for step in plan.steps if step.action == "keep"}
    assert {name for name in kept if "lm_head" in name or "fc" in name} == {
        "model.fc.weight", "fc.linear.weight",
        "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight",
    }  # fmt: skip
    for engine in ("vllm", "sglang"):
        said = dq.check(source, engine=engine, gpu="h200")  # type: ignore[arg-type]
        assert said.verdict == "REFUSED"
        assert "draft is EAGLE-4" in str(said.to_mapping())
        assert "for the architecture LlamaForCausalLMEagle4" in str(said.to_mapping())


def test_a_matrix_without_a_rule_stops_until_it_is_named(tmp_path: Path) -> None:
    source, out = draft("strange", tmp_path / "draft"), tmp_path / "out"
    with pytest.raises(DraftQuantError):
        dq.plan(source, "fp8-ptpc")
    for role, count in (("other", 7), ("mlp", 8)):
        made = tmp_path / role
        roles = [f"*.strange.weight={role}"]
        assert len(dq.quantize(source, "fp8-ptpc", out=made, roles=roles).plan.quantized) == count
        assert json.loads((made / "draftquant.json").read_text(encoding="utf-8"))["roles"] == roles
        assert dq.verify(made, against=source).ok
        assert dq.inspect(made).audit.faults == ()  # type: ignore[union-attr]
    assert not out.exists()


REFUSED = (
    *(("--role", role) for role in ("x=linear", "=mlp", "*.dense.weight=mlp")),
    *(("--algorithm", "gptq"), ("--kv-cache", "unit")),
)


def test_bad_input_is_told(tmp_path: Path) -> None:
    source = draft("eagle", tmp_path / "draft")
    for options in REFUSED:
        assert main(["plan", str(source), "--recipe", "fp8-ptpc", *options]) == 2


def test_a_family_gives_roles_itself(tmp_path: Path) -> None:
    with pytest.raises(DraftQuantError, match="which has a role for every tensor"):
        dq.inspect(tiny_eagle3_llama(tmp_path / "draft"), roles=["fc.weight=mlp"])


def test_what_needs_maths_names_the_way_without(tmp_path: Path) -> None:
    from draftquant.quantize.stored.loading import load_draft

    with pytest.raises(DraftQuantError, match="no family reads it"):
        load_draft(draft("eagle", tmp_path / "draft"))


def test_an_engine_answers_for_a_draft_that_no_family_reads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dq.quantize(draft("v4", tmp_path / "draft"), "fp8-ptpc", out=out)
    edit_json(out / "config.json", model_type="deepseek_v4")
    found = dq.check(out, engine="vllm", gpu="sm90")
    assert (found.verdict, "--ask" in (found.remedy or "")) == ("UNKNOWN", True)
