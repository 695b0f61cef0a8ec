"""A file of counts of any other text, by the user: how often each token of the target stands in it.

JSON, one array of as many whole numbers as the target has tokens, the count of token 0 first.
"""

from pathlib import Path

import numpy as np

from ...recipes.errors import reason, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import CalibrationError
from .token_counts import Counts

_LARGEST = 2**53
_FORM = "write one JSON array with the count of every token of the target, token 0 first"


def read_general_counts(path: Path, vocab_size: int) -> Counts:
    """Read the file.

    Args:
        vocab_size: tokens of the target.

    Returns:
        [vocab_size] int64, with at least one above 0.

    Raises:
        CalibrationError: it cannot be read, or is not such a file.
    """
    try:
        counts = parse_json(read_text(path))
    except OSError as exc:
        raise CalibrationError(path, f"cannot be read: {reason(exc)}", fix=_FORM) from exc
    except JsonProblem as exc:
        raise CalibrationError(path, str(exc), fix=_FORM) from exc
    if not isinstance(counts, list):
        raise CalibrationError(path, f"expected a JSON array, got {short(counts)}", fix=_FORM)
    for token, count in enumerate(counts):
        if type(count) is not int or not 0 <= count < _LARGEST:
            what = f"token {token}: expected a whole number from 0 on, got {short(count)}"
            raise CalibrationError(path, what, fix=_FORM)
    if len(counts) != vocab_size:
        raise CalibrationError(
            path,
            f"expected {vocab_size:,} counts, one for each token of the target, got"
            f" {len(counts):,}",
            fix="count with the tokenizer of the target, whose config.json says vocab_size",
        )
    if not any(counts):
        raise CalibrationError(path, "every count is 0", fix="count the tokens of some text")
    return np.array(counts, dtype=np.int64)
