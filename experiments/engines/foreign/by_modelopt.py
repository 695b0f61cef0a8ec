"""NVIDIA ModelOpt: its configs on modules with the draft's names, and its own export."""

import copy
import json
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
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

EXCLUDES = ("*embed_tokens*", "*lm_head*", "*fc.*", "*kv_b_proj*")


def make(scheme: str, source: Path, out: Path) -> None:
    """Write the folder `out` by the config of this name."""
    config = copy.deepcopy(getattr(mtq, scheme))
    config["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in EXCLUDES]
    model = mtq.quantize(module_tree(source), config, forward_loop=_calibrate)
    with torch.no_grad():
        shared, norms = collect_shared_input_modules(model, lambda: run_linears(model))
        _fuse_shared_input_modules(
            model, shared, norms, quantization_format=get_quantization_format(model)
        )
        nested = get_quant_config(model)
        _process_quantized_modules(model, torch.float32)
        cache = nested["quantization"]["kv_cache_quant_algo"]
        tensors = postprocess_state_dict(model.state_dict(), 448, cache)
    write_folder(out, source, tensors, convert_hf_quant_config_format(nested))
    (out / "hf_quant_config.json").write_text(json.dumps(nested, indent=2) + "\n", encoding="utf-8")


def _calibrate(model: torch.nn.Module) -> None:
    with torch.no_grad():
        run_linears(model)
