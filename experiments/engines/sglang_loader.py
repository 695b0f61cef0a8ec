"""Load draft folders with SGLang's own config parser, model class and loader, on a CPU.

Usage: `VENV/bin/python sglang_loader.py --arch gfx942 --target TARGET DRAFT...`.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", SGLANG_LOG_LEVEL="error")

import sglang_platform
import torch
from captures import method_of, reads_layers, sglang_captures
from loader import run, tensors_of_layer
from proposals import sglang_proposals
from torch import nn
from verdict import Subject, read_tensors

_UNUSED = re.compile(r"[.]layers[.][1-9][0-9]*[.]input_layernorm[.]|shared_head[.]head")
"""Layers after the first of `llama_eagle3.py` build it, and use hidden_norm in its place; the head
of an MTP layer is filled with the target's."""

_UNUSED_WITHOUT_FUSION = re.compile(rf"{_UNUSED.pattern}|[.]fc[.]")
"""It is built for such drafts too, and never called: `llama_eagle3.py` compares the widths."""


def subject(draft: Path, target: Path, tp: int, rank: int) -> Subject:
    """One shard of the draft, as a server with default arguments builds it.

    SGLang looks at the draft alone here, but for the layers that it captures; the dtype is the one
    that the draft's config.json says.
    """
    from sglang.srt.configs.model_config import ModelConfig

    served = json.loads((target / "config.json").read_text(encoding="utf-8"))
    num_target_layers = served.get("text_config", served)["num_hidden_layers"]
    architecture = json.loads((draft / "config.json").read_text(encoding="utf-8"))["architectures"][
        0
    ]
    tensors = read_tensors(draft)
    method = method_of(architecture, tensors)
    reads, algorithm = reads_layers(method), {"eagle3": "EAGLE3", "eagle": "EAGLE"}.get(method)
    sglang_platform.publish_server_arguments(tp)
    sglang_platform.become_rank(tp, rank)
    config = ModelConfig(str(draft), is_draft_model=True, quantization=None, dtype="auto")
    build, load_folder = loading(config)
    section = getattr(config.hf_config, "eagle_config", None) or {}
    fuses = section.get("use_aux_hidden_state", True)
    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=tensors,
        needs_gpu=sglang_platform.needs_gpu,
        unused=_UNUSED if fuses else _UNUSED_WITHOUT_FUSION,
        ignored=("transform_config",) if _is_transformed(draft) else (),
        first=rank == 0,
        # A block draft proposes by the target's head: `dflash_worker_v2.py:138`.
        proposes=lambda model: sglang_proposals(model, algorithm) if algorithm and tp == 1 else [],
        captures=lambda: sglang_captures(draft, config, num_target_layers) if reads else {},
    )


def of_layer(folder: Path, _target: Path, tp: int, rank: int) -> Subject:
    """A target's MTP layer, as `--model-path FOLDER --speculative-algorithm NEXTN` builds it."""
    from sglang.srt.configs.model_config import ModelConfig

    sglang_platform.publish_server_arguments(tp)
    sglang_platform.become_rank(tp, rank)
    config = ModelConfig(str(folder), is_draft_model=True, quantization=None, dtype="bfloat16")
    build, load_folder = loading(config)
    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=tensors_of_layer(folder),
        needs_gpu=sglang_platform.needs_gpu,
        unused=_UNUSED,
        first=rank == 0,
    )


def loading(config: Any) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]:
    """How SGLang builds a model of its config, and loads its folder."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    load_config = LoadConfig()
    engine_loader = loader.DefaultModelLoader(load_config)

    def build() -> nn.Module:
        quantization = loader._get_quantization_config(config, load_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            return loader._initialize_model(config, load_config, quantization)
        finally:
            torch.set_default_dtype(before)

    def load_folder(model: nn.Module) -> None:
        weights = engine_loader._get_all_weights(config, model)
        engine_loader.load_weights_only(model, weights, torch.device("cpu"))

    loader._get_quantization_config(config, load_config)  # what it refuses, it refuses as a config
    return build, load_folder


def _is_transformed(draft: Path) -> bool:
    """Whether inputs or outputs of linears are to be transformed, which SGLang does not do."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    declared = config.get("quantization_config") or {}
    schemes = (declared.get("transform_config") or {}).get("config_groups", {}).values()
    asked = [each for scheme in schemes for each in scheme["apply"]]
    return any(each["location"] in ("input", "output") for each in asked)


if __name__ == "__main__":
    run("sglang", sglang_platform, subject, of_layer)
