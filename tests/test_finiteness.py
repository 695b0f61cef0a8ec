"""NaN and infinity in any tensor: seen in its bits, and named by each verb that reads the draft."""

import json
from pathlib import Path

import numpy as np
import pytest
from draftquant.quantize.files.finiteness import Finiteness
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from handmade import MADE, quantize_by_hand
from test_balance import unbalanced
from tiny import Stored, tiny_eagle3_llama
from verify_cases import Q, Tensors, edit

BITS = {  # of the largest numbers and of zeros, and of what is no number
    "BF16": ("<u2", [0x7F7F, 0xFF7F, 0x8000], [0x7F80, 0xFF80, 0x7FC0, 0xFF81]),
    "F16": ("<u2", [0x7BFF, 0xFBFF, 0x8000], [0x7C00, 0xFC00, 0x7E00, 0xFC01]),
    "F32": ("<u4", [0x7F7FFFFF, 0xFF7FFFFF], [0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001]),
    "F64": ("<u8", [0x7FEF << 48, 0xFFEF << 48], [0x7FF0 << 48, 0xFFF0 << 48, 0xFFF8 << 48]),
    "F8_E5M2": ("u1", [0x7B, 0xFB, 0x80], [0x7C, 0xFC, 0x7F, 0xFD]),
    "F8_E4M3": ("u1", [0x7E, 0xFE, 0x80], [0x7F, 0xFF]),
    "F8_E8M0": ("u1", [0x00, 0x7F, 0x80, 0xFE], [0xFF]),
    "I64": ("<u8", [2**64 - 1, 0x7FF0 << 48], []),
}


@pytest.mark.parametrize("dtype", BITS)
def test_every_pattern(dtype: str) -> None:
    kind, numbers, others = BITS[dtype]
    sound = np.array(numbers * 4, kind)
    for other in [None, *others]:
        found = Finiteness(dtype, (3, len(sound)))
        for block in (sound, sound, sound.copy()):
            if other is not None and block is not sound:
                block[[2, 5]] = other
            found.look(memoryview(block).cast("B"))
        said = f"NaN or infinity in 2 of {3 * len(sound)} values, first at [2, 2]"
        assert found.problem == (None if other is None else said)


NOT_FINITE = {"BF16": b"\x80\xff", "F16": b"\x01\x7c", "F32": b"\0\0\x80\x7f"}


def broken(folder: Path, name: str) -> None:
    def change(tensors: Tensors) -> None:
        one: Stored = tensors[name]
        bits = NOT_FINITE.get(one.dtype, b"\xff")
        tensors[name] = one._replace(data=one.data[: -len(bits)] + bits)

    edit(folder, change)


def says(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    return " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "midlayer.input_layernorm.weight", f"{Q}.weight"]
)
def test_a_tensor_of_a_draft(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = unbalanced(tmp_path / "draft", "llama", 1 / 16)
    made, new = tmp_path / "made", tmp_path / "new"
    quantize = ("quantize", draft, "--recipe", "int4-channel", "--out")
    says(capsys, 0, *quantize, made)
    assert json.loads((made / "draftquant.json").read_text(encoding="utf-8"))["balanced"]
    for folder in (draft, made) if not name.startswith(Q) else (draft,):
        broken(folder, name)
    said = f"{name}: NaN or infinity in 1 of "
    assert said in says(capsys, 2, "inspect", draft)
    assert said in says(capsys, 1, "check", draft, "--engine", "vllm")
    verified = says(capsys, 1, "verify", made, "--against", draft)
    assert said.replace(": ", ": expected finite numbers, got ") in verified
    refused = "holds NaN or inf" if name.startswith(Q) else said
    assert refused in says(capsys, 2, *quantize, new)
    assert not new.exists()
    with pytest.raises(CheckpointError, match=said):
        load_draft(draft)


PARTS = {  # how a folder is made, a tensor of a linear or of the draft, and another layout
    ("ct-fp8", "weight", "quark"),
    ("modelopt-fp8", "input_scale", "quark"),
    ("modelopt-nvfp4", "weight_scale_2", "compressed-tensors"),
    ("ct-nvfp4", "weight_global_scale", "modelopt"),
    ("quark-mxfp4", "weight_scale", "compressed-tensors"),
    ("awq", "scales", "compressed-tensors"),
    ("ct-int4", "norm.weight", "quark"),
}


@pytest.mark.some(4)
@pytest.mark.parametrize(("made", "part", "layout"), sorted(PARTS))
def test_a_tensor_of_a_quantized_folder(
    made: str, part: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out = tiny_eagle3_llama(tmp_path / "draft"), tmp_path / "out"
    folder = quantize_by_hand(draft, tmp_path / "folder", MADE[made])
    name = part if "." in part else f"{Q}.{part}"
    broken(folder, name)
    said = f"{name}: NaN or infinity in 1 of "
    assert said in says(capsys, 2, "inspect", folder)
    assert said in says(capsys, 1, "check", folder, "--engine", "vllm")
    assert name in says(capsys, 1, "verify", folder, "--against", draft, "--foreign")
    verbs = [("dequantize",), ("transcode", "--layout", layout)]
    for verb, *more in verbs if part != "input_scale" else verbs[1:]:  # plain weights have none
        assert name.rpartition(".")[0] in says(capsys, 2, verb, folder, *more, "--out", out)
        assert not out.exists()
    with pytest.raises(CheckpointError, match=name.rpartition(".")[0]):
        load_draft(folder)
