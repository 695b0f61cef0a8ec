"""What `check` says of folders of other tools' kinds, beside what the engines did with them.

The folders are imitated by hand (`engines/kinds.py`); `kinds.json` has their headers and what the
engines' own loaders answered.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines import EngineName, Verdict
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.engines.registry import choose
from draftquant.quantize.engines.repairs import plan_repairs
from draftquant.quantize.errors import CheckpointError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.scripts.cli import main
from tiny import edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import tiny_eagle1, tiny_language_model
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import tiny_mimo_mtp

ENGINES_FOLDER = Path(__file__).parent / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

import foreign_sample  # noqa: E402

ROWS = foreign_sample.read_sample(ENGINES_FOLDER / "kinds.json")
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
NOT_SURE = {"lm-gptq-act", "e3-gptq-act", "mla-blocks-kv"}
"""Of which loading does not tell how one engine serves them: UNKNOWN is right there."""
TWO_WIDTHS = {"qwen2-head-dim", "qwen2-odd-heads"}
"""Drafts that are none: the two engines read two widths of a head."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["draft"])
def test_check_says_what_the_engines_did(row: dict[str, Any], tmp_path: Path) -> None:
    if row["draft"] in TWO_WIDTHS:
        with pytest.raises(CheckpointError, match="does not read the key"):
            list(foreign_sample.predictions(row, tmp_path))
        return
    wrong = [
        f"{asked}: {said.verdict} ({said.error}), not {verdict}"
        for asked, verdict, said in foreign_sample.predictions(row, tmp_path)
        if said.verdict != verdict
        and not (said.verdict == "UNKNOWN" and _is_not_told(row["draft"], asked))
    ]
    assert wrong == []


def _is_not_told(draft: str, asked: str) -> bool:
    """Marlin packs AutoRound's codes on a GPU that has no Marlin: loading ends before that."""
    return draft in NOT_SURE or ("-ar" in draft and "gfx942" in asked)


def test_the_kinds_have_every_answer_of_both_engines() -> None:
    told = {
        (asked.split()[0], verdict)
        for row in ROWS
        for verdict, questions in row["answers"].items()
        for asked in questions
    }
    assert told == set(itertools.product(ENGINES, ("LOADS", "LOADS BUT WRONG", "REFUSED")))
    assert len(ROWS) > 150


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["gguf", "bitsandbytes", "gptq"])
def test_names_decide_nothing_under_a_method_that_is_not_read(
    method: str, engine: EngineName, tmp_path: Path
) -> None:
    row = next(row for row in ROWS if row["draft"] == "lm-gptq")
    declared = {**row["config"]["quantization_config"], "quant_method": method, "lm_head": True}
    row = {**row, "config": {**row["config"], "quantization_config": declared}}
    row["answers"] = {"UNKNOWN": [f"{engine} sm90 1"]}
    (_, _, said) = next(iter(foreign_sample.predictions(row, tmp_path)))
    refused = method in ("gguf", "bitsandbytes")
    assert said.verdict == ("REFUSED" if refused else "UNKNOWN")
    assert "no module or parameter" not in (said.error or "")


BUILDERS: tuple[Callable[..., Path], ...] = (
    tiny_eagle3_llama,
    tiny_eagle3_mla,
    tiny_dflash,
    tiny_dspark,
    tiny_eagle1,
    tiny_language_model,
    tiny_mimo_mtp,
)
EDITS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "layers": {"num_hidden_layers": 24},
    "other name": {"architectures": ["Eagle3LlamaForCausalLM"]},
    "eagle name": {"architectures": ["EagleLlamaForCausalLM"]},
    "tied under another name": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "tie_word_embeddings": True,
    },
    "layers under another name": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "num_hidden_layers": 24,
    },
    "v3 name": {"architectures": ["Eagle3DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "no vocabulary": {"draft_vocab_size": None},
    "no dtype": {"torch_dtype": None},
    "empty declaration": {"quantization_config": {}},
    "elsewhere": {"compression_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_repair_never_makes_a_silent_fault_of_an_error(
    build: Callable[..., Path], edit: str, engine: EngineName, tmp_path: Path
) -> None:
    folder = build(tmp_path / "draft")
    edit_json(folder / "config.json", **EDITS[edit])
    try:
        plan = plan_repairs(folder, engine=engine, target_layers=None)
    except CheckpointError:
        return  # exit 2: nothing is repaired
    source = plan.source
    for arch in choose(engine).archs:
        before = _verdict(source, engine, arch)
        after = _verdict(Checkpoint.open(folder), engine, arch, config=plan.config)
        assert (before, after) != ("REFUSED", "LOADS BUT WRONG"), plan.repairs


def _verdict(
    checkpoint: Checkpoint, engine: EngineName, arch: str, *, config: Any = None
) -> Verdict | str:
    asked = dataclasses.replace(checkpoint, config=config or checkpoint.config)
    try:
        return check_checkpoint(asked, engine=engine, arch=arch, has_side_file=False).verdict
    except CheckpointError:
        return "no draft"


def test_what_would_be_served_wrongly_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own name SGLang would take the draft's tokens for those of the whole vocabulary."""
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    tensors = read_tensors(folder)
    del tensors["d2t"]
    write_tensors(folder, tensors, metadata={"format": "pt"})
    edit_json(folder / "config.json", architectures=["Eagle3LlamaForCausalLM"])
    out = tmp_path / "out"
    asked = ["check", str(folder), "--engine", "sglang", "--fix", "--out", str(out)]
    assert main(asked) == 1
    assert not out.exists()
    assert "would serve the repaired one wrongly" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("build", [tiny_eagle3_llama, tiny_eagle3_mla])
def test_a_tied_head_is_untied_by_fix(build: Callable[..., Path], tmp_path: Path) -> None:
    folder = build(tmp_path / "draft", pruned_vocabulary=True)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    source = Checkpoint.open(folder)
    assert _verdict(source, "sglang", "sm90") == "LOADS BUT WRONG"
    assert _verdict(source, "vllm", "sm90") == "LOADS"
    plan = plan_repairs(folder, engine="sglang")
    assert plan.config["tie_word_embeddings"] is False
    assert _verdict(source, "sglang", "sm90", config=plan.config) == "LOADS"


@pytest.mark.parametrize(
    ("build", "verdict"),
    [(tiny_eagle3_llama, "LOADS BUT WRONG"), (tiny_eagle3_mla, "REFUSED")],
)
def test_the_targets_number_of_layers_is_repaired(
    build: Callable[..., Path], verdict: str, tmp_path: Path
) -> None:
    """Engines build as many layers as config.json says; the draft has one."""
    folder = build(tmp_path / "draft")
    edit_json(folder / "config.json", num_hidden_layers=36)
    source = Checkpoint.open(folder)
    assert _verdict(source, "sglang", "sm90") == verdict
    assert _verdict(source, "vllm", "sm90") == "LOADS BUT WRONG"
    plan = plan_repairs(folder, engine="vllm")
    assert plan.config["num_hidden_layers"] == 1
    assert _verdict(source, "vllm", "sm90", config=plan.config) == "LOADS"
    assert _verdict(source, "sglang", "sm90", config=plan.config) == "LOADS"


def test_a_declaration_that_is_not_supported_is_bad_input(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    edit_json(folder / "config.json", quantization_config={"quant_method": "gguf"})
    for command in ("dequantize", "transcode"):
        layout = ["--layout", "quark"] if command == "transcode" else []
        assert main([command, str(folder), "--out", str(tmp_path / "out"), *layout]) == 2
    source = tiny_eagle3_llama(tmp_path / "source")
    assert main(["verify", str(folder), "--against", str(source), "--foreign"]) == 2


def test_a_tied_language_model_may_store_its_head(tmp_path: Path) -> None:
    folder = tiny_language_model(tmp_path / "draft")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    source = Checkpoint.open(folder)
    assert read_draft(source).row("lm_head.weight") is not None
    assert _verdict(source, "vllm", "sm90") == "LOADS"
