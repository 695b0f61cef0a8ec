"""Folders of other tools that say the same otherwise: FP8's scales and blocks, files saved anew."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from handmade import LINEARS
from handmade_gptq import gptq_folder
from handmade_numbers import nearest_e4m3
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors

UP = "midlayer.mlp.up_proj"
KEPT = ["fc", "model.fc", "lm_head", "embed_tokens"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spellings") / "source"
    return tiny_eagle3_llama(folder, hidden=128, intermediate=192, vocab=32)


def fp8_folder(
    source: Path,
    out: Path,
    block: tuple[int, int] | None,
    dtype: str,
    *,
    powers: bool = False,
    shape: tuple[int, ...] = (),
    **declared: Any,
) -> Path:
    """Every linear under scales of blocks, or of the whole matrix."""
    out.mkdir()
    tensors: dict[str, Stored] = {}
    for name, tensor in read_tensors(source).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in LINEARS:
            tensors[name] = tensor
            continue
        w = values_of(tensor)
        rows, columns = block or w.shape
        blocks = [
            [np.abs(w[i : i + rows, j : j + columns]).max() for j in range(0, w.shape[1], columns)]
            for i in range(0, w.shape[0], rows)
        ]
        scale = np.array(blocks, np.float32) / np.float32(448)
        scale = 2 ** np.ceil(np.log2(scale)) if powers else scale
        exponents = (np.log2(scale) + 127).astype(np.uint8)
        stored = (
            Stored(dtype, scale.shape, exponents.tobytes())
            if dtype == "F8_E8M0"
            else store(scale.astype(np.float32), dtype)
        )
        used = scale if dtype == "F8_E8M0" else values_of(stored)
        wide = used.repeat(rows, 0)[: w.shape[0]].repeat(columns, 1)[:, : w.shape[1]]
        codes = Stored("F8_E4M3", w.shape, nearest_e4m3(w / wide.astype(np.float32)))
        suffix = "weight_scale_inv" if block else "weight_scale"
        stored = stored if block else stored._replace(shape=shape)
        tensors |= {f"{module}.weight": codes, f"{module}.{suffix}": stored}
    write_tensors(out, tensors, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    plain = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    sizes = {"weight_block_size": list(block)} if block else {}
    config["quantization_config"] = {**plain, **sizes, "ignored_layers": KEPT, **declared}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (out / file).write_bytes((source / file).read_bytes())
    return out


@pytest.mark.parametrize(
    ("block", "dtype", "powers", "shape"),
    [
        ((128, 128), "F32", True, ()),
        ((128, 128), "F8_E8M0", True, ()),
        ((128, 128), "BF16", False, ()),
        ((1, 128), "F32", False, ()),
        (None, "F32", False, (1,)),
    ],
    ids=str,
)
def test_fp8_is_decoded_as_it_is_declared(
    block: tuple[int, int] | None,
    dtype: str,
    powers: bool,
    shape: tuple[int, ...],
    source: Path,
    tmp_path: Path,
) -> None:
    declared = {"scale_fmt": "ue8m0"} if powers else {}
    out = fp8_folder(source, tmp_path / "out", block, dtype, powers=powers, shape=shape, **declared)
    for found in (verify(out, source, foreign=True), audit_checkpoint(Checkpoint.open(out))):
        assert [f for f in found.faults if "config.json" not in f.where] == []
    plain = values_of(read_tensors(source)[f"{UP}.weight"])
    loaded = load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()
    assert np.abs(loaded - plain).max() < np.abs(plain).max() / 14
    assert np.abs(loaded - plain).max() > 0


def test_scales_may_be_negative(source: Path, tmp_path: Path) -> None:
    """AutoRound's symmetric scales have the sign that puts the largest weight at -8."""
    out = gptq_folder(source, tmp_path / "out")
    before = load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()
    tensors = read_tensors(out)
    scales = tensors[f"{UP}.scales"]
    tensors[f"{UP}.scales"] = store(-values_of(scales), "F16")
    words = np.frombuffer(tensors[f"{UP}.qweight"].data, "<u4")
    nibbles = [(words >> np.uint32(4 * i)) & 15 for i in range(8)]
    mirrored = sum((np.minimum(16 - n, 15) & 15).astype(np.uint32) << np.uint32(4 * i)
                   for i, n in enumerate(nibbles))  # fmt: skip
    qweight = tensors[f"{UP}.qweight"]
    tensors[f"{UP}.qweight"] = qweight._replace(data=np.asarray(mirrored, "<u4").tobytes())
    write_tensors(out, tensors, metadata={"format": "pt"})

    after = load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()
    assert np.mean(before != after) < 0.1
    assert verify(out, source, foreign=True).faults == ()
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()


def test_what_tools_save_anew_is_no_fault(source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out")
    edit_json(out / "tokenizer_config.json", saved_by="another version")
    for file in ("quantize_config.json", "generation_config.json", "special_tokens_map.json"):
        (out / file).write_text("{}", encoding="utf-8")
    write_tensors(out, read_tensors(out), metadata={})
    assert verify(out, source, foreign=True).faults == ()
