"""A draft beside its target as `check` asks of it, both in folders."""

from pathlib import Path
from typing import Any

from draftquant.quantize.asked import Checking
from draftquant.quantize.pairing import pair_check
from draftquant.quantize.pairing.pair import PairCheck


def check_pair(
    draft: Path,
    target: Path,
    *,
    arch: str | None = None,
    largest_feature: float | None = None,
    **asked: Any,
) -> PairCheck:
    """With the other fields of `Checking`."""
    settings = Checking(draft, target=target, **asked)
    return pair_check.check_pair(
        draft, target, settings, arch=arch, largest_feature=largest_feature
    )
