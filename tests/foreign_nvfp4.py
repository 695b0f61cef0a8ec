"""A draft as compressed-tensors 0.20 itself writes NVFP4 W4A4, and what that library makes of it.

llm-compressor observes inputs and leaves the rest to this library: here the global scales are those
of fixed inputs, everything else is the library's own.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tree import module_tree, write_folder

INPUT_ABSMAX = {"q_proj": 3.7, "o_proj": 1.9, "gate_proj": 2.3, "down_proj": 11.1}
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def by_compressed_tensors(source: Path, out: Path) -> Path:
    """Every linear of the layer in NVFP4, with global scales that fused linears share."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = module_tree(source)
    groups = {"group_0": preset_name_to_scheme("NVFP4", ["Linear"])}
    ignore = ["lm_head", "re:.*fc$", "re:.*embed_tokens$"]
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    linears = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }
    for name, module in linears.items():
        leaf = name.rpartition(".")[2]
        first = _FUSED.get(leaf, leaf)
        fused = [w for n, w in linears.items() if _FUSED.get(_leaf(n), _leaf(n)) == first]
        largest = torch.stack([w.weight.float().abs().max() for w in fused]).max()
        absmax = torch.tensor(INPUT_ABSMAX[first])
        module.weight_global_scale.data.copy_(generate_gparam(-largest, largest))
        module.input_global_scale.data.copy_(generate_gparam(-absmax, absmax))
        parts = module.weight.float().reshape(len(module.weight), -1, 16)
        args, whole = module.quantization_scheme.weights, module.weight_global_scale
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
        module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    write_folder(out, source, model.state_dict(), None)
    compressor.update_config(str(out))
    return out


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def input_scales(folder: Path) -> dict[str, Tensor]:
    """The `input_global_scale` of every linear, by its name on disk."""
    suffix = ".input_global_scale"
    tensors = load_file(folder / "model.safetensors")
    return {n.removesuffix(suffix): t for n, t in tensors.items() if n.endswith(suffix)}


class NVFP4:
    """The library's own quantize-dequantize."""

    @staticmethod
    def rounded_inputs(x: Tensor, global_scale: Tensor) -> Tensor:
        """What its forward pass makes of a linear's input."""
        from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        scheme = preset_name_to_scheme("NVFP4", ["Linear"])
        module: Any = nn.Module()
        module.input_global_scale = global_scale
        module.quantization_status = QuantizationStatus.COMPRESSED
        return forward_quantize(module, x, "input", scheme.input_activations)

    @staticmethod
    def weight(folder: Path, module: str) -> Tensor:
        """What its decompressor makes of the stored tensors of a linear, in float32."""
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        tensors = load_file(folder / "model.safetensors")
        packed = tensors[f"{module}.weight_packed"]
        return dequantize(
            x_q=unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1]).float(),
            scale=tensors[f"{module}.weight_scale"].float(),
            args=preset_name_to_scheme("NVFP4", ["Linear"]).weights,
            global_scale=tensors[f"{module}.weight_global_scale"],
            dtype=torch.float32,
        )
