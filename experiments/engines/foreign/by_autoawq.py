"""AutoAWQ's own rounding, packing and config, on the linears of a draft's layers.

Its search for scales wants models that transformers knows, so the weights are rounded as they are:
the same files, but for the values of scales.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from awq.models._config import AwqConfig
from awq.modules.linear import WQLinear_GEMM, WQLinear_GEMV
from awq.quantize.quantizer import AwqQuantizer
from maker import main
from torch import nn
from tree import module_tree, write_folder

SCHEMES = {
    "gemm-128": (128, "GEMM", True),
    "gemm-64": (64, "GEMM", True),
    "gemm-32": (32, "GEMM", True),
    "gemm-128-symmetric": (128, "GEMM", False),
    "gemv-128": (128, "GEMV", True),
}
LEFT = ((), ("kv_b_proj",), ("self_attn",))
"""Linears of the layers that stay as they are, besides fc and the head."""


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    size, version, zero_point = SCHEMES[scheme]
    left = LEFT[variant]
    rounding = SimpleNamespace(group_size=size, zero_point=zero_point, w_bit=4)
    model = module_tree(source).half()
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in ("fc", "lm_head")
    ]
    packed = {"GEMM": WQLinear_GEMM, "GEMV": WQLinear_GEMV}[version]
    for name, linear in linears:
        if any(part in name for part in left):
            continue
        with torch.no_grad():
            weight, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(rounding, linear.weight)
            linear.weight.data = weight
            if zeros is None:
                zeros = torch.full_like(scales, 8)
            if version == "GEMM":
                scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
            stored = packed.from_linear(linear, 4, size, False, scales, zeros)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, stored)
    config = AwqConfig(
        quant_method="awq",
        zero_point=zero_point,
        q_group_size=size,
        version=version,
        modules_to_not_convert=list(left) or None,
    )
    write_folder(out, source, model.state_dict(), config.to_transformers_dict())


if __name__ == "__main__":
    main("autoawq", [*SCHEMES], make, every=2)
