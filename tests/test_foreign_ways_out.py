"""Declarations of other tools: what is read exactly, and what else says what to do about it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.recipes.errors import CheckpointError, DeclarationError
from tiny import edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from verify_cases import quantized_folder

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False,
           "strategy": "group", "group_size": 32}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 256, "intermediate": 256, "heads": 4, "kv_heads": 4, "head_dim": 64}
    return tiny_eagle3_llama(tmp_path_factory.mktemp("ways") / "source", **sizes)


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights},
             "input_activations": None, "output_activations": None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*fc$"], "kv_cache_scheme": None}  # fmt: skip


def declared(source: Path, folder: Path, declaration: dict[str, Any]) -> Checkpoint:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edit_json(folder / "config.json", quantization_config=declaration)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("zero", [8, 9])
def test_symmetric_awq_of_auto_round_is_read(zero: int, source: Path, tmp_path: Path) -> None:
    """Where no zero points are declared, engines may look for none: those stored have to be 8."""
    out = quantized_folder(source, tmp_path / "out", "mi325x-int4-awq")
    weights = load_draft(out).weights
    (out / "draftquant.json").unlink()
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    said = {**config["quantization_config"], "zero_point": False, "provider": "auto-round"}
    edit_json(out / "config.json", quantization_config=said)
    tensors = read_tensors(out)
    name = next(name for name in tensors if name.endswith("down_proj.qzeros"))
    tensor = tensors[name]
    words = np.full(tensor.shape, int(f"{zero:x}" * 8, 16), np.uint32)
    tensors[name] = tensor._replace(data=words.tobytes())
    write_tensors(out, tensors, metadata={"format": "pt"})
    if zero == 8:
        found = load_draft(out).weights
        assert all(torch.equal(found[key], weights[key]) for key in weights)
    else:
        with pytest.raises(CheckpointError, match="symmetric values are declared, whose zero"):
            load_draft(out)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (compressed() | {"transform_config": {"config_groups": {"u": {}}}}, "without rotations"),
    (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed zeros"),
    (compressed(symmetric=False), "with symmetric: true, or as AWQ or GPTQ"),
    (compressed(num_bits=8), "whose weights of 8 bits are read"),
    ({"quant_method": "auto-round", "bits": 8, "data_type": "fp"}, "llm_compressor"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "export it as FP8 or NVFP4"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
      "rotation": "hadamard"}, "without rotations"),
]  # fmt: skip


@pytest.mark.parametrize(("declaration", "fix"), REFUSED)
def test_what_is_not_read_says_what_to_do(
    declaration: dict[str, Any], fix: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(DeclarationError) as caught:
        declared_scheme(declared(source, tmp_path / "out", declaration))
    assert fix in (caught.value.fix or "")
    assert "quantize the BF16 draft with draftquant" in (caught.value.fix or "")
