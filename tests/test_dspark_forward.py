"""DSpark's forward maths against the trainer's own module, and an independent draft.

`dspark_maths.json` holds what SpecForge's own `DSparkDraftModel` computes;
the independent draft chooses token by token. Tolerance: see test_dflash_forward.py; a Markov head
adds some ten products of the same size.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sink_drafts
import torch
from asked_pairs import check_draft
from block_pair import (
    AS_NEMOTRON,
    MASK_TOKEN_ID,
    TARGET_LAYER_IDS,
    save_draft,
    shared_tables,
    with_own_tensors,
)
from by_recipe import draft_of, quantized
from draftquant.calibration.linear_inputs.plan_inputs import measured_inputs
from draftquant.calibration.linear_inputs.static_scales import run_over_traces
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.quantize.drafts.families.dspark import DSpark, DSparkGeometry
from draftquant.quantize.drafts.families.dspark_mla import FAMILY
from draftquant.quantize.drafts.passes import BlockForward
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError
from formats import format_recipe
from heads import BEYOND
from k3_draft import CASES, write_draft
from reference_dflash import ReferenceDSpark, ReferenceDSparkMla, random_weights
from reference_draft import assert_close
from replay_proof import (
    EXECUTED,
    assert_fitted_draft_is_the_engine,
    assert_logits_of_engines,
    block_logits,
)
from rounding_pairs import shared_pair
from tiny import change, config_of, edit_json, read_tensors, store, write_tensors
from tiny_dspark import tiny_dspark, tiny_dspark_mla, tiny_nemotron
from torch import Tensor
from verify_cases import edit

K = 5
NUM_CONTEXT = 11
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "block_size": K, "mask_token_id": 95, "target_layer_ids": [1, 3, 5],
    "markov_rank": 8, "markov_head_type": "vanilla",
}  # fmt: skip
BLOCK = [17, 3, 80, 41, 5, 60]
"""An anchor, and K tokens behind it."""

TABLE = json.loads((EXECUTED / "dspark_maths.json").read_text(encoding="utf-8"))


def build(**changes: Any) -> tuple[DSparkGeometry, dict[str, Tensor], BlockForward]:
    geometry = DSpark().read_geometry(CONFIG | changes, "config.json")
    weights = random_weights(geometry, family=DSpark())
    return geometry, weights, DSpark().forward(geometry, weights, lambda _name, x: x)


def random_features(geometry: DSparkGeometry) -> Tensor:
    """[1, CONTEXT, num_aux * W_target] float64."""
    width = geometry.num_aux_layers * geometry.target_hidden_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn((1, NUM_CONTEXT, width), generator=generator, dtype=torch.float64)


@pytest.mark.usefixtures("float64_on_one_thread")
def test_logits_are_those_of_the_trainers_own_module() -> None:
    geometry, _, forward = build()
    got = block_logits(forward, random_features(geometry), BLOCK)
    expected = torch.tensor(TABLE["vanilla"], dtype=torch.float64)
    assert_close(got[:, : expected.shape[1]], expected)


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 24}, {"sample_from_anchor": False}])
def test_logits_are_those_of_a_draft_that_chooses_token_by_token(changes: dict[str, Any]) -> None:
    geometry, weights, forward = build(**changes)
    reference = ReferenceDSpark(geometry, weights)
    reference.extend(random_features(geometry))
    anchor, *tokens = BLOCK
    recorded = iter(tokens)
    expected = reference.steps(anchor, K, lambda _logits: next(recorded))
    assert_close(block_logits(forward, random_features(geometry), BLOCK), torch.stack(expected))


# ---- the family: what is read, and a draft's way through the commands


SMALL: dict[str, Any] = {"num_layers": 1}


@pytest.mark.usefixtures("float64_on_one_thread")
def test_a_mask_embedding_beside_it_is_read_by_no_engine(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", mask_embedding=True, **SMALL)
    geometry = draft_of(folder).geometry
    with pytest.raises(CheckpointError, match="which no engine reads beside a DSpark draft"):
        DSpark().side_weights(geometry, folder)


@pytest.mark.usefixtures("float64_on_one_thread")
def test_it_is_quantized_verified_and_decoded(tmp_path: Path) -> None:
    source = tiny_dspark(tmp_path / "d", num_layers=2)
    quantized(source, "int4-channel", tmp_path / "q", target_layers=8)
    kept, before = read_tensors(tmp_path / "q"), read_tensors(source)
    heads = [name for name in before if "_head." in name]
    assert len(heads) == 4
    assert all(kept[name] == before[name] for name in heads)
    dequantize_draft(DraftSource(folder=tmp_path / "q"), tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == before.keys()
    for engine in ("vllm", "sglang"):
        said = check_draft(tmp_path / "q", engine=engine, arch="sm90", target_layers=8)  # type: ignore[arg-type]
        assert said.verdict == "LOADS", said.error
        launch = said.launch or ""
        assert '"method": "dspark"' in launch or "--speculative-algorithm DSPARK" in launch
        assert '"num_speculative_tokens": 8' in launch or "-num-draft-tokens 9" in launch
    edit_json(source / "config.json", architectures=["DSparkDraftModel"], model_type="llama")
    other = check_draft(source, engine="vllm")
    assert other.verdict == "UNKNOWN"
    assert other.error == "vLLM takes a draft of model_type llama for DeepSeek-V4's own"


@pytest.mark.usefixtures("float64_on_one_thread")
def test_speculators_spell_it_with_layers_of_their_own(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", **SMALL)
    config = config_of(folder)
    own = {key: config[key] for key in ("block_size", "mask_token_id", "markov_rank")}
    ids = [i + 1 for i in config.pop("target_layer_ids")]
    layers = {key: value for key, value in config.items() if key not in own}
    layers |= {"max_position_embeddings": 512, "hidden_act": "silu"}
    spelled = {
        **own,
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark"},
        "aux_hidden_state_layer_ids": ids,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "transformer_layer_config": layers,
    }
    (folder / "config.json").write_text(json.dumps(spelled), encoding="utf-8")
    draft = draft_of(folder)
    assert (draft.family.name, draft.geometry.most_draft_tokens) == ("dspark", 8)
    assert draft.geometry.aux_layer_ids == (1, 3, 5)
    assert check_draft(folder, engine="vllm", arch="sm90").verdict == "LOADS"
    edit_json(folder / "config.json", sample_from_anchor=None)  # vLLM's default, not the package's
    assert draft_of(folder).geometry.most_draft_tokens == 7


# ---- latent attention


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_vllms_own_class(case: str, tmp_path: Path) -> None:
    assert_logits_of_engines(write_draft(tmp_path / "d", case), "k3_maths", case, 2e-4)


LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["mi325x-w4a8", None])
def test_replay_equals_a_loop_that_decodes(recipe: str | None, tmp_path: Path) -> None:
    """Of a draft that is fitted to its target, so that counts vary; slots predict their own."""
    pair, k = shared_pair("dflash"), 6
    few, target = pair.traces.only(pair.traces.manifest.prompts[:4]), pair.folder / "target"
    own = {"dflash_config": None, "mask_token_id": MASK_TOKEN_ID, "sample_from_anchor": False}
    ids = list(TARGET_LAYER_IDS)
    folder = save_draft(
        tmp_path / "d", target, pair.traces, FAMILY, architectures=["K3DSparkModel"],
        model_type="k3_dspark", target_layer_ids=ids, num_target_layers=len(ids),
        target_num_hidden_layers=4, markov_rank=12, **LATENT, **own,
    )  # fmt: skip
    # No engine reads the mask embedding beside a DSpark draft.
    reference, kept = ReferenceDSparkMla, ("kv_b_proj",)
    assert_fitted_draft_is_the_engine(folder, target, few, k, recipe, reference, kept)


def test_it_is_planned_quantized_verified_and_loads_in_vllm_alone(tmp_path: Path) -> None:
    source = tiny_dspark_mla(tmp_path / "d", heads=4, config={"block_size": None})
    draft = draft_of(source)
    assert (draft.family.name, draft.geometry.most_draft_tokens) == ("dspark-mla", 7)
    assert {row.role for row in draft.rows if "context_proj" in row.tensor.name} == {"fusion"}
    quantized(source, "fp8-ptpc", tmp_path / "q")
    assert verify(tmp_path / "q", source).ok
    declared = json.loads((tmp_path / "q" / "config.json").read_text(encoding="utf-8"))
    assert {"context_proj", "markov_head.markov_w2"} <= {
        name.removeprefix("model.") for name in declared["quantization_config"]["ignore"]
    }
    said = check_draft(tmp_path / "q", engine="vllm", arch="sm100", target_layers=8)
    assert said.verdict == "LOADS", said.error
    assert '"method": "dspark"' in (said.launch or "")
    assert "model.context_kv_proj" in {name for name, taken in said.linears.items() if taken}
    other = check_draft(tmp_path / "q", engine="sglang", arch="sm100")
    assert other.verdict == "REFUSED"
    assert "k3_dspark" in (other.error or "")


def test_layers_share_the_scale_that_vllm_takes_once_for_the_context(tmp_path: Path) -> None:
    """It takes one scale of the whole matrix for the kv_a_proj_with_mqa of all layers."""
    source, out = tiny_dspark_mla(tmp_path / "d"), tmp_path / "q"
    quantized(source, "nvfp4-weights", out)
    stored = read_tensors(out)
    scales = {n: t for n, t in stored.items() if "_a_proj" in n and n.endswith("_global_scale")}
    assert len(scales) == 4
    assert len({t.data for t in scales.values()}) == 1
    assert check_draft(out, engine="vllm", arch="sm100").verdict == "LOADS"
    # Each layer for itself, as other tools do, no linear of one layer has two scales.
    own = {name: store(np.float32([[2.0]])[0], "F32") for name in scales if "layers.1." in name}
    write_tensors(out, stored | own)
    said = check_draft(out, engine="vllm", arch="sm100")
    assert (said.verdict, "context_kv_proj" in str(said.error)) == ("LOADS BUT WRONG", True)
    assert not verify(out, source).ok


def test_its_fusion_is_quantized_under_its_own_name(tmp_path: Path) -> None:
    quantized(tiny_dspark_mla(tmp_path / "d"), BEYOND["fp8-fc"], tmp_path / "q")
    said = check_draft(tmp_path / "q", engine="vllm", arch="sm90")
    assert said.verdict == "LOADS", said.error
    assert "model.context_proj" in {name for name, taken in said.linears.items() if taken}


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_end_inside_blocks_of_the_joined_projection(layers: int, tmp_path: Path) -> None:
    """Parts of 192 rows: scales of a third one lie over those of the second; of two none fit."""
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 176, "intermediate": 128, "num_layers": layers}
    recipe, source = format_recipe("fp8", "fp8-block", "fp8-group"), tmp_path / "d"
    quantized(tiny_dspark_mla(source, **sizes), recipe, tmp_path / "q", target_layers=8)
    said = check_draft(tmp_path / "q", engine="vllm", arch="sm90", target_layers=8)
    assert said.verdict == "UNKNOWN"
    assert "blocks of model.context_kv_proj are split between its parts" in str(said.error)


NOT_SERVED = {
    "num_target_layers": 8,
    "draft_vocab_size": 48,
    "mla_use_output_gate": True,
    "rope_interleave": False,
    "kv_lora_rank": 128,
}


@pytest.mark.parametrize("key", NOT_SERVED)
def test_what_vllm_does_not_serve_is_refused(key: str, tmp_path: Path) -> None:
    folder = tiny_dspark_mla(tmp_path / "d", config={key: NOT_SERVED[key]})
    with pytest.raises(CheckpointError):
        draft_of(folder)


def test_names_of_a_dflash_draft_are_none_of_vllms_class(tmp_path: Path) -> None:
    folder = tiny_dspark_mla(tmp_path / "d")
    edit(folder, lambda tensors: tensors.update({"fc.weight": tensors.pop("context_proj.weight")}))
    said = check_draft(folder, engine="vllm", arch="sm90")
    assert said.verdict == "REFUSED"
    assert "'model.fc' in K3DSparkForCausalLM" in str(said.error)
    edit_json(folder / "config.json", model_type="kimi_k2")
    assert check_draft(folder, engine="vllm", arch="sm90").verdict != "LOADS"


# ---- attention sinks, windows, causal blocks


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", sink_drafts.CASES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_logits_with_sinks_are_those_of_engines(engine: str, case: str, tmp_path: Path) -> None:
    folder = sink_drafts.write_draft(tmp_path / "d", case)
    assert_logits_of_engines(folder, "block_maths", f"{engine} {case}", 1e-5)


# ---- the layout of NVIDIA's drafts of Nemotron 3.5


LAYOUT = "blackwell-nvfp4-weights"


def test_gptq_reaches_fc_and_the_markov_head(tmp_path: Path) -> None:
    pair = shared_pair("dflash")
    source = with_own_tensors(pair.draft_folder, tmp_path / "d", "dspark", **AS_NEMOTRON)
    few = pair.traces.only(pair.traces.manifest.prompts[:2])
    tables, seen = shared_tables(pair.folder / "target"), dict[str, list[Tensor]]()

    def watch(name: str, x: Tensor) -> Tensor:
        seen.setdefault(name, []).append(x.flatten(0, -2))
        return x

    exact = load_draft(source, shared=tables)
    watched = load_draft(source, shared=tables, on_input=watch)
    run_over_traces(watched.forward, DraftRun(watched, few, 7), row_stride=4)
    chosen = load_recipe(LAYOUT)
    errors: dict[str, dict[str, float]] = {}
    for recipe in (chosen, replace(chosen, algorithm=chosen.algorithm.rounded("gptq"))):
        plan = make_plan(recipe, draft_of(source))
        measured = measured_inputs(plan, DraftRun(exact, few, 7), spool=tmp_path)
        out = tmp_path / recipe.algorithm.rounding
        quantize_draft(plan, out, source=DraftSource(folder=source), measured=measured)
        assert verify(out, source).ok
        weights = load_draft(out, shared=tables).weights
        for module in ("fc", "markov_head.markov_w2"):
            lost = exact.weights[f"{module}.weight"] - weights[f"{module}.weight"]
            error = float((torch.cat(seen[module]) @ lost.T).square().mean())
            errors.setdefault(module, {})[recipe.algorithm.rounding] = error
    for module, by_rounding in errors.items():
        assert 0 < by_rounding["gptq"] < 0.8 * by_rounding["nearest"], module


@pytest.mark.parametrize("dspark", [True, False])
def test_the_layout_of_nemotrons_drafts(dspark: bool, tmp_path: Path) -> None:
    """Quantized, verified with and without its record, decoded, and read by both engines."""
    sizes = {"hidden": 128, "intermediate": 128, "vocab": 128}
    source, out = tiny_nemotron(tmp_path / "d", dspark=dspark, **sizes), tmp_path / "q"
    report = quantized(source, LAYOUT, out, target_layers=8)
    roles = Counter(step.row.role for step in report.plan.quantized)
    assert roles == {"mlp": 6, "fusion": 1, **({"correction": 1} if dspark else {})}
    config = out / "config.json"
    declared = json.loads(config.read_text(encoding="utf-8"))["quantization_config"]
    assert declared["quant_algo"] == "W4A16_NVFP4"
    for arch, verdict in {"sm90": "REFUSED", "sm100": "LOADS"}.items():
        of_vllm = check_draft(out, engine="vllm", arch=arch, target_layers=8)
        said = check_draft(out, engine="sglang", arch=arch, target_layers=8)
        assert (of_vllm.verdict, said.verdict) == ("LOADS", verdict if dspark else "LOADS")
        option = "--speculative-draft-attention-backend trtllm_mha" in str(said.launch)
        assert option == dspark
        quantized_by = {name for name, taken in said.linears.items() if taken}
        assert "fc" in quantized_by
        assert ("markov_head.markov_w2" in quantized_by) == dspark
    # As published: other patterns for what is kept, and no record.
    (out / "draftquant.json").unlink()
    patterns = ["*embed_tokens*", "*markov_w1*", "*self_attn*"]
    declared |= {"ignore": patterns, "exclude_modules": patterns}
    edit_json(config, quantization_config=declared)
    side = json.loads((out / "hf_quant_config.json").read_text(encoding="utf-8"))
    side["quantization"]["exclude_modules"] = patterns
    edit_json(out / "hf_quant_config.json", **side)
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()
    assert check_draft(out, engine="sglang", arch="sm100", target_layers=8).verdict == "LOADS"
    dequantize_draft(DraftSource(folder=out), tmp_path / "back")
    back, before = read_tensors(tmp_path / "back"), read_tensors(source)
    assert back.keys() == before.keys()
    sinks = [name for name in before if "sink" in name]
    assert len(sinks) == (2 if dspark else 0)
    assert all(back[name] == before[name] for name in sinks)


def test_sglang_reads_no_window_of_a_bf16_draft_without_a_key(tmp_path: Path) -> None:
    source = tiny_nemotron(tmp_path / "d")
    said = check_draft(source, engine="sglang", arch="sm100", target_layers=8)
    assert said.verdict == "REFUSED"
    assert said.remedy == "write sliding_window, and use_sliding_window: true"
    edit_json(source / "config.json", use_sliding_window=True)
    said = check_draft(source, engine="sglang", arch="sm100", target_layers=8)
    assert said.verdict == "UNKNOWN"  # whether the target's embedding is equal
    change(source, embed_tokens__weight=None)
    assert check_draft(source, engine="sglang", arch="sm90", target_layers=8).verdict == "LOADS"
