"""How drafts of the Hugging Face Hub are named."""

import re

NAMES = r"[\w][\w.-]*/[\w][\w.-]*"
"""Owner and name."""
_HUB_ID = re.compile(rf"{NAMES}(@[\w./-]+)?")


def is_hub_id(reference: str) -> bool:
    """True for `owner/name` and `owner/name@revision`."""
    return _HUB_ID.fullmatch(reference) is not None
