"""`verify` of whole folders: correct ones pass in every layout; declarations, files, headers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CheckpointError
from handmade import MADE, by_hand, quantize_by_hand, stored_parts
from handmade_declarations import EXCLUDES
from tiny import (
    INDEX_FILE,
    edit_json,
    read_tensors,
    store,
    tiny_eagle3_llama,
    values_of,
    write_tensors,
)
from verify_cases import (
    ATTENTION,
    Q,
    Tensors,
    assert_only_fault,
    codes_of,
    edit,
    edit_declaration,
    faults_of,
    method_of,
    provenance_of,
    recipe_of,
    reseal,
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


@pytest.mark.parametrize(
    "options",
    [
        {"sharded": True},
        {"prefix": "layers.0."},
        {"prefix": "model.layers.0.", "num_layers": 2},
        {"dtype": "F16"},
        {"dtype": "F32"},
        {"embed": False, "head": False},
        {"heads": 3, "kv_heads": 3, "head_dim": 40, "hidden": 40, "intermediate": 72},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["quark-int4", "ct-int4", "ct-fp8-static"])
def test_variants_of_the_draft_pass(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "source", **options)
    report = verify(quantize_by_hand(draft, tmp_path / "out", MADE[name]), draft, foreign=True)
    assert report.faults == ()
    assert report.quantized == 7 * options.get("num_layers", 1)


@pytest.mark.parametrize("name", sorted(MADE))
def test_zero_rows_and_a_zero_weight_pass(name: str, tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "source")

    def zero(tensors: Tensors) -> None:
        q, o = tensors[f"{Q}.weight"], tensors[f"{ATTENTION}o_proj.weight"]
        tensors[f"{Q}.weight"] = q._replace(data=bytes(256) + q.data[256:])
        tensors[f"{ATTENTION}o_proj.weight"] = o._replace(data=bytes(len(o.data)))

    edit(draft, zero)
    report = verify(quantize_by_hand(draft, tmp_path / "out", MADE[name]), draft, foreign=True)
    assert report.faults == ()
    by_module = {linear.module: linear for linear in report.linears}
    assert by_module[f"{ATTENTION}o_proj"].relative_l2_error == 0


@pytest.mark.parametrize("foreign", [True, False])
def test_an_unquantized_copy_is_nothing_to_verify(
    foreign: bool, source: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="nothing to verify") as caught:
        verify(copy, source, foreign=foreign)
    assert caught.value.where == str(copy)


def test_hashes_are_those_of_the_bytes(made: dict[str, Path], source: Path) -> None:
    report = verify(made["ct-fp8-static"], source, foreign=True)
    for folder, hashes in (
        (source, report.source_digests),
        (made["ct-fp8-static"], report.output_digests),
    ):
        tensors = read_tensors(folder)
        assert hashes == {n: f"blake3:{blake3(t.data).hexdigest()}" for n, t in tensors.items()}


def test_saturation_and_one_more_bf16_rounding_pass(source: Path, tmp_path: Path) -> None:
    """ModelOpt rounds w/scale to bfloat16 before FP8; absmax itself may land a hair above 448."""
    made = MADE["modelopt-fp8"]
    out = quantize_by_hand(source, tmp_path / "out", made)
    weight = read_tensors(source)[f"{Q}.weight"]
    exact = stored_parts(by_hand(weight, made), "BF16", made)
    scale = values_of(exact["weight_scale"])
    divided = store(values_of(weight) / scale, "BF16")
    twice = stored_parts(by_hand(divided, made), "BF16", made)
    assert twice["weight"].data != exact["weight"].data
    rescaled = codes_of(divided)
    edit(out, lambda t: t.__setitem__(f"{Q}.weight", rescaled))
    assert verify(out, source, foreign=True).faults == ()


# ---- declarations


@pytest.mark.parametrize(
    ("stored", "declared"),
    [
        ("quark-int4", "quark-fp8"),
        ("quark-int4", "quark-int4-static"),
        ("quark-fp8", "quark-int4"),
        ("quark-fp8", "quark-fp8-static"),
        ("quark-int4", "ct-int4"),
        ("ct-int4", "quark-int4"),
        ("ct-int4", "ct-fp8"),
        ("ct-fp8", "ct-fp8-static"),
        ("ct-fp8", "modelopt-fp8-pcpt"),
        ("modelopt-fp8", "modelopt-fp8-pcpt"),
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


def test_the_second_declaration_of_modelopt_is_needed(
    copy_of: Callable[[str], Path], source: Path
) -> None:
    out = copy_of("modelopt-fp8")
    (out / "hf_quant_config.json").unlink()
    assert_only_fault(verify(out, source, foreign=True), "hf_quant_config.json", "got none")


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


def test_metadata_of_the_source_is_preserved(copy_of: Callable[[str], Path], source: Path) -> None:
    out = copy_of("quark-int4")
    write_tensors(out, read_tensors(out), metadata={"format": "tf"})
    assert_only_fault(
        verify(out, source, foreign=True), "__metadata__: format", "expected 'pt', got 'tf'"
    )


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


# ---- broken folders


@pytest.mark.parametrize("cut", [1, 1000, 10**6])
def test_a_truncated_file(copy_of: Callable[[str], Path], source: Path, cut: int) -> None:
    out = copy_of("quark-int4")
    content = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(content[: max(9, len(content) - cut)])
    report = verify(out, source, foreign=True)
    assert_only_fault(report, "model.safetensors", "expected readable headers and declaration")


def test_folders_that_are_no_input(made: dict[str, Path], source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds no config"):
        verify(tmp_path, source, foreign=True)
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(made["quark-int4"], tmp_path / "absent", foreign=True)
    with pytest.raises(CheckpointError, match="give the floating-point draft"):
        verify(made["quark-fp8"], made["quark-fp8"], foreign=True)
