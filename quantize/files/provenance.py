"""Provenance: who made a folder, from what and how; what draftquant.json holds.

A folder is quantized, dequantized, cut, a target with a layer grafted into it, or another tool's in
another layout; one class for each, whose fields are the keys of the file. No time stamp and no
path, so that equal runs give equal files. The last key is a seal, the sha256 of the others: it
shows edits, and signs none.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Never

from typing_extensions import override

from ...recipes.schema import Recipe, recipe_sha256
from ...recipes.seen_prompts import Sketches
from .how_rounded import GptqFactors, LearnedRounding
from .provenance_sources import Digested, QuantizedSource, SourceDraft, SourceFolder, TranscodedFrom
from .safetensors_header import FloatDtype
from .vocabulary_cut import VocabularyCut


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the codes of a folder were found: what verification holds them against.

    Attributes:
        recipe: resolved.
        input_scales: stored static scale of a linear's input, by on-disk module name.
        balanced: on-disk name of a norm's weight -> k, by whose 2^k it was divided, while the
            columns that read it were multiplied.
        learned_norms: on-disk name of the weight of a norm that learned -> the largest factor by
            which one of its elements was multiplied or divided, beside what balancing did.
        few_inputs: expert's module -> inputs that reached it, too few: rounded to nearest.
        cache_scales: stored scales of the KV cache, by on-disk name of an attention and ".k" for
            its keys, ".v" for its values.
    """

    recipe: Recipe
    input_scales: Mapping[str, float] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    few_inputs: Mapping[str, int] = field(default_factory=dict)
    cache_scales: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """What wrote the folder at first: version of this package, command line."""

    draftquant: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of all tensors together, of the source and of the folder; headers not counted."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What rounding code * scale to `dtype` lost; see `DequantizedLinear`."""

    elements: int
    rounded: int
    max_relative_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProvenance(Digested):
    """Of a folder that `quantize` wrote.

    Attributes:
        argv: the command line, see `recorded_argv`.
        backend_versions: packages that the codes depend on.
        config_changes: dotted config.json key -> the value that a lint asked for.
        dropped: table of the source that is not stored -> the target's tensor that equals it, byte
            for byte, so that its sha256 is that in `source`.
        balanced, learned_norms, input_scales, few_inputs, cache_scales: see `Method`.
        input_scale_origin: where they came from; None = not said, "" = there are none.
        calibration_prompts, calibration_sketches: of the prompts that the run looked at, by which
            the gate knows them whatever they are called: see `SeenPrompts`.
        gptq: how the factors of GPTQ were computed; None = there are none, or float64 by an older
            version.
        learned: how codes were learned; None where not.
        cuts: of the vocabulary of the source, in order, before it was quantized.
        made_by: where the folder was transcoded later: `draftquant` and `argv` are that run's.
        transcoded_from: where its codes were written by `transcode`, `recipe` having the layout and
            carrier of this folder.
        card: README.md has to be there. sha256: the seal, see `sealed`; "" until it is written.
    """

    format: Literal["draftquant-provenance"] = "draftquant-provenance"
    version: Literal[1] = 1
    draftquant: str
    backend_versions: Mapping[str, str]
    argv: tuple[str, ...]
    source: SourceDraft
    recipe: Recipe
    recipe_sha256: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    tensor_bytes: TensorBytes
    config_changes: Mapping[str, object] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    input_scales: Mapping[str, float] = field(default_factory=dict)
    input_scale_origin: str | None = ""
    few_inputs: Mapping[str, int] = field(default_factory=dict)
    cache_scales: Mapping[str, float] = field(default_factory=dict)
    calibration_prompts: tuple[str, ...] = ()
    calibration_sketches: Sketches | None = None
    gptq: GptqFactors | None = None
    learned: LearnedRounding | None = None
    cuts: tuple[VocabularyCut, ...] = ()
    made_by: MadeBy | None = None
    transcoded_from: TranscodedFrom | None = None
    card: bool = False
    sha256: str = ""

    @property
    def changed_norms(self) -> frozenset[str]:
        """On-disk names of the norms' weights that are not those of the source."""
        return frozenset(self.balanced.keys() | self.learned_norms.keys())

    @property
    def method(self) -> Method:
        """How the codes were found."""
        return Method(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Method)})

    @override
    def problem(self) -> str | None:
        if problem := Digested.problem(self):  # no `super()` in a class that slots make anew
            return problem
        if self.recipe_sha256 != recipe_sha256(self.recipe):
            return f"recipe_sha256: not that of the recipe: {self.recipe_sha256!r}"
        if bool(self.input_scales) != (self.input_scale_origin != ""):
            return "input_scales and input_scale_origin: expected both or none"
        stored = self.dropped.keys() & self.digests.keys()
        if stored or self.dropped.keys() - self.source.digests.keys():
            return "dropped: expected tensors of source.tensor_digests that are not stored"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedProvenance(Digested):
    """Of a folder whose codes another tool found, and `transcode` wrote in another layout.

    Attributes:
        repairs: always empty.
        transcoded_from: as in `QuantizedProvenance`.
    """

    format: Literal["draftquant-repaired"] = "draftquant-repaired"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: SourceFolder
    repairs: tuple[Never, ...]
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    made_by: MadeBy | None = None
    transcoded_from: TranscodedFrom
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutProvenance(Digested):
    """Of a folder that `vocab` wrote: rows of fewer tokens, all else as it was.

    Attributes:
        cuts: in order; each one's `source` is what the one before it wrote, the last one wrote this
            folder.
        quantized_by: the draftquant.json of the quantized folder that was cut first; None where it
            was not quantized, or nothing says how.
    """

    format: Literal["draftquant-cut"] = "draftquant-cut"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    cuts: tuple[VocabularyCut, ...]
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    tensor_bytes: TensorBytes
    quantized_by: QuantizedProvenance | TranscodedProvenance | None = None
    sha256: str = ""

    @property
    def cut(self) -> VocabularyCut:
        """The last one."""
        return self.cuts[-1]

    @property
    def source(self) -> SourceDraft:
        """The folder that it was made from."""
        return self.cut.source

    @override
    def problem(self) -> str | None:
        if problem := Digested.problem(self):
            return problem
        if not self.cuts:
            return "cuts: expected at least one"
        if self.quantized_by and self.quantized_by.digests != self.cuts[0].source.digests:
            return "quantized_by: expected the record of the folder that was cut first"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedProvenance(Digested):
    """Of a folder of plain weights that `dequantize` wrote.

    Attributes:
        dtype: of the weights that were codes.
        quantized_by: the draftquant.json of the quantized folder, None where it had none.
    """

    format: Literal["draftquant-dequantized"] = "draftquant-dequantized"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: QuantizedSource
    dtype: FloatDtype
    rounding: Rounding
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    tensor_bytes: TensorBytes
    quantized_by: QuantizedProvenance | TranscodedProvenance | CutProvenance | None
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftedProvenance(Digested):
    """Of a target's folder into which `graft` put an MTP layer.

    Attributes:
        layers: prefixes of the layers that were put in.
        replaced: tensors of the target that they stand in the place of.
        target: each safetensors file of the target that is in the folder unchanged -> its header's
            digest: its tensors are not read.
        source: the folder of the layer.
        tensor_digests: of the layer's tensors alone.
        quantized_by: the draftquant.json of the layer's folder; None where it had none.
    """

    format: Literal["draftquant-grafted"] = "draftquant-grafted"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    layers: tuple[str, ...]
    replaced: tuple[str, ...] = ()
    target: Mapping[str, str]
    source: SourceFolder
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    quantized_by: QuantizedProvenance | TranscodedProvenance | DequantizedProvenance | None = None
    sha256: str = ""


Provenance = (
    QuantizedProvenance
    | DequantizedProvenance
    | TranscodedProvenance
    | CutProvenance
    | GraftedProvenance
)
