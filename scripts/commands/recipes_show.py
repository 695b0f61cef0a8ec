"""`draftquant recipes show`: one recipe as it is hashed and stored."""

import argparse

import yaml

from ...recipes import recipe_sha256, to_mapping
from ..api.recipes import recipes_show
from ..console import print_document, print_json

VERB = recipes_show


def run(options: argparse.Namespace) -> int:
    """Print the recipe and its hash."""
    recipe = recipes_show.run(options.settings)
    if options.json:
        print_json(to_mapping(recipe) | {"sha256": recipe_sha256(recipe)})
    else:
        print_document(f"# sha256 of the resolved recipe: {recipe_sha256(recipe)}")
        print_document(yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100))
    return 0
