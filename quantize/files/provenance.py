"""Provenance: who made a folder, from what and how; a class for each kind of draftquant.json.

No time stamp and no path, so that equal runs give equal files. The last key is a seal, the sha256
of the others: it reveals edits, but is not a signature.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...recipes.brief import counted
from ...recipes.decode import HEX_64, Spelled
from ...recipes.schema import Recipe, StoredLayoutName, WeightFormat, recipe_sha256
from .safetensors_header import FloatDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFolder:
    """Where a folder came from: Hub id and commit, None for a local one."""

    hub_id: str | None
    revision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraft(SourceFolder):
    """The unquantized draft that was quantized, with the digest of each of its tensors."""

    family: str
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSource(SourceFolder):
    """The quantized folder that was dequantized; `scheme` is what it declared."""

    family: str
    scheme: str
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedFrom(SourceFolder):
    """The quantized folder whose codes and scales were written in another layout or carrier.

    Attributes:
        weights: format in which they were first stored, before the first of several transcodings.
        scale_dtype: safetensors dtype to which the scales were rounded then.
    """

    layout: StoredLayoutName
    weights: WeightFormat
    scale_dtype: str
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRounding:
    """How codes were learned, and what they gave on prompts that were not used for learning.

    Attributes:
        sequences: traces in each step.
        kept_step: the step whose codes are stored; 0 = those before learning.
        acceptance_length: mean over every position of the validation prompts, with the bonus token.
        overlap: with the unquantized draft's distributions: mean over rows and depths of the sum of
            the smaller probabilities, 1 = equal.
    """

    traces_sha256: str
    num_draft_tokens: int
    steps: int
    sequences: int
    seed: int
    validation_prompts: int
    kept_step: int
    acceptance_length: float
    overlap: float
    acceptance_length_before: float
    overlap_before: float
    acceptance_length_unquantized: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFactors:
    """How the Cholesky factors were computed with which GPTQ compensates errors.

    Attributes:
        damping: linear -> what was added to the diagonal of its inputs' second moments, as a share
            of the mean of the diagonal, where the usual 0.01 was too little. By canonical names.
        input_correction: the same for weights that were corrected for the rounding of their inputs.
    """

    dtype: Literal["float32", "float64"]
    damping: Mapping[str, float] = field(default_factory=dict)
    input_correction: Mapping[str, float] = field(default_factory=dict)


# A prompt is recognised by the sha256 of its token ids, and a near duplicate by its sketch
# and that of its continuation: the smallest values of a hash of their shingles
# (`calibration.traces.related_prompts` computes them).

_SKETCH = Spelled("(?:[0-9a-f]{8}){1,64}", "1 to 64 values of 8 hex digits")
SketchMethod = Literal["64 minima of 4-token shingles, of 16-token ones of continuations, 2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketches:
    """Sketches by category: up to 64 values of 32 bits each, as hex digits."""

    method: SketchMethod
    minima: Mapping[str, Annotated[tuple[str, ...], _SKETCH]]
    continuations: Mapping[str, Annotated[tuple[str, ...], _SKETCH]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTarget:
    """The target whose traces were used, as their trace.json names it; None = it does not say."""

    name: str
    config_sha256: Annotated[str | None, HEX_64] = None
    weights_sha256: Annotated[str | None, HEX_64] = None

    def __str__(self) -> str:
        return f"{self.name} ({(self.weights_sha256 or self.config_sha256 or 'unknown')[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPrompts:
    """Prompts that were used: sha256 of each and of its first turn, ascending; and their target."""

    sha256: Annotated[tuple[str, ...], HEX_64] = ()
    sketches: Sketches | None = None
    target: SeenTarget | None = None


NO_PROMPTS = SeenPrompts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAmong:
    """Which recipes a recipe was chosen among, on how many prompts.

    `prompts`: all of the traces, both those that chose and those that calibrated.
    """

    recipes: tuple[str, ...]
    num_prompts: int
    traces_sha256: str
    prompts: SeenPrompts

    def __str__(self) -> str:
        return f"chosen among {len(self.recipes)} by {counted(self.num_prompts, 'prompt')}"


def _seen(record: "VocabularyChoice | QuantizedProvenance") -> SeenPrompts:
    return SeenPrompts(
        sha256=record.calibration_prompts,
        sketches=record.calibration_sketches,
        target=record.calibration_target,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyChoice:
    """Why these rows were kept.

    Attributes:
        method: how the tokens were ordered, in words.
        size, coverage: one of them was requested: rows, or a share of the target's tokens.
        coverage_reached: share of the counted tokens that the rows cover.
    """

    method: str
    traces_sha256: str
    size: int | None = None
    coverage: float | None = None
    coverage_reached: float
    calibration_prompts: Annotated[tuple[str, ...], HEX_64]
    calibration_sketches: Sketches | None = None
    calibration_target: SeenTarget | None = None

    @property
    def prompts(self) -> SeenPrompts:
        """The prompts that chose the rows."""
        return _seen(self)

    def problem(self) -> str | None:
        """What two keys say differently about one thing, or None."""
        if (self.size is None) == (self.coverage is None):
            return "size and coverage: expected one of the two"
        if not 0 <= self.coverage_reached <= 1 or not 0 <= (self.coverage or 0) <= 1:
            return "coverage and coverage_reached: expected shares from 0 to 1"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LentHead:
    """The target's table whose rows a draft without a head of its own received."""

    tensor: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyCut:
    """One cut of a vocabulary; `missing` ids of the target have no row in the source."""

    source: SourceDraft
    choice: VocabularyChoice
    vocabulary: int
    size_before: int
    size: int
    convention: Literal["offsets"] = "offsets"
    missing: int = 0
    head_from: LentHead | None = None

    def problem(self) -> str | None:
        """Sizes that no cut can have, or None."""
        if not 0 < self.size <= self.size_before <= self.vocabulary:
            got = f"{self.size}, {self.size_before}, {self.vocabulary}"
            return f"expected 0 < size <= size_before <= vocabulary, got {got}"
        return None

    def __str__(self) -> str:
        return f"vocabulary {self.size:,} of {self.vocabulary:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the codes of a folder were found: what verification compares them with.

    Attributes:
        input_scales: stored static scale of a linear's input, by on-disk module name.
        balanced: on-disk name of a norm's weight -> k: it was divided by 2^k, and the columns that
            read it were multiplied.
        learned_norms: on-disk name of a norm's weight -> the largest factor by which one of its
            elements changed, not counting balancing.
        few_inputs: expert's module -> inputs that reached it; too few: it was rounded to nearest.
        cache_scales: stored scales of the KV cache, by on-disk name of an attention and ".k", ".v".
        roles: PATTERN=ROLE, as the user said of a draft that no family reads.
    """

    recipe: Recipe
    input_scales: Mapping[str, float] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    few_inputs: Mapping[str, int] = field(default_factory=dict)
    cache_scales: Mapping[str, float] = field(default_factory=dict)
    roles: tuple[str, ...] = ()

    @property
    def changed_norms(self) -> frozenset[str]:
        """On-disk names of the norms' weights that differ from the source."""
        return frozenset(self.balanced.keys() | self.learned_norms.keys())

    @property
    def keys(self) -> dict[str, Any]:
        """The same as keys of a record."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """What wrote the folder first: version of this package, command line."""

    draftquant: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of all tensors together, of the source and of the folder, without headers."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What rounding code * scale to `dtype` lost."""

    elements: int
    rounded: int
    max_relative_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProvenance:
    """Record of a folder that `quantize` wrote.

    Attributes:
        config_changes: dotted config.json key -> the value that a lint asked for.
        dropped: table of the source that is not stored -> the equal tensor of the target.
        input_scale_origin: None = not recorded, "" = there are none.
        calibration_prompts, calibration_sketches: by which the gate recognises prompts.
        calibration_target: whose traces these are; None also in records of earlier versions.
        gptq: None = there are none, or an earlier build used float64.
        cuts: of the vocabulary of the source, in order, before it was quantized.
        chosen: how the recipe was chosen; None = somebody named it.
        made_by: the first run, where the folder was transcoded later.
        transcoded_from: where `transcode` wrote it; `recipe` then has this folder's layout and
            carrier.
        card: README.md must exist.
    """

    format: Literal["draftquant-provenance"] = "draftquant-provenance"
    version: Literal[1] = 1
    draftquant: str
    backend_versions: Mapping[str, str]
    argv: tuple[str, ...]
    source: SourceDraft
    recipe: Recipe
    recipe_sha256: str
    tensor_digests: Mapping[str, str]
    tensor_bytes: TensorBytes
    config_changes: Mapping[str, object] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    input_scales: Mapping[str, float] = field(default_factory=dict)
    input_scale_origin: str | None = ""
    few_inputs: Mapping[str, int] = field(default_factory=dict)
    cache_scales: Mapping[str, float] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    calibration_prompts: tuple[str, ...] = ()
    calibration_sketches: Sketches | None = None
    calibration_target: SeenTarget | None = None
    gptq: GptqFactors | None = None
    learned: LearnedRounding | None = None
    cuts: tuple[VocabularyCut, ...] = ()
    chosen: ChosenAmong | None = None
    made_by: MadeBy | None = None
    transcoded_from: TranscodedFrom | None = None
    card: bool = False
    sha256: str = ""

    @property
    def method(self) -> Method:
        """How the codes were found."""
        return Method(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Method)})

    @property
    def prompts(self) -> SeenPrompts:
        """The prompts that calibrated it."""
        return _seen(self)

    def problem(self) -> str | None:
        """What two keys say differently about one thing, or None."""
        if self.recipe_sha256 != recipe_sha256(self.recipe):
            return f"recipe_sha256: not that of the recipe: {self.recipe_sha256!r}"
        if bool(self.input_scales) != (self.input_scale_origin != ""):
            return "input_scales and input_scale_origin: expected both or none"
        stored = self.dropped.keys() & self.tensor_digests.keys()
        if stored or self.dropped.keys() - self.source.tensor_digests.keys():
            return "dropped: expected tensors of source.tensor_digests that are not stored"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedProvenance:
    """Record of a folder whose codes another tool found and `transcode` wrote in another layout."""

    format: Literal["draftquant-transcoded"] = "draftquant-transcoded"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: SourceFolder
    tensor_digests: Mapping[str, str]
    made_by: MadeBy | None = None
    transcoded_from: TranscodedFrom
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutProvenance:
    """Record of a folder that `vocab` wrote; each cut's `source` is what the previous one wrote."""

    format: Literal["draftquant-cut"] = "draftquant-cut"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    cuts: tuple[VocabularyCut, ...]
    tensor_digests: Mapping[str, str]
    tensor_bytes: TensorBytes
    quantized_by: QuantizedProvenance | TranscodedProvenance | None = None
    sha256: str = ""

    @property
    def cut(self) -> VocabularyCut:
        """The last cut."""
        return self.cuts[-1]

    @property
    def source(self) -> SourceDraft:
        """The folder that it was made from."""
        return self.cut.source

    def problem(self) -> str | None:
        """What two keys say differently about one thing, or None."""
        if not self.cuts:
            return "cuts: expected at least one"
        first, made = self.cuts[0].source.tensor_digests, self.quantized_by
        if made and made.tensor_digests != first:
            return "quantized_by: expected the record of the folder that was cut first"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedProvenance:
    """Record of a folder of plain weights that `dequantize` wrote."""

    format: Literal["draftquant-dequantized"] = "draftquant-dequantized"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: QuantizedSource
    dtype: FloatDtype
    rounding: Rounding
    tensor_digests: Mapping[str, str]
    tensor_bytes: TensorBytes
    quantized_by: QuantizedProvenance | TranscodedProvenance | CutProvenance | None
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftedProvenance:
    """Record of a target's folder into which `graft` put an MTP layer.

    Attributes:
        layers: prefixes of the layers that were put in. replaced: tensors of the target.
        target: unchanged safetensors file -> its header's digest: its tensors are not read.
        tensor_digests: those of the layer's tensors only.
    """

    format: Literal["draftquant-grafted"] = "draftquant-grafted"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    layers: tuple[str, ...]
    replaced: tuple[str, ...] = ()
    target: Mapping[str, str]
    source: SourceFolder
    tensor_digests: Mapping[str, str]
    quantized_by: QuantizedProvenance | TranscodedProvenance | DequantizedProvenance | None = None
    sha256: str = ""


Provenance = (
    QuantizedProvenance
    | DequantizedProvenance
    | TranscodedProvenance
    | CutProvenance
    | GraftedProvenance
)
