"""`draftquant reconcile`: what a server accepted against what replay says of the same prompts."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from ..api.reconcile import reconcile
from ..console import print_json, print_table, stdout, table

if TYPE_CHECKING:
    from ...validate.served.reconciliation import Reconciliation

SHOWN = 20
"""Differences that are printed; the report has all."""

OF_ROUNDS = {
    "K": "the server proposed fewer than K tokens",
    "kernel": "a near tie of the draft's logits, which kernels settle either way",
    "draft": "the server had another draft",
}


VERB = reconcile


def run(options: argparse.Namespace) -> int:
    """Reconcile; 0 = all is explained, 1 = something is not, 3 = not known of some."""
    found = reconcile.run(options.settings)
    if options.json:
        print_json(found.to_mapping())
    else:
        print_reconciliation(found)
    return found.exit_code


def print_reconciliation(found: "Reconciliation") -> None:
    """Print the figures over all prompts, the first differences, and what they come to."""
    out, prompts = stdout(), found.prompts
    numbers = ("acceptance length", "verify steps")
    lengths = table(
        f"{found.name}, K = {found.num_draft_tokens}, {len(prompts)} prompts",
        "",
        *numbers,
        right=numbers,
    )
    for name, counts in found.totals.items():
        length = f"{counts.mean_acceptance_length:.4f}" if counts.num_steps else ""
        lengths.row(name, length, f"{counts.num_steps:,}")
    print_table(lengths)
    compared = sum(prompt.num_compared for prompt in prompts)
    equal = sum(prompt.num_equal for prompt in prompts)
    beyond = sum(prompt.num_beyond for prompt in prompts)
    out.line(
        f"{equal:,} of {compared:,} verify steps in text that both wrote are equal; replay does not"
        f" count {beyond:,} more, at the end of that text or after it"
    )
    _print_differences(found)
    outcomes = [prompt.outcome for prompt in prompts]
    said = ", ".join(
        f"{outcomes.count(name)} {name}"
        for name in ("equal", "explained", "not known", "unexplained")
        if name in outcomes
    )
    out.line(f"prompts: {said}")
    if "not known" in outcomes:
        out.line(
            "  to learn how near a tie was, record with --logprobs --top-logprobs 8 or measure with"
            " --top-logprobs 2"
        )
    for warning in found.warnings:
        out.line(("warning:", "yellow"), f" {warning}")
    if found.num_left_out:
        out.line(f"{found.num_left_out} more common prompts are left out (--limit)")


def _print_differences(found: "Reconciliation") -> None:
    """Rounds that are explained by their number, everything else one by one, the worst first."""
    ranks = {False: 0, None: 1, True: 2}
    words = {False: "unexplained", None: "not known", True: "explained"}
    rows = [(prompt.id, one) for prompt in found.prompts for one in prompt.differences]
    explained = Counter(one.kind for _, one in rows if one.explained and one.kind in OF_ROUNDS)
    for kind, count in sorted(explained.items()):
        stdout().line(f"{count:,} of the others are explained: {OF_ROUNDS[kind]}")
    told = [row for row in rows if not (row[1].explained and row[1].kind in OF_ROUNDS)]
    if not told:
        return
    told.sort(key=lambda row: ranks[row[1].explained])
    more = f", the first {SHOWN} of {len(told)}" if len(told) > SHOWN else ""
    shown = table(f"Differences{more}", "prompt", "token", "kind", "what", "")
    for name, one in told[:SHOWN]:
        position = "" if one.position is None else str(one.position)
        shown.row(name, position, one.kind, one.what, words[one.explained])
    print_table(shown)
