"""A draft as `check` asks of it, alone or beside its target, in folders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftquant.quantize.asked import Checking
from draftquant.quantize.engines.contract import EngineCheck
from draftquant.quantize.engines.engine_check import check_checkpoint, with_maths, with_values
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.finiteness import not_finite
from draftquant.quantize.pairing import pair_check
from draftquant.quantize.pairing.pair import PairCheck
from draftquant.quantize.stored.layouts import HF_QUANT_CONFIG


def check_draft(folder: Path, **asked: Any) -> EngineCheck:
    """In one engine: by headers, by what the draft computes, and by its tensors' values."""
    checkpoint = Checkpoint.open(folder)
    has_side_file = (folder / HF_QUANT_CONFIG).is_file()
    answer = check_checkpoint(checkpoint, has_side_file=has_side_file, **asked)
    return with_values(with_maths(answer, checkpoint), not_finite(checkpoint))


def check_config(draft: Any, config: Mapping[str, Any], **asked: Any) -> EngineCheck:
    """By headers, as if config.json were another one."""
    return check_checkpoint(replace(draft.checkpoint, config=config), has_side_file=False, **asked)


def check_pair(
    draft: Path,
    target: Path,
    *,
    arch: str | None = None,
    largest_feature: float | None = None,
    **asked: Any,
) -> PairCheck:
    """With the other fields of `Checking`."""
    how = Checking(draft, target=target, **asked)
    return pair_check.check_pair(draft, target, how, arch=arch, largest_feature=largest_feature)
