"""`golden`, whole: golden acceptance in the forms of load tests and Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...quantize.files.report_files import check_place, write_reports
from ...recipes.brief import Brief
from ...recipes.errors import GoldenError
from ..golden.golden_acceptance import ALL, Golden, read_golden
from ..golden.prometheus import Queries, check_window, limits_of, prometheus_rules
from ..golden.synthetic import simulation
from .serving_asked import GoldenRun


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GoldenText(Brief):
    """What was made from golden acceptance.

    Attributes:
        golden: the golden acceptance that was read.
        text: arguments or rules; "" where nothing was asked for.
        notes: what to know about it, one sentence each.
        out: the file that was written, if one was asked for.
    """

    golden: Golden
    text: str
    notes: tuple[str, ...]
    out: Path | None

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self.golden.brief(), "written": self.out}


def golden_made(asked: GoldenRun) -> GoldenText:
    """Read golden acceptance, and turn it into the requested form."""
    out = None if asked.out is None else Path(asked.out)
    if out is not None:
        check_place(out, overwrite=asked.overwrite)
    golden, category = read_golden(Path(asked.golden)), asked.category or ALL
    if category not in golden.categories:
        known = ", ".join(filter(None, golden.categories)) or "none"
        raise GoldenError(asked.golden, f"has no category {category!r}, but {known}",
                          fix="leave --category out for all prompts")  # fmt: skip
    text, notes = _made(asked, golden, category)
    if out is not None:
        write_reports({out: text}, overwrite=asked.overwrite)
    return GoldenText(golden=golden, text=text, notes=notes, out=out)


def _made(asked: GoldenRun, golden: Golden, category: str) -> tuple[str, tuple[str, ...]]:
    to = asked.to
    if to is None:
        return "", ()
    if to == "prometheus":
        return _monitored(asked, golden, category), ()
    simulated = simulation(golden.categories[category], to)
    return f"{simulated.line}\n", simulated.notes


def _monitored(asked: GoldenRun, golden: Golden, category: str) -> str:
    measured = None if golden.source == "replay" else golden.source
    engine = asked.engine or measured
    if engine is None:
        raise GoldenError(
            "--engine",
            "is needed: a replay does not say whose counters are monitored",
            fix="give --engine vllm, sglang or tensorrt-llm",
        )
    check_window(asked.window)
    queries = Queries.of(engine, asked.model, asked.category_label)
    limits = limits_of(
        golden, asked.max_drop, category=category, by_category=asked.category_label is not None
    )
    return prometheus_rules(golden, limits, queries, asked.window)
