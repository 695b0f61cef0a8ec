"""`draftquant retune`, and what `gate`, `verify`, `inspect` and `quantize` make of its folders."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tied_pair
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.record_traces import record_traces
from draftquant.calibration.rounding import learning_settings as settings_module
from draftquant.calibration.rounding.learning_settings import RETUNING, Teaching
from draftquant.scripts.api.retune import retuned_recipe
from draftquant.scripts.cli import main
from reference_draft import transformers_in_float64
from rounding_pairs import RoundingPair, make_pair
from test_retune import FEW, keep_the_last_step
from tiny import edit_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def few_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settings_module, "RETUNING", FEW)
    keep_the_last_step(patch)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    few_steps(monkeypatch)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    """With 40 prompts for the gate beside the 12 for calibration."""
    made = make_pair(tmp_path_factory.mktemp("retune") / "llama", "llama")
    prompts = [
        Prompt(id=f"g{i}", category="a", token_ids=ids)
        for i, ids in enumerate(tied_pair.prompt_tokens(40, 6, seed=9))
    ]
    with transformers_in_float64():
        record_traces(
            made.folder / "target", prompts, made.folder / "gate", max_new_tokens=44,
            dtype="float64",
        )  # fmt: skip
    return made


def retune(pair: RoundingPair, folder: Path, *arguments: str, recipe: str = "int4-channel") -> int:
    return main(
        [
            *("retune", str(pair.draft_folder), "--recipe", recipe),
            *("--traces", str(pair.folder / "traces"), "--target", str(pair.folder / "target")),
            *("--out", str(folder / "out"), "--baseline", str(folder / "baseline"), *arguments),
        ]
    )


@pytest.fixture(scope="module")
def made(pair: RoundingPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        few_steps(patch)
        assert retune(pair, folder) == 0
    return folder


def gate(pair: RoundingPair, candidate: Path, *arguments: str, baseline: Path | None = None) -> int:
    return main(
        [
            *("gate", str(baseline or pair.draft_folder), str(candidate)),
            *("--traces", str(pair.folder / "gate"), "--target", str(pair.folder / "target")),
            *("--max-relative-drop", "0.5", *arguments),
        ]
    )


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


# ---- retune


def test_both_folders_are_told_of(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert retune(pair, tmp_path) == 0
    text = said(capsys)
    assert "out RETUNED: 7 linears quantized and fine-tuned on the target" in text
    assert (
        "baseline RETUNED: the BF16 draft fine-tuned identically (control), written, verified"
        in text
    )
    assert "training, not quantization" in text
    assert "BF16 control: step 2 of 4, loss" in text
    assert "quantized draft: step 4 of 4, loss" in text
    assert f"--tuned-baseline {tmp_path / 'baseline'}" in text
    record = json.loads((tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert record["argv"][:2] == ["draftquant", "retune"]
    shutil.rmtree(tmp_path / "out")
    assert retune(pair, tmp_path) == 0
    assert (
        "the BF16 draft fine-tuned identically (control), which existed already and is kept"
        in said(capsys)
    )


def test_json(pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert retune(pair, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["retuned"] is True
    assert found["baseline_made_before"] is False
    assert found["retuning"]["learned_prompts"] == 10
    assert found["learned"]["steps"] == found["baseline_learned"]["steps"] == 4
    assert found["verification"]["ok"]


def test_too_few_prompts_are_refused_with_the_reason(
    pair: RoundingPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "RETUNING", dataclasses.replace(FEW, teaching=Teaching()))
    assert retune(pair, tmp_path) == 2
    text = said(capsys)
    assert "expected at least 128 prompts to learn from, got 10" in text
    assert "on fewer overfits" in text
    assert "record more prompts: 160 or more" in text
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, what in (("out", "it already exists"), ("baseline", "already exists")):
        (tmp_path / name).mkdir()
        assert retune(pair, tmp_path) == 2
        assert f"{name}: {what}" in said(capsys)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).rmdir()


def test_a_recipe_keeps_where_scales_start_if_it_says_so() -> None:
    assert str(retuned_recipe("int4-channel").algorithm) == "scale mse, rounding retuned"
    assert str(retuned_recipe("int4-channel-gptq").algorithm) == "scale mse, rounding retuned"
    assert retuned_recipe("mi325x-w4a8").backend == "torch"


def test_quantize_does_not_retune(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = json.loads((made / "out" / "draftquant.json").read_text(encoding="utf-8"))["recipe"]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "int4-channel.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    path = str(tmp_path / "r" / "int4-channel.yaml")
    for traces in ([], ["--traces", str(pair.folder / "traces")]):
        out = str(tmp_path / "out")
        arguments = ["quantize", str(pair.draft_folder), "--recipe", path, "--out", out, *traces]
        assert main(arguments) == 2
        text = said(capsys)
        assert "rounding: retuned fine-tunes the draft" in text
        assert "use 'draftquant retune', which makes both" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


# ---- verify and inspect


@pytest.mark.parametrize("folder", ["out", "baseline"])
def test_verify_says_what_it_shows_and_what_not(
    folder: str, pair: RoundingPair, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(made / folder), "--against", str(pair.draft_folder)]
    assert main(arguments) == 0
    text = said(capsys)
    assert "RETUNED: fine-tuned on its target" in text
    assert "are verified by the digests that draftquant.json records under its seal" in text
    assert "7 linears as the recipe demands" in text
    assert "point in the direction of the source's" in text
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["retuned"] is True


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("out", "recipe int4-channel, from a folder, RETUNED: fine-tuned on its target"),
        ("baseline", "RETUNED: not the draft as released, but fine-tuned as the BF16 control"),
    ],
)
def test_inspect_shows_the_mark(
    folder: str, words: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(made / folder)]) == 0
    assert words in said(capsys)
    assert main(["inspect", str(made / folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["retuned"] is True


def test_inspect_marks_nothing_else(pair: RoundingPair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pair.draft_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["retuned"] is False
    assert main(["inspect", str(pair.draft_folder)]) == 0
    assert "RETUNED" not in said(capsys)


# ---- gate


def test_both_comparisons(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    tuned = ("--tuned-baseline", str(made / "baseline"))
    assert gate(pair, made / "out", *tuned, "--report", str(report)) == 0
    text = said(capsys)
    verdict = (
        "PASS: RETUNED. Against the identically fine-tuned BF16 draft (quantization alone): PASS."
    )
    assert verdict in text
    assert "Against the BF16 draft as released (quantization and fine-tuning): PASS." in text
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["mark"] == "RETUNED"
    identities = {
        key: found[key]["background"]["baseline_sha256"]
        for key in ("against_tuned", "against_bf16")
    }
    record = json.loads((made / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert identities["against_tuned"] == record["retuning"]["baseline_sha256"]
    assert identities["against_tuned"] != identities["against_bf16"]
    assert found["against_tuned"]["candidate"] == found["against_bf16"]["candidate"]
    assert gate(pair, made / "out", *tuned, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"date": found["date"]} == found


def test_a_dequantized_or_transcoded_one_keeps_the_mark(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["dequantize"], ["transcode", "--layout", "quark"]):
        out = tmp_path / command[0]
        assert main([*command, str(made / "out"), "--out", str(out)]) == 0
        capsys.readouterr()
        assert gate(pair, out) == 2
        assert "RETUNED: this draft was fine-tuned as well as quantized" in said(capsys)
        assert gate(pair, out, "--tuned-baseline", str(made / "baseline")) == 0
        assert "PASS: RETUNED." in said(capsys)
    verified = ["verify", str(tmp_path / "transcode"), "--against", str(pair.draft_folder)]
    assert main(verified) == 0
    assert "RETUNED" in said(capsys)


def refused(
    capsys: pytest.CaptureFixture[str], pair: RoundingPair, *arguments: Any, **given: Any
) -> str:
    assert gate(pair, *arguments, **given) == 2
    return said(capsys)


def test_without_the_tuned_baseline(
    pair: RoundingPair, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, pair, made / "out")
    assert "expected the identically fine-tuned BF16 draft (control) too, got none" in text
    assert "the folder that 'draftquant retune --baseline B' wrote: --tuned-baseline B" in text


def test_the_baseline_of_another_retuning(
    pair: RoundingPair,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "RETUNING", dataclasses.replace(FEW, seed=5))
    assert retune(pair, tmp_path) == 0
    capsys.readouterr()
    tuned = ("--tuned-baseline", str(tmp_path / "baseline"))
    text = refused(capsys, pair, made / "out", *tuned)
    assert "belongs to another run of retune: expected tensors" in text


def test_what_is_no_tuned_baseline(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (pair.draft_folder, made / "out"):
        text = refused(capsys, pair, made / "out", "--tuned-baseline", str(folder))
        assert (
            "expected the identically fine-tuned BF16 draft (control), but this folder has no"
            " record" in text
        )
    shutil.copytree(made / "baseline", tmp_path / "bare")
    (tmp_path / "bare" / "draftquant.json").unlink()
    text = refused(capsys, pair, made / "out", "--tuned-baseline", str(tmp_path / "bare"))
    assert "this folder has no record of fine-tuning" in text
    shutil.copytree(made / "baseline", tmp_path / "edited")
    edit_json(tmp_path / "edited" / "draftquant.json", calibration_prompts=[])
    text = refused(capsys, pair, made / "out", "--tuned-baseline", str(tmp_path / "edited"))
    assert "sha256: not that of the other keys" in text


def test_a_tuned_draft_is_not_the_draft_as_released(
    pair: RoundingPair, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(
        capsys, pair, made / "out", "--tuned-baseline", str(made / "baseline"),
        baseline=made / "baseline",
    )  # fmt: skip
    assert "this draft was fine-tuned (RETUNED)" in text
    assert "give the BF16 draft as released first, and this one with --tuned-baseline" in text
    text = refused(capsys, pair, made / "baseline")
    assert "expected a quantized draft as the candidate" in text


def test_a_tuned_baseline_of_another_draft(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_pair(tmp_path / "mla", "mla")
    assert retune(other, tmp_path) == 0
    capsys.readouterr()
    text = refused(capsys, pair, made / "out", "--tuned-baseline", str(tmp_path / "baseline"))
    assert "was not made from" in text


def test_prompts_that_taught_the_candidate_do_not_judge_it(
    pair: RoundingPair, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(
        capsys, pair, made / "out", "--tuned-baseline", str(made / "baseline"),
        "--traces", str(pair.folder / "traces"),
    )  # fmt: skip
    assert "12 of its 12 prompts were used to calibrate the candidate" in text


def test_a_tuned_baseline_without_use(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(pair.draft_folder), "--recipe", "int4-channel"]
    assert main([*arguments, "--out", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    tuned = ("--tuned-baseline", str(made / "baseline"))
    assert "but this candidate was not" in refused(capsys, pair, tmp_path / "plain", *tuned)
    text = refused(capsys, pair, made / "out", *tuned, "--unrelated")
    assert "two drafts are compared on purpose" in text


def test_on_purpose_the_mark_is_still_said(
    pair: RoundingPair, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = gate(pair, made / "out", "--unrelated", baseline=made / "baseline")
    assert code == 0
    assert "warning: RETUNED: the candidate was fine-tuned as well" in said(capsys)


def test_the_command_uses_the_settings_that_were_measured() -> None:
    assert RETUNING.teaching is not None
    assert RETUNING.teaching.min_prompts == 128


def test_a_record_of_plain_weights_beside_codes(
    pair: RoundingPair, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(made / "out", mixed)
    shutil.copy(made / "baseline" / "draftquant.json", mixed)
    assert main(["dequantize", str(mixed), "--out", str(tmp_path / "plain")]) == 2
    assert "the folder was tuned in BF16, but its config.json declares codes" in said(capsys)
    assert main(["verify", str(mixed), "--against", str(pair.draft_folder)]) == 1
    text = said(capsys)
    assert "config.json: expected no quantization_config, got compressed-tensors int4" in text
    assert "up_proj.weight_packed: expected no such tensor" in text
    tuned = ("--tuned-baseline", str(made / "baseline"))
    assert "belongs to other tensors" in refused(capsys, pair, mixed, *tuned)
