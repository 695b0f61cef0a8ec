"""`draftquant golden`: golden acceptance as load tests, Prometheus and Grafana take it."""

import argparse
from typing import TYPE_CHECKING

from ..api.golden import golden
from ..console import print_document, print_json, print_table, stderr, table

if TYPE_CHECKING:
    from ...validate.golden.golden import Golden

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
