"""A draft as modules of its own names: what tools that want a model are given.

Knows torch and safetensors only, so that it serves in the environment of every tool.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_SHARE_AN_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def module_tree(source: Path) -> nn.Module:
    """The tensors of a folder as modules: weights of two dimensions are linears or an embedding."""
    top = nn.Module()
    for name, tensor in read_tensors(source).items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight":
            top.register_buffer(name, tensor)  # d2t, t2d
            continue
        *parents, last = path.split(".")
        place = top
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = getattr(place, parent)
        place.add_module(last, _holder(last, tensor))
    return top


def _holder(name: str, weight: Tensor) -> nn.Module:
    holder: nn.Module = nn.Module()
    if "embed" in name:
        holder = nn.Embedding(*weight.shape, dtype=weight.dtype)
    elif weight.dim() == 2:
        holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    holder.weight = nn.Parameter(weight, requires_grad=False)
    return holder


def run_linears(model: nn.Module) -> None:
    """Every linear once; those that read the same input in a draft are given the same tensor."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[tuple[str, str, int], Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        parent, _, leaf = name.rpartition(".")
        width = module.in_features
        key = (parent, _SHARE_AN_INPUT.get(leaf, leaf), width)
        if key not in inputs:
            inputs[key] = torch.randn(1, 4, width, generator=generator).to(module.weight.dtype)
        module(inputs[key])


def write_folder(
    out: Path, source: Path, tensors: Mapping[str, Tensor], declared: Mapping[str, Any] | None
) -> None:
    """The source's side files, its config.json with a declaration, and these tensors."""
    out.mkdir()
    for path in source.iterdir():
        if ".safetensors" not in path.name:
            shutil.copy(path, out)
    if declared is not None:
        path = out / "config.json"
        config = json.loads(path.read_text("utf-8")) | {"quantization_config": dict(declared)}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
