"""Drafts that the toolkits themselves quantized: what `inspect` and `verify` say of them.

Quark 0.13 from file to file, ModelOpt 0.47 and compressed-tensors 0.20 from a module tree with the
draft's names, written as each writes its own checkpoints.
"""

import copy
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.backends.quark_backend import quark_process_state
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from safetensors.torch import save_file
from tiny import tiny_eagle3_llama
from torch import Tensor, nn
from vendors import needs
from verify_cases import provenance_of

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


def quark_file_to_file(source: Path, out: Path, spec: Callable[[Any], Any]) -> Path:
    with quark_process_state():
        from quark.torch import ModelQuantizer
        from quark.torch.quantization.config import config as quark

        layer = quark.QLayerConfig(weight=spec(quark).to_quantization_spec())
        excluded = ["*embed_tokens*", "lm_head", "fc", "*norm*"]
        config = quark.QConfig(global_quant_config=layer, exclude=excluded)
        ModelQuantizer(config).direct_quantize_checkpoint(
            pretrained_model_path=str(source), save_path=str(out), device="cpu"
        )
    return out


# Quark counts the headers into total_size, and leaves the metadata of safetensors out.
QUARK_HABITS = {FC, "model.safetensors.index.json: metadata.total_size"}


@needs_quark
@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        (
            "quark fp8_e4m3 per tensor, activations none",
            lambda q: q.FP8E4M3PerTensorSpec(
                observer_method="min_max", scale_type="float32", is_dynamic=False
            ),
        ),
        (
            "quark mxfp4 per group of 32, activations none",
            lambda q: q.OCP_MXFP4Spec(is_dynamic=False, ch_axis=-1),
        ),
    ],
)
def test_quark(source: Path, tmp_path: Path, scheme: str, spec: Callable[[Any], Any]) -> None:
    out = quark_file_to_file(source, tmp_path / "out", spec)
    assert inspected(out) == (scheme, QUARK_HABITS)
    assert verified(out, source) == QUARK_HABITS


@needs_quark
def test_quark_int4_is_decoded_although_its_zero_points_are_missing(
    source: Path, tmp_path: Path
) -> None:
    out = quark_file_to_file(
        source,
        tmp_path / "out",
        lambda q: q.Int4PerChannelSpec(
            symmetric=True, scale_type="float", round_method="half_even", ch_axis=0
        ),
    )
    scheme, faults = inspected(out)
    assert scheme == "quark int4 per channel (reorder), activations none"
    missing = {f"{module}.weight_zero_point" for module in LINEARS}
    assert faults == {*QUARK_HABITS, *missing}
    assert verified(out, source) >= missing


# ModelOpt and compressed-tensors


def write(out: Path, source: Path, tensors: Mapping[str, Tensor]) -> Path:
    shutil.copytree(source, out)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    return out


def run_linears(model: nn.Module) -> None:
    """Every linear once, on one input per width: fused ones see the same."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(1, 4, module.in_features, generator=generator)
            module(inputs.to(module.weight.dtype))


@needs_modelopt
@pytest.mark.parametrize(
    ("config", "scheme", "own"),
    [
        ("FP8_DEFAULT_CFG", "modelopt fp8_e4m3 per tensor, activations tensor-static", ()),
        (
            "FP8_PER_CHANNEL_PER_TOKEN_CFG",
            "modelopt fp8_e4m3 per channel, activations token-dynamic",
            (),
        ),
        (
            "NVFP4_DEFAULT_CFG",
            "modelopt nvfp4 per group of 16, activations nvfp4",
            ("weight_scale_2",),
        ),
    ],
)
def test_modelopt(
    source: Path, tmp_path: Path, config: str, scheme: str, own: tuple[str, ...]
) -> None:
    """Without its pass over fused linears, each has a global scale of its own: that is a fault."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    chosen = copy.deepcopy(getattr(mtq, config))
    kept = ("*embed_tokens*", "*lm_head*", "*fc.*")
    chosen["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in kept]
    model = mtq.quantize(module_tree(source), chosen, forward_loop=run_linears)
    with torch.no_grad():
        nested = get_quant_config(model)
        _process_quantized_modules(model, torch.float32)
        tensors = postprocess_state_dict(model.state_dict(), 448, None)
    out = write(tmp_path / "out", source, tensors)
    declared = convert_hf_quant_config_format(nested)
    content = json.loads((out / "config.json").read_text(encoding="utf-8")) | {
        "quantization_config": declared
    }
    (out / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (out / "hf_quant_config.json").write_text(json.dumps(nested), encoding="utf-8")
    unshared = {", ".join(f"{m}.{suffix}" for m in group) for group in FUSED for suffix in own}
    assert inspected(out) == (scheme, {FC, *unshared})
    assert verified(out, source) == {FC, *unshared}


def by_compressed_tensors(
    source: Path, out: Path, groups: Mapping[str, tuple[str, list[str]]]
) -> Path:
    """A folder as the library writes it; `groups` by name: preset and targets."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = module_tree(source)
    schemes = {
        name: preset_name_to_scheme(preset, targets) for name, (preset, targets) in groups.items()
    }
    apply_quantization_config(
        model, QuantizationConfig(config_groups=schemes, ignore=["lm_head", "fc"])
    )
    for module in model.modules():
        chosen = getattr(module, "quantization_scheme", None)
        if chosen is None:
            continue
        rows, columns = module.weight.shape
        width = {"tensor": rows * columns, "channel": columns, "group": 128}
        parts = module.weight.float().reshape(-1, width[chosen.weights.strategy])
        scale, _ = calculate_qparams(parts.amin(1), parts.amax(1), chosen.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    write(out, source, model.state_dict())
    compressor.update_config(str(out))
    return out


@pytest.mark.parametrize(
    ("preset", "scheme"),
    [
        ("W4A16", "compressed-tensors int4 per group of 128 (order), activations none"),
        ("FP8", "compressed-tensors fp8_e4m3 per tensor, activations tensor-static"),
        ("FP8_DYNAMIC", "compressed-tensors fp8_e4m3 per channel, activations token-dynamic"),
    ],
)
def test_compressed_tensors(source: Path, tmp_path: Path, preset: str, scheme: str) -> None:
    out = by_compressed_tensors(source, tmp_path / "out", {"group_0": (preset, ["Linear"])})
    assert inspected(out) == (scheme, {FC})
    # Rounding weight/scale to BF16 first puts some INT4 codes a little beyond half a step.
    assert verified(out, source) == {FC}
    if preset == "W4A16":  # this package divides in float32: in a folder of its own it is a fault
        recorded = provenance_of(verify(out, source, foreign=True), "absmax")
        (out / "draftquant.json").write_text(json.dumps(recorded), encoding="utf-8")
        assert f"{LINEARS[0]}.weight_packed" in verified(out, source)
