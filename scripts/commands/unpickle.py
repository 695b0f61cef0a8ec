"""`draftquant unpickle`: a draft's pickled weights (pytorch_model.bin) as safetensors."""

import argparse
from pathlib import Path

from ...quantize.files.hub import resolve_draft
from ..console import megabytes, print_json, stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`unpickle DRAFT --out O`."""
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id (owner/name)")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...quantize.files.unpickle import unpickle_draft

    done = unpickle_draft(resolve_draft(options.draft).folder, options.out)
    if options.json:
        print_json(
            {
                "out": str(done.out),
                "files": list(done.files),
                "tensors": done.tensors,
                "bytes": done.nbytes,
            }
        )
    else:
        stdout().line(
            (str(done.out), "bold"),
            f": {done.tensors} tensors of {', '.join(done.files)}, {megabytes(done.nbytes)}, value"
            " for value",
        )
    return 0
