"""Quark's INT4 per channel in an engine's own FP8 scheme: unpacked once, after loading.

The codes -8..7 are exact in FP8 E4M3, so weights, scales and sums equal those of W4A8; the memory
is that of FP8.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_Engine: Any = object
_NIBBLES = 8  # per int32 word
_REORDERED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble that holds column i of a word where `pack_method` is "reorder"."""


def is_int4_per_channel(config: Mapping[str, Any]) -> bool:
    """Whether Quark's config of a layer is INT4 weights per channel under FP8 activations."""
    weight, inputs = config.get("weight"), config.get("input_tensors")
    return (
        isinstance(weight, Mapping)
        and isinstance(inputs, Mapping)
        and weight.get("dtype") == "int4"
        and weight.get("qscheme") == "per_channel"
        and weight.get("ch_axis") == 0
        and weight.get("symmetric") is True
        and not weight.get("is_dynamic")
        and inputs.get("dtype") == "fp8_e4m3"
    )


def as_fp8(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same layer with FP8 weights; any other config unchanged."""
    if not is_int4_per_channel(config):
        return config
    return {**config, "weight": {**config["weight"], "dtype": "fp8_e4m3"}}


def fp8_codes(words: Tensor, *, reordered: bool) -> Tensor:
    """[rows, in_features] float8_e4m3fn, -8..7, from [rows, in_features / 8] int32 words."""
    order = _REORDERED if reordered else tuple(range(_NIBBLES))
    shifts = torch.tensor([28 - 4 * nibble for nibble in order], device=words.device)
    # Shift to the top and back: the shift to the right extends the sign.
    codes = (words[..., None] << shifts.to(words.dtype)) >> 28
    return codes.flatten(-2).to(torch.float32).to(torch.float8_e4m3fn)


class UnpackedInt4:
    """The scheme of one layer: loads INT4 words, and serves with the engine's own for FP8."""

    def __init__(self, fp8: Any, *, reordered: bool, parameters: Any) -> None:
        self.fp8 = fp8
        self.reordered = reordered
        self.parameters = parameters

    def create_weights(
        self,
        layer: Any,
        output_partition_sizes: Sequence[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **options: Any,
    ) -> None:
        """The parameters of FP8, with words instead of the weight, and Quark's zero points."""
        uneven = [n for n in (*output_partition_sizes, input_size_per_partition) if n % _NIBBLES]
        if uneven:
            raise ValueError(
                f"draftquant: Quark packs {_NIBBLES} INT4 codes into a word, this shard has"
                f" {uneven[0]} rows or columns; fix: fewer tensor-parallel shards"
            )
        self.fp8.create_weights(
            layer=layer,
            output_partition_sizes=output_partition_sizes,
            input_size_per_partition=input_size_per_partition,
            params_dtype=params_dtype,
            weight_loader=weight_loader,
            **options,
        )
        rows, columns = layer.weight.shape
        words = {"packed_factor": _NIBBLES, "weight_loader": weight_loader, "output_dim": 0}
        layer.weight = self.parameters.PackedvLLMParameter(
            data=torch.empty(rows, columns // _NIBBLES, dtype=torch.int32),
            input_dim=1,
            packed_dim=1,
            **words,
        )
        layer.weight_zero_point = self.parameters.PackedColumnParameter(
            data=torch.zeros(rows // _NIBBLES, dtype=torch.int32), packed_dim=0, **words
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack, refusing zero points that are not 0, and continue as with FP8."""
        if layer.weight_zero_point.data.any():
            raise ValueError(
                "draftquant: expected symmetric INT4, got a zero point that is not 0; fix: quantize"
                " with symmetric: true"
            )
        del layer.weight_zero_point
        codes = fp8_codes(layer.weight.data, reordered=self.reordered)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        self.fp8.process_weights_after_loading(layer)

    def apply_weights(self, layer: Any, *inputs: Any, **options: Any) -> Any:
        """The engine's FP8 product."""
        return self.fp8.apply_weights(layer, *inputs, **options)


class Int4Quark(_Engine):
    """Before an engine's `QuarkConfig`: INT4 per channel is treated as FP8, and unpacked to it."""

    linear_method: type
    parameters: Any

    def _get_scheme_from_config(self, config: dict[str, Any], **options: Any) -> Any:
        return super()._get_scheme_from_config(as_fp8(config), **options)

    def _get_scheme_cls_from_config(self, config: dict[str, Any]) -> Any:  # vLLM from 0.30
        return super()._get_scheme_cls_from_config(as_fp8(config))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """See the engine's `QuantizationConfig`."""
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, self.linear_method) and is_int4_per_channel(
            self._find_matched_config(prefix, layer)
        ):
            layer.scheme = UnpackedInt4(
                layer.scheme,
                reordered=self.pack_method == "reorder",
                parameters=self.parameters,
            )
        return method
