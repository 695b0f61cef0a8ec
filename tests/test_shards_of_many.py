"""Searches and matrices in shards: what one machine gives, in waves and with kills, to the byte."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from draftquant import api as dq
from draftquant.scripts.cli import main
from draftquant.scripts.shards.shard_folder import ShardFolder
from rounding_pairs import RoundingPair, make_pair

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
RECIPES = ("--recipe", "int4-channel", "fp8-ptpc")
HOW = ("--engine", "vllm", "--arch", "b200", "--fix-config", *RECIPES, "--no-cache")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    made = make_pair(tmp_path_factory.mktemp("many") / "llama", "llama", num_prompts=16)
    config = json.loads((made.draft_folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "llama"}  # without it vLLM refuses every mixture alike
    (made.draft_folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each test: sums of two threads are other sums
    (made.folder / "one").mkdir()
    assert main([*tuning(made, "one"), "--json"]) == 0
    torch.set_num_threads(threads)
    for name in ("int4-channel", "fp8-ptpc"):
        quantize = ["quantize", str(made.draft_folder), "--recipe", name, "--fix-config"]
        assert main([*quantize, "--out", str(made.folder / name)]) == 0
    return made


def tuning(pair: RoundingPair, where: str, *more: str) -> list[str]:
    """A search that narrows again, so that it has four waves."""
    out = str(pair.folder / where / "tuned.yaml")
    given = ["--traces", str(pair.folder / "traces"), "--out", out, "--max-drop", "0.6"]
    return ["tune", str(pair.draft_folder), *given, *HOW, *more]


def shards(*words: str | Path) -> int:
    return main(["shards", *map(str, words)])


def recipe(pair: RoundingPair, where: str) -> bytes:
    return (pair.folder / where / "tuned.yaml").read_bytes()


@pytest.mark.parametrize("count", [3, 7])
def test_a_search_in_shards_is_that_of_one_machine(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Each machine computes its shard again and again; whoever ends a wave plans the next."""
    where, jobs = f"{count}-shards", tmp_path / "jobs"
    (pair.folder / where).mkdir()
    assert shards("plan", "--shards", str(count), "--out", jobs, "--", *tuning(pair, where)) == 0
    folder = ShardFolder.open(jobs)
    passes = 0
    while True:
        before = len(folder.waves(0))
        for number in range(count):
            assert shards("run", jobs, "--shard", str(number)) == 0
        passes += 1
        capsys.readouterr()
        code = shards("merge", jobs)
        if code == 0:
            break
        assert code == 2
        assert "shards have no result yet" in capsys.readouterr().err
        assert len(folder.waves(0)) > before
        assert not (pair.folder / where / "tuned.yaml").exists()
    said = capsys.readouterr().out
    assert len(folder.waves(0)) >= 3
    assert passes <= len(folder.waves(0))
    assert [wave.last for wave in folder.waves(0)].index(True) == len(folder.waves(0)) - 1
    assert recipe(pair, where) == recipe(pair, "one")
    assert "int4-channel" in said
    assert shards("run", jobs, "--all") == 0  # it has ended: that its recipe exists is no error
    assert shards("merge", jobs) == 2  # the recipe exists


def test_a_search_runs_to_its_end_and_says_what_one_machine_says(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pair.folder / "all").mkdir()
    jobs, command = tmp_path / "jobs", tuning(pair, "all")
    assert shards("plan", "--shards", "4", "--out", jobs, "--json", "--", *command) == 0
    capsys.readouterr()
    found = dq.shards_run(jobs, all=True)
    assert found.computed == (0, 1, 2, 3)
    assert dq.shards_run(jobs, all=True).present == (0, 1, 2, 3)
    assert shards("merge", jobs, "--json") == 0
    joined = json.loads(capsys.readouterr().out)
    (pair.folder / "again").mkdir()
    assert main([*tuning(pair, "again"), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert joined.pop("out") != alone.pop("out")
    assert joined == alone
    assert recipe(pair, "all") == recipe(pair, "one")


def test_numbers_that_were_edited_are_refused(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pair.folder / "edited").mkdir()
    jobs = tmp_path / "jobs"
    assert shards("plan", "--shards", "2", "--out", jobs, "--", *tuning(pair, "edited")) == 0
    assert shards("run", jobs, "--all") == 0
    path = next((jobs / "results").glob("*/numbers.json"))
    path.write_text(path.read_text().replace("0.", "0.1", 1))
    assert shards("merge", jobs) == 2
    assert "is not as it was published: numbers.json" in capsys.readouterr().err
    assert not (pair.folder / "edited" / "tuned.yaml").exists()
    draft = pair.draft_folder / "model.safetensors"
    original = draft.read_bytes()
    try:
        draft.write_bytes(original[:-2] + b"\0\0")
        assert shards("merge", jobs) == 2
        assert "other inputs than those of this run: draft" in capsys.readouterr().err
    finally:
        draft.write_bytes(original)


def gates(pair: RoundingPair, where: Path, *names: str) -> list[list[str]]:
    """Two drafts on the same traces."""
    how = ["--traces", str(pair.folder / "traces"), "-k", "1", "--batch-size", "2", "--no-cache"]
    return [
        ["gate", str(pair.draft_folder), str(pair.folder / name), *how, "--policy", "screening",
         "--report", str(where / f"{name}.json")]
        for name in names
    ]  # fmt: skip


@pytest.mark.parametrize("count", [3, 7])
def test_a_matrix_of_gates_computes_the_baseline_once(
    pair: RoundingPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    names = ("int4-channel", "fp8-ptpc")
    for who in ("one", "parts"):
        (tmp_path / who).mkdir()
    codes = [main(words) for words in gates(pair, tmp_path / "one", *names)]
    file, jobs = tmp_path / "matrix.txt", tmp_path / "jobs"
    lines = [" ".join(words) for words in gates(pair, tmp_path / "parts", *names)]
    file.write_text("# drafts x traces\n" + "\n".join(lines) + "\n")
    assert shards("plan", "--shards", str(count), "--out", jobs, "--commands", file) == 0
    assert len(list((jobs / "parts").iterdir())) == 3 * count  # BF16 and two drafts
    for number in reversed(range(count)):
        assert shards("run", jobs, "--shard", str(number)) == 0
    assert len(list((jobs / "results").iterdir())) == 3 * count
    capsys.readouterr()
    code = shards("merge", jobs)
    said = capsys.readouterr().out
    assert code == next(each for each in (1, 3, 0) if each in codes)
    assert [line[:16] for line in said.splitlines()].count("draftquant gate ") == 2
    for name in names:
        one, other = (tmp_path / who / f"{name}.json" for who in ("one", "parts"))
        assert _same(one) == _same(other)
    (tmp_path / "parts" / "fp8-ptpc.json").unlink()
    assert shards("merge", jobs) == 2  # of the first command the report exists
    assert "int4-channel.json: this report file already exists" in capsys.readouterr().err
    assert _same(tmp_path / "parts" / "fp8-ptpc.json") == _same(tmp_path / "one" / "fp8-ptpc.json")


def _same(report: Path) -> Mapping[str, object]:
    """A report but for the name of its own file in the command."""
    found: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
    words = found.pop("argv")
    assert isinstance(words, Sequence)
    return found


def test_a_killed_search_goes_on(pair: RoundingPair, tmp_path: Path) -> None:
    (pair.folder / "killed").mkdir()
    jobs = tmp_path / "jobs"
    assert shards("plan", "--shards", "3", "--out", jobs, "--", *tuning(pair, "killed")) == 0
    run = [sys.executable, "-m", "draftquant.scripts.cli", "shards", "run", str(jobs), "--all"]
    for least in (1, 3, 5):
        killed = subprocess.Popen(run, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while killed.poll() is None and _done(jobs) < least:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert shards("run", jobs, "--all") == 0
    assert shards("merge", jobs) == 0
    assert recipe(pair, "killed") == recipe(pair, "one")


def _done(jobs: Path) -> int:
    return len([path for path in (jobs / "results").iterdir() if path.name[:1] != "."])


def test_a_search_on_ray_needs_no_shared_folder(pair: RoundingPair, tmp_path: Path) -> None:
    """Workers see neither the plan nor the results of others but through the object store."""
    pytest.importorskip("ray")
    (pair.folder / "ray").mkdir()
    jobs = tmp_path / "jobs"
    assert shards("plan", "--shards", "3", "--out", jobs, "--", *tuning(pair, "ray")) == 0
    run = [sys.executable, "-m", "draftquant.scripts.cli", "shards", "run", str(jobs), "--all"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*run, "--ray", "local"], env=one_thread, check=True)
    assert shards("merge", jobs) == 0
    assert recipe(pair, "ray") == recipe(pair, "one")
    digests = {hashlib.sha256(recipe(pair, where)).hexdigest() for where in ("ray", "one")}
    assert len(digests) == 1
