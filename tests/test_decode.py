"""Decoding and declarations, held against torch, compressed-tensors and numbers worked by hand."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.decoded_numbers import E4M3, floats, unpack_int4
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.stored.layouts.scheme import DeclaredScheme
from draftquant.quantize.stored.linear import StoredLinear
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.recipes.errors import VerifyError
from handmade import MADE, quantize_by_hand
from handmade_declarations import EXCLUDES
from handmade_numbers import e4m3_value, nearest_e4m3
from tiny import edit_json, read_tensors, tiny_eagle3_llama, values_of
from verify_cases import edit

Q_PROJ = "midlayer.self_attn.q_proj"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("decode") / "source")


@pytest.mark.slow
def test_verify_runs_without_torch(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["ct-int4"])
    code = (
        "import sys; from pathlib import Path; from draftquant.quantize.verify import verify;"
        "assert verify(Path(sys.argv[1]), Path(sys.argv[2]), foreign=True).ok;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, out, source], check=True)


def test_all_fp8_codes_are_those_of_torch_and_of_the_definition() -> None:
    codes = np.arange(256, dtype=np.uint8)
    ours = floats(codes, "F8_E4M3")
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, [e4m3_value(code) for code in range(256)])
    assert ours[[0x38, 0x7E, 0x01]].tolist() == [1, 448, 2.0**-9]
    assert np.isnan(ours[0xFF])
    assert floats(np.array([0x38, 0x40, 0x48], np.uint8), "F8_E4M3").tolist() == [1, 2, 4]
    finite = [code for code in range(256) if code % 128 != 127 and code != 128]
    assert nearest_e4m3(E4M3[finite]) == bytes(finite)


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_all_16_bit_floats_are_those_of_torch(dtype: str, kind: torch.dtype) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16)).view(kind).float().numpy()
    np.testing.assert_array_equal(floats(bits.view(np.uint8), dtype), theirs)


@pytest.mark.parametrize(
    ("pack_method", "codes"),
    [("order", [0, 1, 2, 3, 4, 5, 6, 7]), ("reorder", [0, 4, 1, 5, 2, 6, 3, 7])],
)
def test_a_word_by_hand(pack_method: str, codes: list[int]) -> None:
    """0x76543210: nibble i is i. With "reorder", nibble 1 holds column 2, nibble 4 column 1."""
    word = np.array([[0x76543210]], np.int32)
    assert unpack_int4(word, pack_method, offset=0).tolist() == [codes]


@pytest.mark.some(8)
@pytest.mark.parametrize("name", sorted(MADE))
def test_decoding_by_rows_and_whole(name: str, source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantize_by_hand(source, tmp_path / "out", MADE[name]))
    scheme = declared_scheme(checkpoint)
    assert scheme is not None
    weight = values_of(read_tensors(source)[f"{Q_PROJ}.weight"])
    linear = StoredLinear(checkpoint, scheme, Q_PROJ, in_features=128)
    whole = linear.decoded()
    error = np.linalg.norm(whole.dequantized() - weight) / np.linalg.norm(weight)
    assert error < (0.03 if MADE[name].dtype == "fp8" else 0.15)
    for rows in (range(0, 1), range(7, 20), range(60, 64)):
        part = linear.decoded(rows)
        expected = whole.dequantized()[rows.start : rows.stop]
        np.testing.assert_array_equal(part.dequantized(), expected)


def test_zero_points_go_with_their_rows(source: Path, tmp_path: Path) -> None:
    out, name = quantize_by_hand(source, tmp_path / "out", MADE["awq"]), f"{Q_PROJ}.qzeros"
    zeros = read_tensors(out)[name]
    other = zeros._replace(data=b"\x88\x68\x87\x78" * (len(zeros.data) // 4))
    edit(out, lambda tensors: tensors.update({name: other}))
    checkpoint = Checkpoint.open(out)
    scheme = declared_scheme(checkpoint)
    assert scheme is not None
    linear = StoredLinear(checkpoint, scheme, Q_PROJ, in_features=128)
    whole, part = linear.decoded().dequantized(), linear.decoded(range(8, 24)).dequantized()
    np.testing.assert_array_equal(part, whole[8:24])


def scheme_of(folder: Path) -> DeclaredScheme | None:
    return declared_scheme(Checkpoint.open(folder))


def changed(source: Path, out: Path, name: str, path: str, value: object) -> Path:
    """A folder by hand, with one key of its declaration changed."""
    quantize_by_hand(source, out, MADE[name])
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    section = config["quantization_config"]
    *parents, key = path.split(".")
    for parent in parents:
        section = section[parent]
    section[key] = value
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("quark-int4", "quant_method", "other", "'awq' or 'gptq'"),
        ("quark-int4", "surprise", 1, r"surprise \(unknown key\)"),
        ("quark-int4", "layer_quant_config", {"fc": {}}, "layer_quant_config: understood is null"),
        ("quark-int4", "export.pack_method", "row", "'order' or 'reorder', got 'row'"),
        ("quark-int4", "global_quant_config.weight.dtype", "mx6", "'fp8_e4m3' or 'fp4', got"),
        ("quark-fp8", "global_quant_config.input_tensors.is_dynamic", False, "is_dynamic"),
        ("ct-int4", "format", "int-quantized", "'pack-quantized' or 'float-quantized' or"),
        ("ct-int4", "config_groups.group_1", {}, r"group_1\.targets: understood is a list"),
        ("ct-int4", "config_groups", {str(i): {} for i in range(17)}, "is 1 to 16 groups"),
        ("ct-int4", "config_groups.group_0.targets", ["re:.*(down"], "a regular expression"),
        ("ct-int4", "config_groups.group_0.weights.strategy", "group", "group_size: understood"),
        ("ct-int4", "config_groups.group_0.weights.actorder", "group", "actorder"),
        ("ct-int4", "kv_cache_scheme", CACHE | {"dynamic": True}, "dynamic: understood is False"),
        ("modelopt-fp8", "quant_algo", "MXFP8", "'W4A16_NVFP4', got 'MXFP8'"),
        ("modelopt-fp8", "ignore", [*EXCLUDES, "model*"], "the same patterns as exclude_modules"),
        ("modelopt-nvfp4", "group_size", 32, "group_size: understood is 16, got 32"),
        ("ct-nvfp4", "config_groups.group_0.weights.scale_dtype", "torch.uint8", "scale_dtype: un"),
        ("ct-fp8-block", "config_groups.group_0.weights.block_structure", [64, 128], "got"),
        ("quark-mxfp4", "global_quant_config.weight.scale_format", "float32", "'e8m0', got"),
        ("fp8-block", "weight_block_size", [128, 96], r"\[128, 128\] or .*, got \[128, 96\]"),
        ("awq", "zero_point", None, "zero_point: understood are True or False, got None"),
        ("awq", "group_size", 48, "group_size: understood are -1 or 16 or 32 or 64 or 128 or"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(
    source: Path, tmp_path: Path, name: str, path: str, value: object, message: str
) -> None:
    out = changed(source, tmp_path / "out", name, path, value)
    with pytest.raises(VerifyError, match=message):
        scheme_of(out)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": EXCLUDES},
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": EXCLUDES},
        {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": [*EXCLUDES, "x"]},
        None,
    ],
)
def test_the_second_declaration_of_modelopt_must_agree(
    source: Path, tmp_path: Path, quantization: object
) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["modelopt-fp8"])
    edit_json(out / "hf_quant_config.json", quantization=quantization)
    with pytest.raises(VerifyError, match=r"hf_quant_config\.json: quantization"):
        scheme_of(out)


def test_inputs_are_rounded_by_the_columns_of_blocks(source: Path, tmp_path: Path) -> None:
    for sizes, wanted in (([128, 64], "group-dynamic-64"), ([64, 128], "group-dynamic")):
        out = changed(source, tmp_path / wanted, "fp8-block", "weight_block_size", sizes)
        found = scheme_of(out)
        assert found is not None
        shown = "of {}x{}, ".format(*sizes) in str(found)
        assert (found.activations, shown) == (wanted, True)


def of_targets(*targets: str) -> DeclaredScheme:
    groups = [
        DeclaredScheme(
            layout=LAYOUTS["compressed-tensors"],
            weight_dtype="fp8_e4m3",
            granularity="channel",
            targets=(target,),
        )
        for target in targets
    ]
    return dataclasses.replace(groups[0], others=tuple(groups[1:]))


def test_names_are_looked_for_before_what_is_for_every_other_linear() -> None:
    """Whatever the order of the groups; a linear that no group means has no scheme."""
    for targets in (("Linear", "re:.*attn.*"), ("re:.*attn.*", "Linear")):
        scheme = of_targets(*targets)
        for name, target in (("attn.q", "re:.*attn.*"), ("mlp.up", "Linear")):
            found = scheme.of(name)
            assert found is not None
            assert found.targets == (target,)
    assert of_targets("re:.*attn.*", "fc").of("mlp.up") is None


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a"] * 1001, "at most 1000 names"),
        (["a" * 1000] * 61, "at most 60000 characters"),
        ([f"re:.+{i:04d}" + "a" * 80 for i in range(50)], "4000 characters of regular expressions"),
        ([f"model.layers.{i}.fc" for i in range(257)], "names of at most 256 layers"),
        (["re:(([a-z._0-9])+)+!" + "(" * 300 + ")" * 300], "more than 500 characters"),
    ],
)
def test_excludes_that_would_take_long_are_refused(
    source: Path, tmp_path: Path, names: list[str], what: str
) -> None:
    out = changed(source, tmp_path / "out", "ct-int4", "ignore", names)
    with pytest.raises(VerifyError, match=what) as caught:
        scheme_of(out)
    assert len(str(caught.value)) < 5000
