"""`DeclaredScheme`: what a declaration says, in one form for every layout."""

import fnmatch
import re
from dataclasses import dataclass
from typing import Literal

from .reader import ObjectReader, not_understood

Layout = Literal["quark", "compressed-tensors", "modelopt", "fp8", "awq"]
WeightDtype = Literal["int4", "fp8_e4m3", "nvfp4", "mxfp4"]
Granularity = Literal["channel", "tensor", "group", "block"]
PackMethod = Literal["order", "reorder"]
PACK_METHODS: tuple[PackMethod, ...] = ("order", "reorder")
Activations = Literal[
    "none", "token-dynamic", "tensor-static", "tensor-dynamic", "group-dynamic", "nvfp4", "mxfp4"
]
SPEC_NO_MEANING = frozenset(
    {
        "enable_buffer_reuse",
        "max_input_numel",
        "observer",
        "observer_cls",
        "observer_kwargs",
        "round_method",
        "scale_type",
    }
)
"""Keys of a tensor's spec that say how values were found, never how to decode them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredScheme:
    """How every linear that is not excluded is stored: w ≈ code * scale (* that of a first stage).

    Attributes:
        granularity: one scale per output row, for the whole matrix, per `group_size` inputs of a
            row, or per square of `group_size` rows and inputs.
        group_size: None for channel and tensor.
        first_stage: what INT4 codes were taken of: values rounded so, under one scale for the
            matrix; None = the weight itself.
        pack_method: which column each nibble of an INT4 word holds; None for other dtypes.
        activations: how the input of these linears is rounded at run time: to FP8 per token, per
            tensor (stored or computed) or per 128 inputs, to NVFP4 or MXFP4.
        excludes: the patterns as written.
    """

    layout: Layout
    weight_dtype: WeightDtype
    granularity: Granularity
    pack_method: PackMethod | None
    activations: Activations
    excludes: tuple[str, ...]
    group_size: int | None = None
    first_stage: Literal["fp8_e4m3"] | None = None

    @property
    def transposed(self) -> bool:
        """True if codes and scales are stored [in, out / 8] and [groups, out]."""
        quark_groups = self.layout == "quark" and self.granularity == "group"
        return self.layout == "awq" or (quark_groups and self.weight_dtype == "int4")

    @property
    def scales_whole_matrix(self) -> bool:
        """True if one stored number scales the whole weight."""
        whole = self.granularity == "tensor" or self.weight_dtype == "nvfp4"
        return whole or self.first_stage is not None

    def is_excluded(self, module: str) -> bool:
        """True if a pattern matches the name `module`, by the rule of the layout.

        Patterns are whole names; `re:` regular expressions matched from the start (quark,
        compressed-tensors); shell wildcards (quark, modelopt); parts of the name (awq).
        """
        return any(self._matches(pattern, module) for pattern in self.excludes)

    def _matches(self, pattern: str, module: str) -> bool:
        if self.layout == "awq":
            return pattern in module
        if pattern.startswith("re:") and self.layout in ("quark", "compressed-tensors"):
            return re.match(pattern[3:], module) is not None
        if self.layout in ("compressed-tensors", "fp8"):
            return pattern == module
        return fnmatch.fnmatchcase(module, pattern)

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.group_size else ""
        packing = f" ({self.pack_method})" if self.pack_method else ""
        of = f" of {self.first_stage} per tensor" if self.first_stage else ""
        weights = f"{self.layout} {self.weight_dtype} per {self.granularity}{size}{of}{packing}"
        return f"{weights}, activations {self.activations}"


def check_patterns(keys: ObjectReader, scheme: DeclaredScheme) -> None:
    """Every `re:` pattern compiles.

    Raises:
        VerifyError: one does not.
    """
    for pattern in scheme.excludes:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as exc:
                understood = (f"a regular expression ({exc})",)
                raise not_understood(keys.where, keys.key, understood, pattern) from exc
