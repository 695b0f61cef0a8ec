"""Faults in the config.json of EAGLE-3 Llama drafts."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes.draft_inputs import check_reads_layers
from draftquant.calibration.recording.target_shape import TargetShape, chosen_layers, feature_spec
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.architectures import declared_architecture
from draftquant.quantize.engines.contract import ENGINE_NAMES
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.estimate.work import VerifyStep
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError, TraceError
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_mla import tiny_eagle3_mla


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read_draft(Checkpoint.open(folder))
    assert caught.value.where.startswith(str(folder / "config.json"))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.mark.parametrize(
    ("architectures", "what"),
    [
        (["GPT2LMHeadModel"], "no supported draft family has 'GPT2LMHeadModel'"),
        ([7], "no supported draft family has 7"),
        ([["LlamaForCausalLMEagle3"]], "no supported draft family has ['LlamaForCausalLMEagle3']"),
        ([], "expected a list of one name, got []"),
        (["a", "b"], "expected a list of one name, got ['a', 'b']"),
        ("LlamaForCausalLMEagle3", "expected a list of one name, got 'Llama"),
        (None, "expected a list of one name, got no such key"),
    ],
)
def test_architectures(architectures: object, what: str, draft: Path) -> None:
    edit_json(draft / "config.json", architectures=architectures)
    refused(draft, f"architectures: {what}")


def test_a_null_architecture_is_not_an_absent_one(draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    (draft / "config.json").write_text(json.dumps(config | {"architectures": None}), "utf-8")
    refused(draft, "architectures: expected a list of one name, got null")


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "EAGLE3LlamaForCausalLM",
        "CosyVoice3Eagle3LlamaForCausalLM",
    ],
)
def test_other_names_of_the_same_draft(name: str, draft: Path) -> None:
    plain = read_draft(Checkpoint.open(draft))
    edit_json(draft / "config.json", architectures=[name])
    named = read_draft(Checkpoint.open(draft))
    assert (named.family, named.geometry, named.rows) == (plain.family, plain.geometry, plain.rows)


def test_the_name_of_an_ordinary_model_means_what_the_tensors_say(draft: Path) -> None:
    tensors = read_tensors(draft)
    del tensors["midlayer.hidden_norm.weight"]
    del tensors["fc.weight"]
    write_tensors(draft, tensors)
    edit_json(draft / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"midlayer.*: no tensor of language-model has"):
        read_draft(Checkpoint.open(draft))


EARLIER: dict[str, tuple[dict[str, Any], Sequence[str], str]] = {
    "Medusa": ({"architectures": ["MedusaModel"]}, (), "a Medusa"),
    "Medusa as FasterDecoding publishes it": (
        {"architectures": None, "medusa_num_heads": 2}, ["0.0.linear.weight"], "a Medusa",
    ),
    "EAGLE-1 under vLLM's name": ({"architectures": ["EagleLlamaForCausalLM"]}, (), "an EAGLE-1"),
    "EAGLE-1 under SGLang's name": ({"architectures": ["LlamaForCausalLMEagle"]}, (), "an EAGLE-1"),
    "EAGLE-1 of Qwen2": ({"architectures": ["Qwen2ForCausalLMEagle"]}, (), "an EAGLE-1"),
    "EAGLE-1 under its target's name": (
        {"architectures": ["LlamaForCausalLM"]}, ["model.fc.weight"], "an EAGLE-1",
    ),
    "EAGLE-1 of speculators": (
        {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
         "speculators_model_type": "eagle"}, ["fusion_fc.weight"], "an EAGLE-1",
    ),
    "Domino under its trainer's name": ({"architectures": ["DominoDraftModel"]}, (), "a Domino"),
    "Domino under SGLang's name": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
        (), "a Domino",
    ),
    "Domino by its tensors": (
        {"architectures": ["DFlashDraftModel"]}, ["prefix_gru.weight_ih_l0"], "a Domino",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EARLIER)
def test_a_draft_of_an_earlier_version_is_refused_by_name(name: str, draft: Path) -> None:
    keys, tensors, kind = EARLIER[name]
    edit_json(draft / "config.json", **keys)
    write_tensors(draft, {tensor: Stored("BF16", (1,), bytes(2)) for tensor in tensors or ["x"]})
    said = f"draftquant does not know the maths of {kind} draft; version 0.2.0 quantized it"
    refused(draft, said)
    for engine in ENGINE_NAMES:
        with pytest.raises(CheckpointError, match=said):
            check_draft(draft, engine=engine)


def with_one_tensor(draft: Path, architecture: str, tensor: str) -> None:
    edit_json(draft / "config.json", architectures=[architecture])
    write_tensors(draft, {tensor: Stored("BF16", (1,), bytes(2))})


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("K3DSparkModel", "DSpark with another body"),
        ("DSparkMiniMaxDraftModel", "DSpark with another body"),
        ("DFlash2BeamDraftModel", "DFlash2 with layers of Beam"),
        ("LiLiCorrDraftModel", "LiLiCorr"),
        ("Qwen3XPressModel", "XPress"),
        ("MuseGlimmerAssistantModel", "Muse Glimmer's DFlash"),
        ("DFlashLagunaForCausalLM", "Laguna's DFlash"),
        ("MedusaLlamaForCausalLM", "a target with Medusa heads"),
        ("Qwen3MoeForCausalLMMTP", "an MTP layer"),
        ("NemotronHMTPModel", "an MTP layer of Nemotron-H"),
        ("DFlareDraftModel", "DFlare"),
        ("DFlash3DraftModel", "DFlash with layers of another kind"),
        ("GptOssForCausalLMEagle3", "EAGLE-3 with layers of another kind"),
        ("EagleMistralForCausalLM", "Mistral's EAGLE"),
        ("Gemma4AssistantForCausalLM", "Gemma's assistant"),
    ],
)
def test_what_is_refused_by_name_is_told_what_it_is(
    architecture: str, kind: str, draft: Path
) -> None:
    edit_json(draft / "config.json", architectures=[architecture])
    refused(draft, f"has {architecture!r}: it is {kind}, which is not supported")


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("markov_head.markov_w1.weight", "DSpark"),
        ("mask_hidden", "P-EAGLE"),
        ("0.0.linear.weight", "Medusa heads"),
        ("medusa_head.0.0.linear.weight", "a target with Medusa heads"),
        ("model.layers.61.eh_proj.weight", "an MTP layer"),
        ("mtp.fc.weight", "an MTP layer"),
        ("eagle_linear.weight", "Mistral's EAGLE"),
        ("hidden_norm.weight", "a DFlash draft under an unknown name"),
        ("model.fc.weight", "an EAGLE draft under an unknown name"),
        ("model.layers.3.mlp.up_proj.weight", "a whole language model"),
    ],
)
def test_where_no_name_tells_the_kind_tensors_do(tensor: str, kind: str, draft: Path) -> None:
    with_one_tensor(draft, "UnheardForCausalLM", tensor)
    refused(draft, f"it is {kind}, which is not supported")


LLAMA, EAGLE3, DFLASH = "LlamaForCausalLM", "LlamaForCausalLMEagle3", "DFlashDraftModel"


@pytest.mark.parametrize(
    ("architecture", "tensor", "kind"),
    [
        (LLAMA, "markov_head.markov_w1.weight", "DSpark"),
        (LLAMA, "candidate_selector.prev_embedding.weight", "DFlash2"),
        (LLAMA, "model.layers.61.eh_proj.weight", "an MTP layer"),
        (LLAMA, "model.layers.0.mlp.experts.0.up_proj.weight", "language-model with a mixture"),
        (EAGLE3, "midlayer.mlp.experts.gate_up_proj", "eagle3-llama with a mixture of experts"),
        (EAGLE3, "midlayer.self_attn.kv_b_proj.weight", "eagle3-llama with latent attention"),
        (EAGLE3, "midlayer.self_attn.sinks", "eagle3-llama with attention sinks"),
        (EAGLE3, "enorm.weight", "EAGLE-3 with TensorRT-LLM's eh_proj"),
        (EAGLE3, "parallel_draft_heads.0.weight", "EAGLE-3 with ModelOpt's parallel heads"),
        (DFLASH, "aux_hidden_norms.0.weight", "Laguna DFlash"),
        (DFLASH, "layers.0.self_attn.g_proj.weight", "dflash with gates on its attention, as"),
        (DFLASH, "layers.0.self_attn.head_gate.weight", "dflash with gates on its attention"),
        (DFLASH, "layers.0.self_attn.qkv_proj.weight", "Laguna DFlash"),
        (DFLASH, "layers.0.self_attn.attention_sink_bias", "dflash with attention sinks"),
        (DFLASH, "layers.0.mlp.switch_mlp.up_proj.weight", "dflash with a mixture of experts"),
        (DFLASH, "layers.0.mixer.in_proj.weight", "dflash with layers of Mamba"),
        (DFLASH, "mask_hidden", "P-EAGLE"),
        ("Qwen3DSparkModel", "layers.0.mlp.experts.0.w1", "dspark with a mixture of experts"),
    ],
)
def test_a_relative_is_told_by_its_mark(
    architecture: str, tensor: str, kind: str, draft: Path
) -> None:
    with_one_tensor(draft, architecture, tensor)
    with pytest.raises(CheckpointError) as caught:
        read_draft(Checkpoint.open(draft))
    assert f"is the mark of {kind}" in caught.value.what
    assert "with the software that it was trained for" in caught.value.fix


def test_tensors_without_the_marks_of_any_family(draft: Path) -> None:
    tensors = read_tensors(draft)
    del tensors["fc.weight"], tensors["midlayer.hidden_norm.weight"]
    write_tensors(draft, tensors)
    with pytest.raises(CheckpointError, match=r"2 tensor.s. of eagle3-llama are missing: fc"):
        read_draft(Checkpoint.open(draft))


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_are_refused(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: True})
    refused(draft, f"{key}: expected false, got true", "cannot be quantized")


def test_another_activation_than_silu_is_refused(draft: Path) -> None:
    edit_json(draft / "config.json", hidden_act="gelu")
    refused(draft, "hidden_act: expected 'silu'", "cannot be replayed")


def test_number_of_layers_that_no_file_has(draft: Path) -> None:
    edit_json(draft / "config.json", num_hidden_layers=10**12)
    refused(draft, "num_hidden_layers: 1000000000000 layers, but 14 tensors", "correct 'num_hid")
    refused(draft, "", "the tensors are those of 1 layer(s)")


def test_the_targets_number_of_layers_is_read_as_one(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft")
    edit_json(draft / "config.json", num_hidden_layers=36)
    assert read_draft(Checkpoint.open(draft)).geometry.num_layers == 1
    with_two = tiny_eagle3_llama(tmp_path / "two", num_layers=2)
    edit_json(with_two / "config.json", num_hidden_layers=36)
    refused(with_two, "36 layers, but", "the tensors are those of 2 layer(s)")


def test_a_config_without_architectures_says_what_would_be_needed(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft")
    edit_json(draft / "config.json", architectures=None)
    refused(draft, "expected a list of one name", "set architectures to LlamaForCausalLMEagle3")
    inner = {"hidden_size": 64, "architectures": ["LlamaForCausalLM"]}
    edit_json(draft / "config.json", model_type="eagle", model=inner)
    refused(draft, "stand below 'model'", "move the keys of 'model' to the top level")


REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


@pytest.mark.parametrize("key", [*REQUIRED, "num_attention_heads"])
def test_missing_key(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: None})
    refused(draft, f"{key}: missing key", f"add '{key}' as the draft was trained with it")


NO_IDS = "distinct layer numbers in ascending order"
WRONG: list[tuple[str, Any, str]] = [
    *(("hidden_size", value, "a positive whole number") for value in (0, -1, 64.0, "64", True, [])),
    ("head_dim", 0, "a positive whole number"),
    ("draft_vocab_size", "96", "a positive whole number"),
    *(("rms_norm_eps", value, "a positive number") for value in (0, -1e-6, "x", True, -(10**40))),
    ("rope_theta", [], "a positive number"),
    ("rope_scaling", "yarn", "an object"),
    ("rope_parameters", [1], "an object"),
    ("eagle_config", [1], "an object"),
    ("norm_before_residual", 1, "true or false"),
    ("fc_norm", "yes", "true or false"),
    ("attention_bias", "no", "true or false"),
    *(
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": ids}, NO_IDS)
        for ids in ([3, 1], [1, 1], [-1], [1.0], ["1"], [True], "1", 1, {})
    ),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG, ids=lambda value: repr(value)[:40])
def test_config_value_of_the_wrong_type(key: str, value: Any, expected: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: value})
    refused(draft, f": expected {expected}, got ", "correct '")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_number_that_is_not_finite(value: str, draft: Path) -> None:
    path = draft / "config.json"
    text = json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"rms_norm_eps": "?"})
    path.write_text(text.replace('"?"', value), encoding="utf-8")
    refused(draft, "rms_norm_eps: expected a positive number, got ", "correct 'rms_norm_eps'")


def test_more_heads_than_channels_leave_no_width_for_a_head(draft: Path) -> None:
    edit_json(draft / "config.json", num_attention_heads=65, head_dim=None)
    refused(draft, "head_dim: expected a positive whole number, got 0", "correct 'head_dim'")


# Drafts without fc, and lists of no layers

LAST_STATE = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}


@pytest.mark.parametrize("builder", [tiny_eagle3_llama, tiny_eagle3_mla])
def test_a_draft_that_reads_the_last_hidden_state_has_no_fc(
    builder: Callable[..., Path], tmp_path: Path
) -> None:
    draft = builder(tmp_path / "draft", config={"eagle_config": LAST_STATE, "fc_norm": True})
    tensors = read_tensors(draft)
    with pytest.raises(CheckpointError, match=r"fc.weight: no tensor of eagle3-"):
        read_draft(Checkpoint.open(draft))
    del tensors["fc.weight"]
    write_tensors(draft, tensors)
    geometry: Any = read_draft(Checkpoint.open(draft)).geometry
    assert (geometry.fuses, geometry.fc_norm, geometry.aux_layer_ids) == (False, False, None)
    plan = make_plan(load_recipe("fp8-ptpc"), read_draft(Checkpoint.open(draft)))
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=draft))
    assert not verify(tmp_path / "out", draft).faults


def test_a_last_hidden_state_is_as_wide_as_the_draft(draft: Path) -> None:
    edit_json(draft / "config.json", eagle_config=LAST_STATE, target_hidden_size=32)
    refused(draft, "use_aux_hidden_state: false needs a target as wide as the draft: 32 is not 64")


def test_use_aux_hidden_state_of_the_wrong_type(draft: Path) -> None:
    edit_json(draft / "config.json", eagle_config={"use_aux_hidden_state": "no"})
    with pytest.raises(CheckpointError, match="use_aux_hidden_state: expected true or false"):
        read_draft(Checkpoint.open(draft))


def test_an_empty_list_of_layers_is_the_default(draft: Path) -> None:
    edit_json(draft / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": []})
    geometry = read_draft(Checkpoint.open(draft)).geometry
    assert (geometry.aux_layer_ids, geometry.num_aux_layers) == (None, 3)


def test_recording_for_a_last_hidden_state(draft: Path) -> None:
    tensors = read_tensors(draft)
    del tensors["fc.weight"]
    write_tensors(draft, tensors)
    edit_json(draft / "config.json", eagle_config=LAST_STATE)
    loaded = load_draft(draft)
    rows = torch.randn(1, 5, 64)
    assert torch.equal(loaded.forward.fuse(rows), rows)
    shape = TargetShape(num_layers=8, vocab_size=96, hidden_size=64, max_positions=None)
    assert chosen_layers(None, loaded, shape) == (7,)
    spec = feature_spec(shape, (7,), loaded, "float32")
    assert (spec.kind, spec.width, spec.fusion_sha256) == ("fused", 64, loaded.fusion_sha256)
    with pytest.raises(TraceError, match="reads the target's last hidden state, and no layers"):
        chosen_layers([1, 3, 4], loaded, shape)
    with pytest.raises(TraceError, match=r"it reads 64 values in torch\.float32, but the target"):
        feature_spec(dataclasses.replace(shape, hidden_size=32), (7,), loaded, "float32")
    with pytest.raises(TraceError, match="it has no fc that fuses layers: it reads the target's"):
        check_reads_layers(loaded)


def test_other_commands_on_a_draft_without_fc(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = read_tensors(draft)
    del tensors["fc.weight"]
    write_tensors(draft, tensors)
    edit_json(draft / "config.json", eagle_config=LAST_STATE)
    assert main(["inspect", str(draft)]) == 0
    assert "reads the target's last hidden state, behind its final norm" in capsys.readouterr().out
    assert main(["plan", str(draft), "--recipe", "int4-channel"]) == 0
    read = read_draft(Checkpoint.open(draft))
    assert candidates_of(read, [], VerifyStep(3, 8))


@pytest.mark.parametrize(
    ("architectures", "name"),
    [(["A"], "A"), (["A", "B"], ""), ([], ""), ("A", ""), (None, ""), ([1], "")],
)
def test_only_one_name_is_the_declared_architecture(architectures: object, name: str) -> None:
    assert declared_architecture({"architectures": architectures}) == name
