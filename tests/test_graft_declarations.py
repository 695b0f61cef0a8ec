"""One quantization_config for a target and a grafted layer: the whole of it, by each tool's way."""

import re
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
    on_disk=("model.layers.2",),
    engines={"vllm": ("model.layers.2",), "sglang": ("model.decoder",)},
)
NAMELESS = LayerNames(on_disk=("mtp.0",), engines={"vllm": None, "sglang": ("self_attn", "mlp")})


def groups(ignore: tuple[str, ...] = ("lm_head",), **by_name: Object) -> Object:
    """A declaration of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": by_name or {"group_0": {"bits": 4, "targets": ["Linear"]}},
        "ignore": [*ignore],
    }


def floats(*excluded: str, **more: object) -> Object:
    """A declaration of plain fp8."""
    declared = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {**declared, "modules_to_not_convert": [*excluded], **more}


def modelopt(*excluded: str, **more: object) -> Object:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [*excluded], **more}


START = r"(?:model\.decoder|model\.layers\.2)\."
NO_NAMES = "it asks for this layer's linears by the names of a layer of the target, so that no"
NO_NAMES += " declaration can tell them apart"
FLOATS = "it gives this layer's linears no name of their own (self_attn.q_proj), and compares"
FLOATS += " excludes with parts of names: it would take the target's for excluded as well"
MEANT = "the target's exclude {!r} means {} of the layer there"
QUARK = {"quant_method": "quark", "exclude": ["lm_head", "re:.*o_proj"]}


def raw(value: Object) -> RawDeclaration:
    place = Path("target") / "config.json"
    key = "quantization_config"
    return RawDeclaration(value=value, where=place, key=key, form="nested", has_method=True)


def layer(
    declared: Object | None = None,
    quantized: tuple[str, ...] = ("self_attn.o_proj",),
    kept: tuple[str, ...] = ("eh_proj",),
    names: LayerNames = NUMBERED,
) -> GraftedLayer:
    """A layer with these modules below its prefix."""
    (start,) = names.on_disk
    codes = quantized if declared else ()
    one_format = declared is not None and declared["quant_method"] in ("fp8", "modelopt")
    return GraftedLayer(
        declared=declared,
        names=names,
        quantized=tuple(f"{start}.{module}" for module in codes),
        kept=tuple(f"{start}.{module}" for module in kept),
        scheme="its own format" if declared else None,
        format=read_scheme(raw(declared), strictness="engine") if one_format and declared else None,
    )


O_PROJ, EH_PROJ = r"re:~(?:.*\.)?o_proj$", r"re:~(?:.*\.)?eh_proj$"
PACKED = "pack-quantized"
OF_TARGET = {"group_0": (["Linear"], PACKED)}
Expected = tuple[Object, dict[str, str]] | None
CASES: dict[str, tuple[Object | None, GraftedLayer, Expected]] = {
    "none of both is quantized": (None, layer(), None),
    "the layer alone": (
        None,
        layer(groups()),
        ({"mtp_0": ([O_PROJ], PACKED), "whole": PACKED, "ignore": ["re:(?!~)", EH_PROJ]}, {}),
    ),
    "the target alone": (
        groups(),
        layer(),
        ({**OF_TARGET, "whole": PACKED, "ignore": ["lm_head", "re:~"]}, {}),
    ),
    "both": (
        groups(),
        layer(groups()),
        (
            {
                "mtp_0": ([O_PROJ], PACKED),
                **OF_TARGET,
                "whole": PACKED,
                "ignore": ["lm_head", EH_PROJ],
            },
            {},
        ),
    ),
    "an earlier graft": (
        groups(
            ("lm_head", EH_PROJ.replace("~", START)),
            mtp_0={"targets": [O_PROJ.replace("~", START)]},
            group_0={"format": "float-quantized", "targets": ["Linear"]},
        ),
        layer(groups()),
        (
            {
                "mtp_0": ([O_PROJ], PACKED),
                "group_0": (["Linear"], "float-quantized"),
                "whole": "mixed-precision",
                "ignore": ["lm_head", EH_PROJ],
            },
            {},
        ),
    ),
    "a group of that name": (
        groups((), mtp_0={"targets": ["Linear"]}),
        layer(groups()),
        (
            {
                "mtp_0_": ([O_PROJ], PACKED),
                "mtp_0": (["Linear"], PACKED),
                "whole": PACKED,
                "ignore": [EH_PROJ],
            },
            {},
        ),
    ),
    "groups by name, one of them of other linears": (
        groups(),
        layer(
            groups(
                a={"targets": ["re:.*gate_up"]},
                b={"targets": ["re:.*o_proj"]},
                c={"format": "float-quantized", "targets": ["Linear"]},
            ),
            quantized=("self_attn.o_proj", "mlp.down_proj"),
        ),
        (
            {
                "mtp_0": ([O_PROJ], PACKED),
                "mtp_1": ([r"re:~(?:.*\.)?down_proj$"], "float-quantized"),
                **OF_TARGET,
                "whole": "mixed-precision",
                "ignore": ["lm_head", EH_PROJ],
            },
            {},
        ),
    ),
    "experts in two forms": (
        groups(group_0={"format": "float-quantized", "targets": ["Linear"]}),
        layer(groups(), quantized=("mlp.experts.0.down_proj",)),
        (
            {
                "mtp_0": ([r"re:~(?:.*\.)?down_proj$"], PACKED),
                "group_0": (["Linear"], "float-quantized"),
                "whole": PACKED,
                "ignore": ["lm_head", EH_PROJ],
            },
            {},
        ),
    ),
    "leaves that both have": (
        groups(),
        layer(groups(), kept=("eh_proj", "other.o_proj")),
        (
            {
                "mtp_0": ([r"re:~self_attn\.o_proj$"], PACKED),
                **OF_TARGET,
                "whole": PACKED,
                "ignore": ["lm_head", r"re:~eh_proj$", r"re:~other\.o_proj$"],
            },
            {},
        ),
    ),
    "a fused linear": (
        groups(),
        layer(groups(), quantized=("self_attn.q_proj",)),
        (
            {
                "mtp_0": ([r"re:~(?:.*\.)?q_proj$", r"re:~(?:.*\.)?qkv_proj$"], PACKED),
                **OF_TARGET,
                "whole": PACKED,
                "ignore": ["lm_head", EH_PROJ],
            },
            {},
        ),
    ),
    "excludes that mean the layer": (
        groups(("re:.*o_proj", "model.layers.2.self_attn.o_proj", "model.layers.1.o_proj")),
        layer(groups()),
        (
            {
                "mtp_0": ([O_PROJ], PACKED),
                **OF_TARGET,
                "whole": PACKED,
                "ignore": ["re:(?!~)(?:.*o_proj)", "model.layers.1.o_proj", EH_PROJ],
            },
            {},
        ),
    ),
    "an exclude that is the end of a name": (
        groups(("o_proj",)),
        layer(groups()),
        (
            {
                "mtp_0": ([O_PROJ], PACKED),
                **OF_TARGET,
                "whole": PACKED,
                "ignore": ["o_proj", EH_PROJ],
            },
            {"sglang": MEANT.format("o_proj", "quantized linears")},
        ),
    ),
    "names of a layer of the target": (
        groups(),
        layer(names=NAMELESS),
        (
            {**OF_TARGET, "whole": PACKED, "ignore": ["lm_head", r"re:(?:mlp|mtp\.0|self_attn)\."]},
            {"vllm": NO_NAMES},
        ),
    ),
    "quark": (
        QUARK,
        layer({"quant_method": "quark"}),
        ({"exclude": ["lm_head", "re:(?!~)(?:.*o_proj)", EH_PROJ]}, {}),
    ),
    "quark, a layer of floats": (
        QUARK,
        layer(),
        ({"exclude": ["lm_head", "re:.*o_proj", "re:~"]}, {}),
    ),
    "wildcards": (
        modelopt("lm_head", "model.layers.2*"),
        layer(modelopt(), quantized=("mlp.down_proj",)),
        ({"ignore": ["lm_head", "model.decoder.*eh_proj", "model.layers.2.*eh_proj"]}, {}),
    ),
    "wildcards, a layer of floats": (
        modelopt("lm_head"),
        layer(),
        ({"ignore": ["lm_head", "model.decoder.*", "model.layers.2.*"]}, {}),
    ),
    "wildcards, leaves that both have": (
        modelopt(),
        layer(modelopt(), kept=("x.o_proj",)),
        ({"ignore": ["model.layers.2.x.o_proj", "model.decoder.x.o_proj"]}, {}),
    ),
    "wildcards under the other name": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        layer(),
        ({"exclude_modules": ["lm_head", "model.decoder.*", "model.layers.2.*"]}, {}),
    ),
    "a list of floats": (
        floats("lm_head", "model.layers.2.self_attn", "model.layers.1.mlp"),
        layer(floats(), kept=("eh_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj")),
        (
            {
                "modules_to_not_convert": [
                    *("lm_head", "model.layers.1.mlp"),
                    *("model.layers.2.eh_proj", "model.decoder.eh_proj"),
                    *("model.layers.2.mlp.experts", "model.decoder.mlp.experts"),
                ]
            },
            {},
        ),
    ),
    "a list of floats that means the layer": (
        floats("self_attn"),
        layer(floats()),
        (
            {
                "modules_to_not_convert": [
                    *("self_attn", "model.layers.2.eh_proj", "model.decoder.eh_proj"),
                ]
            },
            {"sglang": MEANT.format("self_attn", "linears")},
        ),
    ),
    "floats of no name of their own": (
        floats(),
        layer(kept=("mlp.up_proj",), names=NAMELESS),
        (
            {"modules_to_not_convert": ["mtp.0.mlp.up_proj", "mtp.0.mlp.gate_up_proj"]},
            {"vllm": NO_NAMES, "sglang": FLOATS},
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_merged(case: str) -> None:
    target, of, expected = CASES[case]
    merged = merged_declaration(None if target is None else raw(target), of)
    assert (merged and (in_short(merged.value), merged.cannot)) == expected
    if merged is not None and expected is not None:
        assert list(in_short(merged.value)) == list(expected[0])  # groups are asked in this order
        base = target or of.declared or {}
        others = [key for key in base if key not in LISTS]
        assert [merged.value[key] for key in others] == [base[key] for key in others]


LISTS = {"config_groups", "format", "ignore", "exclude", "exclude_modules"}
LISTS |= {"modules_to_not_convert"}


def in_short(value: Mapping[str, Any]) -> Object:
    """Groups by targets and format, and lists of excludes; ~ is the start of the layer's names."""

    def short(entries: list[str]) -> list[str]:
        return [entry.replace(START, "~") for entry in entries]

    groups = value.get("config_groups", {})
    found: Object = {name: (short(row["targets"]), row["format"]) for name, row in groups.items()}
    if groups:
        found["whole"] = value["format"]
    excludes = sorted(LISTS - {"config_groups", "format"} & value.keys())
    return found | {key: short(value[key]) for key in excludes if key in value}


def of_modelopt(**more: object) -> GraftedLayer:
    return layer(modelopt(**more))


CACHE = {"num_bits": 8, "type": "float"}
REFUSED: dict[str, tuple[Object | None, GraftedLayer]] = {
    "in layout fp8 a declaration cannot mean the layer alone": (None, layer(floats())),
    "quant_method is 'gptq', whose way to declare one layer": ({"quant_method": "gptq"}, layer()),
    "quant_method is 'fp8', the layer's 'modelopt'": (floats(), of_modelopt()),
    "its tool has one format for all linears": (
        modelopt(),
        layer({**modelopt(), "quant_algo": "NVFP4"}),
    ),
    "modelopt: the layer declares a quantized KV cache": (
        modelopt(),
        of_modelopt(kv_cache_quant_algo="FP8"),
    ),
    "groups: the layer declares a quantized KV cache": (
        groups(),
        layer({**groups(), "kv_cache_scheme": CACHE}),
    ),
    "is no pattern that can be decided": (groups(("re:(?<name>x)",)), layer(groups())),
    "the target's exclude '*o_proj' means quantized": (modelopt("*o_proj"), of_modelopt()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    target, of = REFUSED[what]
    with pytest.raises(LayoutError, match=re.escape(what.partition(": ")[2] or what)) as caught:
        merged_declaration(None if target is None else raw(target), of)
    assert caught.value.fix


def test_a_cache_that_both_declare_is_kept() -> None:
    declared = {**groups(), "kv_cache_scheme": CACHE}
    merged = merged_declaration(raw(declared), layer(declared))
    assert merged is not None
    assert merged.value["kv_cache_scheme"] == CACHE
