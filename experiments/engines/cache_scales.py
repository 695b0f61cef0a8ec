"""What each engine's loader makes of folders that store scales of a KV cache: `cache_scales.json`.

The folders are those of `quantize --kv-cache unit`, in each layout that declares a cache;
`test_cache_engines.py` holds `check` against what is said of them.
"""

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(HERE / "foreign")]

import asking  # noqa: E402
from asking import TARGET_FOLDER, write_target  # noqa: E402
from draftquant.quantize.drafts import read_draft  # noqa: E402
from draftquant.quantize.files.checkpoint import Checkpoint  # noqa: E402
from draftquant.quantize.files.hub import resolve_draft  # noqa: E402
from draftquant.quantize.making.quantize_draft import quantize_draft  # noqa: E402
from draftquant.quantize.planning.quantization_plan import Measured, make_plan  # noqa: E402
from draftquant.recipes import KvCacheFormat, load_recipe  # noqa: E402
from tiny import tiny_eagle3_llama  # noqa: E402
from tiny_dflash import tiny_dflash  # noqa: E402
from tiny_dspark import tiny_dspark  # noqa: E402
from tiny_llama import tiny_language_model  # noqa: E402
from tiny_mtp import tiny_mimo_mtp  # noqa: E402

OUT = HERE / "cache_scales.json"
ARCH = "sm90"
_HEADS: dict[str, Any] = {"hidden": 256, "intermediate": 512, "vocab": 512, "heads": 4,
                          "kv_heads": 2, "head_dim": 64}  # fmt: skip
_TWO = {**_HEADS, "num_layers": 2}
DRAFTS: Mapping[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "e3": (tiny_eagle3_llama, {**_HEADS, "pruned_vocabulary": True}),
    "dflash": (tiny_dflash, _TWO),
    "dspark": (tiny_dspark, {**_TWO, "rank": 128}),
    "lm": (tiny_language_model, _TWO),
    "qwen3": (tiny_language_model, {**_TWO, "kind": "Qwen3"}),
}
FAMILIES = ("e3", "dflash", "dspark", "lm", "qwen3", "mimo")
_RECIPES = {
    "compressed-tensors": load_recipe("fp8-ptpc"),
    "quark": load_recipe("mi325x-fp8"),
    "modelopt": load_recipe("blackwell-fp8"),
    "fp8": dataclasses.replace(load_recipe("blackwell-fp8"), layout="fp8"),
}
CASES = tuple(f"{family} {layout}" for family in FAMILIES for layout in _RECIPES)
_LAYERS = 24


def write(case: str, work: Path) -> Path:
    """One folder, beside a folder with its target's config.json."""
    family, layout = case.split()
    place = work / case.replace(" ", "-")
    plain, out = place / "plain", place / "draft"
    place.mkdir(parents=True)
    if family == "mimo":
        tiny_mimo_mtp(plain, tables=False, config={"model_type": "qwen2"})
        (place / TARGET_FOLDER).mkdir()
        shutil.copy(plain / "config.json", place / TARGET_FOLDER)
    else:
        build, arguments = DRAFTS[family]
        build(plain, **arguments)
        write_target(place / TARGET_FOLDER, 256, 512)
    cache = KvCacheFormat(dtype="fp8_e4m3", scales="unit")
    recipe = dataclasses.replace(_RECIPES[layout], kv_cache=cache)
    layers = None if family in ("dflash", "dspark") else _LAYERS  # which name theirs themselves
    plan = make_plan(recipe, read_draft(Checkpoint.open(plain)), target_layers=layers)
    needed = {step.row.module: 0.01 for step in plan.quantized if recipe.needs_input_scales}
    source, measured = resolve_draft(str(plain)), Measured(input_scales=needed)
    quantize_draft(plan, out, source=source, measured=measured)
    return out


def main() -> int:
    """See the module."""
    rows = {}
    with tempfile.TemporaryDirectory() as made:
        folders = [write(case, Path(made)) for case in CASES]
        for engine in asking.ENGINES:
            said = asking.loaded(engine, folders, arch=ARCH)
            for case, outcome in zip(CASES, said, strict=True):
                kept = {key: outcome[key] for key in ("verdict", "stage", "error", "unread")}
                rows[f"{engine} {case}"] = kept
    asking.write_table(OUT, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
