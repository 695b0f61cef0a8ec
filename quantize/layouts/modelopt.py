"""NVIDIA ModelOpt's layout (0.47): FP8 with one scale per matrix, or per channel and token."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..safetensors_header import TensorInfo
from .base import StoredTensor, is_int4, refuse, stored_scalars

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics import QuantizedWeight

PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose JSON this is
SIDE_FILE = "hf_quant_config.json"


class ModelOptLayout:
    """`weight` FP8, `weight_scale` [] or [out], `input_scale` [] where activations are static."""

    name: LayoutName = "modelopt"

    def check(self, recipe: Recipe) -> None:
        """See `Layout.check`: ModelOpt 0.47 has names for exactly two FP8 schemes."""
        if is_int4(recipe.weights):
            raise refuse(
                self.name,
                "ModelOpt has no INT4 per-channel scheme (its export raises TypeError)",
                able=("quark", "compressed-tensors"),
            )
        static = recipe.needs_input_scales
        if recipe.activations is None or static != (recipe.weights.granularity == "tensor"):
            raise refuse(
                self.name,
                "ModelOpt pairs per-tensor weights with static activations, and per-channel"
                " weights with per-token ones; nothing else has a name",
                able=("quark", "compressed-tensors"),
            )

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """See `Layout.stored`."""
        module = weight.name.removesuffix(".weight")
        channel = recipe.weights.granularity == "channel"
        scale_shape = weight.shape[:1] if channel else ()
        tensors = [
            StoredTensor(name=weight.name, dtype="F8_E4M3", shape=weight.shape),
            StoredTensor(name=f"{module}.weight_scale", dtype="F32", shape=scale_shape),
        ]
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=()))
        return tuple(tensors)

    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_rows`."""
        rows = {f"{module}.weight": block.codes}
        if weights.granularity == "channel":
            rows[f"{module}.weight_scale"] = block.scale[:, 0]
        return rows

    def encode_whole(
        self, weight: TensorInfo, scale: "Tensor", recipe: Recipe, input_scale: float | None
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_whole`."""
        return stored_scalars(weight, scale, recipe, input_scale, ())

    def declare(self, recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
        """See `Layout.declare`: the flat form, which every engine reads.

        Engines match these as wildcards against runtime names, so the last part of a name between
        two stars is enough; ModelOpt's own `model*` would match every layer of the draft.
        """
        excludes = [f"*{leaf}*" for leaf in sorted({name.rpartition(".")[2] for name in kept})]
        if recipe.weights.granularity == "channel":
            return {
                "exclude_modules": excludes,
                "ignore": excludes,
                "producer": PRODUCER,
                "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
                "quant_method": "modelopt",
            }
        args = {"dynamic": False, "num_bits": 8, "type": "float"}
        group = {"input_activations": args, "targets": ["Linear"], "weights": args}
        return {
            "config_groups": {"group_0": group},
            "exclude_modules": excludes,
            "ignore": excludes,
            "producer": PRODUCER,
            "quant_algo": "FP8",
            "quant_method": "modelopt",
        }

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """ModelOpt's own nested form beside config.json: TensorRT-LLM reads it."""
        quantization = {
            "quant_algo": declared["quant_algo"],
            "kv_cache_quant_algo": None,
            "exclude_modules": declared["exclude_modules"],
        }
        return {SIDE_FILE: {"producer": PRODUCER, "quantization": quantization}}
