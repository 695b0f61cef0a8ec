"""Load draft folders with vLLM's own config parser, model class and loader, on a CPU.

Usage: `VENV/bin/python vllm_loader.py --arch sm90 --target TARGET DRAFT...`.
"""

import json
import os
import re
from collections.abc import Callable
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
from captures import Captured, function_of, method_of, reads_layers, vllm_captures
from loader import run, tensors_of_layer
from proposals import vllm_proposals
from torch import nn
from verdict import Steps, Subject, read_tensors

_SHARING = "gpu/spec_decode/eagle/utils.py"
_UNUSED = re.compile(r"[.]layers[.][1-9][0-9]*[.]hidden_norm[.]|shared_head[.]head")
"""Layers after the first of `llama_eagle3.py` and `deepseek_eagle3.py` build and skip it; the head
of an MTP layer is filled with the target's (`glm4_moe_mtp.py`)."""


def subject(draft: Path, target: Path, tp: int, rank: int) -> Subject:
    """One shard of the draft, as `vllm serve --speculative-config` builds it."""
    config = _config(draft, target)
    vllm_platform.become_rank(tp, rank)
    speculative = config.speculative_config
    whole = speculative.method == "draft_model"
    # Other shards, and wholes and MTP layers, have no head of fewer rows.
    asked = tp == 1 and speculative.method not in ("draft_model", "mtp")
    dtype = config.model_config.dtype
    return _shard(
        of_its_own(config) if whole else config,
        speculative.draft_model_config,
        read_tensors(draft),
        rank,
        prefix="draft_model" if whole else "",
        captures=lambda: _captures(speculative),
        proposes=lambda model: vllm_proposals(model, config) if asked else [],
        more_steps=lambda model: {} if whole else _head_step(model, dtype),
    )


def of_layer(folder: Path, _target: Path, tp: int, rank: int) -> Subject:
    """A target's MTP layer, as `vllm serve FOLDER --speculative-config` with mtp builds it."""
    config = speculating(folder, method="mtp", num_speculative_tokens=1)
    vllm_platform.become_rank(tp, rank)
    served = config.speculative_config.draft_model_config
    return _shard(config, served, tensors_of_layer(folder), rank, is_second=True)


def _shard(
    config: Any,
    served: Any,
    tensors: dict[str, torch.Tensor],
    rank: int,
    *,
    prefix: str = "",
    is_second: bool = False,
    more_steps: Callable[[nn.Module], Steps] = lambda _model: {},
    **more: Any,
) -> Subject:
    """Of the model `served`; `is_second`: the target is built first, and shares its config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    def build() -> nn.Module:
        config.compilation_config.static_forward_context.clear()  # of the model built before
        with set_default_torch_dtype(served.dtype):
            if is_second:
                initialize_model(vllm_config=config)
            return initialize_model(vllm_config=config, model_config=served, prefix=prefix)

    return Subject(
        build=build,
        load_folder=lambda model: DefaultModelLoader(config.load_config).load_weights(
            model, served
        ),
        tensors=tensors,
        needs_gpu=vllm_platform.needs_gpu,
        unused=_UNUSED,
        first=rank == 0,
        context=set_current_vllm_config(config),
        last_steps=lambda model: {
            **_attention_steps(model, served.dtype),
            **_context_steps(model, served.dtype),
            **more_steps(model),
        },
        **more,
    )


def _captures(speculative: Any) -> Captured:
    return vllm_captures(speculative) if reads_layers(speculative.method) else {}


def of_its_own(config: Any) -> Any:
    """A whole model as a draft gets a config of its own: `DraftModelProposer`.

    Source: `_create_draft_vllm_config` of `v1/spec_decode/draft_model.py`, and `load_draft_model`
    of `v1/worker/gpu/spec_decode/standalone_ar/speculator.py`.
    """
    from vllm.config.utils import replace

    speculative = config.speculative_config
    speculative.verify_equal_vocab_size_if_draft_model()
    return replace(
        config,
        quant_config=None,
        parallel_config=speculative.draft_parallel_config,
        model_config=speculative.draft_model_config,
    )


def _attention_steps(model: nn.Module, dtype: torch.dtype) -> Steps:
    """MLA takes kv_b_proj apart after all modules are done."""
    from vllm.model_executor.model_loader.utils import is_deferred_attention_layer

    return {
        name: partial(module.process_weights_after_loading, dtype)
        for name, module in model.named_modules()
        if is_deferred_attention_layer(module)
    }


def _context_steps(model: nn.Module, dtype: torch.dtype) -> Steps:
    """Drafts of Laguna and Gemma 4 multiply contexts with weights as they are stored.

    Source: `_project_context_kv` of `laguna_dflash.py` and `gemma4_dspark.py`.
    """
    found = {
        name: getattr(getattr(model, "model", None), name, None)
        for name in ("_kv_weights", "_fused_k_weight")
    }
    return {
        name: partial(torch.matmul, torch.zeros(1, table.shape[-1], dtype=dtype), table.mT)
        for name, table in found.items()
        if table is not None
    }


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


def _config(draft: Path, target: Path) -> Any:
    """The engine's config for this target and draft, in BF16 as the target is served."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    architecture, tensors = config["architectures"][0], read_tensors(draft)
    method = method_of(architecture, tensors)
    # The default where Triton is, without which V1 is taken, which refuses candidate selectors,
    # DSpark and layers of two kinds.
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    heads = ("DFlash2", "LiLiCorr", "XPress")  # beside the layers
    slides = "sliding_attention" in (config.get("layer_types") or ())
    if any(part in architecture for part in heads) or method == "dspark" or slides:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return speculating(
        target,
        model=str(draft),
        method=method,
        parallel_drafting="mask_hidden" in tensors,
        num_speculative_tokens=3,
    )


def speculating(target: Path, **speculative: Any) -> Any:
    """The engine's config of a target that is served with a draft."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    served = ModelConfig(
        model=str(target),
        tokenizer=str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
    )
    parallel = ParallelConfig()
    return VllmConfig(
        model_config=served,
        parallel_config=parallel,
        speculative_config=SpeculativeConfig(
            target_model_config=served, target_parallel_config=parallel, **speculative
        ),
        load_config=LoadConfig(use_tqdm_on_load=False),
        cache_config=CacheConfig(block_size=16),
        device_config=DeviceConfig("cpu"),
    )


if __name__ == "__main__":
    run("vllm", vllm_platform, subject, of_layer)
