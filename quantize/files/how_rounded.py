"""How codes were found where they were not rounded to nearest, as draftquant.json records it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
