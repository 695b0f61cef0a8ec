"""What vLLM's own functions make of heads while they load: online_head.json.

Usage: `VENV/bin/python online_head.py`, in the environment of `setup`.

`_quantize_nvfp4` and `Fp8PtpcOnlineLinearMethod`'s scale and rounding run on a CPU, as they stand;
what FP8's kernel gets is what they return. Kept are the float32 bits of the quantized values times
their scales.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPES = {"BF16": (97, 64), "F16": (40, 48), "BF16 of every size": (1024, 64)}


def heads() -> dict[str, Tensor]:
    """Heads with what breaks quantizers: rows of zeros, tiny ones, groups of zeros, every number.

    Made without a random generator, so that every version of torch makes the same.
    """
    found = {}
    for name, (rows, columns) in SHAPES.items():
        if "every" in name:
            bits = torch.arange(rows * columns, dtype=torch.int32).to(torch.int16)
            head = bits.view(torch.bfloat16).reshape(rows, columns)
            head = torch.where(head.abs() < 100, head, 0)
        else:
            steps = torch.arange(rows * columns).reshape(rows, columns)
            head = ((steps * 7919) % 1009 - 504).float() / 5040
            head[3], head[5, :16] = 0, 0
            head[4] *= 1e-4
            head = head.to(torch.float16 if name == "F16" else torch.bfloat16)
        found[name] = head
    return found


def digest(served: Tensor) -> str:
    """Of float32 numbers, bit for bit; zeros have no sign."""
    return hashlib.sha256((served + 0.0).contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Write the digests."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # the one platform that imports without compiled parts
    import vllm_platform

    vllm_platform.install("sm90")
    from vllm.model_executor.layers.quantization.online.fp8 import (
        _fp8_channel_scale,
        _fp8_quant_per_channel,
    )
    from vllm.model_executor.layers.quantization.online.lm_head import _quantize_nvfp4
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    table = {}
    for name, head in heads().items():
        packed, scales, whole = _quantize_nvfp4(head)
        nvfp4 = dequantize_to_dtype(packed, scales, whole, torch.float32, 16, swizzle=False)
        scale = _fp8_channel_scale(weight_amax(head, dim=-1, keepdim=True))
        fp8 = _fp8_quant_per_channel(head, scale).float() * scale
        table[name] = {"fp8": digest(fp8), "nvfp4": digest(nvfp4)}
    (HERE / "online_head.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
