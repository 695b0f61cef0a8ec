"""`verify --foreign`: sound folders of other tools are GOOD, and damage in them is found."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.quantize.verify import VerifyReport, verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes.errors import CheckpointError, DeclarationError
from draftquant.scripts.cli import main
from foreign_kinds import KINDS, foreign
from handmade import LINEARS
from handmade_gptq import gptq_folder
from handmade_numbers import nearest_e4m3
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from verify_cases import edit, edit_declaration, faults_of, quantized_folder

UP = "mlp.up_proj."
CODES = ("weight_packed", "qweight", "weight")
SCALES = ("weight_scale", "weight_scale_inv", "scales")
Tensors = dict[str, Stored]


Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return functools.cache(lambda kind: foreign(kind, tmp_path_factory.mktemp("kinds")))


def checked(pair: tuple[Path, Path]) -> VerifyReport:
    source, out = pair
    return verify(out, source, foreign=True)


@pytest.mark.some(7)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_folder_is_good(kind: str, made: Made) -> None:
    report = checked(made(kind))
    assert report.faults == ()
    assert report.quantized >= 7
    said = {linear.found for linear in report.linears}
    if "INT4" not in kind and "AWQ" not in kind and "GPTQ" not in kind:
        assert said == {None}
    elif "searched" in kind:
        assert all(str(one).startswith("scales searched, 0.") for one in said)
    else:
        (one,) = said
        rule = kind.rpartition(", ")[2]
        assert one == f"scales {rule}, {'compensating' if 'GPTQ' in kind else 'nearest'} codes"


def of_up(tensors: Tensors, suffixes: tuple[str, ...]) -> str:
    """One linear's tensor: of codes, or of scales."""
    (module,) = {name.rpartition(".")[0] for name in tensors if UP in name}
    return next(name for s in suffixes if (name := f"{module}.{s}") in tensors)


def wrong_code(tensors: Tensors) -> None:
    """One other number: the lowest bits of a byte in the middle, or of FP8 the sign."""
    name = of_up(tensors, CODES)
    data = bytearray(tensors[name].data)
    data[len(data) // 2] ^= 0x84 if tensors[name].dtype == "F8_E4M3" else 0x44
    tensors[name] = tensors[name]._replace(data=bytes(data))


def swapped_nibbles(tensors: Tensors) -> None:
    """Every pair of INT4 codes the other way round; of FP8 every pair of bytes."""
    name = of_up(tensors, CODES)
    data = np.frombuffer(tensors[name].data, np.uint8)
    fp8 = tensors[name].dtype == "F8_E4M3"
    other = data.reshape(-1, 2)[:, ::-1] if fp8 else data << 4 | data >> 4
    tensors[name] = tensors[name]._replace(data=np.ascontiguousarray(other).tobytes())


def one_wrong_scale(tensors: Tensors) -> None:
    name = of_up(tensors, SCALES)
    scale = values_of(tensors[name]).copy()
    scale.reshape(-1)[0] *= 2
    tensors[name] = store(scale, tensors[name].dtype)


def scales_of_other_rows(tensors: Tensors) -> None:
    name = of_up(tensors, SCALES)
    scale = values_of(tensors[name])
    rolled = np.roll(scale.reshape(-1), 1).reshape(scale.shape) * np.float32(1.5)
    tensors[name] = store(rolled, tensors[name].dtype)


DAMAGES = (wrong_code, swapped_nibbles, one_wrong_scale, scales_of_other_rows)
CASES = [(kind, DAMAGES[i % 4]) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_damaged_folder_is_wrong(kind: str, damage: Any, made: Made, tmp_path: Path) -> None:
    """Of codes that make up for the errors of others a single one cannot be told: that is said."""
    source, out = copied(made(kind), tmp_path)
    edit(out, damage)
    report = checked((source, out))
    if damage is wrong_code and "GPTQ" in kind:
        assert report.ok
        assert any("compensating" in str(linear.found) for linear in report.linears)
        return
    assert not report.ok
    assert UP in faults_of(report)


def copied(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    return pair[0], Path(shutil.copytree(pair[1], tmp_path / "out"))


def test_a_head_of_modelopt_has_to_be_listed(made: Made, tmp_path: Path) -> None:
    """Engines take it for a linear."""
    source, out = copied(made("ModelOpt FP8, EAGLE-3"), tmp_path)
    keys = ("ignore", "exclude_modules")
    edit_declaration(out, lambda d: [d.update({k: ["fc", "model.fc"]}) for k in keys if k in d])
    side = out / "hf_quant_config.json"
    content = json.loads(side.read_text(encoding="utf-8"))["quantization"]
    edit_json(side, quantization=content | {"exclude_modules": ["fc", "model.fc"]})
    assert "config.json: lm_head: expected excluded" in faults_of(checked((source, out)))


# ---- declarations of other tools: what is read exactly, and what else says what to do about it


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


@pytest.mark.parametrize("zero", [8, 9])
def test_symmetric_awq_of_auto_round_is_read(zero: int, source: Path, tmp_path: Path) -> None:
    """Where no zero points are declared, engines may look for none: those stored have to be 8."""
    out = quantized_folder(source, tmp_path / "out", "mi325x-int4-awq")
    weights = load_draft(out).weights
    (out / "draftquant.json").unlink()
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    said = {**config["quantization_config"], "zero_point": False, "provider": "auto-round"}
    edit_json(out / "config.json", quantization_config=said)
    (name,) = (name for name in read_tensors(out) if name.endswith("down_proj.qzeros"))
    zeros = read_tensors(out)[name]
    words = np.full(zeros.shape, int(f"{zero:x}" * 8, 16), np.uint32)
    edit(out, lambda tensors: tensors.update({name: zeros._replace(data=words.tobytes())}))
    if zero == 8:
        found = load_draft(out).weights
        assert all(torch.equal(found[key], weights[key]) for key in weights)
    else:
        with pytest.raises(CheckpointError, match="symmetric values are declared, whose zero"):
            load_draft(out)


REFUSED = [compressed(symmetric=False)]
REFUSED += [compressed(actorder=order) for order in ("group", "dynamic")]
REFUSED += [compressed() | {"format": "int-quantized"}]


@pytest.mark.parametrize("declaration", REFUSED, ids=range(4))
def test_what_is_not_read(declaration: dict[str, Any], source: Path, tmp_path: Path) -> None:
    out = shutil.copytree(source, tmp_path / "out")
    edit_json(out / "config.json", quantization_config=declaration)
    with pytest.raises(DeclarationError):
        declared_scheme(Checkpoint.open(out))
    assert main(["dequantize", str(tmp_path / "out"), "--out", str(tmp_path / "plain")]) == 2


# ---- folders of other tools that say the same otherwise: FP8's scales and blocks, files saved anew


UP_PROJ = "midlayer.mlp.up_proj"
KEPT = ["fc", "model.fc", "lm_head", "embed_tokens"]


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spellings") / "source"
    return tiny_eagle3_llama(folder, hidden=128, intermediate=192, vocab=32)


Block = tuple[int, int] | None


def fp8_folder(
    spelled: Path, out: Path, block: Block, dtype: str, *, powers: bool, shape: tuple[int, ...]
) -> Path:
    """Every linear under scales of blocks, or of the whole matrix."""
    out.mkdir()
    tensors: dict[str, Stored] = {}
    for name, tensor in read_tensors(spelled).items():
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
        if dtype == "F8_E8M0":
            exponents = (np.log2(scale) + 127).astype(np.uint8)
            stored, used = Stored(dtype, scale.shape, exponents.tobytes()), scale
        else:
            stored = store(scale.astype(np.float32), dtype)
            used = values_of(stored)
        wide = used.repeat(rows, 0)[: w.shape[0]].repeat(columns, 1)[:, : w.shape[1]]
        codes = Stored("F8_E4M3", w.shape, nearest_e4m3(w / wide.astype(np.float32)))
        suffix = "weight_scale_inv" if block else "weight_scale"
        stored = stored if block else stored._replace(shape=shape)
        tensors |= {f"{module}.weight": codes, f"{module}.{suffix}": stored}
    write_tensors(out, tensors, metadata={"format": "pt"})
    config = json.loads((spelled / "config.json").read_text(encoding="utf-8"))
    plain = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    sizes = {"weight_block_size": list(block)} if block else {}
    sizes |= {"scale_fmt": "ue8m0"} if powers else {}
    config["quantization_config"] = {**plain, **sizes, "ignored_layers": KEPT}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (out / file).write_bytes((spelled / file).read_bytes())
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
    block: Block, dtype: str, powers: bool, shape: tuple[int, ...], spelled: Path, tmp_path: Path
) -> None:
    out = fp8_folder(spelled, tmp_path / "out", block, dtype, powers=powers, shape=shape)
    for found in (verify(out, spelled, foreign=True), audit_checkpoint(Checkpoint.open(out))):
        assert [f for f in found.faults if "config.json" not in f.where] == []
    plain = values_of(read_tensors(spelled)[f"{UP_PROJ}.weight"])
    loaded = load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()
    assert np.abs(loaded - plain).max() < np.abs(plain).max() / 14
    assert np.abs(loaded - plain).max() > 0


def test_scales_may_be_negative(spelled: Path, tmp_path: Path) -> None:
    """AutoRound's symmetric scales have the sign that puts the largest weight at -8."""
    out = gptq_folder(spelled, tmp_path / "out")
    before = load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()
    tensors = read_tensors(out)
    tensors[f"{UP_PROJ}.scales"] = store(-values_of(tensors[f"{UP_PROJ}.scales"]), "F16")
    words = np.frombuffer(tensors[f"{UP_PROJ}.qweight"].data, "<u4")
    nibbles = [(words >> np.uint32(4 * i)) & 15 for i in range(8)]
    mirrored = sum((np.minimum(16 - n, 15) & 15).astype(np.uint32) << np.uint32(4 * i)
                   for i, n in enumerate(nibbles))  # fmt: skip
    qweight = tensors[f"{UP_PROJ}.qweight"]
    tensors[f"{UP_PROJ}.qweight"] = qweight._replace(data=np.asarray(mirrored, "<u4").tobytes())
    write_tensors(out, tensors, metadata={"format": "pt"})
    assert np.mean(before != load_draft(out).weights["layers.0.mlp.up_proj.weight"].numpy()) < 0.1
    assert verify(out, spelled, foreign=True).faults == ()
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()


def test_what_tools_save_anew_is_no_fault(spelled: Path, tmp_path: Path) -> None:
    out = gptq_folder(spelled, tmp_path / "out")
    edit_json(out / "tokenizer_config.json", saved_by="another version")
    for file in ("quantize_config.json", "generation_config.json", "special_tokens_map.json"):
        (out / file).write_text("{}", encoding="utf-8")
    write_tensors(out, read_tensors(out), metadata={})
    assert verify(out, spelled, foreign=True).faults == ()
