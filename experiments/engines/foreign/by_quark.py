"""AMD Quark: from file to file."""

import os
from pathlib import Path

os.environ["QUARK_DISABLE_COMPILE"] = "1"

from draftquant.quantize.backends.quark_backend import quark_process_state

EXCLUDE = ["*embed_tokens*", "*lm_head*", "*fc*", "*kv_b_proj*"]


def make(scheme: str, source: Path, out: Path) -> None:
    """Write the folder `out`."""
    with quark_process_state():
        from quark.torch import LLMTemplate, ModelQuantizer
        from quark.torch.quantization.config.config import QConfig

        layer = LLMTemplate._SCHEME_COLLECTION.get_scheme(scheme).config
        config = QConfig(global_quant_config=layer, exclude=EXCLUDE)
        ModelQuantizer(config).direct_quantize_checkpoint(
            pretrained_model_path=str(source), save_path=str(out), device="cpu"
        )
