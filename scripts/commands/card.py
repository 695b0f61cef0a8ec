"""`draftquant card`: README.md of a quantized draft, for the Hub."""

import argparse

from ..api.card import card
from ..api.references import optional_path
from ..console import print_document, print_json, stdout

VERB = card


def run(options: argparse.Namespace) -> int:
    """Print the card, or where it was written."""
    text, out = card.run(options.settings), optional_path(options.settings.out)
    if options.json:
        print_json({"out": None if out is None else str(out), "card": text})
    elif out is not None:
        stdout().line((str(out), "bold"), f": the model card, {len(text.splitlines())} lines")
    else:
        print_document(text)
    return 0
