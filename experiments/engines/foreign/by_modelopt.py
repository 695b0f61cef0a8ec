"""NVIDIA ModelOpt: its configs on modules with the draft's names, and its own export."""

import copy
import json
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from maker import main
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import (
    get_quant_config,
    get_quantization_format,
    postprocess_state_dict,
)
from modelopt.torch.export.unified_export_hf import (
    _fuse_shared_input_modules,
    _process_quantized_modules,
    collect_shared_input_modules,
)
from tree import module_tree, run_linears, write_folder

CONFIGS = (
    "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "NVFP4_MLP_ONLY_CFG", "W4A8_NVFP4_FP8_CFG",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "INT8_DEFAULT_CFG",
    "INT8_WEIGHT_ONLY_CFG", "MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "W4A8_MXFP4_FP8_CFG",
)  # fmt: skip
EXCLUDES = (
    (),
    ("*embed_tokens*", "*lm_head*", "*fc.*"),
    ("*embed_tokens*", "*lm_head*", "*fc.*", "*kv_b_proj*"),
)
MIXED = "MIXED"


def _config(name: str, variant: int) -> dict[str, object]:
    chosen = copy.deepcopy(getattr(mtq, "FP8_DEFAULT_CFG" if name == MIXED else name))
    if name == MIXED:
        nvfp4 = copy.deepcopy(mtq.NVFP4_MLP_ONLY_CFG["quant_cfg"])
        chosen["quant_cfg"] += [rule for rule in nvfp4 if "mlp" in str(rule)]
    off = [{"quantizer_name": name, "enable": False} for name in EXCLUDES[variant]]
    chosen["quant_cfg"] += [*off, {"quantizer_name": "*embed_tokens*", "enable": False}]
    return chosen


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`; "CONFIG" as in its flat form, "CONFIG:nested" as its exporter of drafts."""
    name, _, form = scheme.partition(".")
    model = mtq.quantize(module_tree(source), _config(name, variant), forward_loop=_calibrate)
    with torch.no_grad():
        shared, norms = collect_shared_input_modules(model, lambda: run_linears(model))
        _fuse_shared_input_modules(
            model, shared, norms, quantization_format=get_quantization_format(model)
        )
        nested = get_quant_config(model)
        _process_quantized_modules(model, torch.float32)
        cache = nested["quantization"]["kv_cache_quant_algo"]
        tensors = postprocess_state_dict(model.state_dict(), 448, cache)
    flat = convert_hf_quant_config_format(nested)
    write_folder(out, source, tensors, nested if form == "nested" else flat)
    if form != "nested":
        (out / "hf_quant_config.json").write_text(
            json.dumps(nested, indent=2) + "\n", encoding="utf-8"
        )


def _calibrate(model: torch.nn.Module) -> None:
    with torch.no_grad():
        run_linears(model)


if __name__ == "__main__":
    names = [*CONFIGS, MIXED, "FP8_DEFAULT_CFG.nested", "NVFP4_DEFAULT_CFG.nested"]
    main("modelopt", names, make, every=4)
