"""`check` on config.json as other tools write it: names of architectures, speculators."""

import sys
from pathlib import Path

import pytest
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_draft

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

from broken import CT_FP8  # noqa: E402
from cases import NUM_TARGET_LAYERS, Workshop, break_folder  # noqa: E402
from config_edits import (  # noqa: E402
    as_fnuz,
    both,
    named,
    plain_norms,
    quantized,
    speculators,
)
from edits import QKV, SHARED, Edit, Folder, configure, excludes, kept  # noqa: E402
from formats import FamilyName, format_recipe  # noqa: E402


class Maker:
    """Makes folders that are edited, of CT_FP8."""

    def __init__(self, out: Path) -> None:
        self.workshop = Workshop(out)
        self.count = 0

    def __call__(self, edit: Edit, family: FamilyName = "eagle3-llama") -> Path:
        self.count += 1
        source = self.workshop.source(family)
        out = self.workshop.quantize(source, format_recipe(*CT_FP8), f"draft-{self.count}")
        break_folder(out, source, edit)
        return out


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


def test_vllm_excludes_qkv_proj_of_qwen3_under_a_name_without_self_attn(make: Maker) -> None:
    """Executed with vLLM 0.33.0: the exclude that says self_attn misses it, the other does not."""
    verdicts = {}
    for exclude in ("re:.*self_attn[.]qkv_proj$", "re:model[.]layers[.]8[.]qkv_proj$"):
        edit = both(
            kept(*QKV, exclude=[exclude]), named("Eagle3Qwen3ForCausalLM", normed_heads=True)
        )
        answer = check_draft(
            make(edit), engine="vllm", arch="sm90", target_layers=NUM_TARGET_LAYERS
        )
        verdicts[exclude] = answer.verdict
    assert list(verdicts.values()) == ["LOADS BUT WRONG", "LOADS"]


@pytest.mark.parametrize(
    ("name", "engine", "remedy"),
    [
        ("Qwen3ForCausalLMEagle3", "vllm", "give a draft of a supported architecture"),
        ("EAGLE3LlamaForCausalLM", "vllm", "set architectures to LlamaForCausalLMEagle3"),
        ("Eagle3LlamaForCausalLM", "sglang", "set architectures to LlamaForCausalLMEagle3"),
        ("Eagle3Qwen3ForCausalLM", "sglang", "set architectures to LlamaForCausalLMEagle3"),
        ("PeagleLlamaForCausalLM", "vllm", "set architectures to LlamaForCausalLMEagle3"),
        ("LlamaForCausalLMEagle", "sglang", "set architectures to LlamaForCausalLMEagle3"),
    ],
)
def test_a_name_that_an_engine_has_not(name: str, engine: str, remedy: str, make: Maker) -> None:
    answer = check_draft(make(named(name)), engine=engine, arch="sm90")  # type: ignore[arg-type]
    assert answer.verdict == "REFUSED"
    assert name in (answer.error or "")
    assert remedy in (answer.remedy or "")


@pytest.mark.parametrize(
    "name", ["DFlash2BeamDraftModel", "Lfm2DSparkDraftModel", "GPT2LMHeadModel"]
)
def test_a_name_of_which_nothing_is_known_is_unknown(name: str, make: Maker) -> None:
    answer = check_draft(make(named(name)), engine="sglang", arch="sm90")
    assert answer.verdict == "UNKNOWN"
    error = f"Loading a draft of architectures [{name!r}] was never executed"
    assert (answer.error or "").endswith(error)
    assert (answer.error or "").startswith("The draft is ")


def changed(**keys: object) -> Edit:
    return lambda folder: folder.config.update(keys)


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
    change: dict[str, object], verdict: str, error: str | None, make: Maker
) -> None:
    folder = make(both(speculators("qwen3"), changed(**change)), "dflash")
    answer = check_draft(folder, engine="vllm", arch="sm90")
    assert answer.verdict == verdict
    assert (answer.error is None) if error is None else error in (answer.error or "")


@pytest.mark.parametrize("model_type", [None, "speculators", "speculator_model"])
def test_sglang_reads_no_speculators(model_type: str | None, make: Maker) -> None:
    folder = make(both(speculators(), changed(model_type=model_type)))
    answer = check_draft(folder, engine="sglang", arch="sm90")
    assert answer.verdict == "REFUSED"
    assert "model" in (answer.error or "")
    assert "serve a draft of speculators with vLLM" in (answer.remedy or "")


def verdict(folder: Path, engine: EngineName) -> str:
    return check_draft(folder, engine=engine, arch="sm90", target_layers=8).verdict


@pytest.mark.parametrize(
    ("edit", "family", "vllm", "sglang"),
    [
        (quantized("embed_tokens"), "eagle3-llama", "REFUSED", "LOADS BUT WRONG"),
        (quantized("embed_tokens"), "eagle3-mla", "REFUSED", "LOADS BUT WRONG"),
        (
            both(quantized("embed_tokens"), lambda f: f.drop("embed_tokens.weight_scale")),
            "eagle3-llama",
            "LOADS BUT WRONG",
            "LOADS BUT WRONG",
        ),
        (excludes(*SHARED, "midlayer.self_attn.kv_b_proj"), "eagle3-mla", "LOADS BUT WRONG",
         "REFUSED"),
        (excludes("re:.*fc$", "lm_head", "self_attn.kv_b_proj"), "eagle3-mla", "LOADS BUT WRONG",
         "LOADS"),
    ],
)  # fmt: skip
def test_codes_and_floats_where_the_other_is_expected(
    edit: Edit, family: FamilyName, vllm: str, sglang: str, make: Maker
) -> None:
    folder = make(edit, family)
    assert (verdict(folder, "vllm"), verdict(folder, "sglang")) == (vllm, sglang)


@pytest.mark.parametrize(
    ("key", "nested", "family", "vllm", "sglang"),
    [
        (True, None, "eagle3-llama", "LOADS", "LOADS"),
        (False, True, "eagle3-llama", "LOADS", "LOADS"),
        (True, False, "eagle3-llama", "LOADS BUT WRONG", "LOADS BUT WRONG"),
        (True, None, "eagle3-mla", "REFUSED", "LOADS BUT WRONG"),
    ],
)
def test_norm_before_fc_is_asked_for_in_eagle_config_first(
    key: bool, nested: bool | None, family: FamilyName, vllm: str, sglang: str, make: Maker
) -> None:
    def inside(folder: Folder) -> None:
        if nested is not None:
            folder.config["eagle_config"]["norm_before_fc"] = nested

    norm = plain_norms("input_norm", width=3)
    folder = make(both(norm, configure("norm_before_fc", key), inside), family)
    assert (verdict(folder, "vllm"), verdict(folder, "sglang")) == (vllm, sglang)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_codes_of_the_fnuz_kind_are_copied_by_value(engine: EngineName, make: Maker) -> None:
    assert verdict(make(as_fnuz), engine) == "LOADS"
