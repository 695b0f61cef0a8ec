"""Load a target's folder with vLLM's own classes on a CPU: the target, then its MTP layer.

Usage: `VENV/bin/python vllm_graft.py --arch sm90 FOLDER...`; two lines for each folder.
"""

from pathlib import Path

import vllm_loader  # before vllm: it sets the environment
import vllm_platform
from loader import run
from torch import nn
from verdict import Subject
from whole_folder import HEAD, parts_of


def subject(folder: Path, part: Path, tp: int, rank: int) -> Subject:
    """The target or the layer, as `vllm serve FOLDER --speculative-config` with mtp builds it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = vllm_loader.speculating(folder, method="mtp", num_speculative_tokens=1)
    vllm_platform.become_rank(tp, rank)
    is_layer = part.name == "layer"
    served = config.speculative_config.draft_model_config if is_layer else config.model_config

    def build() -> nn.Module:
        config.compilation_config.static_forward_context.clear()  # of the model built before
        with set_default_torch_dtype(served.dtype):
            target = initialize_model(vllm_config=config)  # first, and both share its config
            if not is_layer:
                return target
            return initialize_model(vllm_config=config, model_config=served)

    def load_folder(model: nn.Module) -> None:
        DefaultModelLoader(config.load_config).load_weights(model, served)

    return Subject(
        build=build,
        load_folder=load_folder,
        tensors=parts_of(folder)[part.name],
        needs_gpu=vllm_platform.needs_gpu,
        unused=HEAD,
        first=rank == 0,
        context=set_current_vllm_config(config),
        last_steps=lambda model: vllm_loader._attention_steps(model, served.dtype),
    )


if __name__ == "__main__":
    run("vllm", vllm_platform, subject)
