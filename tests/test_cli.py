"""The command line: exit codes, stdout and stderr, and each error as a user meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import corpus
import pytest
from draftquant.scripts.cli import main

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
DRAFT, TARGET = str(PAIR / "draft"), str(PAIR / "target")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of 12 prompts, and the shipped draft in INT4, in FP8, and in FP8 by these traces."""
    folder = tmp_path_factory.mktemp("cli")
    llama = "eagle3-llama"
    for name, made in {
        "traces": corpus.traces(llama),
        "int4": corpus.quantized(llama, "int4-channel", pair=True),
        "fp8": corpus.quantized(llama, "fp8-ptpc", pair=True),
        "static": corpus.quantized(llama, "blackwell-fp8", pair=True, measured=True),
    }.items():
        (folder / name).symlink_to(made)
    return folder


@pytest.mark.parametrize("text", ["one", "%", "1%%", ""])
def test_what_is_no_share(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gate", DRAFT, DRAFT, "--traces", "t", "--max-relative-drop", text])
    assert f"expected a share such as 0.01 or 1%, got {text!r}" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="no such folder"):
        main(["plan", "nowhere", "--recipe", "int4-channel", "--debug"])


def test_recipes_list_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "mi325x-w4a8" in capsys.readouterr().out
    assert main(["recipes", "show", "fp8-ptpc"]) == 0
    shown = capsys.readouterr().out
    assert "granularity: channel" in shown
    (tmp_path / "fp8-ptpc.yaml").write_text(shown, encoding="utf-8")
    assert main(["recipes", "check", str(tmp_path / "fp8-ptpc.yaml")]) == 0
    capsys.readouterr()
    (tmp_path / "mine.yaml").write_text(
        "extends: fp8-ptpc\nname: mine\nlayuot: quark\n", encoding="utf-8"
    )
    assert main(["recipes", "check", str(tmp_path / "mine.yaml")]) == 2
    assert "mine.yaml:3: layuot: unknown key\n  fix: did you mean 'layout'?" in (
        capsys.readouterr().err
    )


def test_verify_says_good_or_lists_every_fault(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(work / "int4"), "--against", DRAFT]) == 0
    assert "GOOD" in capsys.readouterr().out
    broken = tmp_path / "broken"
    shutil.copytree(work / "int4", broken)
    path = broken / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(broken), "--against", DRAFT]) == 1
    assert "WRONG" in capsys.readouterr().out
    path.write_bytes(data[:-1])
    assert main(["verify", str(broken), "--against", DRAFT]) == 1
    output = capsys.readouterr()
    assert "truncated" in output.out + output.err


def test_replay_and_gate_judge_the_shipped_pair(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = ["--traces", str(work / "traces")]
    assert main(["replay", DRAFT, str(work / "int4"), str(work / "fp8"), *traces, "--json"]) == 0
    bf16, int4, fp8 = json.loads(capsys.readouterr().out)
    assert bf16["mean_acceptance_length"] > 2
    assert sum(p["num_steps"] for p in int4["prompts"]) == int4["num_steps"]
    assert fp8["first_step_agreement"] > int4["first_step_agreement"] > 0.8
    limits = ["--min-prompts", "10", "--max-relative-drop", "0.5"]
    report = tmp_path / "gate.json"
    gate = ["gate", DRAFT, str(work / "fp8"), *traces, *limits]
    assert main([*gate, "--report", str(report)]) == 0
    assert json.loads(report.read_text(encoding="utf-8"))["verdict"] == "PASS"
    assert "PASS" in capsys.readouterr().out
    assert main([*gate, "--report", str(report)]) == 2  # never overwritten
    known = float(bf16["mean_acceptance_length"])
    assert main([*gate, "--expect-baseline", f"{1.04 * known}"]) == 0
    assert main([*gate, "--expect-baseline", f"{1.06 * known}"]) == 3
    assert "(a difference of 5% is allowed)" in " ".join(capsys.readouterr().out.split())
    assert main(["gate", DRAFT, str(work / "fp8"), *traces]) == 3  # 12 prompts are too few
    assert "INCONCLUSIVE" in capsys.readouterr().out
    assert main([*gate, "-k", "30"]) == 2  # of 48 tokens
    assert "verify steps per prompt on average, expected at least 10" in capsys.readouterr().err


def test_a_candidate_does_not_choose_its_own_policy(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe asks for screening, which 12 prompts are enough for; release wants 30."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "extends: int4-channel\nname: mine\ngate: {policy: screening}\n", encoding="utf-8"
    )
    own = str(tmp_path / "own")
    assert main(["quantize", DRAFT, "--recipe", str(recipe), "--out", own]) == 0
    capsys.readouterr()
    gate = ["gate", DRAFT, own, "--traces", str(work / "traces")]
    assert main(gate) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "12 distinct prompts have an effective sample size of 11." in said
    assert "and the policy 'release' needs an effective sample size of 30." in said
    assert "warning: the candidate's recipe asks for the policy 'screening', but 'release'" in said
    assert "looser" not in said
    main([*gate, "--policy", "screening"])
    said = " ".join(capsys.readouterr().out.split())
    assert "too few prompts" not in said
    assert "the policy 'release': max_relative_drop 0.03 (release: 0.01), min_" in said
    assert "recipe asks" not in said


def test_gate_refuses_the_traces_that_calibrated_the_draft(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["gate", DRAFT, str(work / "static"), "--traces", str(work / "traces")]
    assert main(gate) == 2
    assert "12 of its 12 prompts were used to calibrate the candidate" in capsys.readouterr().err


def test_a_folder_without_its_record_is_no_release(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "fp8"
    shutil.copytree(work / "fp8", bare)
    (bare / "draftquant.json").unlink()
    gate = ["gate", DRAFT, str(bare), "--traces", str(work / "traces"), "--min-prompts", "10"]
    gate += ["--max-relative-drop", "0.5"]
    assert main(gate) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "ANOMALOUS: The candidate's folder has no record (draftquant.json)" in said
    assert "add --unrecorded" in said
    assert main([*gate, "--unrecorded"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "record_required False (release: True)" in said
    assert (
        "the candidate has no draftquant.json, so nothing shows which prompts calibrated it" in said
    )
    assert main([*gate, "--policy", "screening"]) == 0
    assert "the candidate has no draftquant.json" in " ".join(capsys.readouterr().out.split())


def test_gate_fails_a_damaged_draft(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the up_proj rows overwritten by others: still loads, but accepts less."""
    from draftquant.calibration.passes import memory
    from tiny import Stored, read_tensors, write_tensors

    monkeypatch.setattr(memory, "available_bytes", lambda _: 2**34)  # whatever is free here
    damaged = tmp_path / "damaged"
    shutil.copytree(DRAFT, damaged)
    tensors = read_tensors(damaged)
    name = "midlayer.mlp.up_proj.weight"
    up = tensors[name]
    half = up.data[: len(up.data) // 2]
    tensors[name] = Stored(up.dtype, up.shape, half + half)
    write_tensors(damaged, tensors, sharded=False, metadata={"format": "pt"})
    gate = ["gate", DRAFT, str(damaged), "--traces", str(work / "traces"), "--min-prompts", "10"]
    assert main(gate) == 2  # not even quantized
    assert "declares no quantization" in capsys.readouterr().err
    assert main([*gate, "--unrelated"]) == 1, capsys.readouterr().err


def test_a_draft_without_embedding_and_head_takes_those_of_its_target(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny import read_tensors, write_tensors

    bare = tmp_path / "bare"
    shutil.copytree(DRAFT, bare)
    tensors = read_tensors(bare)
    del tensors["embed_tokens.weight"]
    write_tensors(bare, tensors, sharded=False, metadata={"format": "pt"})
    traces = ["--traces", str(work / "traces")]
    assert main(["replay", str(bare), *traces]) == 2
    assert "--target" in capsys.readouterr().err
    assert main(["replay", DRAFT, str(bare), *traces, "--target", TARGET, "--json"]) == 0
    whole, borrowed = json.loads(capsys.readouterr().out)
    assert borrowed["prompts"] == whole["prompts"]


def test_the_installed_command_runs_from_anywhere(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "draftquant"
    run = subprocess.run(
        [command, "recipes", "list", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {recipe["name"] for recipe in json.loads(run.stdout)} >= {"int4-channel", "fp8-ptpc"}
