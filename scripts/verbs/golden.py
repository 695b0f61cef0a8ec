"""`golden`: golden acceptance as load tests, Prometheus and Grafana take it."""

import argparse
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typing_extensions import override

from ...quantize.files.report_files import check_place, write_reports
from ...recipes.brief import Brief
from ...recipes.errors import GoldenError
from ...recipes.regular_file import AnyPath
from ...validate.measure.measurement import EngineName
from ..frame.arguments import Overwrite, share
from ..frame.console import print_document, print_json, print_table, stderr, table
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...validate.golden.golden_acceptance import Golden

Form = Literal["vllm", "sglang", "tensorrt-llm", "prometheus", "grafana"]
_MONITORED: tuple[Form, ...] = ("prometheus", "grafana")
_TAKEN_BY: Mapping[str, tuple[Form, ...]] = {
    "engine": _MONITORED,
    "model": ("prometheus",),  # a dashboard lets its reader choose among the served targets
    "category_label": _MONITORED,
    "max_drop": _MONITORED,
    "window": ("prometheus",),
}
"""Options that say something of these forms alone."""


@dataclass(frozen=True, slots=True)
class GoldenSettings(Settings):
    """Which file, for whom, and of which of its prompts."""

    golden: Annotated[
        AnyPath,
        Argument("golden acceptance, written by --golden of another command", "G.json"),
    ]
    _: KW_ONLY
    to: Annotated[
        Form | None,
        Option(
            "what is made of it: settings by which an engine simulates this acceptance (vllm,"
            " sglang, tensorrt-llm), rules for Prometheus or a dashboard for Grafana; without it"
            " the figures are printed",
            flag="--for",
        ),
    ] = None
    category: Annotated[
        str | None,
        Option("category of prompts that your traffic is like (default: all)", "CATEGORY"),
    ] = None
    category_label: Annotated[
        str | None,
        Option("label of the counters whose values are categories of golden: each has a limit of"
               " its own", "NAME"),
    ] = None  # fmt: skip
    engine: Annotated[
        EngineName | None,
        Option("engine whose counters are monitored (default: the one that was measured)"),
    ] = None
    model: Annotated[
        str | None,
        Option("name of the served target; others in the same Prometheus are left out", "NAME"),
    ] = None
    max_drop: Annotated[
        float,
        Option(
            "relative drop of the acceptance length that is tolerated, below golden's 95%% interval"
            " (default 1%%, as the gate tolerates in a release)",
            "SHARE",
            reads=share,
        ),
    ] = 0.01
    window: Annotated[
        str,
        Option("time over which the rules add up counters, in Prometheus' words (default 1h)",
               "TIME"),
    ] = "1h"  # fmt: skip
    out: Annotated[AnyPath | None, Option("write it here instead of printing it", "FILE")] = None
    overwrite: Overwrite = False

    exclusive = (("category", "category_label"),)

    def check(self) -> None:
        """What is asked for has what it needs."""
        for name, forms in _TAKEN_BY.items():
            given = getattr(self, name) != self.__dataclass_fields__[name].default
            if given and self.to not in forms:
                option = f"--{name.replace('_', '-')}"
                raise GoldenError(option, f"is for --for {' and '.join(forms)} alone",
                                  fix="leave it out, or ask for what takes it")  # fmt: skip
        if self.model is not None and not (self.model and self.model.isprintable()):
            raise GoldenError("--model", f"expected a name, got {self.model!r}",
                              fix="give the name under which the target is served")  # fmt: skip
        if self.to is None and self.out is not None:
            raise GoldenError("--out", "needs --for, which says what to write",
                              fix="add --for prometheus, for example")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GoldenText(Brief):
    """What was made of golden acceptance.

    Attributes:
        golden: that was read.
        text: arguments, rules or a dashboard; "" where nothing was asked for.
        notes: what has to be known of it, a sentence each.
        out: the file that was written, if one was asked for.
    """

    golden: "Golden"
    text: str
    notes: tuple[str, ...]
    out: Path | None

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self.golden.brief(), "written": self.out}


@verb(GoldenSettings)
def golden(settings: GoldenSettings) -> GoldenText:
    """Turn golden acceptance into settings of load tests, alerts or a dashboard.

    Returns:
        The golden acceptance that was read, and what was made of it as text.

    Raises:
        GoldenError: the file is no golden acceptance, its figures do not follow from its counts, or
            it lacks the category; or no limit follows from it, or none that a draft can fall below.
        OutputError: the file to write exists already, or cannot be written.
    """
    from ...validate.golden.golden_acceptance import ALL, read_golden

    out = None if settings.out is None else Path(settings.out)
    if out is not None:
        check_place(out, overwrite=settings.overwrite)
    found, category = read_golden(Path(settings.golden)), settings.category or ALL
    if category not in found.categories:
        known = ", ".join(filter(None, found.categories)) or "none"
        raise GoldenError(settings.golden, f"has no category {category!r}, but {known}",
                          fix="leave --category out for all prompts")  # fmt: skip
    text, notes = _made(settings, found, category)
    if out is not None:
        write_reports({out: text}, overwrite=settings.overwrite)
    return GoldenText(golden=found, text=text, notes=notes, out=out)


def _made(settings: GoldenSettings, golden: "Golden", category: str) -> tuple[str, tuple[str, ...]]:
    from ...validate.golden.synthetic import simulation

    to = settings.to
    if to is None:
        return "", ()
    if to == "prometheus" or to == "grafana":
        return _monitored(settings, golden, category), ()
    found = simulation(golden.categories[category], to)
    return f"{found.line}\n", found.notes


def _monitored(settings: GoldenSettings, golden: "Golden", category: str) -> str:
    from ...validate.golden.grafana_dashboard import grafana_dashboard
    from ...validate.golden.prometheus import Queries, check_window, limits_of, prometheus_rules

    measured = None if golden.source == "replay" else golden.source
    engine = settings.engine or measured
    if engine is None:
        raise GoldenError(
            "--engine",
            "is needed: a replay does not say whose counters are monitored",
            fix="give --engine vllm, sglang or tensorrt-llm",
        )
    check_window(settings.window)
    queries = Queries.of(engine, settings.model, settings.category_label)
    limits = limits_of(
        golden,
        settings.max_drop,
        category=category,
        by_category=settings.category_label is not None,
    )
    if settings.to == "grafana":
        return grafana_dashboard(golden, limits, queries)
    return prometheus_rules(golden, limits, queries, settings.window)


# ---- `draftquant golden`: golden acceptance as load tests, Prometheus and Grafana take it

VERB = golden


def run(options: argparse.Namespace) -> int:
    """Print what was made, and on stderr what has to be known of it."""
    found = golden.run(options.settings)
    if options.json:
        from ...recipes.decode import encode

        own = encode(found.golden)
        out = None if found.out is None else str(found.out)
        print_json({"golden": own, "text": found.text, "notes": found.notes, "out": out})
        return 0
    if not found.text:
        _print(found.golden)
    elif found.out is None:
        print_document(found.text)
    for note in found.notes:
        stderr().line(note)
    if found.out is not None:
        stderr().line((str(found.out), "bold"), f": written for {options.settings.to}")
    return 0


def _print(golden: "Golden") -> None:
    """One row for all prompts, for each category and for each context bin."""
    positions = [f"pos {i + 1}" for i in range(golden.num_draft_tokens)]
    numbers = ("acceptance length", "standard error", "prompts", "verify steps", *positions)
    where = "replayed" if golden.source == "replay" else f"{golden.source} {golden.source_version}"
    found = table(
        f"{golden.draft}, K = {golden.num_draft_tokens}, {where}", "prompts of", *numbers,
        right=numbers, spare=("verify steps", "prompts"),
    )  # fmt: skip
    rows = [(name or "all", own) for name, own in golden.categories.items()]
    rows += [(f"context {name}", own) for name, own in golden.context_bins.items()]
    for name, own in rows:
        error = own.standard_error
        found.row(
            name,
            f"{own.mean_acceptance_length:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{own.prompts:,}",
            f"{own.verify_steps:,.0f}",
            *(f"{rate:.3f}" for rate in own.acceptance_rates),
        )
    print_table(found)
