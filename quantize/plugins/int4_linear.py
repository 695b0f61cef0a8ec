"""Quark's INT4 per channel in an engine's own FP8 scheme: unpacked once, after loading.

The codes -8..7 are exact in FP8 E4M3, so weights, scales and sums equal those of W4A8; the memory
is that of FP8.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


def unpack_at_load(config: Any, layer: Any, prefix: str, parameters: Any) -> None:
    """Load INT4 words into a linear, only if its scheme is the engine's for FP8."""
    if is_int4_per_channel(config._find_matched_config(prefix, layer)):
        layer.scheme = UnpackedInt4(
            layer.scheme,
            reordered=config.pack_method == "reorder",
            packed=parameters.PackedvLLMParameter,
            packed_rows=parameters.PackedColumnParameter,
        )


def fp8_codes(words: Tensor, *, reordered: bool) -> Tensor:
    """[rows, in_features] float8_e4m3fn, -8..7, from [rows, in_features / 8] int32 words.

    Args:
        reordered: nibble i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its word, else column i.
    """
    order = _REORDERED if reordered else tuple(range(_NIBBLES))
    shifts = torch.tensor([28 - 4 * nibble for nibble in order], device=words.device)
    # Shift to the top and back: the shift to the right extends the sign.
    codes = (words[..., None] << shifts.to(words.dtype)) >> 28
    return codes.flatten(-2).to(torch.float32).to(torch.float8_e4m3fn)


class UnpackedInt4:
    """A scheme of an engine for one layer: loads INT4 words, serves with the engine's FP8 scheme.

    Attributes:
        packed: the engine's parameter of packed words [rows, columns / 8].
        packed_rows: its parameter of words that pack rows, [rows / 8].
    """

    def __init__(
        self,
        fp8: Any,
        *,
        reordered: bool,
        packed: Callable[..., nn.Parameter],
        packed_rows: Callable[..., nn.Parameter],
    ) -> None:
        self.fp8 = fp8
        self.reordered = reordered
        self.packed = packed
        self.packed_rows = packed_rows

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
        layer.weight = self.packed(
            data=torch.empty(rows, columns // _NIBBLES, dtype=torch.int32),
            input_dim=1,
            packed_dim=1,
            **words,
        )
        layer.weight_zero_point = self.packed_rows(
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

    def apply_weights(self, layer: Any, *inputs: Any, **options: Any) -> Tensor:
        """The engine's FP8 product."""
        output: Tensor = self.fp8.apply_weights(layer, *inputs, **options)
        return output
