"""Load a target's folder with SGLang's own classes on a CPU: the target, then its MTP layer.

Usage: `VENV/bin/python sglang_graft.py --arch sm90 FOLDER...`; two lines for each folder.
"""

from pathlib import Path

import sglang_loader  # before sglang: it sets the environment
import sglang_platform
import torch
from loader import Engine, main
from torch import nn
from verdict import Subject
from whole_folder import HEAD, parts_of


def subject(folder: Path, part: Path, tp: int, rank: int) -> Subject:
    """The target or the layer, as `--model-path FOLDER --speculative-algorithm NEXTN` builds it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader

    is_layer = part.name == "layer"
    sglang_platform.publish_server_arguments(tp)
    sglang_platform.become_rank(tp, rank)
    config = ModelConfig(str(folder), is_draft_model=is_layer, quantization=None, dtype="bfloat16")
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

    loader._get_quantization_config(config, load_config)
    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=parts_of(folder)[part.name],
        needs_gpu=sglang_platform.needs_gpu,
        unused=HEAD,
        first=rank == 0,
    )


if __name__ == "__main__":
    main(
        Engine(
            name="sglang",
            version=sglang_loader.version("sglang"),
            archs=sglang_platform.ARCHS,
            install=sglang_platform.install,
            subject=subject,
            needs_gpu=sglang_platform.needs_gpu,
        )
    )
