"""NVIDIA ModelOpt 0.47 as a backend: its own calibration and export, FP8 and NVFP4, per linear.

Its export packing is private API, hence the pinned version and a contract test.
"""

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...recipes.errors import BackendError
from ...recipes.schema import Algorithm, BackendName, WeightFormat
from ..algorithms.algorithm import Absmax, Moments
from ..numerics.quantized_weight import QuantizedWeight, fp4_codes_of_bytes
from .vendor import (
    OURS,
    VendorBackend,
    finite_absmax,
    gptq_inputs,
    process_state,
    toolkit_errors,
    with_absmax,
)

TESTED_SERIES = "0.47.*"
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
"""Below it, ModelOpt 0.47 gives NaN codes, or a scale that is far too large."""
_CALIBRATIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("absmax", "nearest"): {"method": "max"},
    # The factors that a recipe calls mse; ModelOpt's own go up to 4: the largest codes stay unused.
    ("mse", "nearest"): {
        "method": "mse",
        "start_multiplier": 0.25,
        "stop_multiplier": 1.0,
        "step_size": 1 / 32,
    },
    # The inputs are damped already, but ModelOpt wants some damping.
    ("absmax", "gptq"): {"method": "gptq", "perc_damp": 1e-12},
}
"""ModelOpt's algorithm by the recipe's `scale` and `rounding`."""
_failing = partial(toolkit_errors, "NVIDIA ModelOpt", fix=OURS)


class ModelOptBackend(VendorBackend):
    """FP8 and NVFP4; nearest codes are `TorchBackend`'s. It cannot export INT4 per channel."""

    name: BackendName = "modelopt"
    package = "nvidia-modelopt"
    wanted = TESTED_SERIES

    @override
    def check(self, weights: WeightFormat) -> None:
        if weights.dtype not in ("fp8_e4m3", "nvfp4") or weights.granularity == "block":
            where = "backend modelopt"
            raise BackendError(
                where,
                f"expected fp8_e4m3 per channel or tensor, or nvfp4, got {weights}, which this"
                " backend does not compute",
                fix="use --backend torch, or --backend quark for int4 and mxfp4 (in a recipe:"
                " 'backend: torch')",
            )
        problem = _problem(self._algorithm, weights)
        if problem is not None:
            where = f"backend modelopt, {self._algorithm}"
            raise BackendError(
                where,
                f"{problem}, got {weights}",
                fix=f"{OURS}, or 'scale: absmax' with 'rounding: nearest'",
            )
        self.versions()

    @override
    def start(self) -> None:
        with _failing("backend modelopt"), process_state():
            import modelopt.torch.export.unified_export_hf
            import modelopt.torch.quantization  # noqa: F401

    @override
    def quantize(
        self, weight: Tensor, weights: WeightFormat, absmax: Absmax = None, moments: Moments = None
    ) -> QuantizedWeight:
        rows = finite_absmax(self.name, weight).float()
        covered = with_absmax(self.name, weight, weights, absmax)
        largest = rows.amax(dim=0, keepdim=True) if absmax is None else absmax
        self.check(weights)
        whole = weights.number.global_scale or weights.granularity == "tensor"
        where = f"backend modelopt, weight {list(weight.shape)} {weight.dtype}"
        if (least := float(largest if whole else rows.amin())) < SMALLEST_NORMAL:
            raise BackendError(
                where,
                "expected a magnitude of at least 2^-126 in the matrix, or in each row, got"
                f" {least:g}: ModelOpt has no scale for less",
                fix=OURS,
            )
        inputs = gptq_inputs(moments) if self._gptq else None
        with _failing(where), torch.no_grad(), process_state():
            packed = _run_modelopt(covered, weights, self._algorithm, inputs)
        codes, scale = packed.weight.data[: len(weight)], packed.weight_scale
        if weights.number.global_scale:
            return QuantizedWeight(
                codes=fp4_codes_of_bytes(codes),
                scale=scale[: len(weight)],
                global_scale=packed.weight_scale_2,
                group_size=weights.group_size,
            )
        return QuantizedWeight(codes=codes, scale=scale.reshape(-1, 1))


def _problem(algorithm: Algorithm, weights: WeightFormat) -> str | None:
    if (algorithm.scale, algorithm.rounding) == ("absmax", "nearest"):
        return None
    if weights.number.global_scale:
        return (
            "expected fp8_e4m3: ModelOpt's search and GPTQ round NVFP4 in Triton kernels, on CUDA"
            " alone"
        )
    if algorithm.scale == "mse" and weights.granularity == "tensor":
        return (
            "expected scales of channels: ModelOpt searches one for each weight alone, and linears"
            " that engines fuse share that of the matrix"
        )
    return None


def _run_modelopt(
    weight: Tensor, weights: WeightFormat, algorithm: Algorithm, inputs: Tensor | None
) -> Any:
    """One linear as ModelOpt's calibration and packing for export leave it."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    # In float32: ModelOpt floors an absmax at the smallest normal number of its dtype, which is
    # 6e-5 in float16, and its export divides in the dtype of the weight.
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": _attributes(weights, len(weight))},
        ],
        "algorithm": dict(_CALIBRATIONS[algorithm.scale, algorithm.rounding]),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):  # tqdm
        reading = None if inputs is None else lambda model: model(inputs)
        model = mtq.quantize(nn.Sequential(linear), config, reading)
    if "not positive definite" in printed.getvalue():
        raise RuntimeError("GPTQ found no Cholesky factor and went on with the nearest codes")
    # The default, the checkpoint's dtype, rounds twice: in bfloat16 first, then to FP8.
    _process_quantized_modules(model, torch.float32)
    return model[0]


def _attributes(weights: WeightFormat, rows: int) -> dict[str, Any]:
    if weights.number.global_scale:
        # "dynamic" means that the group scales follow from the weight when it is exported.
        groups = {-1: weights.group_size, "type": "dynamic", "scale_bits": (4, 3)}
        return {"num_bits": (2, 1), "axis": None, "block_sizes": groups}
    # With a single row both granularities are one scale, and the per-channel export fails.
    axis = 0 if weights.granularity == "channel" and rows > 1 else None
    return {"num_bits": (4, 3), "axis": axis}
