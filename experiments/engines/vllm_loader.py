"""Load draft folders with vLLM's own config parser, model class and loader, on a CPU.

Usage: `VENV/bin/python vllm_loader.py --arch sm90 --target TARGET DRAFT...`.
"""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_TARGET_DEVICE="cpu",  # the one platform that imports without compiled parts
)

import torch
import vllm_platform
from captures import Captured, function_of, reads_layers, vllm_captures
from loader import Loaded, run, tensors_of_layer
from torch import nn

from inside.in_vllm import draft_config, of_its_own, shard, speculating  # isort: skip
from inside.loaded_model import Steps, Subject  # isort: skip

_SHARING = "gpu/spec_decode/eagle/utils.py"


def loaded(draft: Path, target: Path, tp: int, rank: int) -> Loaded:
    """One shard of the draft, as `vllm serve --speculative-config` builds it."""
    config = draft_config(draft, target, "cpu")
    vllm_platform.become_rank(tp, rank)
    speculative = config.speculative_config
    whole = speculative.method == "draft_model"
    dtype = config.model_config.dtype
    subject = shard(
        of_its_own(config) if whole else config,
        speculative.draft_model_config,
        draft,
        prefix="draft_model" if whole else "",
        more_steps=lambda model: {} if whole else _head_step(model, dtype),
        needs_gpu=vllm_platform.needs_gpu,
        whole=tp == 1,
        first=rank == 0,
    )
    return Loaded(subject=subject, captures=lambda: _captures(speculative))


def subject(draft: Path, target: Path) -> Subject:
    """The whole draft."""
    return loaded(draft, target, 1, 0).subject


def of_layer(folder: Path, _target: Path, tp: int, rank: int) -> Loaded:
    """A target's MTP layer, as `vllm serve FOLDER --speculative-config` with mtp builds it."""
    config = speculating(folder, "cpu", method="mtp", num_speculative_tokens=1)
    vllm_platform.become_rank(tp, rank)
    served = config.speculative_config.draft_model_config
    subject = shard(
        config,
        served,
        folder,
        target_first=True,
        only=tensors_of_layer(folder).__contains__,
        needs_gpu=vllm_platform.needs_gpu,
        whole=tp == 1,
        first=rank == 0,
    )
    return Loaded(subject=subject)


def _captures(speculative: Any) -> Captured:
    return vllm_captures(speculative) if reads_layers(speculative.method) else {}


def _head_step(model: nn.Module, dtype: torch.dtype) -> Steps:
    """The V2 model runner, which is the default, compares a head of the draft with the target's.

    Source: `load_eagle_model` and `load_dflash_model` of `v1/worker/gpu/spec_decode`.
    """
    if getattr(model.config, "has_own_lm_head", False):
        return {}
    config: Any = getattr(model.config, "text_config", model.config)
    table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    targets = SimpleNamespace(weight=table)
    should_share = function_of(_SHARING, "_should_share", torch=torch, nn=nn)
    head = getattr(model, "lm_head", None)  # a borrowed one is not built
    return {"lm_head": partial(should_share, model, "has_own_lm_head", head, targets)}


if __name__ == "__main__":
    run("vllm", vllm_platform, loaded, of_layer)
