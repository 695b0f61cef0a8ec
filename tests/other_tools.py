"""Small linears as other tools' own code stores them, and what that code dequantizes them to.

Usage: `PYTHON tests/other_tools.py` writes `other_tools.json` anew with every tool that this
interpreter has, and leaves the linears of others as they are. `test_other_tools.py` holds the
reading side against the file.
"""

import base64
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_suffix(".json")
ROWS, COLUMNS = 32, 64
MODULE = "model.layers.0.mlp.down_proj"
Linear = tuple[str, dict[str, Any], dict[str, Any], Any]
"""Name, declaration, stored tensors by suffix, and dequantized weight."""


def weights(seed: int) -> Any:
    """A weight of float32, some of whose rows are far from symmetric."""
    import torch

    drawn = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    drawn[::3] += 0.7
    return torch.from_numpy(drawn)


def gptqmodel() -> Iterator[Linear]:
    """GPTQModel 7.7: `TorchLinear.pack_block`, its two versions and `dequantize_weight`."""
    import torch
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for number, (bits, size, symmetric, ordered, version) in enumerate(
        [
            (4, 32, True, False, "gptq"),
            (4, 32, False, True, "gptq"),
            (4, -1, False, False, "gptq_v2"),
            (2, 32, False, False, "gptq_v2"),
            (3, 32, False, True, "gptq"),
            (3, 64, True, False, "gptq_v2"),
            (8, 16, False, False, "gptq"),
            (8, -1, True, True, "gptq"),
        ]
    ):
        weight, top = weights(number), 2**bits - 1
        of_group = COLUMNS if size == -1 else size
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(COLUMNS, generator=generator) if ordered else torch.arange(COLUMNS)
        groups = torch.empty(COLUMNS, dtype=torch.int32)
        groups[order] = (torch.arange(COLUMNS) // of_group).int()
        scales, zeros = [], []
        for group in range(COLUMNS // of_group):
            part = weight[:, groups == group]
            low, high = part.amin(1).clamp(max=-0.1), part.amax(1).clamp(min=0.1)
            largest = torch.maximum(-low, high)
            scale = 2 * largest / top if symmetric else (high - low) / top
            scale = scale.half().float()
            scales.append(scale)
            middle = torch.full_like(scale, (top + 1) / 2)
            zeros.append(middle if symmetric else torch.round(-low / scale).clamp(1, top))
        keys = {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": ordered}
        sizes = {"in_features": COLUMNS, "out_features": ROWS, "bias": False}
        packed = TorchLinear(**keys, **sizes, pack_dtype=torch.int32)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = weight
        packed.pack_block(linear, torch.stack(scales, 1), torch.stack(zeros, 1), groups)
        packed.post_init()
        stored = packed.scales
        packed.scales = stored.float()
        plain = packed.dequantize_weight().T.float()
        packed.scales = stored
        config = QuantizeConfig(**keys, format=version)
        if version == "gptq":
            convert_gptq_v2_to_v1_format_module(packed, config)
        tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        form = "symmetric" if symmetric else "asymmetric"
        name = f"{version} {bits} bits, groups of {size}, {form}{', ordered' if ordered else ''}"
        declared = config.to_dict()
        declared["meta"] = {}
        yield name, declared, tensors, plain


TOOLS: dict[str, Callable[[], Iterator[Linear]]] = {"gptqmodel": gptqmodel}


def _text(array: Any) -> dict[str, Any]:
    import torch

    names = {torch.int32: "I32", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8",
             torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64",
             torch.uint8: "U8", torch.float8_e8m0fnu: "F8_E8M0"}  # fmt: skip
    data = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": names[array.dtype],
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode("ascii"),
    }


def main() -> None:
    """Write the file."""
    linears = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for tool, make in TOOLS.items():
        if importlib.util.find_spec(tool) is None:
            continue
        linears = {name: one for name, one in linears.items() if one["tool"] != tool}
        for name, declared, tensors, plain in make():
            plain = plain.detach().float().contiguous().numpy()
            linears[name] = {
                "tool": tool,
                "declared": declared,
                "tensors": {suffix: _text(tensor) for suffix, tensor in tensors.items()},
                "sha256": hashlib.sha256(plain.tobytes()).hexdigest(),
            }
        sys.stderr.write(f"{tool}: {sum(one['tool'] == tool for one in linears.values())}\n")
    OUT.write_text(json.dumps(linears, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
