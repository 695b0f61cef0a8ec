"""What the trainer's own module of an EAGLE-1 head computes: `eagle1.json`.

Usage: `.venv/bin/python tests/engines/eagle1.py CHECKOUT`, a clone of SafeAILab/EAGLE at cb7e084,
whose `eagle/model/cnets1.py` is run as it is. `test_eagle1.py` holds replay against the file.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # tiny_llama.py and its kin

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_llama import tiny_eagle1  # noqa: E402

OUT = HERE / "eagle1.json"
NUM_TOKENS, DEPTHS, SHOWN = 12, 3, 6
CASES: dict[str, dict[str, Any]] = {
    "one layer": {"fc_bias": True},
    "two layers": {"num_layers": 2, "fc_bias": True},
    "without a bias": {"config": {"rope_theta": 500000.0}},
}


def text() -> tuple[list[int], torch.Tensor]:
    """Tokens, and the target's last hidden states [NUM_TOKENS, 64] of all; any numbers do."""
    tokens = [(37 * i + 11) % 96 for i in range(NUM_TOKENS)]
    features = torch.tensor(
        [[((7 * i + 3 * j) % 23 - 11) / 8 for j in range(64)] for i in range(NUM_TOKENS)]
    )
    return tokens, features


def hidden_states(module: Any, tokens: list[int], features: torch.Tensor) -> list[list[float]]:
    """Of the last row, behind each of `DEPTHS` steps along the text; by the module's own cache.

    The chain starts DEPTHS - 1 tokens before the end, so that it reads recorded tokens only.
    """
    rows = NUM_TOKENS - DEPTHS
    state, cache = module(
        features[None, :rows], torch.tensor([tokens[1 : rows + 1]]), use_cache=True
    )
    found = [state[0, -1]]
    for depth in range(1, DEPTHS):
        token = torch.tensor([[tokens[rows + depth]]])
        state, cache = module(found[-1][None, None], token, past_key_values=cache, use_cache=True)
        found.append(state[0, -1])
    return [[round(value, 5) for value in one[:SHOWN].tolist()] for one in found]


def main() -> int:
    """See the module."""
    sys.path.insert(0, sys.argv[1])
    package = types.ModuleType("eagle.model")  # its __init__ imports what needs a GPU
    package.__path__ = [str(Path(sys.argv[1]) / "eagle" / "model")]
    sys.modules["eagle.model"] = package
    cnets, configs = (importlib.import_module(f"eagle.model.{n}") for n in ("cnets1", "configs"))
    tokens, features = text()
    rows = []
    for name, arguments in CASES.items():
        with TemporaryDirectory() as temporary:
            folder = tiny_eagle1(Path(temporary) / "draft", dtype="F32", **arguments)
            keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = configs.EConfig(**keys)
            config.rope_theta, config.rope_scaling = keys["rope_theta"], None
            module = cnets.Model(config, bias=bool(arguments.get("fc_bias")))
            module.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            with torch.no_grad():
                found = hidden_states(module.eval(), tokens, features)
        rows.append(f"{json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}")
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
