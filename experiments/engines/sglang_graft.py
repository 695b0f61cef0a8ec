"""Load a target's folder with SGLang's own classes on a CPU: the target, or its MTP layer.

Usage: `VENV/bin/python sglang_graft.py --arch sm90 --target /layer FOLDER...`.
"""

from pathlib import Path

import sglang_loader  # before sglang: it sets the environment
import sglang_platform
from loader import run
from verdict import Subject
from whole_folder import HEAD, parts_of


def subject(folder: Path, part: Path, tp: int, rank: int) -> Subject:
    """The target or the layer, as `--model-path FOLDER --speculative-algorithm NEXTN` builds it."""
    from sglang.srt.configs.model_config import ModelConfig

    is_layer = part.name == "layer"
    sglang_platform.publish_server_arguments(tp)
    sglang_platform.become_rank(tp, rank)
    config = ModelConfig(str(folder), is_draft_model=is_layer, quantization=None, dtype="bfloat16")
    build, load_folder = sglang_loader.loading(config)
    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=parts_of(folder)[part.name],
        needs_gpu=sglang_platform.needs_gpu,
        unused=HEAD,
        first=rank == 0,
    )


if __name__ == "__main__":
    run("sglang", sglang_platform, subject)
