"""torchao: `quantize_` on modules with the draft's names, and its own form of safetensors."""

import shutil
from pathlib import Path

import torch
from maker import main
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
    quantize_,
)
from tree import module_tree

# On a CPU only the two that leave inputs alone and pack nothing run.
CONFIGS = {
    "float8-row": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "float8-weights": Float8WeightOnlyConfig,
    "int4-group128": lambda: Int4WeightOnlyConfig(group_size=128),
    "int4-group128-unpacked": lambda: IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(128)
    ),
}
_KEPT = (("lm_head",), ("lm_head", "fc"), ("lm_head", "fc", "kv_b_proj"))


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    model = module_tree(source)

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.split(".")[-1] not in _KEPT[variant]

    quantize_(model, CONFIGS[scheme](), filter_fn=chosen)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    out.mkdir()
    shutil.copy(source / "config.json", out)
    save_file(tensors, out / "model.safetensors", metadata=metadata)


if __name__ == "__main__":
    main("torchao", list(CONFIGS), make, every=4)
