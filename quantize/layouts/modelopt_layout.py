"""NVIDIA ModelOpt's layout (0.47): FP8 per matrix, or per channel and token; NVFP4."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.formats import NUMBER_FORMATS
from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .layout import (
    Columns,
    Heads,
    Layout,
    OwnFormat,
    check_divides,
    codes_tensor,
    last_parts,
    scalar,
    scale_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose JSON this is
SIDE_FILE = "hf_quant_config.json"


class ModelOptLayout(Layout):
    """`weight` FP8, `weight_scale` [] or [out]; NVFP4: packed, with `weight_scale_2` [].

    `input_scale` [] where one is stored.
    """

    name: LayoutName = "modelopt"
    # vLLM 0.33 has `model.layers.61.mlp.down_proj`, SGLang 0.5.23 `model.down_proj`, or no `model`.
    mix_problem: str | None = (
        "ModelOpt's layout declares several formats by whole names of linears"
        " (MIXED_PRECISION), but engines have names of their own for a draft's"
        " linears"
    )
    heads: Heads = "as linears"
    cache_problem = None

    @override
    def problem(self, recipe: Recipe) -> str | None:
        if _algorithm(recipe) is None:
            return "ModelOpt's layout holds FP8 and NVFP4 only, each with inputs of the same format"
        return None

    @override
    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        module, weights = weight.name.removesuffix(".weight"), recipe.weights
        rows, columns = weight.shape
        shape: tuple[int, ...] = (rows,) if weights.granularity == "channel" else ()
        if weights.group_size is not None:
            check_divides(self.name, weight, 1, weights.group_size)
            shape = (rows, columns // weights.group_size)
        scale = StoredTensor(
            name=f"{module}.weight_scale", dtype=scale_dtype(weight, weights), shape=shape
        )
        tensors = [codes_tensor(weight.name, weight, weights), scale]
        if weights.number.global_scale:
            tensors.append(StoredTensor(name=f"{module}.weight_scale_2", dtype="F32", shape=()))
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=()))
        return tuple(tensors)

    @override
    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        from ..numerics.quantized_weight import packed

        codes = packed(weights.dtype, block.codes, interleaved=False, offset=0)
        rows: dict[str, Tensor | Columns] = {f"{module}.weight": codes}
        if weights.granularity == "group":
            rows[f"{module}.weight_scale"] = block.scale
        elif weights.granularity == "channel":
            rows[f"{module}.weight_scale"] = block.scale[:, 0]
        return rows

    @override
    def encode_whole(
        self,
        weight: TensorInfo,
        block: "QuantizedWeight",
        recipe: Recipe,
        input_scale: float | None,
    ) -> "dict[str, Tensor]":
        module = weight.name.removesuffix(".weight")
        whole = super().encode_whole(weight, block, recipe, input_scale)
        if block.global_scale is not None:
            whole[f"{module}.weight_scale_2"] = scalar(block.global_scale, ())
        return whole

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines match these as wildcards against runtime names, so the last part of a name between
        # two stars is enough; ModelOpt's own `model*` would match every layer of the draft
        return [f"*{leaf}*" for leaf in last_parts(kept)]

    @override
    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        declared = _flat_form(_algorithm(recipe) or "", self.excludes(kept))
        if recipe.kv_cache is not None:
            number = NUMBER_FORMATS[recipe.kv_cache.dtype]
            args = {"dynamic": False, "num_bits": number.bits, "type": number.kind}
            declared["kv_cache_scheme"] = args
        return declared

    @override
    def cache_scale_names(self, attention: str) -> tuple[str, str]:
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"

    @override
    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        # ModelOpt's own nested form beside config.json: TensorRT-LLM reads it.
        quantization = {
            "quant_algo": declared["quant_algo"],
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in declared else None,
            "exclude_modules": declared["exclude_modules"],
        }
        if "group_size" in declared:
            quantization["group_size"] = declared["group_size"]
        return {SIDE_FILE: {"producer": PRODUCER, "quantization": quantization}}


def _flat_form(algorithm: str, excludes: list[str]) -> dict[str, Any]:
    """The flat `quantization_config` of an algorithm, which every engine reads."""
    declared: dict[str, Any] = {
        "exclude_modules": excludes,
        "ignore": excludes,
        "producer": PRODUCER,
        "quant_algo": algorithm,
        "quant_method": "modelopt",
    }
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return declared
    (nvfp4,) = NUMBER_FORMATS["nvfp4"].sizes["group"]
    group_size = nvfp4 if algorithm.endswith("NVFP4") else None
    args: dict[str, Any] = {"dynamic": False, "num_bits": 4 if group_size else 8, "type": "float"}
    if group_size:
        args["group_size"] = declared["group_size"] = group_size
    group: dict[str, Any] = {"targets": ["Linear"], "weights": args}
    if not algorithm.startswith("W4A16"):
        group["input_activations"] = args
    return {"config_groups": {"group_0": group}, **declared}


def _algorithm(recipe: Recipe) -> str | None:
    """ModelOpt's name for the pair of formats, None where it has none."""
    weights, activations = recipe.weights, recipe.activations
    pair = (weights.dtype, weights.granularity, str(activations) if activations else None)
    return {
        ("fp8_e4m3", "tensor", "fp8_e4m3 per tensor, static"): "FP8",
        ("fp8_e4m3", "channel", "fp8_e4m3 per token, dynamic"): "FP8_PER_CHANNEL_PER_TOKEN",
        ("nvfp4", "group", "nvfp4 per group, dynamic under one static scale"): "NVFP4",
        ("nvfp4", "group", None): "W4A16_NVFP4",
    }.get(pair)
