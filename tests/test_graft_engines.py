"""What `graft` predicts of target and layer, against what the engines' own loaders said."""

import json
from pathlib import Path

import pytest
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.grafting.graft_layer import plan_graft
from draftquant.scripts.cli import main
from tiny_target import MTP, quantized_target, tiny_target

ROWS = json.loads(
    (Path(__file__).parents[1] / "experiments" / "engines" / "graft.json").read_text(
        encoding="utf-8"
    )
)
RECIPES = {"int4": "int4-group128", "fp8": "fp8-ptpc", "quark fp8": "mi325x-fp8"}
MIXES = tuple(
    name.removeprefix("vllm ").removesuffix(": layer")
    for name in ROWS
    if name.startswith("vllm ") and name.endswith(": layer")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mix", [mix for mix in MIXES if mix.partition(" + ")[2] in ("bf16", *RECIPES)]
)
def test_prediction_is_what_the_loaders_said(mix: str, tmp_path: Path) -> None:
    kind, _, rest = mix.partition(" ")
    form, _, layer = rest.partition(" + ")
    plain = tiny_target(tmp_path / "plain", kind)
    target = quantized_target(plain, tmp_path / "target", form)
    source = resolve_draft(str(plain), MTP[kind])
    if layer != "bf16":
        out = str(tmp_path / "layer")
        command = ["quantize", str(plain), "--subtree", MTP[kind], "--recipe", RECIPES[layer]]
        assert main([*command, "--backend", "torch", "--quiet", "--out", out]) == 0
        source = resolve_draft(out)
    for check in plan_graft(target, source).checks:
        row = ROWS[f"{check.engine} {mix}: layer"]
        said = check.by_gpu.get("sm90", check.verdict)
        wanted = ("LOADS",) if row["verdict"] == "LOADS" else ("REFUSED", row["verdict"])
        assert said in (*wanted, "UNKNOWN"), (check.engine, check.error)
