"""What each engine's own loader makes of MTP layers in folders of their own: `mtp.json`.

The target that vLLM is
given has the layer's own config.json, unquantized.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
import tiny_mtp as tiny  # noqa: E402
from draftquant.scripts.cli import main as draftquant  # noqa: E402

OUT = HERE / "mtp.json"
RECIPE = "fp8-ptpc"
BUILDERS: dict[str, Callable[..., Path]] = {
    "mimo-mtp": partial(tiny.tiny_mimo_mtp, config={"model_type": "qwen2"}),
    "deepseek-mtp": tiny.tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny.tiny_glm4_moe_mtp,
    "qwen3-next-mtp": tiny.tiny_qwen3_next_mtp,
    "qwen3.5-mtp": partial(tiny.tiny_qwen3_next_mtp, experts=0),
    "deepseek-mtp of 3": partial(tiny.tiny_deepseek_mtp, modules=3),
    "glm4-moe-mtp of 3": partial(tiny.tiny_glm4_moe_mtp, modules=3),
    "step3p5-mtp": partial(
        tiny.tiny_step3p5_mtp, number=45
    ),  # SGLang builds layer 45 of any target
    "step3p5-mtp in Quark's layout": partial(tiny.tiny_step3p5_mtp, number=45),
    "step3p5-mtp in ModelOpt's layout": partial(tiny.tiny_step3p5_mtp, number=45),
}
RECIPES = {
    "step3p5-mtp in Quark's layout": ["mi325x-fp8", "--backend", "torch"],
    "step3p5-mtp in ModelOpt's layout": [
        "blackwell-fp8", "--backend", "torch", "--input-scale", "0.01",
    ],
}  # fmt: skip


def main() -> int:
    """See the module."""
    rows = {}
    with tempfile.TemporaryDirectory() as made:
        for family, build in BUILDERS.items():
            folder = Path(made) / family
            folder.mkdir()
            tables = family.startswith("step3p5")  # vLLM wants its embedding
            plain = build(folder / "plain", tables=tables)
            layers = ["--target-layers", "45"] if tables else []
            recipe = RECIPES.get(family, [RECIPE])
            quantize = ["quantize", str(plain), *layers, "--recipe", *recipe]
            if draftquant([*quantize, "--out", str(folder / "quantized")]):
                return 1
            (folder / "target").mkdir()
            shutil.copy(plain / "config.json", folder / "target")
            drafts = [folder / "plain", folder / "quantized"]
            for engine in asking.ENGINES:
                rows |= {
                    f"{engine} {family} {found['draft']}": found
                    for found in asking.loaded(engine, drafts, target=folder / "target")
                }
    keys = ("verdict", "stage", "error", "schemes", "unloaded")
    asking.write_table(OUT, {name: {key: row[key] for key in keys} for name, row in rows.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
