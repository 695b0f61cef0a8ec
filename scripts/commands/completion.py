"""`draftquant completion`: what a shell completes commands, options and recipes by."""

import argparse

from ..api.completion import completion
from ..console import print_document, print_json

VERB = completion


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    script = completion.run(options.settings)
    if options.json:
        print_json({"shell": options.settings.shell, "script": script})
    else:
        print_document(script)
    return 0
