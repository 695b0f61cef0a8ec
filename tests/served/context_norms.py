"""vLLM 0.32 on a CPU normalizes the context of every DFlash layer like that of the first layer: it
passes all weights of k_norm to one call of `rms_norm` (`qwen3_dflash.py`, `_normalize_context_k`),
and the CPU kernel reads only the first row. If the engine does so, its verify steps are also
compared with a replay that repeats this mistake.
"""

import subprocess
import sys
from pathlib import Path

from torch import Tensor

ASK_ENGINE = """
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
current_platform.import_kernels()
keys = torch.ones(2, 1, 1, 32, dtype=torch.bfloat16)
normed = torch.empty_like(keys)
ops.rms_norm(normed, keys, torch.stack((keys[0, 0, 0], 3 * keys[0, 0, 0])), 1e-6)
print("first" if normed[1].max() < 2 else "each")
"""


def engine_reads_first_row(python: Path) -> bool:
    """Whether the engine of this interpreter norms all rows with the first weights.

    Raises:
        subprocess.CalledProcessError: it cannot be asked.
    """
    asked = subprocess.run(
        [python, "-c", ASK_ENGINE], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    return asked.split()[-1] == "first"


def norm_as_first_layer() -> None:
    """Make this process replay DFlash drafts as such an engine serves them."""
    from draftquant.quantize.drafts.families.dflash.forward import DFlashForward
    from draftquant.quantize.drafts.maths import rms_norm, rotate

    def context(
        self: DFlashForward, layer: int, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        attention = f"layers.{layer}.self_attn."
        first = self.weights["layers.0.self_attn.k_norm.weight"]
        keys = rms_norm(self._heads(f"{attention}k_proj", rows), first, self.geometry.rms_norm_eps)
        values = self._heads(f"{attention}v_proj", rows).transpose(1, 2)
        return rotate(keys.transpose(1, 2), positions, self.rope), values

    DFlashForward.context = context  # type: ignore[method-assign]


if __name__ == "__main__":
    from draftquant.scripts.cli import main

    norm_as_first_layer()
    sys.exit(main())
