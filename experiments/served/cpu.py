"""What vLLM's build for this CPU lacks: without AVX-512 the product that reads INT4 weights.

Such a build loads the weights, says that it is healthy, and dies at the first request: `'_C' object
has no attribute 'cpu_gemm_wna16'`.
"""

import json
from pathlib import Path

NOTE = (
    "this CPU has no AVX-512, and vLLM's build for it no product with INT4 weights: those drafts"
    " are served dequantized, the same codes as BF16 weights"
)


def has_int4_product(cpuinfo: str) -> bool:
    """Whether a CPU with this /proc/cpuinfo gets the build that has it; other kinds of CPU do."""
    flags = [line.split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return all("avx512f" in words for words in flags)


def needs_it(draft: Path) -> bool:
    """Whether a folder holds INT4 weights that are multiplied as such: those of compressed-tensors
    with inputs that nobody rounds."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    groups = (config.get("quantization_config") or {}).get("config_groups") or {}
    return any(
        (group.get("weights") or {}).get("num_bits") == 4
        and (group.get("weights") or {}).get("type") == "int"
        and not group.get("input_activations")
        for group in groups.values()
    )
