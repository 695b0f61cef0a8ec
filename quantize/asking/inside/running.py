"""Every quantized linear of a loaded draft, run through the engine's own module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_OF_EXPERTS = ("w13_", "w2_")
"""How both engines begin the names of parameters of all experts together."""


def run_linears(
    model: nn.Module,
    filled: "Mapping[str, list[str]]",
    quantized: "Mapping[str, str]",
    inputs: "Mapping[int, Tensor]",
    widths: "Mapping[str, int]",
    needs_gpu: "Callable[[Exception], bool]",
) -> "tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, str]]":
    """Give each module that a quantized linear of the folder fills its inputs, without a bias.

    Args:
        filled: parameter -> tensors, in order. quantized: tensor of codes -> linear of the folder.
        inputs: width -> [rows, width] BF16. widths: of each linear of the folder.

    Returns:
        Module, parts, kernel and dtype of each; its outputs; and why modules were not run.
    """
    parts: dict[str, list[str]] = {}
    experts = set()
    for parameter, tensors in filled.items():
        module, _, leaf = parameter.rpartition(".")
        own = [quantized[name] for name in tensors if name in quantized]
        if own:
            parts.setdefault(module, []).extend(own)
        if leaf.startswith(_OF_EXPERTS):
            experts.add(module)
    modules, dtype = dict(model.named_modules()), _served_dtype(model)
    lines, outputs, not_run = [], {}, {}
    for name, of in parts.items():
        module, of = modules[name], list(dict.fromkeys(of))
        method: Any = getattr(module, "quant_method", None)
        if name in experts or not hasattr(method, "apply"):
            not_run[name] = f"{type(module).__name__} is no linear"
            continue
        x = inputs[widths[of[0]]].to(_device(module), dtype)
        try:
            with torch.inference_mode():
                y = method.apply(module, x)
        except Exception as exc:
            if not needs_gpu(exc):
                raise
            not_run[name] = str(exc)
            continue
        outputs[name] = y.detach().float().cpu().contiguous()
        scheme = getattr(module, "scheme", None)
        kinds = [type(each).__name__ for each in (method, scheme) if each is not None]
        lines.append(
            {"module": name, "parts": of, "kernel": " / ".join(kinds), "dtype": str(dtype)}
        )
    return lines, outputs, not_run


def _served_dtype(model: nn.Module) -> torch.dtype:
    """Of activations: that of the norms."""
    norms = (p.dtype for name, p in model.named_parameters() if "norm" in name)
    return next(norms, torch.get_default_dtype())


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
