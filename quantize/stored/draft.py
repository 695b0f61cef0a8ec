"""`StoredDraft`: what a folder stores, and the draft of plain weights that it stands for.

Both are known from headers alone. It shares no code with the side that wrote the folder.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..drafts import Draft, Row, read_config, read_draft
from ..errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .declarations import DeclaredScheme, declared_scheme
from .decode import read_whole
from .linear import StoredLinear
from .parts import (
    FLOAT_DTYPES,
    ZERO_POINTS,
    quantized_looking,
    scale_suffix,
    stored_parts,
    weight_suffix,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraft:
    """A draft folder, quantized or not.

    Attributes:
        checkpoint: the folder as it is.
        scheme: what it declares; None where it declares nothing.
        modules: on-disk names of the linears that are stored quantized.
        draft: every quantized linear is one row `NAME.weight` of its unquantized shape, in the file
            of its codes; dtype and byte range of such a row mean nothing.
    """

    checkpoint: Checkpoint
    scheme: DeclaredScheme | None
    modules: frozenset[str]
    draft: Draft

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "StoredDraft":
        """Read headers and declaration.

        Raises:
            CheckpointError: the folder is not a draft, or a stored tensor is not as declared.
            VerifyError: its quantization_config is not understood.
        """
        scheme = declared_scheme(checkpoint)
        modules = quantized_looking(checkpoint.tensors.values()) if scheme else set()
        plain = _as_if_unquantized(checkpoint, scheme, modules) if scheme else checkpoint
        draft = read_draft(plain)
        return cls(checkpoint=checkpoint, scheme=scheme, modules=frozenset(modules), draft=draft)

    def is_quantized(self, row: Row) -> bool:
        """True if a row of `draft` is stored as codes."""
        return row.module in self.modules

    def parts(self, row: Row) -> dict[str, TensorInfo]:
        """The stored tensors of a quantized row by suffix ("weight", "weight_scale", ...)."""
        module = row.module
        rows, columns = row.tensor.shape
        names = stored_parts(self._scheme_of(row), rows, columns)
        return {suffix: self.checkpoint.tensors[f"{module}.{suffix}"] for suffix in names}

    def linear(self, row: Row) -> StoredLinear:
        """A quantized row, ready to decode: its scales and zero points are read and checked.

        Raises:
            CheckpointError: a scale is not a positive number, or a zero point is not the constant
                one of symmetric codes.
        """
        module, scheme = row.module, self._scheme_of(row)
        for suffix, part in self.parts(row).items():
            expected = ZERO_POINTS.get(suffix)
            if expected is not None and (read_whole(self.checkpoint, part) != expected).any():
                raise CheckpointError(
                    self.checkpoint.folder,
                    f"{part.name}: expected the zero points of symmetric codes, got others",
                    fix="quantize the draft again: asymmetric codes are not decoded",
                )
        linear = StoredLinear(self.checkpoint, scheme, module, in_features=row.tensor.shape[1])
        bad = np.argwhere(~(np.isfinite(linear.scale) & (linear.scale > 0)))
        if len(bad):
            first = tuple(bad[0])
            raise CheckpointError(
                self.checkpoint.folder,
                f"{module}.{scale_suffix(scheme)}: expected positive scales, got {len(bad)}"
                f" other(s), first {linear.scale[first]} at row {first[0]}",
                fix="run `draftquant verify`, then quantize the draft again",
            )
        return linear

    def _scheme_of(self, row: Row) -> DeclaredScheme:
        if self.scheme is None or not self.is_quantized(row):
            raise ValueError(f"{row.tensor.name} is not stored quantized")
        return self.scheme


def _as_if_unquantized(
    checkpoint: Checkpoint, scheme: DeclaredScheme, modules: set[str]
) -> Checkpoint:
    """The same headers with every quantized linear spelled as the one weight that it stands for.

    So the family's own table recognises the draft and checks names and shapes.
    """
    shapes = family_shapes(checkpoint)
    tensors = dict(checkpoint.tensors)
    for module in sorted(modules):
        name = f"{module}.weight"
        shape = shapes.get(name)
        if shape is None or len(shape) != 2:
            raise CheckpointError(
                checkpoint.folder,
                f"{module} is stored quantized, but is no linear of this draft's family",
                fix="quantize the draft again",
            )
        parts = stored_parts(scheme, *shape)
        stored = [tensors.pop(f"{module}.{suffix}", None) for suffix in parts]
        for tensor, (suffix, part) in zip(stored, parts.items(), strict=True):
            if tensor is None or tensor.dtype not in part.dtypes or tensor.shape != part.shape:
                got = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "none"
                raise CheckpointError(
                    checkpoint.folder,
                    f"{module}.{suffix}: {scheme} needs {' or '.join(part.dtypes)}"
                    f" {list(part.shape)}, got {got}",
                    fix="run `draftquant verify`, then quantize the draft again",
                )
        file = checkpoint.tensors[f"{module}.{weight_suffix(scheme)}"].file
        tensors[name] = TensorInfo(
            name=name, dtype=FLOAT_DTYPES[0], shape=shape, file=file, start=0, stop=0
        )
    return dataclasses.replace(checkpoint, tensors=tensors)


def family_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """On-disk weight name -> unquantized shape, for every module of the folder.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    family, geometry = read_config(checkpoint)
    specs = family.tensor_specs(geometry)
    shapes = {}
    for module in {name.rpartition(".")[0] for name in checkpoint.tensors}:
        spec = specs.get(family.canonical_name(f"{module}.weight"))
        if spec is not None:
            shapes[f"{module}.weight"] = tuple(dim.size for dim in spec.shape)
    return shapes


def plain_headers(checkpoint: Checkpoint, modules: Collection[str]) -> Checkpoint:
    """The same headers, everything stored under a quantized module replaced by its plain weight.

    A module that the family does not know is left out.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    kept = {n: t for n, t in checkpoint.tensors.items() if n.rpartition(".")[0] not in modules}
    floats = [t.dtype for t in kept.values() if t.dtype in FLOAT_DTYPES and len(t.shape) == 2]
    files = {name.rpartition(".")[0]: t.file for name, t in checkpoint.tensors.items()}
    for name, shape in family_shapes(checkpoint).items():
        module = name.removesuffix(".weight")
        if module in modules:
            dtype = floats[0] if floats else FLOAT_DTYPES[0]
            kept[name] = TensorInfo(
                name=name, dtype=dtype, shape=shape, file=files[module], start=0, stop=0
            )
    return dataclasses.replace(checkpoint, tensors=dict(sorted(kept.items())))
