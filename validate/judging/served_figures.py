"""What is said of two measurements beside the figures of the two drafts."""

from dataclasses import dataclass
from typing import Literal

from ..counting.paired_change import PairedChange

EstimatorName = Literal["weighted rounds", "whole outputs"]
"""See `estimator`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """How two measurements of the same prompts were compared.

    Attributes:
        engine, version, model: of the baseline's server.
        concurrency: of the baseline's run and of the candidate's.
        estimator: "whole outputs" where no prompt tells which rounds lie in common text.
        identical_share: of the prompts, those with the same output on both servers; in [0, 1].
        common_share: of the output tokens, those that both servers wrote before they parted;
            in [0, 1].
        baseline_mean_acceptance_length, candidate_mean_acceptance_length: of all rounds, as the
            engine counts them.
        whole_change: by all rounds of both outputs, each weighing one.
        common_change: by the rounds inside common text alone, as replay counts; it is of another
            mixture of text where outputs part. Either is None for fewer than two such prompts.
        repeated_8gram_share: of the baseline's outputs.
        mean_token_probability: of the tokens of the baseline's outputs, where they were drawn and
            the server tells it.
        num_near_duplicates: distinct prompts with the same output of the baseline's server.
    """

    engine: str
    version: str
    model: str
    concurrency: tuple[int, int]
    estimator: EstimatorName
    identical_share: float
    common_share: float
    baseline_mean_acceptance_length: float
    candidate_mean_acceptance_length: float
    whole_change: PairedChange | None
    common_change: PairedChange | None
    repeated_8gram_share: float
    mean_token_probability: float | None
    num_near_duplicates: int
