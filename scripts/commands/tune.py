"""`draftquant tune`: which formats the linears of a draft may have, and the recipe that says so."""

import argparse

from ..api.tune import tune
from ..console import print_json
from .tune_report import print_choice, print_report

VERB = tune


def run(options: argparse.Namespace) -> int:
    """Tune, and print what was found; 1 if no mixture is as wanted."""
    settings = options.settings
    report = tune.run(settings)
    if options.json:
        out = str(settings.out) if report.recipe else None
        print_json(report.to_mapping() | {"algorithm": report.algorithm, "out": out})
    else:
        print_report(report)
        print_choice(settings, report)
    return 0 if report.recipe else 1
