"""Provenance: who made a folder, from what and how; what draftquant.json holds.

A folder is quantized, dequantized, tuned, or was made by something else and repaired here; one
class for each, whose fields are the keys of the file. No time stamp and no path, so that equal runs
give equal files. The last key is a seal, the sha256 of the others: it shows edits, and signs none.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from ...recipes.schema import LayoutName, Recipe, WeightFormat, recipe_sha256
from ...recipes.seen_prompts import Sketches
from .retuning import Retuning
from .safetensors_header import FloatDtype


class _Digested:
    """A record of tensors, each by the digest of its bytes; see `digests`.

    Attributes:
        tensor_digests: by name.
        tensor_sha256: in their place, in records of version 0.2 and before.
    """

    __slots__ = ()
    tensor_digests: Mapping[str, str]
    tensor_sha256: Mapping[str, str]

    @property
    def digests(self) -> Mapping[str, str]:
        """Of every tensor, as `Digest` spells them."""
        return self.tensor_digests or self.tensor_sha256

    def problem(self) -> str | None:
        """What two keys say of one thing differently, or None."""
        if bool(self.tensor_digests) == bool(self.tensor_sha256):
            return "tensor_digests: expected the digest of every tensor"
        return None


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
    """

    recipe: Recipe
    input_scales: Mapping[str, float] = field(default_factory=dict)
    balanced: Mapping[str, int] = field(default_factory=dict)
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    few_inputs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """What wrote the folder at first: version of this package, command line."""

    draftquant: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRecord:
    """One repair; fields as in `engines.repairs.Repair`."""

    name: str
    wrong: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFolder:
    """Where a folder came from: Hub id and commit, None for a local one."""

    hub_id: str | None
    revision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraft(_Digested, SourceFolder):
    """The unquantized draft that was quantized, with the digest of each of its tensors."""

    family: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSource(_Digested, SourceFolder):
    """The quantized folder that was dequantized; `scheme` is what it declared."""

    family: str
    scheme: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedFrom(_Digested, SourceFolder):
    """The quantized folder whose codes and scales were written in another layout or carrier.

    Attributes:
        layout: of that folder.
        weights: in which format codes and scales were found at first: of several transcodings in a
            row, before the first one.
        scale_dtype: safetensors dtype to which the scales were rounded then.
    """

    layout: LayoutName
    weights: WeightFormat
    scale_dtype: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)


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
class LearnedRounding:
    """How codes were learned, and what they gave on prompts that nothing was learned from.

    Attributes:
        traces_sha256: of the calibration traces.
        num_draft_tokens: K, along which was learned.
        steps, sequences: planned, and traces in each.
        seed: of what was learned from when, and of which prompts were held back.
        validation_prompts: how many were held back.
        kept_step: whose codes are stored; 0 = the first ones, before anything was learned: nearest,
            or by GPTQ corrected for the rounding of inputs.
        acceptance_length: mean over every position of the validation prompts, bonus token counted.
        overlap: there, of its distributions with those of the unquantized draft: the mean over rows
            and depths of the sum of the smaller probabilities, 1 = equal.
        acceptance_length_before, overlap_before: of the first codes.
        acceptance_length_unquantized: of the draft that was quantized.
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
    """How the Cholesky factors were computed by which GPTQ makes up for errors.

    Attributes:
        dtype: of the computation.
        damping: linear -> what was added to the diagonal of its inputs' second moments, as a share
            of its mean, where the usual 0.01 was too little. By canonical names.
        input_correction: linear -> the same of those whose weights were corrected for the rounding
            of their inputs: of few inputs less is believed.
    """

    dtype: Literal["float32", "float64"]
    damping: Mapping[str, float] = field(default_factory=dict)
    input_correction: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProvenance(_Digested):
    """Of a folder that `quantize` wrote.

    Attributes:
        argv: the command line, see `recorded_argv`.
        backend_versions: packages that the codes depend on.
        config_changes: dotted config.json key -> the value that a lint asked for.
        dropped: table of the source that is not stored -> the target's tensor that equals it, byte
            for byte, so that its sha256 is that in `source`.
        balanced, learned_norms, input_scales, few_inputs: see `Method`.
        input_scale_origin: where they came from; None = not said, "" = there are none.
        calibration_prompts, calibration_sketches: of the prompts that the run looked at, by which
            the gate knows them whatever they are called: see `SeenPrompts`.
        gptq: how the factors of GPTQ were computed; None = there are none, or float64 by an older
            version.
        learned, retuning: how codes were learned, how the target taught them; None where not.
        made_by: where the folder was repaired or transcoded later: `draftquant` and `argv` are that
            run's.
        transcoded_from: where its codes were written by `transcode`, `recipe` having the layout and
            carrier of this folder.
        repairs: in order.
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
    calibration_prompts: tuple[str, ...] = ()
    calibration_sketches: Sketches | None = None
    gptq: GptqFactors | None = None
    learned: LearnedRounding | None = None
    retuning: Retuning | None = None
    made_by: MadeBy | None = None
    repairs: tuple[RepairRecord, ...] = ()
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
        if problem := _Digested.problem(self):  # no `super()` in a class that slots make anew
            return problem
        if self.recipe_sha256 != recipe_sha256(self.recipe):
            return f"recipe_sha256: not that of the recipe: {self.recipe_sha256!r}"
        if bool(self.input_scales) != (self.input_scale_origin != ""):
            return "input_scales and input_scale_origin: expected both or none"
        stored = self.dropped.keys() & self.digests.keys()
        if stored or self.dropped.keys() - self.source.digests.keys():
            return "dropped: expected tensors of source.tensor_digests that are not stored"
        if (self.retuning is not None) != (self.recipe.algorithm.rounding == "retuned"):
            return "retuning: expected exactly where the recipe says rounding: retuned"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedProvenance(_Digested):
    """Of a folder that something else made: it says nothing of how the codes were found.

    It was repaired or transcoded here; `transcoded_from` as in `QuantizedProvenance`.
    """

    format: Literal["draftquant-repaired"] = "draftquant-repaired"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: SourceFolder
    repairs: tuple[RepairRecord, ...]
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    made_by: MadeBy | None = None
    transcoded_from: TranscodedFrom | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedProvenance(_Digested):
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
    quantized_by: QuantizedProvenance | RepairedProvenance | None
    made_by: MadeBy | None = None
    repairs: tuple[RepairRecord, ...] = ()
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProvenance(_Digested):
    """Of the unquantized draft that `retune` taught, as the quantized one beside it.

    Keys as in `QuantizedProvenance`; of `learned` the first looks are of the draft as it was.
    """

    format: Literal["draftquant-tuned"] = "draftquant-tuned"
    version: Literal[1] = 1
    draftquant: str
    argv: tuple[str, ...]
    source: SourceDraft
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    tensor_bytes: TensorBytes
    calibration_prompts: tuple[str, ...]
    learned: LearnedRounding
    retuning: Retuning
    calibration_sketches: Sketches | None = None
    made_by: MadeBy | None = None
    repairs: tuple[RepairRecord, ...] = ()
    sha256: str = ""


Provenance = QuantizedProvenance | DequantizedProvenance | TunedProvenance | RepairedProvenance
