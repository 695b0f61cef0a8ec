"""`check`: its predictions beside what the engines really did, its rules, the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_draft
from by_recipe import quantized
from cases import FAMILIES, Workshop, _quantized, beyond_cases, mixed_cases
from draftquant import api as dq
from draftquant.quantize.engines.contract import ENGINE_NAMES, FROM_WORST
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from folder_rows import FILES, read_rows, write_folder
from formats import all_formats, format_recipe
from handmade import MADE, quantize_by_hand
from handmade_declarations import declaration
from predictions import find_mismatches, predicted
from reasons import own_text
from results import read_outcomes
from tiny import change, config_of, edit_json, read_tensors, tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla
from verify_cases import edit

OTHER_TEXT = {"eagle3-mla--modelopt-nvfp4-head", "dflash--modelopt-nvfp4-head"}
"""Several things are wrong: which of them an engine meets first follows the order of tensors."""
BROKEN = {row["draft"]: row for row in read_rows(FILES["broken on purpose"])}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("engines"))


def plain_cases(workshop: Workshop) -> None:
    """Every family, and all formats of the one in which the engines differ most."""
    for family in FAMILIES:
        workshop.source(family).rename(workshop.out / f"{family}--unquantized")
    for recipe in all_formats():
        _quantized(workshop, "format", "eagle3-mla", recipe)


@pytest.mark.parametrize(
    ("cases", "count", "loaded"),
    [
        (plain_cases, 215, 109),
        pytest.param(
            mixed_cases, 490, 320, marks=pytest.mark.slow
        ),  # all on 5 GPUs, 1 and 2 shards
        pytest.param(beyond_cases, 370, 261, marks=pytest.mark.slow),
    ],
)
def test_predictions_are_what_the_engines_did(
    cases: Callable[[Workshop], None], count: int, loaded: int, tmp_path: Path
) -> None:
    """Verdicts, errors, captured layers, and which linears were built, and which as quantized."""
    cases(Workshop(tmp_path))
    outcomes = [one for one in read_outcomes() if (tmp_path / one["draft"]).is_dir()]
    outcomes = [{"error": None, **one} for one in outcomes]
    assert find_mismatches(tmp_path, outcomes) == []
    refused = [one for one in outcomes if one["verdict"] == "REFUSED"]
    for outcome in refused:  # the first words: what follows are numbers and lists of the engine's
        said = own_text(predicted(tmp_path / outcome["draft"], outcome).error)
        same = said[:40] == outcome["error"][:40]
        assert same or outcome["draft"] in OTHER_TEXT, (said, outcome["error"])
    assert (len(outcomes), len(outcomes) - len(refused)) == (count, loaded)


WRONG_TOKENS = {95: "", 96: "target id 96, outside the vocabulary of 96", -1: "target id -1,",
                94: "1 of 48 rows of d2t stand for a token"}  # fmt: skip
"""Token of the last row of a head of 48, of which another row stands for 94."""


@pytest.mark.parametrize("token", WRONG_TOKENS)
def test_a_map_to_tokens_that_do_not_exist_loads_wrongly(token: int, tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    old = read_tensors(folder)["d2t"]
    offsets = old.data[:-8] + (token - 47).to_bytes(8, "little", signed=True)
    edit(folder, lambda tensors: tensors.update(d2t=old._replace(data=offsets)))
    for engine in ("vllm", "sglang"):
        found = dq.check(folder, engine=engine, gpu="h200")
        assert found.verdict == ("LOADS BUT WRONG" if WRONG_TOKENS[token] else "LOADS")
        assert WRONG_TOKENS[token] in (found.answer.error or "")


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"pruned_vocabulary": True}, "add draft_vocab_size to config.json"),
        ({}, "remove d2t and t2d"),
    ],
)
def test_a_map_without_draft_vocab_size(
    sizes: dict[str, bool], remedy: str, tmp_path: Path
) -> None:
    cut = read_tensors(tiny_eagle3_llama(tmp_path / "cut", pruned_vocabulary=True))
    folder = tiny_eagle3_llama(tmp_path / "draft", **sizes)
    change(folder, d2t=cut["d2t"])
    edit_json(folder / "config.json", draft_vocab_size=None)
    assert check_draft(folder, engine="vllm", arch="sm90").remedy == remedy


def fp8_odd(**weights: Any) -> dict[str, Any]:
    """FP8 of compressed-tensors, but for some keys of its weights."""
    declared = declaration(MADE["ct-fp8"])
    declared["config_groups"]["group_0"]["weights"] |= weights
    return declared


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 0, "desc_act": False, "sym": True}
SPARSE = {"quant_method": "compressed-tensors", "sparsity_config": {"targets": ["Linear"]}}


@pytest.mark.parametrize(("intermediate", "verdict"), [(512, "LOADS"), (384, "UNKNOWN")])
def test_gpus_share_whole_blocks_of_rows(intermediate: int, verdict: str, tmp_path: Path) -> None:
    """o_proj, down_proj and the one head of k and v give each all of their rows; gate_proj half."""
    sizes = {"hidden": 192, "intermediate": intermediate, "heads": 4, "kv_heads": 1}
    draft = tiny_eagle3_llama(tmp_path / "draft", **sizes, head_dim=128)
    out = quantize_by_hand(draft, tmp_path / "out", MADE["fp8-block"])
    found = {tp: check_draft(out, engine="vllm", arch="sm90", tp=tp).verdict for tp in (1, 2)}
    assert found == {1: "LOADS", 2: verdict}


@pytest.mark.parametrize("key", ["bits", "w_bit"])
def test_awq_that_names_its_bits_otherwise_is_not_for_marlin(key: str, tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", hidden=128, intermediate=256)
    out = quantize_by_hand(draft, tmp_path / "out", MADE["awq"])
    declared = config_of(out)["quantization_config"]
    declared[key] = declared.pop("bits")
    edit_json(out / "config.json", quantization_config=declared)
    said = str(check_draft(out, engine="sglang", arch="sm90").error)
    assert ("Marlin kernel", "float16 only")[key == "w_bit"] in said


@pytest.mark.parametrize("inputs", ["fp8-token", "fp8-static"])
def test_scales_without_rows_are_joined_by_no_engine(inputs: Any, tmp_path: Path) -> None:
    draft, recipe = tiny_eagle3_mla(tmp_path / "d"), format_recipe("quark", "fp8-tensor", inputs)
    out = quantized(draft, recipe, tmp_path / "out", scale=0.01).out
    assert "single numbers without rows" in str(check_draft(out, engine="sglang").error)


def test_what_is_refused_as_config_json_is_read_needs_no_linear(tmp_path: Path) -> None:
    """SGLang takes ModelOpt's method on no AMD GPU, whatever is excluded; beside a null too."""
    draft = tiny_eagle3_llama(tmp_path / "draft")
    made = quantize_by_hand(draft, tmp_path / "made", MADE["modelopt-fp8"])
    declared = config_of(made)["quantization_config"]
    declared |= {"ignore": ["*"], "exclude_modules": ["*"]}
    config = {**config_of(draft), "quantization_config": None, "compression_config": declared}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert check_draft(draft, engine="sglang", arch="sm90").verdict != "REFUSED"
    on_amd = check_draft(draft, engine="sglang", arch="gfx942")
    assert on_amd.verdict == "REFUSED"
    assert "not supported in ROCm" in str(on_amd.error)


@pytest.mark.parametrize(
    ("declared", "asked", "why"),
    [
        (None, {"version": "0.99"}, "vLLM 0.99 are not known"),
        (None, {"arch": "sm75"}, "never executed"),
        (GPTQ, {}, ""),
        (SPARSE, {}, "leaves zeros out of what is stored"),
        (fp8_odd(group_size=[[]]), {}, ""),
        (fp8_odd(symmetric=False), {}, ""),
        (fp8_odd(strategy="block", block_structure=[64, 64]), {}, ""),
        (fp8_odd(num_bits=4, strategy="group", group_size=64), {}, ""),
        ({"quant_method": "quark", "surprise": 1}, {}, ""),
        ({"quant_method": "fp8", "activation_scheme": 7}, {"engine": "sglang"}, ""),
        ({"quant_method": "moe_wna16"}, {}, "Loading this declaration was never executed"),
    ],
)
def test_what_was_not_executed_is_unknown(
    declared: dict[str, Any] | None, asked: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = {"quantization_config": declared} if declared else {}
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True, config=config)
    answer = check_draft(draft, **{"engine": "vllm", "arch": "sm90"} | asked)  # type: ignore[arg-type]
    assert answer.verdict == "UNKNOWN"
    assert why in " ".join(finding.text for finding in answer.findings)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_a_family_does_not_know_are_unknown(key: str, tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", config={key: True})
    assert "such a draft with biases" in str(check_draft(folder, engine="vllm").error)
    edit_json(folder / "config.json", **{key: False, "intermediate_size": "wide"})
    with pytest.raises(CheckpointError, match="intermediate_size"):
        check_draft(folder, engine="sglang")


def test_a_declaration_is_an_object(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "d", config={"quantization_config": []})
    with pytest.raises(CheckpointError, match="expected an object with quant_method"):
        check_draft(draft, engine="vllm")


@pytest.mark.parametrize("name", ["backbone.norm.weight", "backbone.self_attn.q_scale"])
def test_names_that_were_not_executed_are_unknown(tmp_path: Path, name: str) -> None:
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True)
    edit(draft, lambda tensors: tensors.update({name: tensors["norm.weight"]}))
    assert check_draft(draft, engine="vllm", arch="sm90").verdict == "UNKNOWN"


BOTH_PLACES = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
"""The target's layers for every runner of every engine, whatever the target's default is."""


def test_a_layer_number_of_the_target_is_unknown(workshop: Workshop) -> None:
    recipe = format_recipe("compressed-tensors", "fp8-channel", "fp8-token")
    folder = workshop.quantize(workshop.source("eagle3-llama"), recipe, "numbered")
    declared = config_of(folder)["quantization_config"]
    declared["ignore"].append("model.layers.61.self_attn.o_proj")
    edit_json(folder / "config.json", quantization_config=declared, **BOTH_PLACES)
    answer = check_draft(folder, engine="vllm", arch="sm90")
    assert answer.verdict == "UNKNOWN"
    assert "counts the draft's layers after the target's" in (answer.error or "")
    for layers, verdict in ((61, "REFUSED"), (60, "LOADS")):  # is it the draft's own layer?
        known = check_draft(folder, engine="vllm", arch="sm90", target_layers=layers)
        assert known.verdict == verdict
    assert check_draft(folder, engine="sglang", arch="sm90", target_layers=61).verdict == "LOADS"
    turned = {"R1": {"apply": [{"targets": ["Linear"], "location": "output"}]}}
    declared["transform_config"] = {"config_groups": turned}
    edit_json(folder / "config.json", quantization_config=declared)
    assert check_draft(folder, engine="vllm", arch="sm90", target_layers=60).verdict == "UNKNOWN"


def test_target_layers_agrees_with_config(tmp_path: Path) -> None:
    config = {"num_target_layers": 61} | BOTH_PLACES
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True, config=config)
    with pytest.raises(CheckpointError, match=r"config\.json: num_target_layers: "):
        check_draft(draft, engine="vllm", target_layers=60)
    for layers in (None, 61):
        assert check_draft(draft, engine="vllm", target_layers=layers).verdict == "LOADS"


NO_INPUTS = "TypeError: 'NoneType' object is not subscriptable"
READ_IN_TENSORRT_LLM = {
    ("compressed-tensors", "int4-group128", "weights-only"): ("REFUSED", NO_INPUTS),
    ("compressed-tensors", "fp8-channel", "fp8-static"): ("REFUSED", "inputs_quant_strategy: tens"),
    ("modelopt", "nvfp4", "nvfp4"): ("UNKNOWN", "reads this declaration as NVFP4,"),
    ("quark", "fp8-channel", "fp8-token"): ("LOADS BUT WRONG", "plain numbers without"),
    ("quark", "int4-group128", "weights-only"): ("UNKNOWN", "quark in this form was not read"),
}


@pytest.mark.parametrize(
    ("formats", "expected"), READ_IN_TENSORRT_LLM.items(), ids=lambda value: "-".join(value)
)
def test_what_was_read_of_tensorrt_llm(workshop: Workshop, formats: Any, expected: Any) -> None:
    recipe = format_recipe(*formats)
    folder = workshop.quantize(workshop.source("eagle3-llama"), recipe, f"trt-{recipe.name}")
    answer = check_draft(folder, engine="tensorrt-llm")
    verdict, text = expected
    assert (answer.verdict, text in str(answer.error)) == (verdict, True)
    assert answer.evidence == "its public source was read in parts, and it was never executed"
    assert '"decoding_type": "Eagle3"' in str(answer.launch)
    assert "trtllm-serve TARGET --tp_size 1 --config draft.yaml" in str(answer.launch)


@pytest.mark.parametrize(
    ("case", "arguments", "code"),
    [
        ("quark-exclude-bare", ["vllm"], 1),
        ("mla-model-type", ["vllm"], 1),
        ("mla-model-type", ["tensorrt-llm", "--gpu", "gfx950"], 3),
        ("o-proj-kept-regex", ["sglang"], 3),
        ("nowhere", ["vllm"], 2),
    ],
)
def test_the_command(case: str, arguments: list[str], code: int, tmp_path: Path) -> None:
    if case in BROKEN:
        write_folder(BROKEN[case], tmp_path / case)
    assert main(["check", str(tmp_path / case), "--engine", *arguments]) == code


@pytest.mark.parametrize(
    ("config", "code", "verdicts"),
    [
        ({}, 0, ["LOADS", "LOADS", "UNKNOWN"]),
        ({"model_type": "nonsense"}, 3, ["REFUSED", "REFUSED", "UNKNOWN"]),
        ({"quantization_config": {"quant_method": "quark", "surprise": 1}}, 3, ["UNKNOWN"] * 3),
    ],
)
def test_without_an_engine_all_answer_in_a_line_each(
    config: Any, code: int, verdicts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True, config=config)
    assert main(["check", str(folder)]) == code
    *lines, hint = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == verdicts
    assert "--engine" in hint
    assert main(["check", str(folder), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == max(verdicts, key=FROM_WORST.index)
    for engine, line, answer in zip(ENGINE_NAMES, lines, found["engines"], strict=True):
        alone = check_draft(folder, engine=engine)
        assert (answer["engine"], answer["verdict"]) == (engine, alone.verdict)
        assert f"{alone.title} on {alone.gpu}" in line
        assert (alone.error or "") in line
