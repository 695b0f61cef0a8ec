"""`accept` on the shipped pair: from nothing to a page, killed at any moment, and bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from block_pair import shared_tables
from draftquant.quantize.stored.loading import load_draft
from draftquant.scripts.cli import main
from stand.decoder import Decoder
from stand.server import served
from stand.sglang import SGLangStand

pytestmark = pytest.mark.slow

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
DRAFT, TARGET = str(PAIR / "draft"), str(PAIR / "target")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Twelve prompts for the gate, and a draft that the others calibrated."""
    folder = tmp_path_factory.mktemp("accept")
    for name, source, count in (("gate", "prompts", 12), ("seen", "calibration", 12)):
        lines = (PAIR / f"{source}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    seen = str(folder / "seen")
    record = ["record", "--target", TARGET, "--draft", DRAFT, "--prompts", f"{seen}.jsonl"]
    assert main([*record, "--out", seen, "--max-new-tokens", "48"]) == 0
    recipe = ["--recipe", "int4-channel-gptq", "--traces", seen]
    assert main(["quantize", DRAFT, *recipe, "--out", str(folder / "int4")]) == 0
    yield folder
    shutil.rmtree(folder)


def line(work: Path, out: Path, *changes: str, quantized: str = "int4") -> list[str]:
    prompts = () if "--prompts" in changes else ("--prompts", str(work / "gate.jsonl"))
    how = ("--max-new-tokens", "48", "--policy", "screening", "--max-relative-drop", "20%")
    given = ["accept", DRAFT, str(work / quantized), "--target", TARGET, *prompts, *how]
    return [*given, *changes, "--out", str(out)]


def contents(folder: Path) -> dict[str, bytes]:
    """What does not depend on when it was made."""
    names = ("check.json", "verify.json", "traces/trace.json", "parity-draft.json", "card.md")
    return {name: (folder / name).read_bytes() for name in names}


def test_from_nothing_to_a_page(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = work / "whole"
    assert main(line(work, out, "--base-model", "a/b", "--license", "mit")) == 0
    said = capsys.readouterr()
    assert "step 3 of 5, record: the target on the prompts" in said.err
    report = json.loads((out / "acceptance.json").read_text(encoding="utf-8"))
    names = {step["name"]: step["outcome"] for step in report["steps"]}
    assert names == {"check": "PASS", "verify": "PASS", "record": "DONE", "gate": "PASS",
                     "parity draft": "DONE", "card": "DONE"}  # fmt: skip
    assert report["gate"]["verdict"] == "PASS"
    shown = (out / "acceptance.html").read_text(encoding="utf-8")
    assert "accepted in the place of" in shown
    assert "Which engines load it" in shown
    assert "base_model: a/b" in (out / "card.md").read_text(encoding="utf-8")
    assert main(["report", str(out / "gate.json"), "--markdown", str(work / "g.md")]) == 0


def test_two_servers_and_one_without_a_draft(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    int4 = load_draft(work / "int4", dtype=torch.float32, shared=shared_tables(Path(TARGET)))
    bf16, other = Decoder("eagle3-llama", 3), Decoder("eagle3-llama", 3, int4)
    said = [
        {"speculative_draft_model_path": path, "speculative_draft_model_quantization": how}
        for path, how in ((DRAFT, None), (str(work / "int4"), "compressed-tensors"))
    ]
    stands = (
        SGLangStand(decoder=bf16, info=said[0]),
        SGLangStand(decoder=other, info=said[1]),
        SGLangStand(decoder=bf16, drafts=False),
    )
    out = work / "measured"
    with served(stands[0]) as first, served(stands[1]) as second, served(stands[2]) as plain:
        asked = ["--server", first.url, second.url, "--plain-server", plain.url]
        code = main(line(work, out, *asked, "--engine", "sglang"))
        wrong = ["--server", first.url, first.url, "--engine", "sglang"]
        assert main(line(work, work / "twice", *wrong)) == 2
    assert code == 3  # 12 prompts are too few for parity of texts
    assert "expected the draft that the server runs" in capsys.readouterr().err
    assert (work / "twice" / "bf16.jsonl").exists()
    report = json.loads((out / "acceptance.json").read_text(encoding="utf-8"))
    assert {step["name"]: step["outcome"] for step in report["steps"]} == {
        "check": "PASS", "verify": "PASS", "measure BF16": "DONE", "measure QUANT": "DONE",
        "measure plain": "DONE", "gate": "PASS", "parity texts": "INCONCLUSIVE",
        "card": "NOT RUN",
    }  # fmt: skip
    assert report["gate"]["served"]["verdict"] == "PASS"
    assert len(report["gate"]["parity"]) == 2


def test_prompts_that_calibrated_it_are_refused(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = work / "seen-again"
    assert main(line(work, out, "--prompts", str(work / "seen.jsonl"))) == 2
    assert "prompts were used to calibrate the candidate" in capsys.readouterr().err
    assert not (out / "acceptance.html").exists()


def test_a_target_of_another_tokenizer_is_refused_before_anything_is_recorded(work: Path) -> None:
    draft, target, int4 = work / "told", work / "other", str(work / "told-int4")
    shutil.copytree(DRAFT, draft)
    shutil.copytree(TARGET, target)
    shutil.copy(target / "tokenizer.json", draft)
    tokenizer = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(words, reversed(words.values()), strict=True))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert main(["quantize", str(draft), "--recipe", "int4-channel", "--out", int4]) == 0
    out = work / "refused"
    given = ["--target", str(target), "--prompts", str(work / "gate.jsonl"), "--out", str(out)]
    assert main(["accept", str(draft), int4, *given]) == 1
    report = json.loads((out / "acceptance.json").read_text(encoding="utf-8"))
    first, *others = report["steps"]
    assert first["outcome"] == "FAIL"
    assert "tokenizer" in first["said"]
    assert {step["outcome"] for step in others} == {"NOT RUN"}
    assert not (out / "traces").exists()


def test_a_draft_with_a_wrong_byte_fails_before_anything_is_recorded(work: Path) -> None:
    shutil.copytree(work / "int4", work / "mixed")
    path = next((work / "mixed").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    out = work / "failed"
    assert main(line(work, out, quantized="mixed")) == 1
    report = json.loads((out / "acceptance.json").read_text(encoding="utf-8"))
    assert [step["outcome"] for step in report["steps"]][1:4] == ["FAIL", "NOT RUN", "NOT RUN"]
    assert report["gate"] is None


def test_runs_killed_at_any_moment_go_on_to_the_same_page(work: Path) -> None:
    whole, out, chance = work / "undisturbed", work / "killed", random.Random(0)
    argv = (sys.executable, "-m", "draftquant")
    card = ("--base-model", "a/b", "--license", "mit")
    began = time.monotonic()
    subprocess.run((*argv, *line(work, whole, *card)), check=True, capture_output=True)
    seconds = time.monotonic() - began
    for _ in range(6):
        with subprocess.Popen(
            (*argv, *line(work, out, *card)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            time.sleep(chance.uniform(0.2, 1) * seconds)
            os.kill(run.pid, signal.SIGKILL)
    last = subprocess.run((*argv, *line(work, out, *card)), check=False, capture_output=True)
    assert last.returncode == 0, last.stderr
    assert contents(out) == contents(whole)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
