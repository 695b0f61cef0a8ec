"""`check` against what the engines' own loaders said of MTP layers: `engines/mtp.json`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from draftquant.quantize.engines.check import check_draft
from draftquant.scripts.cli import main
from tiny_mtp import (
    tiny_deepseek_mtp,
    tiny_glm4_moe_mtp,
    tiny_mimo_mtp,
    tiny_qwen3_next_mtp,
)

ROWS = json.loads((Path(__file__).parent / "engines" / "mtp.json").read_text())
BUILDERS: dict[str, Callable[..., Path]] = {
    "mimo-mtp": partial(tiny_mimo_mtp, config={"model_type": "qwen2"}),
    "deepseek-mtp": tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny_glm4_moe_mtp,
    "qwen3-next-mtp": tiny_qwen3_next_mtp,
    "qwen3.5-mtp": partial(tiny_qwen3_next_mtp, experts=0),
}
HEAD_OF_THE_TARGET = ("vllm deepseek-mtp plain", "vllm glm4-moe-mtp plain")
"""The loader alone leaves the head unwritten, which a server shares with the target afterwards."""
NOT_SAID = (
    "sglang deepseek-mtp plain",
    "sglang deepseek-mtp quantized",
    "sglang glm4-moe-mtp quantized",
    "sglang qwen3-next-mtp quantized",
)
"""UNKNOWN: DeepSeek's needs a GPU, and experts are known in one format alone."""
FUSED_SHARED = "sglang glm4-moe-mtp plain"
"""SGLang takes GLM's shared expert for one more of the routed ones."""


@pytest.mark.parametrize("row", ROWS)
def test_check_says_what_the_loader_said(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, family, kind = row.split()
    folder = BUILDERS[family](tmp_path / "plain", tables=False)
    if kind == "quantized":
        out = tmp_path / "quantized"
        assert main(["quantize", str(folder), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
        folder = out
    capsys.readouterr()
    assert engine in ("vllm", "sglang")
    said = check_draft(folder, engine="vllm" if engine == "vllm" else "sglang", arch="sm90")
    recorded = ROWS[row]
    if row in NOT_SAID:
        assert said.verdict == "UNKNOWN"
        return
    if row in HEAD_OF_THE_TARGET:
        assert recorded["verdict"] == "LOADS BUT WRONG"
        assert [name.rpartition(".")[0] for name in recorded["unloaded"]] == [
            "model.layers.3.shared_head.head"
        ]
        assert said.verdict == "LOADS"
    else:
        assert said.verdict == recorded["verdict"]
        assert said.error == recorded["error"]
    if said.verdict == "LOADS":
        unknown = {layer.module for layer in said.layers} - set(recorded["schemes"])
        assert all(row == FUSED_SHARED and ".shared_experts." in name for name in unknown)


def test_every_row_has_a_builder_and_every_difference_a_row() -> None:
    assert {row.split()[1] for row in ROWS} == set(BUILDERS)
    assert {*HEAD_OF_THE_TARGET, *NOT_SAID} <= set(ROWS)
