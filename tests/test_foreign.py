"""Drafts that the toolkits themselves quantized: what `inspect` and `verify` say of them.

Quark 0.13 from file to file, ModelOpt 0.47 and compressed-tensors 0.20 from a module tree with the
draft's names, written as each writes its own checkpoints.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from draftquant.quantize.backends.quark_backend import quark_process_state
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from foreign_nvfp4 import by_compressed_tensors
from safetensors.torch import save_file
from tiny import tiny_eagle3_llama
from torch import nn
from vendors import needs

sys.path.append(
    str(Path(__file__).parents[1] / "experiments" / "engines" / "foreign")
)  # its modules stand alone

from tree import module_tree

pytestmark = [
    pytest.mark.vendor,
    pytest.mark.filterwarnings("ignore"),  # the toolkits' own
]
needs_quark = needs("quark")
needs_modelopt = needs("modelopt")
FC = "config.json: model.fc"
LINEARS = tuple(
    f"midlayer.{name}"
    for name in (
        *(f"mlp.{part}_proj" for part in ("down", "gate", "up")),
        *(f"self_attn.{part}_proj" for part in "koqv"),
    )
)
FUSED = (LINEARS[1:3], (LINEARS[3], LINEARS[5], LINEARS[6]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "draft"
    return tiny_eagle3_llama(
        folder, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=96
    )


def inspected(folder: Path) -> tuple[str, set[str]]:
    """Declared scheme, and where the faults are; every linear was decoded."""
    found = audit_checkpoint(Checkpoint.open(folder))
    assert tuple(linear.module for linear in found.linears) == LINEARS
    assert all(linear.codes and linear.codes.scales_fit == 1 for linear in found.linears)
    return str(found.scheme), {fault.where for fault in found.faults}


def verified(folder: Path, source: Path) -> set[str]:
    """Where verification finds faults."""
    return {fault.where for fault in verify(folder, source, foreign=True).faults}


# Quark


def quark_file_to_file(source: Path, out: Path) -> Path:
    with quark_process_state():
        from quark.torch import ModelQuantizer
        from quark.torch.quantization.config import config as quark

        spec = quark.OCP_MXFP4Spec(is_dynamic=False, ch_axis=-1)
        layer = quark.QLayerConfig(weight=spec.to_quantization_spec())
        excluded = ["*embed_tokens*", "lm_head", "fc", "*norm*"]
        config = quark.QConfig(global_quant_config=layer, exclude=excluded)
        ModelQuantizer(config).direct_quantize_checkpoint(
            pretrained_model_path=str(source), save_path=str(out), device="cpu"
        )
    return out


# Quark counts the headers into total_size, and leaves the metadata of safetensors out.
QUARK_HABITS = {FC, "model.safetensors.index.json: metadata.total_size"}


@needs_quark
def test_quark(source: Path, tmp_path: Path) -> None:
    out = quark_file_to_file(source, tmp_path / "out")
    scheme = "quark mxfp4 per group of 32, activations none"
    assert inspected(out) == (scheme, QUARK_HABITS)
    assert verified(out, source) == QUARK_HABITS


# ModelOpt and compressed-tensors


def run_linears(model: nn.Module) -> None:
    """Every linear once, on one input per width: fused ones see the same."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(1, 4, module.in_features, generator=generator)
            module(inputs.to(module.weight.dtype))


@needs_modelopt
def test_modelopt(source: Path, tmp_path: Path) -> None:
    """Without its pass over fused linears, each has a global scale of its own: that is a fault."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    chosen = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    kept = ("*embed_tokens*", "*lm_head*", "*fc.*")
    chosen["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in kept]
    model = mtq.quantize(module_tree(source), chosen, forward_loop=run_linears)
    with torch.no_grad():
        nested = get_quant_config(model)
        _process_quantized_modules(model, torch.float32)
        tensors = postprocess_state_dict(model.state_dict(), 448, None)
    out = Path(shutil.copytree(source, tmp_path / "out"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    declared = convert_hf_quant_config_format(nested)
    content = json.loads((out / "config.json").read_text(encoding="utf-8")) | {
        "quantization_config": declared
    }
    (out / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (out / "hf_quant_config.json").write_text(json.dumps(nested), encoding="utf-8")
    unshared = {", ".join(f"{module}.weight_scale_2" for module in group) for group in FUSED}
    scheme = "modelopt nvfp4 per group of 16, activations nvfp4"
    assert inspected(out) == (scheme, {FC, *unshared})
    assert verified(out, source) == {FC, *unshared}


def test_compressed_tensors(source: Path, tmp_path: Path) -> None:
    out = by_compressed_tensors(source, tmp_path / "out")
    scheme = "compressed-tensors nvfp4 per group of 16, activations nvfp4"
    assert inspected(out) == (scheme, {FC})
    assert verified(out, source) == {FC}
