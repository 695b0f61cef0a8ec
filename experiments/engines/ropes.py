"""What each engine's own rotary embedding does with a head: `ropes.json`.

`test_rope.py` holds replay against it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from asking import of_both

OUT = Path(__file__).resolve().parent / "ropes.json"
HEAD_DIM, THETA, MAX_POSITIONS = 16, 500.0, 2048
POSITIONS = [0, 1, 7, 100, 500]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2]}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3-step": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    "dynamic-factor": {"rope_type": "dynamic", "factor": 4.0},
    "mrope": MROPE,
    "mrope-interleaved": {**MROPE, "mrope_interleaved": True},
    "yarn": YARN,
}


def head() -> list[list[float]]:
    """A query of every position; any numbers do."""
    return [
        [((7 * i + 3 * j) % 11 - 5) / 4 for j in range(HEAD_DIM)] for i in range(len(POSITIONS))
    ]


def rotated(engine: str) -> dict[str, list[list[float]]]:
    """The queries as an engine rotates them, for each case."""
    import torch

    positions, queries = torch.tensor(POSITIONS), torch.tensor(head())
    found = {}
    for name, scaling in CASES.items():
        parameters = {"rope_theta": THETA, **scaling}
        # Of text the three positions of mrope are equal.
        given = positions.expand(3, -1) if "mrope_section" in scaling else positions
        rope = _vllm(parameters) if engine == "vllm" else _sglang(parameters)
        turned, _ = rope.forward_native(given, queries.clone(), queries.clone())
        found[name] = [[round(value, 6) for value in row] for row in turned.tolist()]
    return found


def _vllm(parameters: dict[str, Any]) -> Any:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return get_rope(HEAD_DIM, MAX_POSITIONS, rope_parameters=parameters, dtype=torch.float32)


def _sglang(parameters: dict[str, Any]) -> Any:
    import torch
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(
        HEAD_DIM, HEAD_DIM, MAX_POSITIONS, THETA, rope_scaling=parameters, dtype=torch.float32
    )


def main() -> int:
    """See the module."""
    rows = [
        f'"{engine} {name}": {json.dumps(turned, separators=(",", ":"))}'
        for engine, cases in (of_both(__file__, rotated) or {}).items()
        for name, turned in cases.items()
    ]
    if rows:
        OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
