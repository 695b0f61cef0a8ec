"""`check` of names, ropes and missing fc, held against what the engines' own loaders did."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.architectures import KNOWN_TO_BOTH, OTHER_NAMES
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.catalogue import config_changes, find_lints

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "experiments" / "engines")
)  # its modules stand alone

from folder_rows import HERE, checkpoint_of, read_rows
from reasons import own_text
from tiny import edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_mla import tiny_eagle3_mla

ROWS = {row["draft"]: row for row in read_rows(HERE / "names.json")}
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
OTHERWISE = {
    # It builds fc, and does not use it where the widths are equal: `llama_eagle3.py:240`.
    "sglang no-fc": (("LOADS BUT WRONG", "LOADS"), ""),
    # It loads, and unpacks a tensor as a pair in its first forward: `llama.py:502,621`.
    "sglang no-layers": (
        ("LOADS", "LOADS BUT WRONG"), "captures no layer for an empty list",
    ),
    # Its speculator is refused: `v1/worker/gpu/spec_decode/dflash/speculator.py:67`.
    "vllm dflash-no-mask": (
        ("LOADS", "REFUSED"), "Model config must specify `dflash_config.mask_token_id`",
    ),
}  # fmt: skip
"""What it did, and what is said, which is what it does after it has loaded."""
NOT_KNOWN = ("type-", "bare-", "dflash-type-", "rope-theta-null")
"""Of a config class that may change keys, or fill in what the stored tensors are not."""


@pytest.mark.parametrize("engine", ENGINES)
def test_check_says_what_the_engine_did(engine: EngineName, tmp_path: Path) -> None:
    for name, row in ROWS.items():
        key = f"{engine} {name}"
        (executed,) = (v for v, asked in row["answers"].items() if f"{engine} sm90 1" in asked)
        said = check_checkpoint(
            checkpoint_of(row, tmp_path), engine=engine, arch="sm90", has_side_file=False
        )
        if key in OTHERWISE:
            verdicts, text = OTHERWISE[key]
            assert (executed, said.verdict) == verdicts, key
            assert text in str(said.error), key
        elif said.verdict == "UNKNOWN":
            assert name.startswith(NOT_KNOWN), key
        else:
            assert said.verdict == executed, key
            if engine in row["errors"]:
                # vLLM quotes the name behind the "Eagle3" that it puts before it.
                theirs = row["errors"][engine].replace("Eagle3PEagle", "PEagle")
                assert theirs.startswith(own_text(str(said.error))[:60]), key


def test_fix_config_writes_the_name_that_both_engines_have(tmp_path: Path) -> None:
    builders: dict[str, Any] = {
        "LlamaForCausalLMEagle3": tiny_eagle3_llama,
        "Eagle3DeepseekV2ForCausalLM": tiny_eagle3_mla,
        "DFlashDraftModel": tiny_dflash,
        "Qwen3DSparkModel": tiny_dspark,
        "DFlash2DraftModel": functools.partial(tiny_dflash, kind="dflash2"),
    }
    folders = {wanted: make(tmp_path / wanted) for wanted, make in builders.items()}
    for name, wanted in OTHER_NAMES.items():
        if wanted in KNOWN_TO_BOTH:
            edit_json(folders[wanted] / "config.json", architectures=[name])
            draft = read_draft(Checkpoint.open(folders[wanted]))
            assert config_changes(find_lints(draft))["architectures"] == [wanted]
