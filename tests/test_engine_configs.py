"""`check` on config.json as other tools write it: names of architectures, speculators."""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.engines.contract import EngineCheck, EngineName
from draftquant.quantize.engines.engine_check import check_checkpoint

Row = Mapping[str, Any]

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

from folder_rows import checkpoint_of, read_rows  # noqa: E402

BROKEN = {row["draft"]: row for row in read_rows(ENGINES_FOLDER / "broken.json")}
LLAMA, MLA = BROKEN["layers-nowhere"], BROKEN["layers-as-inputs"]
DFLASH = BROKEN["speculators-dflash"]
"""Folders in FP8 per channel; the last in the layout of speculators."""
SHARED = ("embed_tokens", "fc", "lm_head")


def said_of(
    row: Row,
    engine: EngineName,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    excludes: Sequence[str] | None = None,
) -> EngineCheck:
    """What `check` says of a row with changes; None removes a tensor."""
    row = copy.deepcopy(dict(row))
    if excludes is not None:
        row["config"]["quantization_config"]["ignore"] = list(excludes)
    row["config"] |= config or {}
    found = {**row["tensors"], **(tensors or {})}
    row["tensors"] = {name: header for name, header in found.items() if header is not None}
    checkpoint = checkpoint_of(row, folder)
    return check_checkpoint(
        checkpoint, engine=engine, arch="sm90", target_layers=8, has_side_file=False
    )


QKV = {
    f"midlayer.self_attn.{part}_proj": rows for part, rows in (("q", 512), ("k", 256), ("v", 256))
}
FLOATS = {f"{name}.weight": ["BF16", rows, 512] for name, rows in QKV.items()}
FLOATS |= {f"{name}.weight_scale": None for name in QKV}
HEAD_NORMS = {f"midlayer.self_attn.{part}_norm.weight": ["BF16", 64] for part in "qk"}


@pytest.mark.parametrize(
    ("exclude", "verdict"),
    [
        ("re:.*self_attn[.]qkv_proj$", "LOADS BUT WRONG"),
        ("re:model[.]layers[.]8[.]qkv_proj$", "LOADS"),
    ],
)
def test_vllm_excludes_qkv_proj_of_qwen3_under_a_name_without_self_attn(
    exclude: str, verdict: str, tmp_path: Path
) -> None:
    """Executed with vLLM 0.33.0: the exclude that says self_attn misses it, the other does not."""
    excludes = [*LLAMA["config"]["quantization_config"]["ignore"], exclude]
    named = {"architectures": ["Eagle3Qwen3ForCausalLM"]}
    tensors = FLOATS | HEAD_NORMS
    said = said_of(LLAMA, "vllm", tmp_path, config=named, tensors=tensors, excludes=excludes)
    assert said.verdict == verdict


@pytest.mark.parametrize(
    ("name", "engine", "remedy"),
    [
        ("Qwen3ForCausalLMEagle3", "vllm", "give a draft of a supported architecture"),
        ("EAGLE3LlamaForCausalLM", "vllm", "set architectures to LlamaForCausalLMEagle3"),
        ("Eagle3Qwen3ForCausalLM", "sglang", "set architectures to LlamaForCausalLMEagle3"),
    ],
)
def test_a_name_that_an_engine_has_not(
    name: str, engine: EngineName, remedy: str, tmp_path: Path
) -> None:
    answer = said_of(LLAMA, engine, tmp_path, config={"architectures": [name]})
    assert answer.verdict == "REFUSED"
    assert name in (answer.error or "")
    assert remedy in (answer.remedy or "")


@pytest.mark.parametrize("name", ["DFlash2BeamDraftModel", "GPT2LMHeadModel"])
def test_a_name_of_which_nothing_is_known_is_unknown(name: str, tmp_path: Path) -> None:
    answer = said_of(LLAMA, "sglang", tmp_path, config={"architectures": [name]})
    assert answer.verdict == "UNKNOWN"
    error = f"Loading a draft of architectures [{name!r}] was never executed"
    assert (answer.error or "").endswith(error)
    assert (answer.error or "").startswith("The draft is ")


@pytest.mark.parametrize(
    ("change", "verdict", "error"),
    [
        ({}, "LOADS", None),
        ({"model_type": "speculators"}, "LOADS", None),
        ({"speculators_model_type": None}, "REFUSED", "Expected one of"),
        ({"speculators_model_type": "mtp"}, "REFUSED", "Expected one of: "),
        ({"transformer_layer_config": None}, "REFUSED", "no attribute 'vocab_size'"),
        ({"aux_hidden_state_layer_ids": None}, "REFUSED", "TypeError: 'NoneType' object"),
        ({"aux_hidden_state_layer_ids": ["2"]}, "REFUSED", "TypeError"),
    ],
)
def test_dflash_of_speculators_in_vllm(
    change: dict[str, object], verdict: str, error: str | None, tmp_path: Path
) -> None:
    answer = said_of(DFLASH, "vllm", tmp_path, config=change)
    assert answer.verdict == verdict
    assert (answer.error is None) if error is None else error in (answer.error or "")


@pytest.mark.parametrize("model_type", [None, "speculators", "speculator_model"])
def test_sglang_reads_no_speculators(model_type: str | None, tmp_path: Path) -> None:
    answer = said_of(DFLASH, "sglang", tmp_path, config={"model_type": model_type})
    assert answer.verdict == "REFUSED"
    assert "model" in (answer.error or "")
    assert "serve a draft of speculators with vLLM" in (answer.remedy or "")


CODES = {"embed_tokens.weight": ["F8_E4M3", 512, 256]}
SCALED = CODES | {"embed_tokens.weight_scale": ["F32", 512, 1]}
NORM_OF_FC = {"input_norm.weight": ["BF16", 768]}


@pytest.mark.parametrize(
    ("row", "changes", "vllm", "sglang"),
    [
        (LLAMA, {"tensors": SCALED}, "REFUSED", "LOADS BUT WRONG"),
        (MLA, {"tensors": SCALED}, "REFUSED", "LOADS BUT WRONG"),
        (LLAMA, {"tensors": CODES}, "LOADS BUT WRONG", "LOADS BUT WRONG"),
        (MLA, {"excludes": (*SHARED, "midlayer.self_attn.kv_b_proj")}, "LOADS BUT WRONG",
         "REFUSED"),
        (MLA, {"excludes": ("re:.*fc$", "lm_head", "self_attn.kv_b_proj")}, "LOADS BUT WRONG",
         "LOADS"),
        (LLAMA, {"tensors": NORM_OF_FC, "config": {"norm_before_fc": True}}, "LOADS", "LOADS"),
        (LLAMA, {"tensors": NORM_OF_FC, "config": {"norm_before_fc": False, "eagle_config":
         {"norm_before_fc": True}}}, "LOADS", "LOADS"),
        (LLAMA, {"tensors": NORM_OF_FC, "config": {"norm_before_fc": True, "eagle_config":
         {"norm_before_fc": False}}}, "LOADS BUT WRONG", "LOADS BUT WRONG"),
        (MLA, {"tensors": NORM_OF_FC, "config": {"norm_before_fc": True}}, "REFUSED",
         "LOADS BUT WRONG"),
    ],
)  # fmt: skip
def test_codes_floats_and_norms_where_another_is_expected(
    row: Row, changes: dict[str, Any], vllm: str, sglang: str, tmp_path: Path
) -> None:
    found = [said_of(row, engine, tmp_path, **changes).verdict for engine in ("vllm", "sglang")]
    assert found == [vllm, sglang]
