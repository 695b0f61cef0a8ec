"""Loading a draft with the vLLM that is installed here: all that touches its insides.

Run with vLLM 0.21 to 0.32 on a CPU with its kernels, and with 0.26 to 0.33 on faked GPUs.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .loaded_model import FolderTensors, Steps, Subject, architecture_of_gpu

NAME = "vllm"
NEEDED = {
    "vllm.config": (
        "CacheConfig DeviceConfig LoadConfig ModelConfig ParallelConfig SpeculativeConfig"
        " VllmConfig set_current_vllm_config"
    ),
    "vllm.distributed.parallel_state": "init_distributed_environment initialize_model_parallel",
    "vllm.model_executor.model_loader.default_loader": "DefaultModelLoader",
    "vllm.model_executor.model_loader.utils": "initialize_model",
    "vllm.platforms": "current_platform",
    "vllm.plugins": "load_general_plugins",
}
"""Modules and the names that are used of them."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_POSITIONS = 1024
_OF_MTP = re.compile(r"mtp|\beh_proj\b|\bpre_projection\b|\.enorm\b")
_UNUSED = r"[.]layers[.][1-9][0-9]*[.]hidden_norm[.]|shared_head[.]head"
"""Layers after the first of `llama_eagle3.py` and `deepseek_eagle3.py` build and skip it; the head
of an MTP layer is filled with the target's (`glm4_moe_mtp.py`)."""
_UNUSED_TABLE = "|draft_id_to_target_id"
"""Before 0.30 it is zeros for drafts that propose the whole vocabulary."""


def device() -> str:
    """The device, as people call it."""
    from vllm.platforms import current_platform

    if kind() == "cpu":
        return "the CPU"
    return f"{current_platform.get_device_name()} ({architecture_of_gpu()})"


def kind() -> str:
    """Of the device, as torch calls it."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def start(stack: ExitStack) -> None:
    """One process with its plugins, as `vllm serve` starts it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    meeting = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "group"
    with set_current_vllm_config(VllmConfig(device_config=_device_config())):
        if kind() != "cpu":
            torch.get_device_module(kind()).set_device(0)
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=meeting.as_uri(),
            local_rank=0,
            backend=getattr(current_platform, "dist_backend", None) or "gloo",
        )
        parallel_state.initialize_model_parallel(1, 1)


def subject(draft: Path, target: Path) -> Subject:
    """The draft, as `vllm serve --speculative-config` builds it beside this target."""
    on = kind()
    return beside(draft_config(draft, target), draft, device=None if on == "cpu" else on)


def beside(config: Any, draft: Path, **given: Any) -> Subject:
    """The draft of the engine's `config`, which has its target; a whole model has its own."""
    speculative = config.speculative_config
    if speculative.method == "draft_model":
        own = of_its_own(config)
        return shard(own, speculative.draft_model_config, draft, prefix="draft_model", **given)
    steps = partial(_head_step, config, given.get("device"))
    return shard(config, speculative.draft_model_config, draft, more_steps=steps, **given)


def shard(
    config: Any,
    served: Any,
    folder: Path,
    *,
    prefix: str = "",
    target_first: bool = False,
    device: "str | None" = None,
    more_steps: "Callable[[nn.Module], Steps]" = lambda _model: {},
    only: Callable[[str], bool] = lambda _name: True,
    **more: Any,
) -> Subject:
    """Of the model `served`; `target_first`: the target is built before, and shares its config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model

    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said = said.get("text_config", said)
    pruned = said.get("draft_vocab_size") not in (None, said.get("vocab_size"))

    def build() -> nn.Module:
        config.compilation_config.static_forward_context.clear()  # of the model built before
        before = torch.get_default_dtype()
        torch.set_default_dtype(served.dtype)
        try:
            with ExitStack() as stack:
                if device is not None:
                    stack.enter_context(torch.device(device))
                if target_first:
                    initialize_model(vllm_config=config)
                model: nn.Module = initialize_model(
                    vllm_config=config, model_config=served, prefix=prefix
                )
                return model
        finally:
            torch.set_default_dtype(before)

    return Subject(
        build=build,
        load_folder=lambda model: DefaultModelLoader(config.load_config).load_weights(
            model, served
        ),
        tensors=FolderTensors(folder, only=only),
        unused=re.compile(_UNUSED if pruned else _UNUSED + _UNUSED_TABLE),
        context=set_current_vllm_config(config),
        last_steps=lambda model: {
            **_attention_steps(model, served.dtype),
            **_context_steps(model, served.dtype),
            **more_steps(model),
        },
        **more,
    )


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
    from vllm.model_executor.model_loader import utils

    def is_attention(module: nn.Module) -> bool:  # before 0.28
        return type(module).__name__ in ("Attention", "MLAAttention")

    is_deferred = getattr(utils, "is_deferred_attention_layer", is_attention)
    return {
        name: partial(module.process_weights_after_loading, dtype)
        for name, module in model.named_modules()
        if is_deferred(module)
    }


def _head_step(config: Any, device: "str | None", model: nn.Module) -> Steps:
    """The V2 model runner compares a head of the draft with the target's, value by value.

    Source: `load_eagle_model` and `load_dflash_model` of 0.33.0, in `v1/worker/gpu/spec_decode`;
    the V1 model runner, as on CPUs, only looks whether there is one.
    """
    if not getattr(config, "use_v2_model_runner", False) or not hasattr(model, "lm_head"):
        return {}
    try:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share
    except ImportError:  # a version without this comparison
        return {}
    if getattr(model.config, "has_own_lm_head", False):  # of DFlash, which is not compared
        return {}

    def compare() -> None:
        target = config.model_config
        with torch.device(device or "cpu"):
            head = ParallelLMHead(
                target.get_vocab_size(), target.get_hidden_size(), params_dtype=target.dtype
            )
        _should_share(model, "has_own_lm_head", model.lm_head, head)

    return {"lm_head": compare}


def _context_steps(model: nn.Module, dtype: torch.dtype) -> Steps:
    """Laguna, Gemma 4 and, before 0.31, all blocks multiply contexts with weights as stored.

    Source: `_project_context_kv` of `laguna_dflash.py`, `gemma4_dspark.py` and `qwen3_dflash.py`.
    """
    found = {
        name: getattr(getattr(model, "model", None), name, None)
        for name in ("_kv_weights", "_fused_k_weight", "_fused_kv_weight")
    }
    return {
        name: partial(torch.matmul, torch.zeros(1, table.shape[-1], dtype=dtype), table.mT)
        for name, table in found.items()
        if table is not None
    }


def method_of(architecture: str, tensors: "Collection[str]") -> str:
    """VLLM's method for a draft, as `draftquant check` says; tensors tell where its name does not.

    Args:
        architecture: in config.json. tensors: their names.
    """
    if any(map(_OF_MTP.search, tensors)):
        return "mtp"
    block = ("DFlash", "LiLiCorr", "XPress", "MuseGlimmer", "Laguna")
    for part, method in (("DSpark", "dspark"), *((part, "dflash") for part in block)):
        if part in architecture:
            return method
    if "Eagle3" in architecture or any("hidden_norm" in name for name in tensors):
        return "eagle3"
    fused = "Eagle" in architecture or any(re.search(r"(^|[.])fc[.]", name) for name in tensors)
    return "eagle" if fused else "draft_model"


def draft_config(draft: Path, target: Path, device: "str | None" = None) -> Any:
    """The engine's config for this target and draft, in BF16 as the target is served."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    architecture, tensors = config["architectures"][0], FolderTensors(draft)
    method = method_of(architecture, tensors)
    # The default where Triton is, without which V1 is taken, which refuses candidate selectors,
    # DSpark and layers of two kinds.
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    heads = ("DFlash2", "LiLiCorr", "XPress")  # beside the layers
    slides = "sliding_attention" in (config.get("layer_types") or ())
    if any(part in architecture for part in heads) or method == "dspark" or slides:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    said: dict[str, Any] = {"parallel_drafting": True} if "mask_hidden" in tensors else {}
    said |= {"model": str(draft), "method": method, "num_speculative_tokens": 3}
    return speculating(target, device, **said)


def speculating(target: Path, device: "str | None" = None, **speculative: Any) -> Any:
    """The engine's config of a target that is served with a draft; without one, of it alone."""
    from vllm.config import (
        CacheConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    most = config.get("text_config", config).get("max_position_embeddings") or _POSITIONS
    served = ModelConfig(
        model=str(target),
        tokenizer=str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=min(most, _POSITIONS),
    )
    parallel = ParallelConfig()
    if speculative:
        speculative = {
            "speculative_config": SpeculativeConfig(
                target_model_config=served, target_parallel_config=parallel, **speculative
            )
        }
    return VllmConfig(
        model_config=served,
        parallel_config=parallel,
        load_config=LoadConfig(use_tqdm_on_load=False),
        cache_config=CacheConfig(block_size=16),
        device_config=_device_config(device),
        **speculative,
    )


def _device_config(device: "str | None" = None) -> Any:
    from vllm.config import DeviceConfig

    return DeviceConfig(device or kind())
