"""llm-compressor's `oneshot` on a model whose modules have the draft's names, with calibration."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from maker import main
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, PreTrainedModel
from tree import module_tree, read_tensors, run_linears, write_folder

IGNORES = (
    ["lm_head", "fc"],
    ["re:.*lm_head$", "re:.*fc$"],
    ["lm_head", "re:.*fc$", "re:.*kv_b_proj$"],
)
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM", "W4A8", "NVFP4")


class Tree(PreTrainedModel):
    """The draft's tensors as a model that `oneshot` takes and saves."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, source: Path, home: Path) -> None:
        super().__init__(PretrainedConfig(name_or_path=str(home)))
        module_tree(source, self)
        self.eval()

    def forward(self, input_ids: Tensor, **_named: Any) -> Tensor:
        """Every linear once: its observers see something."""
        run_linears(self)
        return input_ids


class NoTokenizer:
    """Calibration has its inputs already; nothing is to be tokenized or saved."""

    def save_pretrained(self, folder: str) -> None:
        """Nothing."""


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    modifier = QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORES[variant])
    inputs = DataLoader([{"input_ids": torch.zeros(4, dtype=torch.long)}])
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as saved:
        (Path(home) / "config.json").write_text(
            '{"model_type": "llama"}', encoding="utf-8"
        )  # it is looked up
        oneshot(
            model=Tree(source, Path(home)),
            processor=NoTokenizer(),
            dataset=inputs,
            recipe=modifier,
            pipeline="basic",
            output_dir=saved,
        )
        declared = json.loads((Path(saved) / "config.json").read_text(encoding="utf-8"))[
            "quantization_config"
        ]
        tensors = read_tensors(Path(saved))
    write_folder(out, source, tensors, declared)


if __name__ == "__main__":
    main("oneshot", PRESETS, make, every=4)
