"""Quantized targets whose MTP layer is excluded in many ways, and what both loaders make of it.

`test_mtp_engines.py` holds `check --target` against `inside.json`. A layer is built under its
target's declaration, often with a list of what its class fuses.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
import kind_formats as kinds  # noqa: E402
import numpy as np  # noqa: E402
from folder_rows import random_tensor  # noqa: E402
from tiny import edit_json, read_tensors, write_tensors  # noqa: E402
from tiny_mtp import tiny_glm4_moe_mtp, tiny_mimo_mtp, tiny_qwen3_next_mtp  # noqa: E402

OUT = HERE / "inside.json"
_SIZES = {"hidden": 256, "intermediate": 512, "vocab": 256, "heads": 4, "kv_heads": 2,
          "head_dim": 64}  # fmt: skip
_MIXTURE = {**_SIZES, "moe_intermediate": 128}
_TWO = {"num_hidden_layers": 2}
_ALL_FULL = {**_TWO, "layer_types": ["full_attention"] * 2}
_ROPE = {"rope_type": "default", "mrope_interleaved": True, "rope_theta": 1e7,
         "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25}  # fmt: skip
_VISION = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 64, "intermediate_size": 128,
           "num_heads": 2, "out_hidden_size": 256, "num_position_embeddings": 64}  # fmt: skip
_QWEN = {**_ALL_FULL, "rope_parameters": _ROPE}
_MIMO = {**_TWO, "model_type": "qwen2"}
_GLM = {**_TWO, "first_k_dense_replace": 0}
FAMILIES: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "qwen": (partial(tiny_qwen3_next_mtp, experts=0, config=_QWEN, **_SIZES), "mtp"),
    "next": (partial(tiny_qwen3_next_mtp, config=_ALL_FULL, **_MIXTURE), "mtp"),
    "mimo": (partial(tiny_mimo_mtp, config=_MIMO, **_SIZES), "model.mtp_layers.0"),
    "glm": (partial(tiny_glm4_moe_mtp, number=2, config=_GLM, **_MIXTURE), "model.layers.2"),
}
"""Name -> builder, and the subtree."""


def _gptq(names: Sequence[str]) -> dict[str, Any]:
    said = (n.removeprefix("re:") if n.startswith("re:") else re.escape(n) for n in names)
    return {**kinds.GPTQ, "dynamic": {f"-:{name}": {} for name in said}}


def _auto_round(names: Sequence[str]) -> dict[str, Any]:
    floats = {"bits": 16, "data_type": "float"}
    return {**kinds.AUTO_ROUND, "extra_config": {n.removeprefix("re:"): floats for n in names}}


_KEPT = "modules_to_not_convert"
_FP8 = kinds.excluding({**kinds.MODELOPT, "quant_algo": "FP8"}, "ignore")
_FP4 = kinds.excluding({**kinds.MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, "ignore")
FORMATS: Mapping[str, tuple[kinds.Store, Callable[[Sequence[str]], dict[str, Any]]]] = {
    "quark": (kinds.fp8_rows("F32"), kinds.excluding(kinds.QUARK, "exclude")),
    "ct-fp8": (kinds.fp8_rows("BF16", 1), kinds.excluding(kinds.CT_FP8, "ignore")),
    "fp8-block": (kinds.fp8_blocks, kinds.excluding(kinds.BLOCKS, _KEPT)),
    "fp8": (kinds.fp8, kinds.excluding(kinds.FP8, _KEPT)),
    "modelopt-fp8": (kinds.fp8, _FP8),
    "modelopt-nvfp4": (kinds.modelopt_nvfp4, _FP4),
    "awq": (kinds.awq, kinds.excluding(kinds.AWQ, _KEPT)),
    "gptq": (kinds.gptq, _gptq),
    "gptq-lists": (
        kinds.gptq,
        lambda names: {**kinds.GPTQ, "modules_in_block_to_quantize": [list(names)]},
    ),
    "auto-round": (kinds.auto_round, _auto_round),
    "auto-round-blocks": (
        kinds.auto_round,
        lambda names: {**kinds.AUTO_ROUND, "block_name_to_quantize": ",".join(names)},
    ),
}
"""Name -> how a linear is stored, and a quantization_config that excludes names; that of the lists
of GPTQ and the blocks of AutoRound quantizes them."""
_NAMED = ("undeclared", "parts", "fused", "one part", "regex inside", "subtree*", "leaves",
          "quantized", "mlp quantized")  # fmt: skip
_MORE = ("blocks", "subtree", "*subtree*", "regex subtree", "regex parts",
         "quantized, fc by regex", "mlp quantized, fused", "attention quantized",
         "quantized, excluded", "fc quantized", "quantized, fc undeclared")  # fmt: skip
_IN_FP8 = ("quark", "ct-fp8", "fp8-block", "modelopt-fp8")
_INTEGERS = ("awq", "gptq", "auto-round")
_OTHERS = ("quark", "ct-fp8", "fp8", "modelopt-fp8", *_INTEGERS)
GRID: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("qwen", (*_OTHERS, "modelopt-nvfp4"), _NAMED + _MORE),
    ("qwen", ("gptq-lists", "auto-round-blocks"), _NAMED),
    ("mimo", _OTHERS, (*_NAMED[:3], "run-time parts", *_NAMED[4:5], *_NAMED[6:])),
    ("next", _IN_FP8, (*_NAMED[:3], *_NAMED[4:8], "parts without experts", "attention quantized")),
    ("next", _INTEGERS, ("undeclared", "regex inside", "parts", "fused", "quantized")),
    ("glm", _IN_FP8, (*_NAMED[:2], "parts without experts", "leaves", "regex inside", "subtree",
                   "quantized")),
)  # fmt: skip
"""Family, formats, cases."""


def cases(subtree: str, linears: Sequence[str]) -> dict[str, tuple[list[str], str]]:
    """Which names are excluded ("re:" = an expression), and which linears are stored quantized."""
    layer = "mtp.layers.0" if subtree == "mtp" else subtree
    above = subtree.removesuffix(".0")
    kept = [
        n for n in linears if re.search(r"(mtp\.fc|input_proj|eh_proj|mlp\.(gate|.*_gate))$", n)
    ]
    parts = [n for n in linears if n not in kept]
    fused = [re.sub("(gate|up)_proj$", "gate_up_proj", re.sub("[qkv]_proj$", "qkv_proj", n))
             for n in parts if ".experts." not in n]  # fmt: skip
    experts = [f"{layer}.mlp.experts"] if any(".experts." in n for n in parts) else []
    attention = [n for n in parts if "attn" in n]
    return {
        "undeclared": ([], ""),
        "parts": ([*kept, *parts], ""),
        "parts without experts": ([*kept, *(n for n in parts if ".experts." not in n)], ""),
        "fused": ([*kept, *fused, *experts], ""),
        "one part": ([*kept, *(n for n in parts if not re.search("[kv]_proj", n))], ""),
        "run-time parts": ([*kept, *(n.replace(layer, "model.layers.2") for n in parts)], ""),
        "leaves": (["fc", *(n.rpartition(".")[2] for n in [*kept, *parts])], ""),
        "blocks": ([*kept, f"{layer}.self_attn", f"{layer}.mlp"], ""),
        "subtree": ([above], ""),
        "subtree*": ([f"{above}*"], ""),
        "*subtree*": ([f"*{above}*"], ""),
        "regex subtree": ([f"re:{above}.*"], ""),
        "regex inside": ([f"re:.*{above}.*"], ""),
        "regex parts": (["re:.*fc", r"re:.*mlp\.gate", "re:.*(q|k|v|o|gate|up|down)_proj"], ""),
        "quantized": (kept, "_proj"),
        "quantized, fc undeclared": (kept[1:], "_proj"),
        "quantized, fc by regex": ([f"re:.*{above}.*fc", *kept[1:]], "_proj"),
        "mlp quantized": ([*kept, *attention], "mlp.*_proj"),
        "mlp quantized, fused": ([*kept, *(n for n in fused if "attn" in n)], "mlp.*_proj"),
        "attention quantized": ([*kept, *(n for n in parts if "mlp" in n)], "attn.*_proj"),
        "fc quantized": ([], "_proj|fc"),
        "quantized, excluded": ([*kept, *parts], "_proj"),
    }


def write(folder: Path, family: str, form: str, case: str) -> None:
    """One target: a linear of its first layer is quantized, its MTP layer as the case says."""
    build, subtree = FAMILIES[family]
    build(folder)
    tensors = read_tensors(folder)
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in sorted(tensors.items(), key=lambda item: item[0] != "mtp.fc.weight")
        if name.startswith(f"{subtree}.") and len(tensor.shape) == 2
        and not re.search("shared_head|embed", name)
    }  # fmt: skip
    excluded, which = cases(subtree, list(shapes))[case]
    chosen = [n for n in shapes if which and re.search(rf"(?<!input)(?<!eh)({which})$", n)]
    below = f"model.{'language_model.' * (family == 'qwen')}layers.0.mlp.down_proj"
    stored, declared = FORMATS[form]
    rng = np.random.default_rng(3)
    found = {n: tensor for n, tensor in tensors.items() if n.removesuffix(".weight") not in chosen}
    for module in [*chosen, below]:
        for suffix, (dtype, shape) in stored(*shapes.get(module, (256, 512))).items():
            found[f"{module}.{suffix}"] = random_tensor(rng, suffix, dtype, shape)
    write_tensors(folder, found, metadata={"format": "pt"})
    more = {"vision_config": _VISION} if family == "qwen" else {}
    edit_json(folder / "config.json", quantization_config=declared(excluded), **more)


def main() -> int:
    """See the module."""
    rows: dict[str, dict[str, list[object]]] = {}
    layer: dict[str, Any] = {"target": Path("/layer"), "loader": "graft"}
    for family, forms, chosen in GRID:
        for form in forms:
            with tempfile.TemporaryDirectory() as made:
                folders = [Path(made) / case for case in chosen]
                for folder in folders:
                    write(folder, family, form, folder.name)
                told = [
                    [row["verdict"] for row in asking.loaded(engine, folders, **layer)]
                    for engine in asking.ENGINES
                ]
            rows.setdefault(f"{family} {form}", {}).update(
                {case: list(both) for case, *both in zip(chosen, *told, strict=True)}
            )
    asking.write_table(OUT, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
