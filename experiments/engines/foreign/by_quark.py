"""AMD Quark: from file to file, and the export of a model whose modules have the draft's names."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["QUARK_DISABLE_COMPILE"] = "1"

from draftquant.quantize.backends.quark_backend import quark_process_state
from maker import main
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from tree import module_tree, read_tensors, run_linears, write_folder

EXCLUDES = (
    ["*lm_head*", "*embed_tokens*"],
    ["*embed_tokens*", "lm_head", "fc", "*norm*"],
    ["*embed_tokens*", "*lm_head*", "*fc*", "*kv_b_proj*"],
)
FILE_TO_FILE = (
    "fp8", "ptpc_fp8", "int4_wo_32", "int4_wo_64", "int4_wo_128", "int4_wo_per_channel",
    "int4_fp8", "mxfp4", "mxfp4_weight_only", "int8", "uint4_wo_128",
)  # fmt: skip
EXPORTED = (
    "fp8", "ptpc_fp8", "int4_wo_32", "int4_wo_128", "int4_wo_per_channel", "int4_fp8",
    "mxfp4_weight_only", "mxfp4_fp8", "int8", "uint4_wo_64", "nvfp4",
)  # fmt: skip


class Tree(PreTrainedModel):
    """What Quark's exporter takes: the draft's tensors as a model."""

    config_class = LlamaConfig
    base_model_prefix = "model"

    def __init__(self, source: Path) -> None:
        super().__init__(LlamaConfig())
        module_tree(source, self)
        self.eval()

    def forward(self, input_ids: Tensor | None = None, **_named: Any) -> Tensor | None:
        """Every linear once: its observers see something."""
        run_linears(self)
        return input_ids


def _config(scheme: str, variant: int) -> Any:
    from quark.torch import LLMTemplate
    from quark.torch.quantization.config.config import QConfig

    layer = LLMTemplate._SCHEME_COLLECTION.get_scheme(scheme).config
    return QConfig(global_quant_config=layer, exclude=list(EXCLUDES[variant]))


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    form, _, name = scheme.partition("-")
    with quark_process_state():
        from quark.torch import ModelQuantizer, export_safetensors

        quantizer = ModelQuantizer(_config(name, variant))
        if form == "file":
            quantizer.direct_quantize_checkpoint(
                pretrained_model_path=str(source), save_path=str(out), device="cpu"
            )
            return
        import torch

        inputs = [torch.zeros(1, 4, dtype=torch.long)]
        model = quantizer.freeze(quantizer.quantize_model(Tree(source), inputs))
        exported = out.with_name(f"{out.name}.exported")
        export_safetensors(model, str(exported))
        declared = json.loads((exported / "config.json").read_text(encoding="utf-8"))[
            "quantization_config"
        ]
        write_folder(out, source, read_tensors(exported), declared)
        for path in exported.iterdir():
            path.unlink()
        exported.rmdir()


if __name__ == "__main__":
    schemes = [f"file-{name}" for name in FILE_TO_FILE] + [f"model-{name}" for name in EXPORTED]
    main("quark", schemes, make, every=5)
