"""`graft`: a layer goes into its target's folder, and what was there stays, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.scripts.cli import main
from tiny import Stored, read_tensors
from tiny_target import FORMS, MTP, quantized_target, tiny_target

INDEX = "model.safetensors.index.json"
KINDS = tuple(MTP)
LAYER_RECIPES = {"int4": "int4-group128", "fp8": "fp8-ptpc"}
MIXES = [
    (kind, form, layer)
    for kind in KINDS
    for form in ("ct-fp8", "ct-int4")
    for layer in LAYER_RECIPES
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind the BF16 target, its layer quantized apart, and targets without the layer."""
    root = tmp_path_factory.mktemp("targets")
    for kind in KINDS:
        plain = tiny_target(root / kind, kind)
        for name, recipe in LAYER_RECIPES.items():
            command = ["quantize", str(plain), "--subtree", MTP[kind], "--recipe", recipe]
            assert main([*command, "--quiet", "--out", str(root / f"{kind}-{name}")]) == 0
        for form in FORMS:
            quantized_target(plain, root / f"{kind}-{form}", form)
    return root


def graft(target: Path, layer: Path, out: Path, *options: str) -> int:
    return main(["graft", str(target), str(layer), *options, "--quiet", "--out", str(out)])


def states(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(("kind", "form", "layer"), MIXES)
def test_target_and_layer_each_in_its_own_format(
    kind: str, form: str, layer: str, folders: Path, tmp_path: Path
) -> None:
    target, own, out = folders / f"{kind}-{form}", folders / f"{kind}-{layer}", tmp_path / "out"
    before = states(target)
    assert graft(target, own, out) == 0
    assert states(target) == before
    tensors = read_tensors(out)
    whole, alone = read_tensors(target), read_tensors(own)
    starts = f"{MTP[kind]}."
    assert {n: t for n, t in tensors.items() if not n.startswith(starts)} == whole
    assert {n: t for n, t in tensors.items() if n.startswith(starts)} == {
        n: t for n, t in alone.items() if n.startswith(starts)
    }
    for file in target.glob("*.safetensors"):
        assert (out / file.name).samefile(file)
    index = json.loads((out / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    added = index["metadata"]["total_parameters"] - 12345
    plain = read_tensors(folders / kind)
    assert added == sum(t.numel for n, t in sizes(plain).items() if n.startswith(starts))
    assert config_of(out)["num_nextn_predict_layers"] == 1
    against = ["verify", str(out), "--against", str(target)]
    assert main(against) == main([*against, "--layer", str(own)]) == 0
    stored = StoredDraft.read(Checkpoint.open(out, subtree=MTP[kind]))
    apart = StoredDraft.read(Checkpoint.open(own))
    assert stored.modules == apart.modules
    schemes = [
        {str(s.scheme_of(r)).partition(";")[0] for r in s.draft.rows} for s in (stored, apart)
    ]
    assert schemes[0] == schemes[1]


def sizes(tensors: dict[str, Stored]) -> dict[str, Any]:
    from types import SimpleNamespace

    import numpy as np

    return {n: SimpleNamespace(numel=int(np.prod(t.shape))) for n, t in tensors.items()}
