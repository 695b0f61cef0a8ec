"""Decoding and declarations, held against torch, compressed-tensors and numbers worked by hand."""

import dataclasses
import json
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
from handmade import MADE, quantize_by_hand
from handmade_numbers import e4m3_value, nearest_e4m3
from readings import read
from tiny import config_of, read_tensors, tiny_eagle3_llama, values_of
from verify_cases import edit

Q_PROJ = "midlayer.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("decode") / "source")


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
    assert unpack_int4(word, pack_method, unsigned=False, out=None).tolist() == [codes]


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
        expected = whole.dequantized()[rows.start : rows.stop]
        np.testing.assert_array_equal(linear.decoded(rows).dequantized(), expected)


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


def changed(source: Path, out: Path, name: str, path: str, value: object) -> Path:
    """A folder by hand, with one key of its declaration changed."""
    quantize_by_hand(source, out, MADE[name])
    config = config_of(out)
    section = config["quantization_config"]
    *parents, key = path.split(".")
    for parent in parents:
        section = section[parent]
    section[key] = value
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def test_inputs_are_rounded_by_the_columns_of_blocks(source: Path, tmp_path: Path) -> None:
    for sizes, wanted in (([128, 64], "group-dynamic-64"), ([64, 128], "group-dynamic")):
        out = changed(source, tmp_path / wanted, "fp8-block", "weight_block_size", sizes)
        found = declared_scheme(Checkpoint.open(out))
        assert found is not None
        assert (found.activations, "of {}x{}, ".format(*sizes) in str(found)) == (wanted, True)


def of_targets(*targets: str) -> DeclaredScheme:
    plain = DeclaredScheme(
        layout=LAYOUTS["compressed-tensors"], weight_dtype="fp8_e4m3", granularity="channel"
    )
    first, *others = (dataclasses.replace(plain, targets=(target,)) for target in targets)
    return dataclasses.replace(first, others=tuple(others))


def test_names_are_looked_for_before_what_is_for_every_other_linear() -> None:
    """Whatever the order of the groups; a linear that no group means has no scheme."""
    for targets in (("Linear", "re:.*attn.*"), ("re:.*attn.*", "Linear")):
        for name, target in (("attn.q", "re:.*attn.*"), ("mlp.up", "Linear")):
            found = of_targets(*targets).of(name)
            assert found is not None
            assert found.targets == (target,)
    assert of_targets("re:.*attn.*", "fc").of("mlp.up") is None


NAMES = "at most 1000 names of at most 1000 characters"
LIMITS: list[tuple[list[str], list[str], str]] = [
    (["a"] * 1000, ["a"], NAMES),
    (["a" * 1000], ["a" * 1001], NAMES),
    (["a" * 1000] * 60, ["a"], "at most 60000 characters of names"),
    (["re:.+" + "a" * 495] * 8, ["("], "at most 4000 characters of regular expressions"),
    ([f"layers.{i}.fc" for i in range(256)], ["layers.256.fc"], "names of at most 256 layers"),
    (["re:" + "a" * 500], ["re:" + "a" * 501], "a regular expression (more than 500 characters)"),
    (["re:" + "(" * 19 + ")" * 19], ["re:" + "(" * 20 + ")" * 20], "a regular expression (more th"),
    (["re:.*down"], ["re:.*(down"], "a regular expression (missing )"),
]


@pytest.mark.parametrize(("inside", "more", "what"), LIMITS)
def test_excludes_that_take_long_are_refused(inside: list[str], more: list[str], what: str) -> None:
    """And hardly fewer are read."""
    declared = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert isinstance(read({**declared, "ignored_layers": inside}, "folder"), dict)
    refused = read({**declared, "ignored_layers": [*inside, *more]}, "folder")
    assert f"understood is {what}" in str(refused)
    assert len(str(refused)) < 5000


def test_both_lists_of_excludes_name_the_same() -> None:
    """Engines read one or the other."""
    declared = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["a", "b"]}
    refused = read({**declared, "modules_to_not_convert": ["a"]}, "folder")
    assert "the same names as ignored_layers ['a', 'b'], got ['a']" in str(refused)


@pytest.mark.parametrize("count", [1, 16, 17])
def test_groups_are_counted(count: int) -> None:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["a"], "weights": weights, "format": "float-quantized"}
    declared = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    groups = {str(i): group for i in range(count)}
    assert isinstance(read({**declared, "config_groups": groups}, "folder"), dict) is (count <= 16)
