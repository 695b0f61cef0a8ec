"""`draftquant card`: README.md of a quantized draft, for the Hub."""

import argparse
from pathlib import Path

from ...quantize.errors import OutputError
from ...quantize.files.card import CARD_FILE
from ...quantize.files.staging import check_output, replace_text
from ..api.card import card
from ..console import print_document, print_json, stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`card O [--gate G.json] [--measured R...] [--out FILE]`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that 'quantize' wrote")
    parser.add_argument(
        "--gate", type=Path, metavar="G.json", help="what 'gate --report' wrote of this draft"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        default=[],
        metavar="R.jsonl",
        help="what 'measure' wrote of servers with this draft",
    )
    parser.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="the draft that was quantized, where that was a local folder",
    )
    parser.add_argument(
        "--license", metavar="ID", help="of that draft, where its card names none: apache-2.0, mit"
    )
    parser.add_argument(
        "--name", metavar="OWNER/NAME", help="that O will have on the Hub, for launch commands"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"write it here, such as O/{CARD_FILE}"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace FILE; what others wrote in it stays"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    _check(options)
    text = card(
        options.folder,
        gate=options.gate,
        measured=options.measured,
        base_model=options.base_model,
        license=options.license,
        name=options.name,
    )
    if options.out:
        replace_text(options.out, text)
    if options.json:
        print_json({"out": str(options.out) if options.out else None, "card": text})
    elif options.out:
        lines = len(text.splitlines())
        stdout().line((str(options.out), "bold"), f": the model card, {lines} lines")
    else:
        print_document(text)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Where the card is to go.

    Raises:
        OutputError: nothing can be written there, or something would be lost.
    """
    if options.out is None:
        if options.overwrite:
            raise OutputError("--overwrite", "without --out, nothing is written", fix="add --out")
        return
    if not options.out.exists() or not options.overwrite:
        check_output(options.out)
    elif options.out.is_symlink() or not options.out.is_file():
        raise OutputError(options.out, "expected a file to replace", fix="give another name")
    elif options.out.resolve() != (options.folder / CARD_FILE).resolve():
        raise OutputError(
            options.out,
            f"--overwrite replaces the {CARD_FILE} of {options.folder} alone, whose text by others"
            " is kept",
            fix=f"--out {options.folder / CARD_FILE}, or a new file",
        )
