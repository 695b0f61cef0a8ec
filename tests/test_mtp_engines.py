"""`check` against what the engines' own loaders said of MTP layers: `engines/mtp.json`.

Of those inside a quantized target, and what excludes them: `engines/inside.json`.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from asked_pairs import check_pair
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_draft, misread_excludes
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.scripts.cli import main
from reasons import own_text
from tiny import edit_json

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

import inside  # noqa: E402
from mtp import BUILDERS, RECIPES  # noqa: E402

ROWS = json.loads((ENGINES_FOLDER / "mtp.json").read_text(encoding="utf-8"))
INSIDE = json.loads((ENGINES_FOLDER / "inside.json").read_text(encoding="utf-8"))
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
NOT_OF_LAYERS = ("one part", "fc quantized", "*subtree*")
"""Cases that `inspect` leaves to `check`, or finds wrong whatever engines do."""
NOT_OF_EXPERTS = ("leaves", "fused", "parts", "quantized", "undeclared", "regex inside")
"""Cases of which `check` may not know how an engine takes fused experts: UNKNOWN."""
HEAD_OF_THE_TARGET = tuple(
    f"vllm {family} plain"
    for family in ("deepseek-mtp", "glm4-moe-mtp", "deepseek-mtp of 3", "glm4-moe-mtp of 3")
)
"""The loader alone leaves the head unwritten, which a server shares with the target afterwards."""
NOT_SAID = (
    "sglang deepseek-mtp plain",
    "sglang deepseek-mtp quantized",
    "sglang glm4-moe-mtp quantized",
    "sglang qwen3-next-mtp quantized",
    *(row for row in ROWS if row.startswith("sglang step3p5-mtp")),
)
"""UNKNOWN: DeepSeek's needs a GPU, experts are known in one format alone, and Step's config.json
names code of its own, without which it was tried."""
FUSED_SHARED = "sglang glm4-moe-mtp plain"
"""SGLang takes GLM's shared expert for one more of the routed ones."""


def parts(row: str) -> tuple[str, str, str]:
    """Engine, draft, and whether it is plain or quantized."""
    engine, _, rest = row.partition(" ")
    family, _, kind = rest.rpartition(" ")
    return engine, family, kind


def without_parameter(error: str | None) -> str:
    """Of several parameters that are not filled vLLM names any one: they are a set."""
    return re.sub(r"(Some parameters like) \S+", r"\1 ...", error or "")


@pytest.mark.some(4)
@pytest.mark.parametrize("row", ROWS)
def test_check_says_what_the_loader_said(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, family, kind = parts(row)
    of_step = family.startswith("step3p5")
    folder = BUILDERS[family](tmp_path / "plain", tables=of_step)
    if kind == "quantized":
        out = tmp_path / "quantized"
        how = [*RECIPES.get(family, ["fp8-ptpc"]), *(["--target-layers", "45"] if of_step else [])]
        assert main(["quantize", str(folder), "--recipe", *how, "--out", str(out)]) == 0
        folder = out
    capsys.readouterr()
    assert engine in ("vllm", "sglang")
    said = check_draft(folder, engine="vllm" if engine == "vllm" else "sglang", arch="sm90")
    recorded = ROWS[row]
    if row in NOT_SAID:
        assert said.verdict == "UNKNOWN"
        return
    if row in HEAD_OF_THE_TARGET:
        assert recorded["verdict"] == "LOADS BUT WRONG"
        assert [name.rpartition(".")[0] for name in recorded["unloaded"]] == [
            f"model.layers.{3 + i}.shared_head.head" for i in range(3 if "of 3" in row else 1)
        ]
        assert said.verdict == "LOADS"
    else:
        assert said.verdict == recorded["verdict"]
        assert without_parameter(own_text(said.error)) == without_parameter(recorded["error"])
    if said.verdict == "LOADS":
        unknown = {layer.module for layer in said.layers} - set(recorded["schemes"])
        assert all(row == FUSED_SHARED and ".shared_experts." in name for name in unknown)


def test_every_row_has_a_builder_and_every_difference_a_row() -> None:
    assert {parts(row)[1] for row in ROWS} == set(BUILDERS)
    assert {*HEAD_OF_THE_TARGET, *NOT_SAID} <= set(ROWS)


@pytest.mark.some(3)
@pytest.mark.parametrize("row", INSIDE)
def test_a_layer_in_its_target_is_taken_as_the_loaders_took_it(row: str, tmp_path: Path) -> None:
    family, _, form = row.partition(" ")
    for case, verdicts in INSIDE[row].items():
        folder, subtree = tmp_path / case, inside.FAMILIES[family][1]
        inside.write(folder, family, form, case)
        pair = check_pair(folder, folder, subtree=subtree, arch="sm90")
        checkpoint = Checkpoint.open(folder, subtree=subtree, is_target=True)
        misread = misread_excludes(checkpoint, target_layers=None)
        for engine, verdict in zip(ENGINES, verdicts, strict=True):
            said = pair.of(engine).verdict
            unsure = family in ("next", "glm") and case in NOT_OF_EXPERTS
            unsure = unsure or (form, case) == ("auto-round", "*subtree*")  # no expression
            assert said == verdict or (said == "UNKNOWN" and unsure), (engine, case, said)
            if said != "UNKNOWN" and family in ("qwen", "mimo") and case not in NOT_OF_LAYERS:
                assert (engine in misread) == (verdict != "LOADS"), (engine, case)


@pytest.mark.parametrize(
    ("form", "engine"), [("quark", "vllm"), ("ct-fp8", "sglang"), ("fp8", "vllm"), ("awq", "vllm")]
)
def test_names_of_the_remedies_exclude_the_layer(
    form: str, engine: EngineName, tmp_path: Path
) -> None:
    """Executed as "parts" and "fused"; no name tells the layer of Qwen3-Next apart in SGLang."""
    for family in ("qwen", "next"):
        folder = tmp_path / family
        inside.write(folder, family, form, "undeclared")
        said = check_pair(folder, folder, subtree="mtp", arch="sm90").of(engine)
        remedies = [found.remedy for found in said.answer.findings]
        if (family, engine) == ("next", "sglang"):
            assert all("serve it with another engine" in remedy for remedy in remedies)
        elif family == "qwen":
            names = {name for each in remedies for name in re.findall(r"'(mtp\.[\w.]+)'", each)}
            declared = inside.FORMATS[form][1](sorted(names))
            edit_json(folder / "config.json", quantization_config=declared)
            again = check_pair(folder, folder, subtree="mtp", arch="sm90").of(engine)
            assert said.verdict != "LOADS" == again.verdict


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mlp quantized", "no faults: everything is stored as declared"),
        (
            "undeclared",
            "got SGLang takes model.layers.0.qkv_proj as quantized, where floats are stored, and 3",
        ),
    ],
)
def test_inspect_of_a_layer_asks_the_engines(
    case: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside.write(tmp_path / "target", "qwen", "quark", case)
    assert main(["inspect", str(tmp_path / "target"), "--subtree", "mtp"]) == 0
    text = capsys.readouterr().out
    assert said in text
    assert ("2 faults" in text) == (case == "undeclared")
