"""`draftquant unpickle`: a draft's pickled weights (pytorch_model.bin) as safetensors."""

import argparse

from ..api.unpickle import unpickle
from ..console import megabytes, print_json, stdout

VERB = unpickle


def run(options: argparse.Namespace) -> int:
    """Unpickle, and print what was written."""
    done = unpickle.run(options.settings)
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
