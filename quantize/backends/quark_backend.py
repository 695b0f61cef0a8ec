"""AMD Quark 0.13 as a backend: the toolkit itself calibrates and rounds, one linear at a time.

Rounds to the nearest codes, or by Quark's own GPTQ: absmax scales, columns in the order of their
inputs' mean squares, 128 between two matrix products.
"""

import ast
import contextlib
import fcntl
import io
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...recipes.errors import BackendError
from ...recipes.schema import BackendName, WeightFormat
from ..algorithms.algorithm import Absmax, Moments
from ..numerics.number_formats import FP8, FP8_MAX, fp4_codes
from ..numerics.quantized_weight import QuantizedWeight
from .vendor import (
    OURS,
    VendorBackend,
    finite_absmax,
    gptq_inputs,
    process_state,
    toolkit_errors,
    with_absmax,
)

# Quark needs `ninja` at every import and a C++ compiler at the first one, which builds an
# extension. It reads environment variables while it is imported, and logs to stderr. torch
# guards that build by a file, `lock`, and waits forever where a process was killed before it
# removed the file. We build in a separate folder under a lock of the kernel, which ends
# with its process: a `lock` found there belongs to nobody.

EXTENSION = "quark_hw_emulation_stable_abi"
_SOUGHT = "use_experts_implementation"


def require_build_tools() -> None:
    """Fail unless `ninja` exists, and a C++ compiler where the extension still has to be built."""
    _path_with_ninja()
    compiler = os.environ.get("CXX", "c++")
    built = extension_folder() / EXTENSION / f"{EXTENSION}.so"
    if not built.exists() and not shutil.which(compiler):
        raise BackendError(
            "backend quark",
            f"AMD Quark builds a C++ extension at its first import: no compiler {compiler!r} found",
            fix="install g++ (or set CXX), or use --backend torch (in a recipe: 'backend: torch')",
        )


def extension_folder() -> Path:
    """Where the extension is built: for this Python and torch, and for no other program."""
    # Not at the top: it imports setuptools, which no other backend needs.
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(root) / f"draftquant-python{python}-torch{torch.__version__}"


@contextlib.contextmanager
def quark_process_state() -> Iterator[None]:
    """Import Quark with the process state that it needs, restored afterwards; silent on stdout."""
    require_build_tools()
    folder = extension_folder()
    # QUARK_DISABLE_COMPILE is read at import: with torch.compile the same bits take 15 s longer.
    with process_state(
        PATH=_path_with_ninja(), QUARK_DISABLE_COMPILE="1", TORCH_EXTENSIONS_DIR=str(folder)
    ):
        # Warnings stay: they say why the extension was not built. Not with Quark's switch, since it
        # walks every logger of the process, 30 ms each time.
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.INFO))
        try:
            if "quark.torch" not in sys.modules:
                with _alone_in(folder), _parsing_what_names_experts():
                    import quark.torch  # noqa: F401
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def _parsing_what_names_experts() -> Iterator[None]:
    """Give Quark's search an empty tree for files without the decorator: saves 8 s of 12."""
    parse = ast.parse

    def parse_less(source: Any, *more: Any, **named: Any) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.endswith(".quark_experts") and _SOUGHT not in source:
            return ast.Module(body=[], type_ignores=[])
        return parse(source, *more, **named)

    ast.parse = parse_less
    try:
        yield
    finally:
        ast.parse = parse


def _path_with_ninja() -> str:
    """A PATH with `ninja` on it: Quark misses the one of a venv that is not activated."""
    path = os.environ.get("PATH", "")
    if shutil.which("ninja"):
        return path
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts):
        return os.pathsep.join((scripts, path))
    raise BackendError(
        "backend quark",
        f"AMD Quark needs 'ninja' at every import: not found on PATH, nor in {scripts}",
        fix="pip install ninja, or use --backend torch (in a recipe: 'backend: torch')",
    )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting if needed, and remove what a killed process left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        where = f"backend quark, folder {folder}"
        raise BackendError(
            where,
            f"AMD Quark's extension cannot be built there: {exc.strerror}",
            fix="set TORCH_EXTENSIONS_DIR to a folder that can be written, or use --backend torch"
            " (in a recipe: 'backend: torch')",
        ) from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (folder / EXTENSION / "lock").unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


TESTED_VERSION = "0.13"
_SCALES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_CODES = {"int4": torch.int8, "fp8_e4m3": FP8, "mxfp4": torch.uint8}
"""Quark's name of each format that it has."""
BLOCK_ELEMENTS = 1 << 24
"""Elements that Quark rounds at a time: it holds about five float32 copies of its input."""
_FIX = f"{OURS}; if Quark's extension was not built, install g++ and ninja"
_failing = partial(toolkit_errors, "AMD Quark", fix=_FIX)


class QuarkBackend(VendorBackend):
    """INT4, also in two stages, FP8 without blocks, MXFP4; nearest codes equal `TorchBackend`'s."""

    name: BackendName = "quark"
    package = "amd-quark"
    wanted = TESTED_VERSION

    @override
    def check(self, weights: WeightFormat) -> None:
        for more, what, fix in self._problems(weights):
            raise BackendError(f"backend quark{more}", what, fix=fix)
        self.versions()
        require_build_tools()

    def _problems(self, weights: WeightFormat) -> Iterator[tuple[str, str, str]]:
        if problem := weights.problem():
            yield "", problem, "correct 'weights' of the recipe"
        if weights.dtype not in _CODES or weights.granularity == "block":
            yield "", f"this backend does not compute {weights}", OURS
        if weights.scale_dtype is not None:
            what = (
                f"this backend does not compute scale_dtype {weights.scale_dtype}: Quark rounds"
                " scales to the weight's dtype first"
            )
            yield "", what, f"{OURS}, or leave scale_dtype out"
        if self._gptq and weights.first_stage is not None:
            what = (
                f"expected weights that are rounded once, got {weights}: Quark's GPTQ does not"
                " round in two stages"
            )
            yield ", rounding gptq", what, OURS

    @override
    def start(self) -> None:
        # Quark's first import builds its extension
        with _failing("backend quark"), quark_process_state():
            import quark.torch  # noqa: F401

    @override
    def quantize(
        self, weight: Tensor, weights: WeightFormat, absmax: Absmax = None, moments: Moments = None
    ) -> QuantizedWeight:
        rows = finite_absmax(self.name, weight).float()
        covered = with_absmax(self.name, weight, weights, absmax)
        self.check(weights)
        inputs = gptq_inputs(moments) if self._gptq else None
        where = f"backend quark, weight {list(weight.shape)} {weight.dtype}"
        with _failing(where), torch.no_grad(), quark_process_state():
            codes, scale, first_scale = _run_quark(covered, weights, inputs)
        largest = rows.amax(dim=0, keepdim=True) if absmax is None else absmax
        # Where a scale would be zero, Quark 0.13 stores 2^-23, draftquant 1: all codes are 0.
        if weights.number.is_fp8:
            covers = largest if weights.granularity == "tensor" else rows
            scale = scale.masked_fill(covers / FP8_MAX == 0, 1.0)
        if first_scale is not None:
            first_scale = first_scale.masked_fill(largest.reshape(()) / FP8_MAX == 0, 1.0)
        return QuantizedWeight(
            codes=codes[: len(weight)],
            scale=scale[: len(weight)],
            global_scale=first_scale,
            group_size=weights.group_size,
        )


class _OneLinear(nn.Module):
    """A model in the form that Quark's algorithms want: layers in a list, a device, a keyword."""

    device = torch.device("cpu")

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(linear)])

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        del use_cache
        y: Tensor = self.layers[0](x)
        return y


def _run_quark(
    weight: Tensor, weights: WeightFormat, inputs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scale and first-stage scale, from Quark's observer and its exporter's quantizer.

    Two stages run in float32: with a bfloat16 weight Quark rounds to bfloat16 before FP8, and so it
    does to scales of rows; with a float32 one it does neither, nor does its file-to-file path. GPTQ
    runs in float32 too, as it writes rounded values into the weight. Scales round as stored.
    """
    spec = _weight_spec(weights, _SCALES[weight.dtype])
    if weights.first_stage or inputs is not None:
        weight = weight.float()
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import GPTQConfig, QConfig, QLayerConfig

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    # The inputs are damped already.
    gptq = GPTQConfig(inside_layer_modules=["0"], model_decoder_layers="layers", damp_percent=0.0)
    algorithms = None if inputs is None else [gptq]
    config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=algorithms)
    # Progress bars go to stderr. Not earlier: Quark's loggers keep the stderr of their import.
    with contextlib.redirect_stderr(io.StringIO()):
        data = None if inputs is None else [inputs]
        model = ModelQuantizer(config).quantize_model(_OneLinear(linear), data)
        # quantize=True would write rounded values into the caller's weight if that is a view.
        frozen: Any = ModelQuantizer.freeze(model, quantize=False).layers[0][0]
        return _exported_codes(frozen, frozen.weight, weights)


def _weight_spec(weights: WeightFormat, scale_type: str) -> Any:
    from quark.torch.quantization.config import config

    of_scales = {"is_dynamic": False, "scale_type": scale_type}
    int4 = {"symmetric": True, "round_method": "half_even", **of_scales}
    fp8 = {"observer_method": "min_max", "scale_type": "float32", "is_dynamic": False}
    if weights.first_stage:
        spec = config.ProgressiveSpec(
            first_stage=config.FP8E4M3PerTensorSpec(**fp8),
            second_stage=config.Int4PerChannelSpec(ch_axis=0, **int4 | {"scale_type": "float32"}),
        )
    elif weights.number.powers_of_two:
        spec = config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False)
    elif weights.number.is_integer and weights.group_size is not None:
        spec = config.Int4PerGroupSpec(ch_axis=1, group_size=weights.group_size, **int4)
    elif weights.number.is_integer:
        spec = config.Int4PerChannelSpec(ch_axis=0, **int4)
    elif weights.granularity == "tensor":
        spec = config.FP8E4M3PerTensorSpec(**fp8)
    else:
        spec = config.FP8E4M3PerChannelSpec(ch_axis=0, scale_type="float32", is_dynamic=False)
    return spec.to_quantization_spec()


def _exported_codes(
    frozen: Any, weight: Tensor, weights: WeightFormat
) -> tuple[Tensor, Tensor, Tensor | None]:
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.utils.pack import PackMethod

    real = get_real_quantizer(
        qspec=frozen.weight_qspec,
        quantizer=frozen.weight_quantizer,
        reorder=False,
        real_quantized=True,
        device=weight.device,
        float_dtype=torch.float32,
    )
    stages = list(real) if weights.first_stage else [real]
    for stage in stages:
        # The base class packs nothing: packing is the layout's job, and Quark's is slow.
        stage.pack_method = PackMethod(None, stage.qspec.dtype.value)
    last = stages[-1]
    scale, zero_point = last.scale, getattr(last, "zero_point", None)
    codes = torch.empty(weight.shape, dtype=_CODES[weights.dtype])
    step = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        if weights.granularity != "tensor":
            last.scale = scale[rows]
            if zero_point is not None:
                last.zero_point = zero_point[rows]
        # In float32: FP8 codes of a bfloat16 weight would be rounded to bfloat16 first.
        rounded = real.to_real_quantize_params(weight[rows].float())
        # Unpacked, Quark's FP4 codes are the values that they stand for.
        codes[rows] = fp4_codes(rounded) if weights.number.powers_of_two else rounded
    scales = 1 if weights.granularity == "tensor" else len(weight)
    first_scale = stages[0].scale.detach().clone() if weights.first_stage else None
    return codes, scale.detach().reshape(scales, -1).clone(), first_scale
