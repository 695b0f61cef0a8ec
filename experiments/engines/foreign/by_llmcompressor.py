"""llm-compressor's `model_free_ptq`: from file to file, its presets and its own configs."""

from pathlib import Path
from typing import Any

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from llmcompressor import model_free_ptq
from maker import main

IGNORES = (
    ["lm_head", "fc", "embed_tokens"],
    ["re:.*lm_head$", "re:.*fc$", "re:.*embed_tokens$"],
    ["lm_head", "re:.*fc$", "re:.*embed.*", "re:.*kv_b_proj$"],
)
PRESETS = (
    "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W8A16", "INT8", "W4A8", "W4AFP8",
    "NVFP4A16", "MXFP4A16", "MXFP4", "MXFP8",
)  # fmt: skip


def _int(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "w4-channel": {"all": {"weights": _int(4, "channel")}},
    "w4-group32": {"attention_and_mlp": {"weights": _int(4, "group", group_size=32)}},
    "w8-group128": {"w8": {"weights": _int(8, "group", group_size=128)}},
    "w4-actorder": {"group_0": {"weights": _int(4, "group", group_size=128, actorder="weight")}},
    "mixed-fp8-mlp-w4": {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "weights": _FP8_CHANNEL,
            "input_activations": _ACTIVATIONS,
        },
        "mlp": {"targets": ["re:.*mlp.*"], "weights": _int(4, "group", group_size=128)},
    },
    "fp8-kv-cache": {"group_0": {"weights": _FP8_CHANNEL, "input_activations": _ACTIVATIONS}},
}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def own_config(name: str, ignore: list[str]) -> QuantizationConfig:
    """A config with groups of one's own."""
    groups = {
        group: QuantizationScheme(
            targets=said.get("targets", ["Linear"]),
            **{
                key: QuantizationArgs(**said[key])
                for key in ("weights", "input_activations")
                if key in said
            },
        )
        for group, said in OWN[name].items()
    }
    cache = QuantizationArgs(**KV_CACHE) if name.endswith("kv-cache") else None
    return QuantizationConfig(config_groups=groups, ignore=ignore, kv_cache_scheme=cache)


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    ignore = IGNORES[variant]
    if scheme in OWN:
        model_free_ptq(source, out, config=own_config(scheme, ignore), device="cpu")
    else:
        preset_name_to_scheme(scheme, [])  # what it does not know is an error here
        model_free_ptq(source, out, scheme=scheme, ignore=ignore, device="cpu")


if __name__ == "__main__":
    main("llm-compressor", [*PRESETS, *OWN], make, every=4)
