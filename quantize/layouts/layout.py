"""Layouts that are written: how codes and scales are named and packed on disk.

They know nothing of how scales were chosen, and nothing of files. A block has a multiple of
`rows_of_block` rows, except the last one of a weight. Planning needs layouts too, so torch is
imported only where they encode.

Quark as Quark 0.13 exports it (real_quantized, `reorder` packing); compressed-tensors 0.20;
ModelOpt 0.47. Plain `fp8` has one scale per matrix, or per 128 x 128 block as DeepSeek-V3 is
published; AutoAWQ (`gemm`) INT4 groups, transposed, with float16 scales and the constant zero point
8. Sources: `fp8.py` and `awq.py` of vLLM 0.33 and SGLang 0.5.23.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import override

from ...recipes.errors import LayoutError
from ...recipes.library import recipe_file
from ...recipes.packages import table_beside
from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..drafts.family import Row
from ..files.safetensors_header import StoredTensor, TensorInfo
from ..stored.layouts import LAYOUTS
from ..stored.layouts.scheme import Activations, DeclaredScheme, OwnFormat, declared_activations
from ..stored.layouts.stored_modelopt import algorithm_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

_HELD = table_beside(__file__)
_ROWS = 32
"""Whole words of 8 rows, where codes are stored transposed; few, so that blocks stay small."""


def rows_of_block(weights: WeightFormat) -> int:
    """A block has a multiple of this many rows: whole blocks of scales, whole transposed words."""
    return (weights.group_size or 1) if weights.granularity == "block" else _ROWS


class GatheredColumns(NamedTuple):
    """Some columns of a tensor stored transposed: the writer gathers them first."""

    tensor: "Tensor"


Encoded = Mapping[str, "Tensor | GatheredColumns"]
Parts = dict[str, tuple[str, tuple[int, ...]]]
"""Suffix -> safetensors dtype and shape of the tensors of one weight."""
ONE_FORMAT = "declares one format for all linears"


def _place(suffix: str) -> int:
    """Order in a file: shapes and zero points after scales, scales of inputs after everything."""
    return 2 if suffix.startswith("input") else suffix.startswith(("weight_shape", "weight_zero"))


class Layout:
    """One way to store quantized weights.

    Attributes:
        mix_problem: why it cannot declare several formats for one draft; None = it can.
        exact_excludes: whether engines compare its excludes with whole names, layer number and all.
        int4_scale_dtype: the only dtype that INT4 scales may have; None = also the weight's.
        cache_problem: why it cannot declare the format of a KV cache; None = it can.
        interleaved: words of INT4 hold the even columns in their lower nibbles, as in AWQ.
        zero_points: words of the zero points of symmetric codes.
    """

    name: LayoutName
    mix_problem: str | None = ONE_FORMAT
    exact_excludes: bool = False
    int4_scale_dtype: Literal["float16"] | None = None
    cache_problem: str | None = "declares no KV cache"
    cache_scale_shape: tuple[int, ...] = ()
    interleaved: bool = False
    zero_points: int = 0

    def problem(self, recipe: Recipe) -> str | None:
        """Why this layout cannot express the formats of a recipe of one format, or None."""
        weights, inputs = recipe.weights, str(recipe.activations or "none")
        of_weights = f"{weights.dtype} per {weights.granularity}"
        values = {
            "weights": of_weights,
            "stages": "two" if weights.first_stage else "one",
            "scales": str(weights.scale_dtype),
            "activations": inputs,
            "pairs": f"{of_weights} with {inputs}",
        }
        for row in _HELD.get(self.name, ()):
            asked = next(key for key in values if key in row)
            if not any(fnmatchcase(values[asked], pattern) for pattern in row[asked]):
                return str(row["says"])
        return None

    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        """LayoutError where a weight [out, in] does not consist of whole groups or words."""
        if weights.granularity == "group":
            check_divides(self.name, weight, 1, weights.group_size or 1)

    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        """What a quantized weight [out, in] becomes, by suffix, in the order of the file."""
        weights = recipe.weights
        self.check_shape(weight, weights)
        scheme = self._scheme(weights, declared_activations(recipe.activations))
        asked = "F16" if weights.scale_dtype else "F32"
        of_weight = "F16" if weights.scale_dtype else weight.dtype
        parts = {}
        for suffix, part in scheme.layout.parts(scheme, *weight.shape).items():
            dtypes = part.dtypes or (of_weight,)
            parts[suffix] = asked if asked in dtypes else dtypes[0], part.shape
        return dict(sorted(parts.items(), key=lambda item: _place(item[0])))

    def _scheme(self, weights: WeightFormat, activations: Activations = "none") -> DeclaredScheme:
        return DeclaredScheme(
            layout=LAYOUTS[self.name],
            weight_dtype=weights.dtype,
            granularity=weights.granularity,
            group_size=weights.group_size,
            first_stage=weights.first_stage,
            activations=activations,
        )

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """The tensors that a quantized weight [out, in] becomes; LayoutError where it has none."""
        module = weight.name.removesuffix(".weight")
        return tuple(
            StoredTensor(name=f"{module}.{suffix}", dtype=dtype, shape=shape)
            for suffix, (dtype, shape) in self.parts(weight, recipe).items()
        )

    def encode_rows(self, module: str, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        """A block of rows -> its part of each stored tensor that consists of rows, by name."""
        from ..numerics.quantized_weight import packed

        scheme, scale = self._scheme(weights), block.scale
        layout, codes = scheme.layout, block.codes.T if scheme.transposed else block.codes
        unsigned = layout.unsigned
        words = packed(weights.dtype, codes, interleaved=self.interleaved, unsigned=unsigned)
        codes_name = f"{module}.{layout.weight_suffix(scheme)}"
        scale_name = f"{module}.{layout.scale_suffix(scheme)}"
        if scheme.transposed:
            return {codes_name: GatheredColumns(words), scale_name: GatheredColumns(scale.T)}
        if weights.granularity == "tensor":
            return {codes_name: words}
        part = layout.parts(scheme, *block.codes.shape)[layout.scale_suffix(scheme)]
        scales = scale[:, 0] if len(part.shape) == 1 else stored_scale(scale, weights)
        return {codes_name: words, scale_name: scales}

    def encode_whole(
        self, weight: TensorInfo, block: "QuantizedWeight", recipe: Recipe, scale: float | None
    ) -> "dict[str, Tensor]":
        """The stored tensors that a weight [out, in] has once, by name.

        `block` is any of its rows, `scale` that of the linear's input.
        """
        import torch

        scheme, whole = self._scheme(recipe.weights), dict[str, "Tensor"]()
        layout, over = scheme.layout, block.global_scale
        for suffix, (_, shape) in self.parts(weight, recipe).items():
            if suffix in layout.zero_points:
                whole[suffix] = torch.full(shape, self.zero_points, dtype=torch.int32)
            elif suffix == "weight_shape":
                whole[suffix] = torch.tensor(weight.shape, dtype=torch.int64)
            elif suffix in ("input_scale", "input_global_scale"):
                if scale is not None:
                    value = scalar(scale, shape)
                    whole[suffix] = 1 / value if suffix == "input_global_scale" else value
            elif suffix == layout.scale_suffix(scheme):
                if scheme.granularity == "tensor":
                    whole[suffix] = scalar(block.scale, shape)
            elif over is not None and suffix != layout.weight_suffix(scheme):
                whole[suffix] = scalar(1 / over if suffix == "weight_global_scale" else over, shape)
        module = weight.name.removesuffix(".weight")
        return {f"{module}.{suffix}": tensor for suffix, tensor in whole.items()}

    def excludes(self, kept: Sequence[str]) -> list[str]:
        """Modules to exclude, spelled so that every engine that reads this layout matches them.

        Exact names and an index-free regex, as vLLM 0.33 and SGLang 0.5.23 need them: vLLM looks up
        `model.fc`, the vendor's own loader for `fc`; layer numbers differ from those on disk.
        """
        exact = [n for module in kept for n in (module, f"model.{module.removeprefix('model.')}")]
        return [*dict.fromkeys(exact), *(f"re:.*{leaf}$" for leaf in last_parts(kept))]

    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json, for a recipe of one format as it is stored.

        Modules `kept` are excluded; `own` has none where the layout cannot mix formats.
        """
        return LAYOUTS[self.name].declaration(recipe, self.excludes(kept), own)

    def cache_scale_names(self, attention: str) -> tuple[str, str]:
        """What tools of this layout call the scales of keys and values of an attention."""
        return f"{attention}.k_scale", f"{attention}.v_scale"

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further JSON files of this layout by name."""
        side = LAYOUTS[self.name].side_file
        return {side.name: side.content(declared)} if side else {}


_BESIDE_LAYERS = re.compile(r"(?:^|\.)((?:lilicorr|xpress_head)\..+)$")


def last_parts(kept: Sequence[str]) -> list[str]:
    """The last part of every kept module name: engines number layers in their own way.

    Where that says too little, the part before it is added: a number, "embed_proj.0", and the
    parts of a head, "confidence_head.proj", or of DeepSeek-V4's `indexer.wq_b`, since names of
    linears in layers also end like that. Networks beside the layers, which have MLPs of their own,
    are named with all that follows: no engine renumbers those.
    """
    return sorted({last_part(module) for module in kept})


def last_part(module: str) -> str:
    """The name of a module in excludes; see `last_parts`."""
    if beside := _BESIDE_LAYERS.search(module):
        return beside[1]
    parent, _, leaf = module.rpartition(".")
    owner = parent.rpartition(".")[2]
    told_apart = leaf.isdecimal() or owner.endswith(("_head", "indexer", "compressor"))
    return f"{owner}.{leaf}" if told_apart else leaf


def check_divides(layout: LayoutName, weight: TensorInfo, axis: int, divisor: int) -> None:
    """Fail if a dimension of a weight does not consist of whole groups or words."""
    if weight.shape[axis] % divisor:
        raise LayoutError(
            weight.name,
            f"layout {layout} needs a multiple of {divisor} {('rows', 'inputs')[axis]}, got"
            f" {weight.shape[axis]}",
            fix="keep this tensor, or use another group size or layout",
        )


def scalar(value: "float | Tensor", shape: tuple[int, ...]) -> "Tensor":
    """One number as a float32 tensor of `shape`, [] or [1]."""
    import torch

    return torch.as_tensor(value, dtype=torch.float32).reshape(shape)


def stored_scale(scale: "Tensor", weights: WeightFormat) -> "Tensor":
    """Scales in the form in which they are stored, same shape."""
    if weights.number.scale_dtype != "U8":
        return scale
    import torch

    # Float32 powers of two -> E8M0 bytes, exponent + 127.
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def check_groups(recipe: Recipe, claimed: Sequence[tuple[Row, int]]) -> None:
    """LayoutError, with the group sizes that fit, where a row is not divisible into groups.

    `claimed` is every tensor, and the number of the rule that claims it.
    """
    rules = [(row.tensor, recipe.rules[index]) for row, index in claimed]
    quantized = [(t, recipe.of(rule).weights) for t, rule in rules if rule.action == "quantize"]
    for tensor, weights in quantized:
        size = weights.group_size
        if weights.granularity != "group" or size is None or tensor.shape[1] % size == 0:
            continue
        rows = [t.shape[1] for t, other in quantized if other == weights]
        known = weights.number.sizes["group"]
        fitting = [s for s in sorted(known, reverse=True) if not any(row % s for row in rows)]
        what = f"layout {recipe.layout} needs a multiple of {size} inputs, got {tensor.shape[1]}"
        if not fitting:
            raise LayoutError(
                tensor.name,
                what,
                fix=f"no groups of {weights.dtype} fit: take a recipe with a scale per channel,"
                " such as int4-channel-gptq or fp8-ptpc",
            )
        raise LayoutError(
            tensor.name,
            what,
            details=recipe_file(_in_groups(recipe, weights, fitting[0])).splitlines(),
            fix=f"groups of {' or '.join(map(str, fitting))} fit every linear: write these lines"
            " into mine.yaml, and give --recipe mine.yaml",
        )


def _in_groups(recipe: Recipe, weights: WeightFormat, size: int) -> Recipe:
    other = replace(weights, group_size=size)
    of_recipe = other if recipe.weights == weights else recipe.weights
    rules = tuple(
        replace(rule, format=replace(rule.format, weights=other))
        if rule.format is not None and rule.format.weights == weights
        else rule
        for rule in recipe.rules
    )
    summary = f"{recipe.name} in groups of {size}"
    return replace(recipe, name="mine", summary=summary, weights=of_recipe, rules=rules)


class CompressedTensorsLayout(Layout):
    """Scales of a whole matrix are [1]; those over others, and of NVFP4's inputs, divide."""

    name: LayoutName = "compressed-tensors"
    mix_problem: str | None = None
    cache_problem = None
    cache_scale_shape = (1,)

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)


class ModelOptLayout(Layout):
    """FP8 and NVFP4; scalars have shape []."""

    name: LayoutName = "modelopt"
    # vLLM 0.33 has `model.layers.61.mlp.down_proj`, SGLang 0.5.23 `model.down_proj`, or no `model`.
    mix_problem: str | None = (
        "ModelOpt's layout declares several formats by whole names of linears (MIXED_PRECISION),"
        " but engines have names of their own for a draft's linears"
    )
    cache_problem = None

    @override
    def problem(self, recipe: Recipe) -> str | None:
        if algorithm_of(recipe) is None:
            return "ModelOpt's layout holds FP8 and NVFP4 only, each with inputs of the same format"
        return None

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines match these as wildcards with runtime names, so the last part of a name between
        # two stars is enough; ModelOpt's own `model*` would match every layer of the draft
        return [f"*{leaf}*" for leaf in last_parts(kept)]

    @override
    def cache_scale_names(self, attention: str) -> tuple[str, str]:
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


class Fp8Layout(Layout):
    """Despite its name `weight_scale_inv`, of blocks, multiplies codes, like every scale here."""

    name: LayoutName = "fp8"
    exact_excludes = True
    cache_problem = None

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # vLLM compares whole names, so both spellings of each are listed; SGLang looks for parts
        bare = [module.removeprefix("model.") for module in kept]
        return sorted({*bare, *(f"model.{module}" for module in bare), *last_parts(kept)})


_PER_WORD = 8


class QuarkLayout(Layout):
    """Zero points are all zero. With two stages `weight_scale` [] is that of the first."""

    name: LayoutName = "quark"
    cache_problem = None
    interleaved = True

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        rows = weight.shape[0]
        if weights.number.is_integer and rows % _PER_WORD:
            raise LayoutError(
                weight.name,
                f"layout quark packs zero points of 8 rows into a word, got {rows} rows",
                fix="keep this tensor, or use layout compressed-tensors",
            )
        super().check_shape(weight, weights)


class AwqLayout(Layout):
    """INT4 groups."""

    name: LayoutName = "awq"
    int4_scale_dtype: Literal["float16"] | None = "float16"
    interleaved = True
    zero_points = -0x77777778  # 0x88888888 as int32: eight times 8

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        check_divides(self.name, weight, 0, 8)
        super().check_shape(weight, weights)

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines look for these parts anywhere in a module's name
        return last_parts(kept)
