"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse

from ..api.recipes import RecipesListSettings
from ..console import OnTerminal
from ..parsers import CommandParser
from . import recipes_list
from .verbs import Verbs, add_verbs, run_verb

VERBS: Verbs = {
    "list": (
        "recipes_list",
        "the built-in recipes, those of a GPU, an engine or a family if asked",
    ),
    "show": ("recipes_show", "one recipe, resolved: what is hashed and stored"),
    "check": ("recipes_check", "report every problem of a recipe file"),
}


def add_arguments(parser: CommandParser) -> None:
    """`recipes [VERB ...]`."""
    add_verbs(parser, VERBS, required=False)


def run(options: argparse.Namespace) -> int:
    """Run the verb; without one, list all."""
    if options.verb is None:
        options.settings = RecipesListSettings(watch=OnTerminal())
        return recipes_list.run(options)
    return run_verb(options, VERBS)
