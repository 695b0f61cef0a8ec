"""Loading a draft with the SGLang that is installed here: all that touches its insides.

Run with SGLang 0.5.19 to 0.5.23 on faked GPUs, without kernels (`experiments/engines`).
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .loaded_model import FolderTensors, Subject, architecture_of_gpu

NAME = "sglang"
NEEDED = {
    "sglang.srt.configs.load_config": "LoadConfig",
    "sglang.srt.configs.model_config": "ModelConfig",
    "sglang.srt.distributed.parallel_state": (
        "init_distributed_environment initialize_model_parallel"
    ),
    "sglang.srt.layers.dp_attention": "initialize_dp_attention",
    "sglang.srt.layers.quantization.fp4_utils": "initialize_fp4_gemm_config",
    "sglang.srt.layers.quantization.fp8_utils": "initialize_fp8_gemm_config",
    "sglang.srt.model_loader.loader": (
        "DefaultModelLoader _get_quantization_config _initialize_model"
    ),
    "sglang.srt.plugins": "load_plugins",
    "sglang.srt.runtime_context": "publish",
    "sglang.srt.server_args": "ServerArgs",
}
"""Modules and the names that are used of them."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_LOG_LEVEL": "error"}
_UNUSED = r"[.]layers[.][1-9][0-9]*[.]input_layernorm[.]|shared_head[.]head"
"""Layers after the first of `llama_eagle3.py` build it, and use hidden_norm in its place; the head
of an MTP layer is filled with the target's."""
_UNUSED_FUSION = "|[.]fc[.]"
"""It is built for drafts without one too, and not called: `llama_eagle3.py` compares the widths."""


def device() -> str:
    """The device, as people call it."""
    if kind() == "cpu":
        return "the CPU"
    return f"{torch.get_device_module(kind()).get_device_name()} ({architecture_of_gpu()})"


def kind() -> str:
    """Of the device, as torch calls it."""
    from sglang.srt.utils import get_device

    return str(get_device()).partition(":")[0]


def start(stack: ExitStack) -> None:
    """One process with its plugins, as the server starts it."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.plugins import load_plugins

    load_plugins()
    on = kind()
    arguments = published(on)
    if on != "cpu":
        torch.get_device_module(on).set_device(0)
    meeting = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "group"
    parallel_state.init_distributed_environment(
        backend="gloo" if on == "cpu" else "nccl",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=meeting.as_uri(),
    )
    parallel_state.initialize_model_parallel()
    given = {"server_args": arguments}
    if "model_config" in signature(initialize_dp_attention).parameters:  # 0.5.19
        given["model_config"] = SimpleNamespace(hf_config=None, hidden_size=0, dtype=None)
    initialize_dp_attention(**given)


def published(device: str) -> Any:
    """What `launch_server` publishes to all modules, and what the scheduler chooses from it."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", device=device)
    spawned = getattr(runtime_context, "SpawnRanks", None)  # after 0.5.19
    ranks = {} if spawned is None else {"ranks": spawned(world_rank=0, gpu_id=0)}
    runtime_context.publish(arguments, role="scheduler", **ranks)
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    return arguments


def speculating(target: Path) -> None:
    """SGLang builds a draft without looking at its target."""


def subject(draft: Path, _target: Path) -> Subject:
    """The draft, as a server with default arguments builds it; dtype is that of its config.json."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(str(draft), is_draft_model=True, quantization=None, dtype="auto")
    return shard(config, draft, device=kind())


def shard(
    config: Any,
    folder: Path,
    *,
    device: str = "cpu",
    only: Callable[[str], bool] = lambda _name: True,
    **more: Any,
) -> Subject:
    """Of the model of SGLang's `config`, loaded as SGLang loads its folder."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    load_config = LoadConfig()
    engine_loader = loader.DefaultModelLoader(load_config)

    def build() -> nn.Module:
        quantization = loader._get_quantization_config(config, load_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            with ExitStack() as stack:
                if device != "cpu":
                    stack.enter_context(torch.device(device))
                model: nn.Module = loader._initialize_model(config, load_config, quantization)
                return model
        finally:
            torch.set_default_dtype(before)

    def load_folder(model: Any) -> None:
        weights = engine_loader._get_all_weights(config, model)
        if hasattr(engine_loader, "load_weights_only"):
            engine_loader.load_weights_only(model, weights, torch.device(device))
        else:  # 0.5.19 finishes them with it
            model.load_weights(weights)

    loader._get_quantization_config(config, load_config)  # what it refuses, it refuses as a config
    section = getattr(config.hf_config, "eagle_config", None) or {}
    fuses = section.get("use_aux_hidden_state", True)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=FolderTensors(folder, only=only),
        unused=re.compile(_UNUSED if fuses else _UNUSED + _UNUSED_FUSION),
        ignored=("transform_config",) if _is_transformed(said) else (),
        **more,
    )


def _is_transformed(config: "Mapping[str, Any]") -> bool:
    """Whether inputs or outputs of linears are to be transformed, which SGLang does not do."""
    declared = config.get("quantization_config") or {}
    schemes = (declared.get("transform_config") or {}).get("config_groups", {}).values()
    asked = [each for scheme in schemes for each in scheme["apply"]]
    return any(each["location"] in ("input", "output") for each in asked)
