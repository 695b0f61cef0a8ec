"""One quantization_config for a target and a grafted layer: the whole of it, by each tool's way."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.grafting.conventions import merged_declaration
from draftquant.quantize.grafting.grafted_layer import GraftedLayer, LayerNames
from draftquant.quantize.stored.stored_declaration import RawDeclaration, read_scheme
from draftquant.recipes.errors import LayoutError

Object = dict[str, Any]
NUMBERED = LayerNames(
    on_disk=("model.layers.2",), engines={"vllm": ("model.layers.2",), "sglang": ("model.decoder",)}
)
NAMELESS = LayerNames(on_disk=("mtp.0",), engines={"vllm": None, "sglang": ("self_attn", "mlp")})
START = r"(?:model\.decoder|model\.layers\.2)\."
CASES = tomllib.loads(Path(__file__).with_name("graft_declarations.toml").read_text("utf-8"))
LISTS = {"config_groups", "format", "ignore", "exclude", "exclude_modules"}
LISTS |= {"ignored_layers", "modules_to_not_convert"}


def raw(value: Object | None) -> RawDeclaration | None:
    if value is None:
        return None
    whole = json.loads(json.dumps(value).replace("~", json.dumps(START)[1:-1]))
    place, key = Path("target") / "config.json", "quantization_config"
    return RawDeclaration(value=whole, where=place, key=key, form="nested", has_method=True)


def layer(case: Mapping[str, Any]) -> GraftedLayer:
    declared = raw(case.get("declared"))
    names = NAMELESS if case.get("nameless") else NUMBERED
    start = names.on_disk[0]
    codes = case.get("quantized", ["self_attn.o_proj"]) if declared else []
    one_format = declared is not None and declared.value["quant_method"] in ("fp8", "modelopt")
    return GraftedLayer(
        declared=declared and declared.value,
        names=names,
        quantized=tuple(f"{start}.{module}" for module in codes),
        kept=tuple(f"{start}.{module}" for module in case.get("kept", ["eh_proj"])),
        scheme="its own format" if declared else None,
        format=read_scheme(declared, strictness="engine") if declared and one_format else None,
    )


def in_short(value: Mapping[str, Any]) -> Object:
    """Groups by targets and format, and lists of excludes, as graft_declarations.toml has them."""

    def short(entries: list[str]) -> list[str]:
        return [entry.replace(START, "~") for entry in entries]

    groups = value.get("config_groups", {})
    told: Object = {name: [short(row["targets"]), row["format"]] for name, row in groups.items()}
    if groups:
        told["whole"] = value["format"]
    excludes = sorted(LISTS - {"config_groups", "format"} & value.keys())
    return told | {key: short(value[key]) for key in excludes if key in value}


@pytest.mark.parametrize("name", [name for name in CASES if "refused" not in CASES[name]])
def test_merged(name: str) -> None:
    case = CASES[name]
    merged = merged_declaration(raw(case.get("target")), layer(case))
    if merged is None:
        assert "merged" not in case
        return
    assert list(in_short(merged.value).items()) == list(case["merged"].items())
    assert merged.cannot == case.get("cannot", {})
    base = case.get("target") or case["declared"]
    others = [key for key in base if key not in LISTS]
    assert [merged.value[key] for key in others] == [base[key] for key in others]


@pytest.mark.parametrize("name", [name for name in CASES if "refused" in CASES[name]])
def test_refused(name: str) -> None:
    case = CASES[name]
    with pytest.raises(LayoutError, match=re.escape(case["refused"])):
        merged_declaration(raw(case.get("target")), layer(case))
