"""The command line judges the shipped pair: exit codes, and each error as a user meets it."""

import json
import shutil
from pathlib import Path

import corpus
import pytest
from draftquant.scripts.cli import main
from tiny import change, edit_json
from verify_cases import reseal

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
DRAFT, TARGET = str(PAIR / "draft"), str(PAIR / "target")
LLAMA = "eagle3-llama"
WIDE = ["--min-prompts", "10", "--max-relative-drop", "0.5"]


@pytest.fixture(scope="module")
def traces() -> list[str]:
    """Of 12 prompts."""
    return ["--traces", str(corpus.traces(LLAMA))]


@pytest.fixture(scope="module")
def fp8() -> Path:
    return corpus.quantized(LLAMA, "fp8-ptpc", pair=True)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["one", "1%%"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(SystemExit):
        main(["gate", DRAFT, DRAFT, "--traces", "t", "--max-relative-drop", text])


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="no such folder"):
        main(["plan", "nowhere", "--recipe", "int4-channel", "--debug"])


def test_recipes_list_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    capsys.readouterr()
    assert main(["recipes", "show", "fp8-ptpc"]) == 0
    recipe = tmp_path / "fp8-ptpc.yaml"
    recipe.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["recipes", "check", str(recipe)]) == 0
    recipe.write_text("extends: fp8-ptpc\nname: mine\nlayuot: quark\n", encoding="utf-8")
    assert main(["recipes", "check", str(recipe)]) == 2


def test_gate_passes_an_expected_baseline(traces: list[str], fp8: Path, tmp_path: Path) -> None:
    report = tmp_path / "gate.json"
    gate = ["gate", DRAFT, str(fp8), *traces, *WIDE]
    assert main([*gate, "--report", str(report)]) == 0
    judged = json.loads(report.read_text(encoding="utf-8"))
    assert judged["verdict"] == "PASS"
    known = judged["baseline"]["mean_acceptance_length"]
    more = ["--expect-baseline", f"{1.06 * known}", "--look", "1/2", "--every-category-passes"]
    assert main([*gate, *more, "--report", str(tmp_path / "2.json")]) == 3
    judged = json.loads((tmp_path / "2.json").read_text(encoding="utf-8"))
    assert (judged["look"]["number"], judged["policy"]["every_category_passes"]) == (1, True)


def test_a_candidate_does_not_choose_its_own_policy(traces: list[str], tmp_path: Path) -> None:
    """Its recipe asks for screening, which 12 prompts are enough for; release wants 30."""
    recipe, own = tmp_path / "mine.yaml", str(tmp_path / "my own")
    text = "extends: int4-channel\nname: mine\ngate: {policy: screening}\n"
    recipe.write_text(text, encoding="utf-8")
    assert main(["quantize", DRAFT, "--recipe", str(recipe), "--out", own]) == 0
    assert main(["gate", DRAFT, own, *traces]) == 3


def test_gate_refuses_seen_prompts(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    static = corpus.quantized(LLAMA, "blackwell-fp8", pair=True, measured=True)
    assert main(["gate", DRAFT, str(static), *traces, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["error"]["ids"]) == 12


OTHER_TARGETS: tuple[tuple[dict[str, str | None], int, str], ...] = (
    ({}, 0, ""),
    ({"weights_sha256": "0" * 64}, 3, "ANOMALOUS: The candidate was calibrated on traces of"),
    ({"config_sha256": "0" * 64}, 3, ", not target ("),
    ({"weights_sha256": None}, 0, "nothing shows that the candidate was calibrated beside the"),
)


def test_a_candidate_is_judged_beside_the_target_that_calibrated_it(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own, other weights, another config, and a record that does not say all."""
    static = shutil.copytree(
        corpus.quantized(LLAMA, "blackwell-fp8", pair=True, measured=True), tmp_path / "static"
    )
    known = json.loads((static / "draftquant.json").read_text())["calibration_target"]
    recorded = json.loads((Path(traces[1]) / "trace.json").read_text())["target"]
    assert known == {name: recorded[name] for name in known}
    capsys.readouterr()
    for changes, code, expected in OTHER_TARGETS:
        edit_json(
            static / "draftquant.json",
            calibration_prompts=["0" * 64],
            calibration_sketches=None,
            calibration_target={k: v for k, v in (known | changes).items() if v},
        )
        reseal(static)
        assert main(["gate", DRAFT, str(static), *traces, *WIDE]) == code
        judged = said(capsys)
        assert expected in judged
        assert ("nothing shows that the candidate was cal" in judged) == (None in changes.values())


@pytest.mark.parametrize(
    "recipe", ["int4-channel-gptq", "mi325x-w4a8-gptq", "blackwell-nvfp4-learned", "blackwell-fp8"]
)
def test_traces_that_a_recipe_needs_are_asked_for_first(recipe: str, tmp_path: Path) -> None:
    """Also where no stock engine loads its result, which is a list of engines and recipes."""
    assert main(["quantize", DRAFT, "--recipe", recipe, "--out", str(tmp_path / "out")]) == 2


def test_what_commands_tell_of_a_quantized_draft(fp8: Path, tmp_path: Path) -> None:
    for words in (["inspect", str(fp8)], ["verify", str(fp8), "--against", DRAFT],
                  ["check", str(fp8), "--engine", "vllm", "--gpu", "h200"],
                  ["check", str(fp8), "--engine", "sglang", "--gpu", "mi300x"],
                  ["clean", str(tmp_path)]):  # fmt: skip
        assert main(words) == 0


def test_a_draft_without_record_is_no_release(traces: list[str], fp8: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(fp8, tmp_path / "fp8")
    (bare / "draftquant.json").unlink()
    gate = ["gate", DRAFT, str(bare), *traces, *WIDE]
    assert main(gate) == 3
    assert main([*gate, "--unrecorded"]) == 0


def test_a_draft_without_an_embedding_takes_that_of_its_target(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(DRAFT, tmp_path / "bare")
    change(bare, embed_tokens__weight=None)
    assert main(["replay", str(bare), *traces]) == 2
    capsys.readouterr()
    assert main(["replay", DRAFT, str(bare), *traces, "--target", TARGET, "--json"]) == 0
    whole, borrowed = json.loads(capsys.readouterr().out)
    assert borrowed["prompts"] == whole["prompts"]
