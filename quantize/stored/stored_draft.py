"""`StoredDraft`: what a folder stores, and the draft of plain weights that it stands for.

Headers are enough for both. Scales of a KV cache are read in every engine's and tool's spelling.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recipes.errors import CheckpointError, LayoutError
from ...recipes.formats import NUMBER_FORMATS, KvCacheDtype
from ...recipes.schema import WeightFormat
from ..drafts import Draft, Family, Row, read_config, read_draft
from ..drafts.draft_cache import UNIT, CacheScales, cached_layers
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import floats, read_whole
from .layouts.scheme import FLOAT_DTYPES, DeclaredScheme, is_of_recipes
from .linear import StoredLinear
from .stored_declaration import declared_scheme, quantized_looking, stored_parts

_SPELLED = re.compile(
    r"(?P<attention>.*\bself_attn)\."
    r"(?:(?:(?:attn|attn_mqa|mla_attn\.mla_attn|[kv]_proj)\.)?(?P<of>k|v|kv)_scale"
    r"|(?P<out>[kv])_proj\.output_scale)$"
)
_LEAST = float(np.finfo(np.float32).tiny)
"""The smallest normal number: engines divide by a scale in float32, in kernels that take smaller
ones for 0."""
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


class CacheTensor(NamedTuple):
    """A stored scale: its layer, and whether it is for keys, values, or both."""

    layer: int
    of: str
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKvCache:
    """The KV cache as declared; scales of a layer that stores none are 1, as in engines."""

    dtype: KvCacheDtype
    scales: Mapping[int, CacheScales]


def cache_tensors(checkpoint: Checkpoint, family: Family) -> Iterator[CacheTensor]:
    """The stored scales of layers of this family, by name; names of other modules do not count."""
    for name, tensor in checkpoint.tensors.items():
        match = _SPELLED.fullmatch(name)
        if match is None:
            continue
        layer = _LAYER.match(family.canonical_name(f"{match['attention']}.k_proj.weight"))
        if layer is not None:
            yield CacheTensor(int(layer[1]), match["of"] or match["out"], tensor)


def cache_problems(
    checkpoint: Checkpoint, draft: Draft, scheme: DeclaredScheme | None
) -> Iterator[tuple[str, str, str]]:
    """Place, expected value and found value for each stored scale that no engine can use."""
    per_head = scheme is not None and scheme.cache_per_head
    seen: dict[tuple[int, str], str] = {}
    heads = getattr(draft.geometry.attention, "num_key_value_heads", 1)  # MLA: one entry
    for layer, of, tensor in cache_tensors(checkpoint, draft.family):
        for part in of:
            other = seen.setdefault((layer, part), tensor.name)
            if other != tensor.name:
                yield tensor.name, f"one {part}_scale of layer {layer}", f"{other} too"
        if tensor.dtype not in FLOAT_DTYPES:
            yield tensor.name, " or ".join(FLOAT_DTYPES), tensor.dtype
        elif tensor.numel not in (1, heads):
            yield tensor.name, f"one scale, or {heads}: one per key-value head", f"{tensor.numel}"
        elif tensor.numel > 1 and not per_head:
            yield tensor.name, "one scale, as declared (no strategy attn_head)", f"{tensor.numel}"
        else:
            values = _values(checkpoint, tensor)
            if small := [value for value in values if 0 < value < _LEAST]:
                least = f"a scale of at least {_LEAST:.3g}: GPUs divide by smaller ones as by 0"
                yield tensor.name, least, f"{small[0]:.3g}"
            elif bad := [value for value in values if not (np.isfinite(value) and value > 0)]:
                yield tensor.name, "a positive, finite scale", f"{bad[0]:g}"


def cache_scales(
    checkpoint: Checkpoint, draft: Draft, scheme: DeclaredScheme | None
) -> dict[int, CacheScales]:
    """The scales that a folder stores, by layer, declared or not; CheckpointError for bad ones."""
    for where, expected, got in cache_problems(checkpoint, draft, scheme):
        at = f"{checkpoint.folder}: {where}"
        raise CheckpointError(
            at,
            f"a scale of the KV cache: expected {expected}, got {got}",
            fix="run 'draftquant verify', then quantize the draft again",
        )
    by_layer: dict[int, dict[str, tuple[float, ...]]] = {}
    for layer, of, tensor in cache_tensors(checkpoint, draft.family):
        by_layer.setdefault(layer, {}).update(dict.fromkeys(of, _values(checkpoint, tensor)))
    return {
        layer: CacheScales(k=each.get("k", UNIT.k), v=each.get("v", UNIT.v))
        for layer, each in sorted(by_layer.items())
    }


def _values(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[float, ...]:
    return tuple(map(float, floats(read_whole(checkpoint, tensor), tensor.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraft:
    """A draft folder, quantized or not.

    Attributes:
        modules: on-disk names of the linears that are stored quantized.
        draft: every quantized linear is one row `NAME.weight` of its unquantized shape, in the file
            of its codes; dtype and byte range of that row mean nothing.
    """

    checkpoint: Checkpoint
    scheme: DeclaredScheme | None
    modules: frozenset[str]
    draft: Draft

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "StoredDraft":
        """Read headers and declaration; CheckpointError where they do not make a draft."""
        scheme = declared_scheme(checkpoint)
        if scheme is None:
            return cls._of(checkpoint, None, frozenset(), checkpoint.tensors)
        modules = frozenset(quantized_looking(checkpoint.tensors.values()))
        declared = _declared_tensors(checkpoint, scheme, modules) | _of_cache(checkpoint)
        return cls._of(checkpoint, scheme, modules, checkpoint.tensors.keys() - declared)

    @classmethod
    def look(cls, checkpoint: Checkpoint, scheme: DeclaredScheme | None = None) -> "StoredDraft":
        """What the tensors are, whatever is declared; does not look inside the codes."""
        modules = frozenset(quantized_looking(checkpoint.tensors.values()))
        biases = _biases(checkpoint)
        plain = {
            name
            for name in checkpoint.tensors
            if name.rpartition(".")[0] not in modules or name in biases
        } - (_of_cache(checkpoint) if modules else frozenset())
        return cls._of(checkpoint, scheme, modules, plain)

    @classmethod
    def _of(
        cls,
        checkpoint: Checkpoint,
        scheme: DeclaredScheme | None,
        modules: frozenset[str],
        plain: Collection[str],
    ) -> "StoredDraft":
        """`plain` are the tensors that belong to no quantized linear.

        Every quantized linear appears as its one plain weight, so that the family's
        table checks it; a module that the family does not know is left out.
        """
        kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name in plain}
        floats = [t.dtype for t in kept.values() if t.dtype in FLOAT_DTYPES and len(t.shape) == 2]
        dtype = floats[0] if floats else FLOAT_DTYPES[0]
        for name, shape in _family_shapes(checkpoint, scheme).items() if modules else ():
            module = name.removesuffix(".weight")
            if module in modules:
                file = _file_of(checkpoint, scheme, module)
                kept[name] = TensorInfo(
                    name=name, dtype=dtype, shape=shape, file=file, start=0, stop=0
                )
        headers = dataclasses.replace(checkpoint, tensors=dict(sorted(kept.items())))
        draft = read_draft(headers if modules else checkpoint)
        return cls(checkpoint=checkpoint, scheme=scheme, modules=modules, draft=draft)

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """The stored scales of the KV cache."""
        return tuple(cache_tensors(self.checkpoint, self.draft.family))

    def kv_cache(self) -> StoredKvCache | None:
        """The KV cache that is declared, with its scales; None where none is."""
        if self.scheme is None or self.scheme.kv_cache is None:
            return None
        scales = cache_scales(self.checkpoint, self.draft, self.scheme)
        return StoredKvCache(dtype=self.scheme.kv_cache, scales=scales)

    def served_cache(self, asked: KvCacheDtype | None) -> dict[int, CacheScales]:
        """Scales with which an engine caches keys and values, for every layer; empty = no rounding.

        Scales that a folder stores without declaring a cache are used where an option turns the
        cache on (`asked`), if the folder is quantized: engines build them with its linears' method.
        """
        if asked is None and (self.scheme is None or self.scheme.kv_cache is None):
            return {}
        layers = cached_layers((row.canonical for row in self.draft.rows), self.checkpoint.folder)
        scales: Mapping[int, CacheScales] = {}
        if self.scheme is not None:
            scales = cache_scales(self.checkpoint, self.draft, self.scheme)
        return {layer: scales.get(layer, UNIT) for layer in layers}

    def is_quantized(self, row: Row) -> bool:
        """True if a row of `draft` is stored as codes."""
        return row.module in self.modules

    @property
    def rounds_alone(self) -> bool:
        """See `LoadedDraft`; an online head always rounds alone, and is not stored."""
        schemes = [self.scheme_of(row) for row in self.draft.rows if self.is_quantized(row)]
        return all(scheme is None or scheme.activations != "tensor-dynamic" for scheme in schemes)

    def parts(self, row: Row) -> dict[str, TensorInfo]:
        """The stored tensors of a quantized row by suffix ("weight", "weight_scale", ...)."""
        module = row.module
        rows, columns = row.tensor.shape
        names = stored_parts(self.needed_scheme(row), rows, columns)
        stored = {suffix: self.checkpoint.tensors.get(f"{module}.{suffix}") for suffix in names}
        return {suffix: tensor for suffix, tensor in stored.items() if tensor is not None}

    def linear(self, row: Row) -> StoredLinear:
        """A quantized row, ready to decode; CheckpointError where scales or zeros are invalid."""
        module, scheme, where = row.module, self.needed_scheme(row), self.checkpoint.folder
        scales = f"{module}.{scheme.layout.scale_suffix(scheme)}"
        constant = scheme.layout.zero_points if not scheme.layout.zeros(scheme) else {}
        for suffix, part in self.parts(row).items():
            expected = constant.get(suffix)
            if expected is not None and (read_whole(self.checkpoint, part) != expected).any():
                raise CheckpointError(
                    where,
                    f"{part.name}: expected the zero points of symmetric values, got others",
                    fix="quantize the draft again with symmetric values: asymmetric ones are not"
                    " supported",
                )
        linear = StoredLinear(self.checkpoint, scheme, module, in_features=row.tensor.shape[1])
        scale = np.abs(linear.scale) if scheme.has_signed_scales else linear.scale
        bad = np.argwhere(~(np.isfinite(scale) & (scale > 0)))
        if len(bad):
            first = tuple(bad[0])
            raise CheckpointError(
                where,
                f"{scales}: expected positive scales, got {len(bad)} other(s), first"
                f" {linear.scale[first]} at row {first[0]}",
                fix="run `draftquant verify`, then quantize the draft again",
            )
        return linear

    def scheme_of(self, row: Row) -> DeclaredScheme | None:
        """What is declared for a quantized row; None where nothing is, and for other rows."""
        return self.scheme.of(row.module) if self.scheme and self.is_quantized(row) else None

    def needed_scheme(self, row: Row) -> DeclaredScheme:
        """What is declared for a quantized row."""
        scheme = self.scheme_of(row)
        assert scheme is not None, f"{row.tensor.name} is not stored quantized"
        return scheme


def _declared_tensors(
    checkpoint: Checkpoint, scheme: DeclaredScheme, modules: Collection[str]
) -> set[str]:
    shapes = _family_shapes(checkpoint, scheme)
    names = set()
    for module in sorted(modules):
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            what = f"{module} is stored quantized, but this draft's family has no such linear"
            raise CheckpointError(checkpoint.folder, what, fix="quantize the draft again")
        how = scheme.of(module)
        if how is None:
            what = f"{module} is stored quantized, but nothing is declared for it: {scheme}"
            raise CheckpointError(checkpoint.folder, what, fix="quantize the draft again")
        for suffix, part in stored_parts(how, *shape).items():
            tensor = checkpoint.tensors.get(f"{module}.{suffix}")
            if not part.fits(tensor):
                got = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "none"
                needs = f"{' or '.join(part.dtypes)} {list(part.shape)}"
                raise CheckpointError(
                    checkpoint.folder,
                    f"{module}.{suffix}: {how} needs {needs}, got {got}",
                    fix="run `draftquant verify`, then quantize the draft again",
                )
            names |= {tensor.name} if tensor else set()
    return names


def _family_shapes(
    checkpoint: Checkpoint, scheme: DeclaredScheme | None
) -> dict[str, tuple[int, ...]]:
    """On-disk weight name -> unquantized shape, for every module of the folder."""
    family, geometry = read_config(checkpoint)
    specs = family.tensor_specs(geometry)
    shapes = {}
    if not family.has_maths:  # no table has the shapes: the codes do
        modules = quantized_looking(checkpoint.tensors.values())
        by_module = {name: _shape_of_codes(checkpoint, scheme, name) for name in sorted(modules)}
        return {f"{name}.weight": shape for name, shape in by_module.items() if shape is not None}
    for module in {name.rpartition(".")[0] for name in checkpoint.tensors}:
        spec = specs.get(family.canonical_name(f"{module}.weight"))
        if spec is not None:
            shapes[f"{module}.weight"] = tuple(dim.size for dim in spec.shape)
    return shapes


_PACKED = ((1, 1), (1, 2), (1, 8), (1, 4), (8, 1), (4, 1))
"""Values in a stored element, by rows and columns."""


def _shape_of_codes(
    checkpoint: Checkpoint, scheme: DeclaredScheme | None, module: str
) -> tuple[int, ...] | None:
    """The shape of the one weight that is stored as the declared parts; None where none is."""
    how = scheme.of(module) if scheme is not None else None
    beside = {n.rpartition(".")[2]: t for n, t in checkpoint.tensors.items() if _in(n, module)}
    codes = next((t.shape for t in beside.values() if len(t.shape) == 2), None)
    if codes is None:
        return None
    if how is None:
        return codes
    tensor = beside.get(how.layout.weight_suffix(how))
    stored = tensor.shape if tensor is not None and len(tensor.shape) == 2 else codes
    for rows, columns in ((a * stored[0], b * stored[1]) for a, b in _PACKED):
        for shape in ((rows, columns), (columns, rows)):
            with suppress(LayoutError):
                if all(part.fits(beside.get(s)) for s, part in stored_parts(how, *shape).items()):
                    return shape
    return stored


def _in(name: str, module: str) -> bool:
    return name.rpartition(".")[0] == module


def _of_cache(checkpoint: Checkpoint) -> frozenset[str]:
    family, _ = read_config(checkpoint)
    return frozenset(tensor.name for _, _, tensor in cache_tensors(checkpoint, family))


def _biases(checkpoint: Checkpoint) -> frozenset[str]:
    family, geometry = read_config(checkpoint)
    specs = family.tensor_specs(geometry)
    stored = (name for name in checkpoint.tensors if name.endswith(".bias"))
    return frozenset(name for name in stored if family.canonical_name(name) in specs)


def _file_of(checkpoint: Checkpoint, scheme: DeclaredScheme | None, module: str) -> str:
    """The file of a linear's codes; if nothing says which these are, of any of its tensors."""
    how = scheme.of(module) if scheme else None
    codes = checkpoint.tensors.get(f"{module}.{how.layout.weight_suffix(how)}") if how else None
    stored = (t for name, t in checkpoint.tensors.items() if name.rpartition(".")[0] == module)
    return (codes or next(stored)).file


def weight_format(stored: StoredDraft, scheme: DeclaredScheme) -> WeightFormat:
    """The declared format of the weights, LayoutError where recipes have no name for it.

    `scale_dtype` is set where INT4 scales are float16.
    """
    int4 = scheme.number.is_integer and scheme.first_stage is None
    tensors, suffix = stored.checkpoint.tensors, scheme.layout.scale_suffix(scheme)
    float16 = int4 and {tensors[f"{m}.{suffix}"].dtype for m in stored.modules} == {"F16"}
    sizes = NUMBER_FORMATS[scheme.weight_dtype].sizes if is_of_recipes(scheme.weight_dtype) else {}
    size = (scheme.group_size,) if scheme.group_size else ()
    known = scheme.granularity in sizes and set(size) <= set(sizes[scheme.granularity])
    if not is_of_recipes(scheme.weight_dtype) or not known:
        size_of = f" of {scheme.group_size}" if scheme.group_size else ""
        where = f"weights {scheme.weight_dtype} per {scheme.granularity}{size_of}"
        raise LayoutError(
            where,
            "no layout that draftquant writes has this format",
            fix="`draftquant dequantize` the folder, and quantize the weights with a recipe",
        )
    return WeightFormat(
        dtype=scheme.weight_dtype, granularity=scheme.granularity, symmetric=True,
        group_size=scheme.group_size, scale_dtype="float16" if float16 else None,
        first_stage=scheme.first_stage,
    )  # fmt: skip
