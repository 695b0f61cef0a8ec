"""`verify` of whole folders: correct ones pass in every layout; declarations, files, headers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CheckpointError
from handmade import MADE, encode, quantize_by_hand
from handmade_declarations import EXCLUDES
from tiny import (
    INDEX_FILE,
    Stored,
    edit_json,
    read_tensors,
    store,
    tiny_eagle3_llama,
    values_of,
)
from verify_cases import (
    ATTENTION,
    Q,
    Tensors,
    assert_only_fault,
    edit,
    edit_declaration,
    faults_of,
    flip_bit,
    method_of,
    provenance_of,
    recipe_of,
    reseal,
    set_scale,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("verify") / "source", pruned_vocabulary=True)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One correct folder per layout; tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    return {name: quantize_by_hand(source, folder / name, how) for name, how in MADE.items()}


@pytest.fixture
def copy_of(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(made[name], tmp_path / name))

    return copy


# ---- correct folders


@pytest.mark.parametrize("foreign", [True, False])
def test_an_unquantized_copy_is_nothing_to_verify(
    foreign: bool, source: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="nothing to verify") as caught:
        verify(copy, source, foreign=foreign)
    assert caught.value.where == str(copy)


# ---- declarations


@pytest.mark.parametrize(
    ("stored", "declared"),
    [
        ("quark-int4", "quark-fp8"),
        ("quark-fp8", "quark-fp8-static"),
        ("quark-int4", "ct-int4"),
        ("ct-int4", "quark-int4"),
        ("ct-fp8", "ct-fp8-static"),
        ("modelopt-fp8", "ct-fp8-static"),
    ],
)
def test_a_config_that_declares_another_scheme(
    copy_of: Callable[[str], Path], made: dict[str, Path], source: Path, stored: str, declared: str
) -> None:
    out = copy_of(stored)
    shutil.copy(made[declared] / "config.json", out / "config.json")
    if stored.startswith("modelopt"):
        (out / "hf_quant_config.json").unlink()
    report = verify(out, source, foreign=True)
    assert sum(Q in fault.where for fault in report.faults) >= 1, faults_of(report)


def test_a_declaration_that_is_not_understood(copy_of: Callable[[str], Path], source: Path) -> None:
    out = copy_of("quark-int4")
    edit_declaration(out, lambda d: d.update(quant_method="other"))
    assert_only_fault(verify(out, source, foreign=True), "config.json", "understood are 'quark' or")


EXCLUDE_KEYS = {"quark-int4": "exclude", "ct-int4": "ignore"}


@pytest.mark.parametrize("name", sorted(EXCLUDE_KEYS))
@pytest.mark.parametrize(
    ("patterns", "missing"),
    [
        (["model.fc", "lm_head", "re:.*embed_tokens$"], ["fc"]),
        (["fc", "lm_head", "re:.*embed_tokens$"], ["model.fc"]),
    ],
)
def test_excludes_that_miss_a_kept_module(
    copy_of: Callable[[str], Path], source: Path, name: str, patterns: list[str], missing: list[str]
) -> None:
    out = copy_of(name)
    edit_declaration(out, lambda d: d.__setitem__(EXCLUDE_KEYS[name], patterns))
    report = verify(out, source, foreign=True)
    assert [fault.where for fault in report.faults] == [f"config.json: {m}" for m in missing]
    assert "expected excluded: it is kept" in faults_of(report)


@pytest.mark.parametrize("name", sorted(EXCLUDE_KEYS))
@pytest.mark.parametrize("patterns", [["re:.*fc$", "re:.*embed_tokens$"], ["re:.*fc$", "lm_head"]])
def test_excludes_need_not_name_what_engines_never_round(
    copy_of: Callable[[str], Path], source: Path, name: str, patterns: list[str]
) -> None:
    """A head by the rules of these two, and an embedding, which is no linear."""
    out = copy_of(name)
    edit_declaration(out, lambda d: d.__setitem__(EXCLUDE_KEYS[name], patterns))
    assert verify(out, source, foreign=True).ok


@pytest.mark.parametrize(
    "pattern",
    ["re:.*q_proj", f"{Q}", f"model.{Q}", "model.qkv_proj", "model.self_attn.qkv_proj",
     "model.layers.0.self_attn.q_proj", "re:model.*", r"re:model\.layers\.\d+\.self_attn"],
)  # fmt: skip
def test_excludes_that_match_a_quantized_module(
    copy_of: Callable[[str], Path], source: Path, pattern: str
) -> None:
    out = copy_of("ct-int4")
    edit_declaration(out, lambda d: d["ignore"].append(pattern))
    found = faults_of(verify(out, source, foreign=True))
    assert "expected not excluded: it is quantized" in found
    assert "q_proj" in found or "qkv_proj" in found


def test_the_excludes_that_modelopt_itself_writes(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    """`model*` matches every layer under its runtime name: engines would quantize nothing."""
    out, excludes = copy_of("modelopt-fp8"), ["fc", "lm_head", "embed_tokens", "model*"]
    edit_declaration(out, lambda d: d.update(ignore=excludes, exclude_modules=excludes))
    nested = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": excludes}
    edit_json(out / "hf_quant_config.json", quantization=nested)
    report = verify(out, source, foreign=True)
    assert len(report.faults) == 7
    assert "expected not excluded: it is quantized" in faults_of(report)


# ---- other files


def test_changed_missing_and_extra_config_keys(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("quark-int4")
    edit_json(out / "config.json", rms_norm_eps=1e-5, rope_theta=None, vocab_size=96.0, new=1)
    computed = {
        "config.json: rms_norm_eps": "config.json: rms_norm_eps: expected 1e-06, got 1e-05",
        "config.json: vocab_size": "config.json: vocab_size: expected 96, got 96.0",
    }
    found = {fault.where: str(fault) for fault in verify(out, source, foreign=True).faults}
    assert found == computed  # other tools write keys of their own, and drop what is the default
    found = {fault.where: str(fault) for fault in verify(out, source, method=method_of(out)).faults}
    assert (
        found.items()
        >= {
            **computed,
            "config.json: new": "config.json: new: expected no such key, got 1",
            "config.json: rope_theta": "config.json: rope_theta: expected 10000.0, got no such key",
        }.items()
    )


def test_side_files(copy_of: Callable[[str], Path], source: Path) -> None:
    out = copy_of("quark-int4")
    (out / "tokenizer.json").write_text('{"version": "1.1"}\n', encoding="utf-8")
    assert_only_fault(verify(out, source, foreign=True), "tokenizer.json", "got other bytes")
    (out / "tokenizer.json").write_text('{"version": "1.0"}\n and more', encoding="utf-8")
    assert_only_fault(verify(out, source, foreign=True), "tokenizer.json", "got other bytes")
    (out / "tokenizer.json").unlink()
    (out / "README.md").write_text("a card may be written later", encoding="utf-8")
    assert_only_fault(verify(out, source, foreign=True), "tokenizer.json", "got none")


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, Path]:
    """(source, output), both in two shards."""
    draft = tiny_eagle3_llama(tmp_path / "source", sharded=True)
    return draft, quantize_by_hand(draft, tmp_path / "out", MADE["ct-int4"])


@pytest.mark.parametrize("total", [1, None, "12", True])
def test_a_wrong_total_size(sharded: tuple[Path, Path], total: object) -> None:
    draft, out = sharded
    edit_json(out / INDEX_FILE, metadata={"total_size": total})
    assert_only_fault(verify(out, draft, foreign=True), "metadata.total_size", f"got {total!r}")


def test_recorded_hashes_must_agree(copy_of: Callable[[str], Path], source: Path) -> None:
    out = copy_of("quark-fp8")
    recipe = recipe_of(out)
    declared = LAYOUTS["quark"].declaration(recipe, EXCLUDES)
    edit_declaration(out, lambda d: (d.clear(), d.update(declared)))
    report = verify(out, source, foreign=True)
    recorded = provenance_of(report, "absmax")
    (out / "draftquant.json").write_text(json.dumps(recorded), encoding="utf-8")
    assert verify(out, source, foreign=True).ok
    recorded["source"]["tensor_digests"]["fc.weight"] = "0" * 64
    del recorded["tensor_digests"]["norm.weight"]
    recorded["tensor_digests"]["of.another.run"] = "0" * 64
    (out / "draftquant.json").write_text(json.dumps(recorded), encoding="utf-8")
    reseal(out)
    found = [fault.where for fault in verify(out, source, foreign=True).faults]
    assert found == ["draftquant.json: tensor_digests.norm.weight",
                     "draftquant.json: tensor_digests.of.another.run",
                     "draftquant.json: source.tensor_digests.fc.weight"]  # fmt: skip
    (out / "draftquant.json").write_text("{}", encoding="utf-8")
    assert_only_fault(verify(out, source, foreign=True), "draftquant.json", "format: missing key")
    (out / "draftquant.json").write_text("not JSON", encoding="utf-8")
    assert_only_fault(
        verify(out, source, foreign=True), "draftquant.json", "not JSON: Expecting value"
    )


# ---- tensors


def put(name: str, change: Callable[[Stored], Stored]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def turned(tensor: Stored) -> Stored:
    """The same bytes, rows and columns exchanged."""
    return tensor._replace(shape=tensor.shape[::-1])


def scaled(value: float) -> Callable[[Tensors], None]:
    return put(SCALE, lambda tensor: set_scale(tensor, value))


SCALE, ZEROS, SHAPE = (f"{Q}.{suffix}" for suffix in ("weight_scale", "weight_zero_point",
                                                      "weight_shape"))  # fmt: skip
INPUT = "midlayer.mlp.down_proj.input_scale"  # not fused with anything
CHANGES: list[tuple[str, Callable[[Tensors], object], str, str]] = [
    *(("quark-int4", put(name, lambda t, bit=bit: flip_bit(t, bit)), name,
       f"1 different byte(s), first at byte {bit // 8}")
      for name in ("fc.weight", "norm.weight", "d2t", "t2d") for bit in (0, 77)),
    ("ct-int4", lambda t: t.update({"extra.weight": t["norm.weight"]}), "extra.weight",
     "expected no such tensor"),
    *(("quark-fp8", without(name), name, "got none")
      for name in ("fc.weight", "d2t", f"{ATTENTION}o_proj.weight", SCALE)),
    ("quark-int4", put("embed_tokens.weight", turned), "embed_tokens.weight",
     "expected BF16 [96, 64] (kept), got BF16 [64, 96]"),
    *((name, scaled(value), SCALE, f"1 other(s), first {value} at row 0")
      for name in ("quark-int4", "ct-fp8", "modelopt-fp8")
      for value in (math.nan, math.inf, 0.0, -0.5)),
    ("quark-int4", scaled(2.0**-24), SCALE, "finite scales > 0 and >= 1.1920928955078125e-07"),
    ("ct-int4", put(SCALE, lambda t: store(values_of(t), "F32")), SCALE,
     "expected BF16 or F16 [64, 1] (compressed-tensors int4"),
    ("modelopt-fp8-pcpt", put(SCALE, lambda t: store(values_of(t), "F16")), SCALE,
     "expected F32 [64] (modelopt fp8"),
    ("ct-int4", put(SHAPE, lambda t: t._replace(data=t.data[8:] + t.data[:8])), SHAPE,
     "expected [64, 128], got [128, 64]"),
    ("quark-int4", put(ZEROS, lambda t: flip_bit(t, 100)), ZEROS,
     "expected all zero (symmetric)"),
    ("ct-fp8-static", without(INPUT), INPUT, "got none"),
    ("ct-fp8-static", put(INPUT, lambda t: set_scale(t, -1.0)), INPUT,
     "expected a finite scale > 0, got -1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "where", "what"), CHANGES)
def test_a_changed_tensor(
    copy_of: Callable[[str], Path],
    source: Path,
    name: str,
    change: Callable[[Tensors], object],
    where: str,
    what: str,
) -> None:
    out = copy_of(name)
    edit(out, change)
    assert_only_fault(verify(out, source, foreign=True), where, what)


@pytest.mark.parametrize("name", ["quark-int4", "ct-fp8", "modelopt-fp8"])
@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("fc", "expected not excluded: it is quantized"),
        ("lm_head", "expected not excluded: it is quantized"),
        ("embed_tokens", "is never quantized, got a quantized weight"),
    ],
)
def test_a_module_that_is_not_declared_as_quantized_or_must_never_be(
    copy_of: Callable[[str], Path], source: Path, name: str, module: str, said: str
) -> None:
    """Even with right codes."""
    out = copy_of(name)
    edit(out, lambda t: t.update(encode(module, t.pop(f"{module}.weight"), MADE[name], 0.05)))
    found = faults_of(verify(out, source, foreign=True))
    assert module in found
    assert said in found


def test_part_of_a_fused_group(copy_of: Callable[[str], Path], source: Path) -> None:
    out, k = copy_of("ct-fp8"), f"{ATTENTION}k_proj.weight"
    edit(out, lambda t: (t.pop(f"{k}_scale"), t.update({k: read_tensors(source)[k]})))
    found = faults_of(verify(out, source, foreign=True))
    assert "expected all or none of them quantized, got kept: midlayer.self_attn.k_proj" in found
    assert "config.json: midlayer.self_attn.k_proj: expected excluded: it is kept" in found


def test_what_is_stored_is_not_what_is_declared(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("quark-int4-static")
    edit_declaration(out, lambda d: d["global_quant_config"].update(input_tensors=None))
    found = faults_of(verify(out, source, foreign=True))
    assert found.count("input_scale: expected no such tensor") == 7
    edit_json(out / "config.json", quantization_config=None)
    found = faults_of(verify(out, source, foreign=True))
    assert found.count("config.json declares no quantization, got a quantized weight") == 7


def test_wide_scales_of_quark(copy_of: Callable[[str], Path], source: Path) -> None:
    """Quark 0.13 from file to file stores scales in F32, a folder of ours never does."""
    out = copy_of("quark-int4")
    edit(out, put(SCALE, lambda t: store(values_of(t), "F32")))
    report = verify(out, source, foreign=True)
    assert report.ok
    (out / "draftquant.json").write_text(
        json.dumps(provenance_of(report, "absmax")), encoding="utf-8"
    )
    assert_only_fault(verify(out, source, foreign=True), SCALE, "expected BF16 [64] (quark int4")


def test_codes_are_compared_without_their_zero_points(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("quark-int4")
    edit(out, lambda t: (t.pop(ZEROS), t.update({f"{Q}.weight": flip_bit(t[f"{Q}.weight"], 3)})))
    wheres = {fault.where for fault in verify(out, source, foreign=True).faults}
    assert wheres >= {ZEROS, f"{Q}.weight"}


def test_fused_linears_share_the_scale_of_their_input(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("modelopt-fp8")
    edit(out, put(INPUT, lambda t: set_scale(t, 0.25)))
    assert verify(out, source, foreign=True).ok
    edit(out, put(f"{Q}.input_scale", lambda t: set_scale(t, 0.25)))
    found = faults_of(verify(out, source, foreign=True))
    assert "expected one input_scale for fused linears" in found


# ---- broken folders


def test_folders_that_are_no_input(made: dict[str, Path], source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds no config"):
        verify(tmp_path, source, foreign=True)
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(made["quark-int4"], tmp_path / "absent", foreign=True)
    with pytest.raises(CheckpointError, match="give the floating-point draft"):
        verify(made["quark-fp8"], made["quark-fp8"], foreign=True)
