"""Load draft folders with SGLang's own config parser, model class and loader, on a CPU.

Usage: `VENV/bin/python sglang_loader.py --arch gfx942 --target TARGET DRAFT...`.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", SGLANG_LOG_LEVEL="error")

import sglang_platform
from captures import reads_layers, sglang_captures
from loader import Loaded, run, tensors_of_layer

from inside.in_sglang import shard  # isort: skip
from inside.in_vllm import method_of  # isort: skip
from inside.loaded_model import FolderTensors  # isort: skip


def loaded(draft: Path, target: Path, tp: int, rank: int) -> Loaded:
    """One shard of the draft, as a server with default arguments builds it.

    SGLang looks at the draft alone here, but for the layers that it captures; the dtype is the one
    that the draft's config.json says.
    """
    served = json.loads((target / "config.json").read_text(encoding="utf-8"))
    num_target_layers = served.get("text_config", served)["num_hidden_layers"]
    said = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    method = method_of(said["architectures"][0], FolderTensors(draft))
    config, found = _shard(draft, tp, rank, "auto")
    if not reads_layers(method):
        return found
    return found._replace(captures=lambda: sglang_captures(draft, config, num_target_layers))


def of_layer(folder: Path, _target: Path, tp: int, rank: int) -> Loaded:
    """A target's MTP layer, as `--model-path FOLDER --speculative-algorithm NEXTN` builds it."""
    return _shard(folder, tp, rank, "bfloat16", only=tensors_of_layer(folder).__contains__)[1]


def _shard(folder: Path, tp: int, rank: int, dtype: str, **more: Any) -> tuple[Any, Loaded]:
    from sglang.srt.configs.model_config import ModelConfig

    sglang_platform.publish_server_arguments(tp)
    sglang_platform.become_rank(tp, rank)
    config = ModelConfig(str(folder), is_draft_model=True, quantization=None, dtype=dtype)
    whole, first = tp == 1, rank == 0
    subject = shard(
        config, folder, needs_gpu=sglang_platform.needs_gpu, whole=whole, first=first, **more
    )
    return config, Loaded(subject=subject)


if __name__ == "__main__":
    run("sglang", sglang_platform, loaded, of_layer)
