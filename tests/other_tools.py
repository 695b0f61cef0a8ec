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

    cases = (
        (4, 32, True, False, "gptq"), (4, 32, False, True, "gptq"),
        (4, -1, False, False, "gptq_v2"), (2, 32, False, False, "gptq_v2"),
        (3, 32, False, True, "gptq"), (3, 64, True, False, "gptq_v2"),
        (8, 16, False, False, "gptq"), (8, -1, True, True, "gptq"),
    )  # fmt: skip
    for number, (bits, size, symmetric, ordered, version) in enumerate(cases):
        weight = weights(number)
        of_group = COLUMNS if size == -1 else size
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(COLUMNS, generator=generator) if ordered else torch.arange(COLUMNS)
        groups = torch.empty(COLUMNS, dtype=torch.int32)
        groups[order] = (torch.arange(COLUMNS) // of_group).int()
        together = weight[:, groups.argsort(stable=True)]
        scales, zeros = _of_neighbours(together, bits, size, symmetric=symmetric)
        keys = {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": ordered}
        sizes = {"in_features": COLUMNS, "out_features": ROWS, "bias": False}
        packed = TorchLinear(**keys, **sizes, pack_dtype=torch.int32)
        packed.pack_block(_linear(weight), scales, zeros, groups)
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


def auto_round() -> Iterator[Linear]:
    """AutoRound 0.15.1: its packings as GPTQ, multiplied by the identity; as AWQ, by AutoAWQ."""
    import torch
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    cases = (
        ("auto_round:auto_gptq", 4, 32, True), ("auto_round:auto_gptq", 4, 32, False),
        ("auto_round", 3, 64, False), ("auto_round", 8, -1, False),
        ("auto_round:auto_awq", 4, 32, False), ("auto_round:auto_awq", 4, 64, True),
    )  # fmt: skip
    for number, (packing, bits, size, symmetric) in enumerate(cases):
        weight = weights(20 + number)
        if packing == "auto_round:auto_awq":
            tensors, plain = _awq(WQLinear_GEMM, weight, bits, size, symmetric=symmetric)
        else:
            scale, zero = _of_neighbours(weight, bits, size, symmetric=symmetric)
            kind = qlinear_torch_zp if "gptq" in packing else qlinear_torch
            packed = kind.QuantLinear(bits, size, COLUMNS, ROWS, bias=False)
            packed.device = "cpu"
            packed.pack(_linear(weight), scale, zero, None, device="cpu")
            tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
            packed.scales = packed.scales.float()
            plain = packed(torch.eye(COLUMNS)).T
        declared = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
        declared |= {"bits": bits, "group_size": size, "sym": symmetric}
        declared |= {"autoround_version": "0.15.1", "block_name_to_quantize": "model.layers"}
        form = "symmetric" if symmetric else "asymmetric"
        yield f"{packing} {bits} bits, groups of {size}, {form}", declared, tensors, plain


def awq() -> Iterator[Linear]:
    """AutoAWQ 0.2.9: `WQLinear_GEMM.from_linear` and `dequantize_gemm`; spelled in three ways."""
    from awq.modules.linear.gemm import WQLinear_GEMM

    plain_keys = {"quant_method": "awq", "bits": 4, "group_size": 32}
    spelled = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}
    for number, keys in enumerate(
        (plain_keys, {**plain_keys, "quant_method": "awq_marlin"}, spelled)
    ):
        tensors, plain = _awq(WQLinear_GEMM, weights(40 + number), 4, 32, symmetric=False)
        declared = {**keys, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        yield f"AutoAWQ, declared as {', '.join(map(str, keys))} {number}", declared, tensors, plain


def _linear(weight: Any) -> Any:
    import torch

    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight
    return linear


def _awq(kind: Any, weight: Any, bits: int, size: int, *, symmetric: bool) -> tuple[Any, Any]:
    """What a tool's `WQLinear_GEMM` stores, and what AutoAWQ makes of it."""
    from awq.utils.packing_utils import dequantize_gemm

    scale, zero = (
        x.T.contiguous() for x in _of_neighbours(weight, bits, size, symmetric=symmetric)
    )
    packed = kind.from_linear(_linear(weight), bits, size, scales=scale, zeros=zero)
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
    plain = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), bits, size)
    return tensors, plain.T


def _of_neighbours(weight: Any, bits: int, size: int, *, symmetric: bool) -> tuple[Any, Any]:
    """Scales and zero points [rows, groups] of neighbouring inputs; no zero point is 0."""
    import torch

    top = 2**bits - 1
    parts = weight.reshape(ROWS, -1, COLUMNS if size == -1 else size)
    low, high = parts.amin(2).clamp(max=-0.1), parts.amax(2).clamp(min=0.1)
    largest = torch.maximum(-low, high)
    scale = (2 * largest / top if symmetric else (high - low) / top).half().float()
    middle = torch.full_like(scale, (top + 1) / 2)
    return scale, middle if symmetric else torch.round(-low / scale).clamp(1, top)


TOOLS: dict[str, Callable[[], Iterator[Linear]]] = {
    "gptqmodel": gptqmodel,
    "auto_round": auto_round,
    "awq": awq,
}


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
