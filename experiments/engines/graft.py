"""What each engine's own loader makes of targets with a grafted layer, both parts: `graft.json`.

docs/mtp.md has the table, and `tests/test_graft.py` holds predictions against it.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
from draftquant.scripts.cli import main as draftquant  # noqa: E402
from tiny_target import LAYERS as TARGET_LAYERS  # noqa: E402
from tiny_target import MTP, quantized_target, tiny_target  # noqa: E402

OUT = HERE / "graft.json"
BLOCKS = """\
name: blocks
extends: fp8-ptpc
layout: fp8
summary: FP8 in blocks of 128 x 128, as targets are published
weights: {dtype: fp8_e4m3, granularity: block, group_size: 128, symmetric: true}
activations: {dtype: fp8_e4m3, granularity: group, dynamic: true}
"""
LAYERS = {
    "bf16": (),
    "int4": ("int4-group128",),
    "fp8": ("fp8-ptpc",),
    "fp8 blocks": ("blocks.yaml", "--target-layers", str(TARGET_LAYERS)),
    "modelopt fp8": ("blackwell-fp8", "--input-scale", "0.01"),
    "quark fp8": ("mi325x-fp8",),
}
"""Name of a layer -> the recipe, and what it needs; none = as it is."""
MIXES = {
    "bf16": ("bf16", "int4", "fp8"),
    "ct-fp8": ("bf16", "int4", "fp8"),
    "ct-int4": ("bf16", "int4", "fp8"),
    "fp8-block": ("bf16", "fp8 blocks"),
    "modelopt-fp8": ("bf16", "modelopt fp8"),
    "quark-fp8": ("bf16", "quark fp8"),
}
"""Form of the target -> layers that are grafted into it; all others are refused by name."""
NOT_MADE = ("glm", "modelopt fp8")
"""`quantize` refuses it: ModelOpt's wildcard for GLM's router, `*gate*`, means gate_proj too."""


def main() -> int:
    """See the module."""
    rows: dict[str, asking.Outcome] = {}
    with tempfile.TemporaryDirectory() as made:
        folders = [folder for kind in MTP for folder in grafts(Path(made), kind)]
        for engine in asking.ENGINES:
            for part in ("target", "layer"):
                for row in asking.loaded(engine, folders, target=Path("/", part)):
                    name = str(row["draft"]).rpartition("/")[2]
                    rows[f"{engine} {name}: {part}"] = row
    keys = ("verdict", "stage", "error", "unloaded", "unread", "cast")
    kept = {name: {key: row[key] for key in keys} | _schemes(row) for name, row in rows.items()}
    asking.write_table(OUT, kept)
    return 0


def grafts(root: Path, kind: str) -> list[Path]:
    """Every target of a kind with every layer, in folders "KIND FORM + LAYER"."""
    plain = tiny_target(root / f"{kind} plain", kind)
    found = []
    for form, layers in MIXES.items():
        target = quantized_target(plain, root / f"{kind} {form}", form)
        for layer in layers:
            if (kind, layer) == NOT_MADE:
                continue
            out = root / f"{kind} {form} + {layer}"
            source = [str(_layer(root, plain, kind, layer))]
            source += ["--subtree", MTP[kind]] if layer == "bf16" else []
            if draftquant(["graft", str(target), *source, "--quiet", "--out", str(out)]):
                raise RuntimeError(f"{out.name} was refused")
            found.append(out)
    return found


def _layer(root: Path, plain: Path, kind: str, layer: str) -> Path:
    out = root / f"{kind} layer {layer}"
    if layer == "bf16" or out.exists():
        return plain if layer == "bf16" else out
    chosen, *needed = LAYERS[layer]
    if chosen == "blocks.yaml":
        chosen = str(root / chosen)
        Path(chosen).write_text(BLOCKS, encoding="utf-8")
    recipe = ["--recipe", chosen, *needed, "--quiet", "--backend", "torch"]
    command = ["quantize", str(plain), "--subtree", MTP[kind], *recipe, "--out", str(out)]
    if draftquant(command):
        raise RuntimeError(f"{out.name} was not made")
    return out


def _schemes(row: dict[str, object]) -> dict[str, list[str]]:
    """The classes that take the linears of the decoder layers, sorted."""
    said = row["schemes"]
    tables = ("embed_tokens", "lm_head", "shared_head.head")
    found = {
        str(name).rpartition(" / ")[2]
        for module, name in (said.items() if isinstance(said, dict) else ())
        if not module.endswith(tables)
    }
    return {"schemes": sorted(name for name in found if not name.endswith("KVCacheMethod"))}


if __name__ == "__main__":
    sys.exit(main())
