"""`parity_divergence`: greedy output with a draft against output without one."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from . import reports
from .arguments import AnyPath
from .findings import FindingsFile
from .option import Argument, Option
from .verb import verb


@dataclass(frozen=True, slots=True)
class DivergenceSettings(FindingsFile):
    """Of which measurements, and what is noise."""

    plain: Annotated[
        AnyPath,
        Argument("measurement without a draft, at temperature 0, with --top-logprobs 2", "PLAIN"),
    ]
    speculative: Annotated[
        Sequence[AnyPath],
        Argument("measurements of the same prompts with drafts: BF16, quantized", "SPECULATIVE"),
    ]
    _: KW_ONLY
    plain_again: Annotated[
        AnyPath | None,
        Option("a second measurement of PLAIN at another concurrency; it shows the "
        "numeric noise",
               "MEASUREMENT"),
    ] = None  # fmt: skip
    max_gap: Annotated[
        float | None,
        Option(
            "largest gap in nats between the target's two most likely tokens at which"
            " a difference counts as noise (default 0.25, or twice what --plain-again"
            " shows, at most 0.5)",
            "NATS",
        ),
    ] = None
    max_hazard_ratio: Annotated[
        float | None,
        Option(
            "how many times as often as --plain-again the speculative output may differ from PLAIN",
            "RATIO",
        ),
    ] = None
    min_prompts: Annotated[
        int | None,
        Option("smallest number of distinct prompts for a pass (default 30)", "PROMPTS"),
    ] = None


@verb(DivergenceSettings)
def parity_divergence(settings: DivergenceSettings) -> "reports.Findings":
    """Compare the greedy output of a target with a draft and without, up to the first difference.

    Returns:
        One finding for each speculative measurement.

    Raises:
        DraftQuantError: the measurements cannot be read, or do not have the same prompts.
    """
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.divergence_findings import MIN_PROMPTS, divergence_findings
    from ...validate.served.served_gate import draft_sha256

    again, fewest = settings.plain_again, settings.min_prompts
    speculative = [read_measurement(Path(path)) for path in settings.speculative]
    findings = divergence_findings(
        read_measurement(Path(settings.plain)),
        speculative,
        plain_again=None if again is None else read_measurement(Path(again)),
        max_gap=settings.max_gap,
        max_hazard_ratio=settings.max_hazard_ratio,
        min_prompts=MIN_PROMPTS if fewest is None else fewest,
    )
    return settings.write(findings, lambda: [draft_sha256(one) for one in speculative])
