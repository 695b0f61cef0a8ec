"""Recipes: the shipped ones, their catalogue, `extends`, and the hash of their decisions.

Faults in recipe files are in test_recipe_faults.py.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import combinations
import draftquant.recipes
import pytest
import yaml
from draftquant.quantize.gpus import GPUS
from draftquant.recipes import (
    Algorithm,
    Expectation,
    Format,
    KvCacheFormat,
    Recipe,
    Rule,
    aliases,
    built_in_recipes,
    load_recipe,
    recipe_sha256,
    to_mapping,
)
from draftquant.recipes.errors import DraftQuantError
from draftquant.recipes.schema import LoadsOn
from told import check_told
from weight_formats import FP8_TENSOR

FOLDER = Path(draftquant.recipes.__file__).parent
FILES = sorted(FOLDER.rglob("*.yaml"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PTPC = load_recipe("fp8-ptpc")


def write(path: Path, mapping: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")
    return path


def table(heading: str) -> list[list[str]]:
    """Rows of the README's table with this first column, as cells without back quotes."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_resolved_recipes_are_recipes_with_the_same_hash(tmp_path: Path) -> None:
    """However they are spelled: keys in another order, and defaults written out."""
    assert built_in_recipes() == tuple(sorted(path.stem for path in FILES))
    hashes = set()
    for recipe in map(load_recipe, built_in_recipes()):
        assert recipe.backend == "torch"  # a plain installation can run it
        mapping = dict(reversed(to_mapping(recipe).items()))
        for rule in mapping["rules"]:
            rule.setdefault("optional", False)
            rule.setdefault("why", None)
        again = load_recipe(write(tmp_path / f"{recipe.name}.yaml", mapping))
        assert again == recipe
        assert recipe_sha256(again) == recipe_sha256(recipe)
        hashes.add(recipe_sha256(recipe))
    assert len(hashes) == len(FILES)


CHANGES: dict[str, Any] = {
    "name": "another",
    "summary": "another",
    "loads_on": (),
    "backend": "quark",
    "layout": "quark",
    "weights": FP8_TENSOR,
    "activations": None,
    "algorithm": Algorithm(scale="mse", rounding="nearest"),
    "kv_cache": KvCacheFormat(dtype="fp8_e4m3", scales="unit"),
    "rules": PTPC.rules[:-1],
    "expect": Expectation(quantized_per_layer=6),
    "gate": dataclasses.replace(PTPC.gate, policy="screening"),
    "schema_version": 2,
}

RULE_CHANGES: dict[str, Any] = {
    "role": ("fusion", "mask"),
    "tensor": ("fc.weight",),
    "action": "quantize",
    "format": Format(weights=FP8_TENSOR, activations=None),
    "why": "another reason",
    "optional": True,
}


def test_hash_changes_with_every_field() -> None:
    index = next(i for i, rule in enumerate(PTPC.rules) if rule.role == ("fusion",))
    changed = [dataclasses.replace(PTPC, **{field: new}) for field, new in CHANGES.items()]
    for field, new in RULE_CHANGES.items():
        rules = list(PTPC.rules)
        rules[index] = dataclasses.replace(rules[index], **{field: new})
        changed.append(dataclasses.replace(PTPC, rules=tuple(rules)))
    assert len({recipe_sha256(recipe) for recipe in (PTPC, *changed)}) == len(changed) + 1
    for cls, new in ((Recipe, CHANGES), (Rule, RULE_CHANGES)):
        assert new.keys() == {f.name for f in dataclasses.fields(cls)}


# rules with a format of their own


HASH_OF_PTPC = "a9ae319cb38c2d3d71c966bc7bc0dd4121ea9a267ab04716b94d6b08d0960890"
"""As published folders have it."""


def test_the_hash_of_a_recipe_of_one_format_is_that_of_before() -> None:
    assert "format" not in json.dumps(to_mapping(PTPC)["rules"])
    before = tuple(rule for rule in PTPC.rules if rule.role != ("proposal",))  # a later role
    every = ("eagle3-llama", "eagle3-mla", "dflash")
    fewer = (  # more GPUs are known since then
        LoadsOn(engine="vllm", arch=("sm90", "sm100"), family=every),
        LoadsOn(engine="sglang", arch=("sm90", "sm100", "gfx942"), family=every),
    )
    assert recipe_sha256(dataclasses.replace(PTPC, rules=before, loads_on=fewer)) == HASH_OF_PTPC


def test_extends_a_file_beside_it_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", to_mapping(PTPC) | {"name": "base"})
    own = {
        "extends": "base.yaml",
        "name": "mine",
        "weights": {"granularity": "tensor"},
        "rules": [{"role": "attention", "action": "quantize"}],
        "activations": None,
    }
    recipe = load_recipe(write(tmp_path / "mine.yaml", own))
    assert recipe.weights == FP8_TENSOR
    assert recipe.rules == (Rule(role=("attention",), action="quantize"),)
    assert recipe.activations is None
    assert recipe.algorithm == PTPC.algorithm
    write(tmp_path / "base.yaml", to_mapping(load_recipe("int4-channel-gptq")) | {"name": "base"})
    other = {"extends": "base.yaml", "name": "mine", "backend": "quark"}
    with pytest.raises(DraftQuantError, match=r"base\.yaml:\d+: algorithm: backend quark"):
        load_recipe(write(tmp_path / "mine.yaml", other))


def test_aliases_load_on_their_gpu_for_every_family_and_need_no_traces() -> None:
    families = [one.family for name in built_in_recipes() for one in load_recipe(name).loads_on]
    assert table("alias") == [[f"`{alias}`", f"`{name}`"] for alias, name in aliases().items()]
    for alias, name in aliases().items():
        recipe, arch = load_recipe(alias), GPUS[alias].arch
        assert recipe == load_recipe(alias.upper()) == load_recipe(name)
        on_gpu = [place for place in recipe.loads_on if arch in place.arch]
        assert on_gpu
        assert all(place.family == max(families, key=len) for place in on_gpu)
        assert not recipe.needs_input_scales
        assert recipe.algorithm.rounding == "nearest"


# recipes/README.md


def schema_keys(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every key of the schema with its type, as `weights.dtype`."""
    keys: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        arguments = typing.get_args(hint)
        inner = next((t for t in (hint, *arguments) if dataclasses.is_dataclass(t)), None)
        if inner is not hint:
            keys[prefix + name] = hint
        if inner is not None:
            keys |= schema_keys(typing.cast(type, inner), f"{prefix}{name}.")
    return keys


def test_the_readme_has_the_keys_of_the_schema() -> None:
    assert [row[0].strip("`") for row in table("key")] == list(schema_keys(Recipe))


def test_what_comes_of_every_combination() -> None:
    check_told("combinations", combinations.combinations())
