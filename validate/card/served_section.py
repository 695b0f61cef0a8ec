"""What servers accepted of a draft, in its model card."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...quantize.files.card_text import code, prose, table
from ..errors import CardError
from ..measure.measurement import Measurement, Speculation
from ..measure.summary import Figures, all_figures, tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One measurement of a server with this draft.

    Attributes:
        figures: of each category, then of all.
    """

    measurement: Measurement
    speculation: Speculation
    figures: tuple[Figures, ...]

    @classmethod
    def of(cls, measurement: Measurement, candidate_sha256: str) -> "Served":
        """A measurement of the draft with this identity.

        Raises:
            CardError: the server drafted nothing, with another draft, or nobody knows with which.
        """
        speculation = measurement.setup.speculation
        if speculation is None:
            raise CardError(measurement.name, "the measured server used no draft",
                            fix="give a measurement with this draft")  # fmt: skip
        other = speculation.draft_sha256
        if other is None:
            raise CardError(
                measurement.name,
                "does not know which draft was served: its draft_sha256 is null",
                fix="measure with --draft FOLDER, which names the draft by its tensors",
            )
        if other != candidate_sha256:
            raise CardError(
                measurement.name,
                f"is of a draft whose tensors are {other[:12]}, expected {candidate_sha256[:12]}",
                fix="give a measurement of a server with this folder",
            )
        return cls(
            measurement=measurement,
            speculation=speculation,
            figures=all_figures(measurement),
        )


def served_section(served: Sequence[Served]) -> list[str]:
    """A table for each measurement, nothing for none."""
    parts: list[str] = []
    for one in served:
        setup, rate = one.measurement.setup, tokens_per_second(one.measurement)
        server, asked = setup.server, setup.asked
        how = f"temperature {asked.temperature:g}" if asked.temperature else "greedy"
        speed = "" if rate is None else f", {rate:,.1f} tokens/s"
        parts += [
            f"Served by {prose(server.engine)} {prose(server.version)} with target"
            f" {code(server.model)}, K = {one.speculation.num_draft_tokens}, {how},"
            f" {asked.concurrency} in flight{speed}:",
            table(
                ("category", "requests", "tokens", "acceptance length", "TTFT, ms", "TPOT, ms"),
                [_row(figures) for figures in one.figures],
            ),
        ]
        parts += [
            "Its acceptance rule is lossy, so that its outputs differ from those of its target:"
            f" {prose(setting)}."
            for setting in one.speculation.lossy
        ]
    return ["### On a server", *parts] if parts else []


def _row(figures: Figures) -> tuple[str, ...]:
    length = figures.acceptance_length
    return (
        prose(figures.category),
        f"{figures.num_requests:,}",
        f"{figures.num_output_tokens:,}",
        "" if length is None else f"{length:.4f}",
        _milliseconds(figures.time_to_first_token),
        _milliseconds(figures.time_per_output_token),
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"
