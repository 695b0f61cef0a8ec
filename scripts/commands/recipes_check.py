"""`draftquant recipes check`: whether a recipe file is good."""

import argparse

from ..api.recipes import recipes_check
from ..console import print_json, stdout

VERB = recipes_check


def run(options: argparse.Namespace) -> int:
    """Print that it is; what is wrong ends the run."""
    recipe = recipes_check.run(options.settings)
    if options.json:
        print_json({"recipe": recipe.name, "rules": len(recipe.rules), "good": True})
    else:
        given = options.settings.recipe
        stdout().line(f"{given}: good ({recipe.name}, {len(recipe.rules)} rules)")
    return 0
