"""`graft`: a layer goes into its target's folder, and what was there stays, byte for byte."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draftquant.api as dq
import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.files.staging import write_text
from draftquant.quantize.grafting.graft_layer import plan_graft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify import verify_graft
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import config_of, edit_json, read_tensors, tiny_eagle3_llama
from tiny_target import FORMS, MTP, quantized_target, tiny_target, write_shards

INDEX, SIDE = "model.safetensors.index.json", "hf_quant_config.json"
LAYER_RECIPES = {"int4": "int4-group128", "fp8": "fp8-ptpc"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind the BF16 target, its layer quantized apart, and targets without the layer."""
    root = tmp_path_factory.mktemp("targets")
    for kind, names in (
        ("glm", ("int4", "ct-fp8")),
        ("mimo", (*LAYER_RECIPES, "bf16", "ct-fp8", "ct-int4", "quark-fp8")),
    ):
        tiny_target(root / kind, kind)
        for name in names:
            made(root, kind, name)
    return root


def made(root: Path, kind: str, name: str) -> Path:
    """A layer by a recipe, or a target in a form."""
    out = root / f"{kind}-{name}"
    if name in FORMS and not out.exists():
        quantized_target(root / kind, out, name)
    elif not out.exists():
        command = ["quantize", str(root / kind), "--subtree", MTP[kind], "--backend", "torch"]
        command += ["--recipe", LAYER_RECIPES.get(name, name)]
        assert main([*command, "--quiet", "--out", str(out)]) == 0
    return out


def graft(target: Path, layer: Path, out: Path, *options: str) -> int:
    return main(["graft", str(target), str(layer), *options, "--quiet", "--out", str(out)])


def states(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "form", "layer"), [("glm", "ct-fp8", "int4"), ("mimo", "ct-int4", "fp8")]
)
def test_target_and_layer_each_in_its_own_format(
    kind: str, form: str, layer: str, folders: Path, tmp_path: Path
) -> None:
    target, own, out = folders / f"{kind}-{form}", folders / f"{kind}-{layer}", tmp_path / "out"
    before = states(target)
    assert graft(target, own, out) == 0
    assert states(target) == before
    tensors, starts = read_tensors(out), f"{MTP[kind]}."
    layer_alone = {n: t for n, t in read_tensors(own).items() if n.startswith(starts)}
    assert tensors == read_tensors(target) | layer_alone
    for file in target.glob("*.safetensors"):
        assert (out / file.name).samefile(file)
    index = json.loads((out / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    assert config_of(out)["num_nextn_predict_layers"] == 1
    alone, own_bytes = dq.verify(out, against=target), (len(t.data) for t in layer_alone.values())
    assert (alone.ok, alone.to_mapping()["bytes_compared"]) == (True, sum(own_bytes))
    assert main(["verify", str(out), "--against", str(target), "--layer", str(own)]) == 0
    stored = StoredDraft.read(Checkpoint.open(out, subtree=MTP[kind]))
    apart = StoredDraft.read(Checkpoint.open(own))
    assert (stored.modules, of_linears(stored)) == (apart.modules, of_linears(apart))


def of_linears(stored: StoredDraft) -> dict[str, str]:
    rows = (row for row in stored.draft.rows if stored.is_quantized(row))
    return {row.module: str(stored.scheme_of(row)).partition(";")[0] for row in rows}


def test_taken_out_and_put_back_is_byte_identical(folders: Path, tmp_path: Path) -> None:
    target, layer = folders / "glm-ct-fp8", folders / "glm-int4"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert graft(target, layer, first, "--link", "symbolic") == 0
    assert all((first / path.name).is_symlink() for path in target.glob("*.safetensors"))
    assert graft(target, first, second, "--subtree", MTP["glm"]) == 0
    assert graft(first, layer, third, "--replace") == 0
    for again in (second, third):
        assert {path.name for path in again.iterdir()} == {path.name for path in first.iterdir()}
        for path in first.iterdir():
            if path.name != "draftquant.json":  # it says by which command line
                assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_shard_with_a_part_of_a_replaced_layer_loses_it(folders: Path, tmp_path: Path) -> None:
    target = quantized_target(folders / "glm", tmp_path / "target", "ct-fp8", drops=False)
    layer, out = folders / "glm-int4", tmp_path / "out"
    with pytest.raises(CheckpointError, match="the target has this layer already: 34 tensors"):
        plan_graft(target, resolve_draft(str(layer)))
    before = states(target)
    assert graft(target, layer, out, "--replace") == 0
    assert states(target) == before
    both = [read_tensors(each).items() for each in (target, out)]
    rest = [{n: t for n, t in each if not n.startswith("model.layers.2.")} for each in both]
    assert rest[0] == rest[1]
    linked = {path.name for path in target.glob("*.safetensors") if (out / path.name).exists()}
    same = {name for name in linked if (out / name).samefile(target / name)}
    assert set() < same < linked
    assert main(["verify", str(out), "--against", str(target), "--layer", str(layer)]) == 0


def with_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tied(folders: Path, tmp_path: Path) -> Path:
    config = config_of(folders / "mimo-bf16") | {"tie_word_embeddings": True}
    target, whole = with_config(tmp_path / "target", config), read_tensors(folders / "mimo-bf16")
    write_shards(target, {n: t for n, t in whole.items() if n != "lm_head.weight"}, 2)
    return target


def with_head(folders: Path, tmp_path: Path, head: str) -> Path:
    """The layer in a folder with a head, which has the values of a table of the target."""
    layer = with_config(tmp_path / "layer", config_of(folders / "mimo"))
    plain = read_tensors(folders / "mimo")
    own = {n: t for n, t in plain.items() if n.startswith(f"{MTP['mimo']}.")}
    write_shards(layer, own | {"lm_head.weight": plain[head]}, 1)
    return layer


def test_head_of_a_tied_target_is_held_against_its_embedding(folders: Path, tmp_path: Path) -> None:
    target, out = tied(folders, tmp_path), tmp_path / "out"
    layer = with_head(folders, tmp_path, "model.embed_tokens.weight")
    assert graft(target, layer, out) == 0
    assert "lm_head.weight" not in read_tensors(out)
    verify = ["verify", str(out), "--against", str(target), "--layer", str(layer)]
    assert main(verify) == 0
    whole = read_tensors(layer)
    whole["lm_head.weight"] = read_tensors(folders / "mimo")["lm_head.weight"]
    write_shards(layer, whole, 1)
    assert main(verify) == 1


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "target"))


def other_index(folders: Path, tmp_path: Path) -> tuple[Path, Path]:
    target = copied(folders / "mimo-ct-fp8", tmp_path)
    index = json.loads((target / INDEX).read_text(encoding="utf-8"))
    first, *_ = index["weight_map"]
    edit_json(target / INDEX, weight_map=index["weight_map"] | {first: SHARD})
    return target, folders / "mimo-int4"


def renumbered(folders: Path, tmp_path: Path) -> tuple[Path, Path]:
    layer = copied(folders / "glm-int4", tmp_path)
    edit_json(layer / "config.json", num_hidden_layers=1)
    return folders / "glm-ct-fp8", layer


def declaring(target: str, **config: object) -> Callable[[Path, Path], tuple[Path, Path]]:
    def made(folders: Path, tmp_path: Path) -> tuple[Path, Path]:
        edit_json(copied(folders / f"mimo-{target}", tmp_path) / "config.json", **config)
        return tmp_path / "target", folders / "mimo-int4"

    return made


SHARD = "model-00003-of-00003.safetensors"
OTHER = {"quant_method": "gptq", "bits": 4}
BAD: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "another width": declaring("ct-fp8", hidden_size=512),
    "gptq": declaring("bf16", quantization_config=OTHER),
    "declared in text_config": declaring("bf16", text_config={"quantization_config": OTHER}),
    "declared elsewhere": declaring("ct-fp8", compression_config=OTHER),
    "a layer of another number": renumbered,
    "another family": lambda f, _: (f / "glm-ct-fp8", f / "mimo-int4"),
    "another shard": other_index,
    "another method": lambda f, _: (f / "mimo-quark-fp8", f / "mimo-int4"),
    "another head": lambda f, out: (tied(f, out), with_head(f, out, "lm_head.weight")),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name(what: str, folders: Path, tmp_path: Path) -> None:
    assert graft(*BAD[what](folders, tmp_path), tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_of_folders_that_cannot_be_read_nothing_was_compared(folders: Path, tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft")
    broken = shutil.copytree(draft, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"none")
    of_draft = dq.verify(broken, against=draft)
    for report in (verify_graft(tmp_path, folders / "mimo", ["a"]), of_draft):
        told = {key for key, value in report.to_mapping().items() if value}
        assert told < {"output", "source", "target", "layers", "faults"}
        assert len(report.faults) == 1


def test_modelopts_nested_declarations_name_the_layer(folders: Path, tmp_path: Path) -> None:
    """In config.json and beside it."""
    inner = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    declared = {"quant_method": "modelopt", "quantization": inner}
    target, _ = declaring("bf16", quantization_config=declared)(folders, tmp_path)
    write_text(target / SIDE, json.dumps({"quantization": inner}))
    assert graft(target, folders / "mimo", tmp_path / "out", "--subtree", MTP["mimo"]) == 0
    side = json.loads((tmp_path / "out" / SIDE).read_text(encoding="utf-8"))
    for found in (config_of(tmp_path / "out")["quantization_config"], side):
        assert f"{MTP['mimo']}.*" in found["quantization"]["exclude_modules"]


def test_groups_of_the_target_by_name_are_asked_after_layers(folders: Path, tmp_path: Path) -> None:
    target = copied(folders / "mimo-ct-fp8", tmp_path)
    declared = config_of(target)["quantization_config"]
    (group,) = declared["config_groups"].values()
    named = {"by_name": {**group, "targets": ["re:.*_proj$"]}}
    edit_json(target / "config.json", quantization_config=declared | {"config_groups": named})
    assert graft(target, folders / "mimo-int4", tmp_path / "out") == 0
    groups = config_of(tmp_path / "out")["quantization_config"]["config_groups"]
    assert list(groups) == ["mtp_0", "by_name"]
    stored = StoredDraft.read(Checkpoint.open(tmp_path / "out", subtree=MTP["mimo"]))
    assert all("int4" in scheme for scheme in of_linears(stored).values())
    assert dq.verify(tmp_path / "out", against=target).ok
    edit_json(tmp_path / "out" / "draftquant.json", argv=["me"])
    (fault,) = dq.verify(tmp_path / "out", against=target).faults
    assert fault.startswith("draftquant.json: sha256: expected its seal")
    named["by_name"]["targets"] = ["re:.*[quk]_proj$"]
    edit_json(tmp_path / "out" / "config.json", quantization_config=declared | {
        "config_groups": {"mtp_0": groups["mtp_0"], **named}})  # fmt: skip
    faults = dq.verify(tmp_path / "out", against=target).faults
    assert any(fault.startswith("declaration of model.layers.0.") for fault in faults), faults
    changed = copied(folders / "mimo-int4", tmp_path / "changed")  # since it was quantized
    file = next(changed.glob("*.safetensors"))
    *content, last = file.read_bytes()
    file.write_bytes(bytes([*content, last ^ 1]))
    assert graft(folders / "mimo-ct-fp8", changed, tmp_path / "none") == 2
