"""Load draft folders with vLLM's own config parser, model class and loader, on a CPU.

Usage: `VENV/bin/python vllm_loader.py --arch sm90 --target TARGET DRAFT...`.
"""

import os
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_TARGET_DEVICE="cpu",  # the one platform that imports without compiled parts
)

import vllm_platform
from captures import Captured, reads_layers, vllm_captures
from loader import Loaded, run, tensors_of_layer

from inside.in_vllm import beside, draft_config, shard, speculating  # isort: skip
from inside.loaded_model import Subject  # isort: skip


def loaded(draft: Path, target: Path, tp: int, rank: int) -> Loaded:
    """One shard of the draft, as `vllm serve --speculative-config` builds it."""
    config = draft_config(draft, target, "cpu")
    vllm_platform.become_rank(tp, rank)
    speculative = config.speculative_config
    made = beside(config, draft, needs_gpu=vllm_platform.needs_gpu, whole=tp == 1, first=rank == 0)
    return Loaded(subject=made, captures=lambda: _captures(speculative))


def subject(draft: Path, target: Path) -> Subject:
    """The whole draft."""
    return loaded(draft, target, 1, 0).subject


def of_layer(folder: Path, _target: Path, tp: int, rank: int) -> Loaded:
    """A target's MTP layer, as `vllm serve FOLDER --speculative-config` with mtp builds it."""
    config = speculating(folder, "cpu", method="mtp", num_speculative_tokens=1)
    vllm_platform.become_rank(tp, rank)
    drafting, only = config.speculative_config.draft_model_config, tensors_of_layer(folder)
    how = {"needs_gpu": vllm_platform.needs_gpu, "whole": tp == 1, "first": rank == 0}
    made = shard(config, drafting, folder, target_first=True, only=only.__contains__, **how)
    return Loaded(subject=made)


def _captures(speculative: Any) -> Captured:
    return vllm_captures(speculative) if reads_layers(speculative.method) else {}


if __name__ == "__main__":
    run("vllm", vllm_platform, loaded, of_layer)
