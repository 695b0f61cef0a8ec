"""Runs divided into shards: the result is one machine's to the byte, and nothing else counts."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from draftquant.scripts.api.listener import SILENT
from draftquant.scripts.cli import main
from draftquant.scripts.shards.divided_run import planned
from draftquant.scripts.shards.schedulers import script
from draftquant.scripts.shards.shard_folder import ShardFolder
from draftquant.scripts.shards.work_shard import Divisible, ShardError

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
WORDS = ("replay", "A", "--traces", "T")
ARITHMETIC = {"torch": "2.13.0"}
RUN = Divisible(
    inputs={"traces": "1" * 64, "draft 1": "2" * 64},
    batches=[(0, 3), (1,), (2, 4), (5,), (6, 7)],
    in_order=False,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> ShardFolder:
    return ShardFolder.create(tmp_path / "jobs", RUN.shards(3, WORDS))


def publish(folder: ShardFolder, i: int, arithmetic: dict[str, str] = ARITHMETIC) -> Path:
    with folder.publishing(folder.shards[i], arithmetic) as staging:
        (staging / "proposals-1.bin").write_bytes(bytes([i]))
    return folder.result(folder.shards[i])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("in_order", [False, True])
def test_each_batch_is_in_one_shard(count: int, in_order: bool) -> None:
    run = Divisible(inputs=RUN.inputs, batches=RUN.batches, in_order=in_order)
    shards = run.shards(count, WORDS)
    held = [batch for shard in shards for batch in shard.batches]
    assert sorted(held) == sorted(RUN.batches)
    assert all(shard.batches for shard in shards)
    assert len({shard.address for shard in shards}) == count
    assert (held == RUN.batches) or not in_order


def test_a_batch_is_never_cut() -> None:
    with pytest.raises(ShardError, match=r"--shards: expected at most 5, the number of batches"):
        RUN.shards(6, WORDS)


def test_the_address_is_the_hash_of_what_is_stored(folder: ShardFolder) -> None:
    for path in (folder.folder / "shards").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    again = RUN.shards(3, WORDS)
    assert ShardFolder.open(folder.folder).shards == folder.shards == again
    other = Divisible(inputs={**RUN.inputs, "draft 1": "3" * 64}, batches=RUN.batches,
                      in_order=False)  # fmt: skip
    assert not {s.address for s in other.shards(3, WORDS)} & {s.address for s in again}


def test_a_shard_that_was_edited_is_refused(folder: ShardFolder) -> None:
    path = folder.folder / "shards" / f"{folder.shards[1].address}.json"
    path.write_text(path.read_text().replace("[1]", "[0]").replace("[0, 3]", "[1, 3]"))
    path.write_text(path.read_text().replace("2" * 64, "4" * 64))
    with pytest.raises(ShardError, match=r"was edited: it is shard [0-9a-f]{12}, expected"):
        ShardFolder.open(folder.folder)
    path.unlink()
    with pytest.raises(ShardError, match="cannot be read"):
        ShardFolder.open(folder.folder)


@pytest.mark.parametrize(
    "text", ['{"shards": []}', '{"shards": ["../x"]}', "[]", '{"shards": ["a", "a"]}', "{"]
)
def test_a_plan_that_is_none_is_refused(folder: ShardFolder, text: str) -> None:
    (folder.folder / "plan.json").write_text(text)
    with pytest.raises(ShardError, match="fix: plan again into a new folder"):
        ShardFolder.open(folder.folder)


def test_shards_of_two_plans_are_not_mixed(folder: ShardFolder, tmp_path: Path) -> None:
    other = ShardFolder.create(tmp_path / "other", RUN.shards(3, ("replay", "B")))
    address = other.shards[0].address
    source = tmp_path / "other" / "shards" / f"{address}.json"
    source.rename(folder.folder / "shards" / source.name)
    own = [shard.address for shard in folder.shards]
    (folder.folder / "plan.json").write_text(json.dumps({"shards": [address, *own[1:]]}))
    with pytest.raises(ShardError, match="its shards are of different commands"):
        ShardFolder.open(folder.folder)


def test_missing_shards_are_named(folder: ShardFolder) -> None:
    publish(folder, 1)
    with pytest.raises(ShardError, match=r"2 of its 3 shards have no result yet: 0, 2") as caught:
        folder.check_whole()
    assert f"shards run {folder.folder} --shard 0" in str(caught.value)


def test_what_is_no_result_of_the_plan_is_named(folder: ShardFolder) -> None:
    for i in range(3):
        publish(folder, i)
    folder.check_whole()
    hidden = folder.folder / "results" / f".{folder.shards[0].address}.1-2-0123456789ab.staging"
    hidden.mkdir()  # a run that was killed left it
    folder.check_whole()
    (folder.folder / "results" / "notes.txt").write_text("mine")
    with pytest.raises(ShardError, match=r"holds what is no result of this plan: notes\.txt"):
        folder.check_whole()


@pytest.mark.parametrize("how", ["edited", "cut", "gone", "more", "described otherwise"])
def test_a_result_that_was_changed_is_refused(folder: ShardFolder, how: str) -> None:
    results = [publish(folder, i) for i in range(3)]
    path = results[1] / "proposals-1.bin"
    if how == "edited":
        path.write_bytes(b"x")
    elif how == "cut":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "more":
        (results[1] / "more").write_text("")
    else:
        (results[1] / "result.json").write_text("{}")
    with pytest.raises(ShardError, match=rf"fix: rm -r {results[1]}.* --shard 1"):
        folder.check_whole()


def test_results_of_two_arithmetics_are_not_joined(folder: ShardFolder) -> None:
    for i in range(3):
        publish(folder, i, {"torch": "2.13.0" if i < 2 else "2.8.0"})
    with pytest.raises(ShardError, match=r"shard 2 was .*: torch: 2\.8\.0, expected 2\.13\.0"):
        folder.check_whole()


def test_a_run_of_other_inputs_is_refused(folder: ShardFolder) -> None:
    shard = folder.shards[0]
    RUN.check(shard, "here")
    with pytest.raises(ShardError, match=r"here: was planned with other inputs .*: draft 1\n"):
        Divisible(inputs={**RUN.inputs, "draft 1": "5" * 64}, batches=RUN.batches,
                  in_order=False).check(shard, "here")  # fmt: skip
    with pytest.raises(ShardError, match="the batches of prompts"):
        Divisible(inputs=RUN.inputs, batches=[(0,), (3,)], in_order=False).check(shard, "here")


@pytest.mark.parametrize("words", [("quantize", "A"), (), ("tune",)])
def test_other_commands_are_not_divided(words: Sequence[str]) -> None:
    with pytest.raises(ShardError, match="COMMAND: expected one of record, replay, gate, compare"):
        planned(words, SILENT)


def test_a_shard_that_there_is_not(folder: ShardFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "run", str(folder.folder), "--shard", "3"]) == 2
    assert "--shard: expected 0 to 2, got 3" in capsys.readouterr().err


@pytest.mark.parametrize("i", [0, 2])
def test_a_task_of_slurm_runs_its_shard(folder: ShardFolder, tmp_path: Path, i: int) -> None:
    here = tmp_path / "it's here"
    here.mkdir()
    (tmp_path / "draftquant").write_text('#!/bin/sh\necho "$PWD: $OMP_NUM_THREADS: $*"\n')
    (tmp_path / "draftquant").chmod(0o755)
    (tmp_path / "job.sh").write_text(text := script("slurm", folder, here, 7))
    assert "#SBATCH --array=0-2\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(i)}
    run = subprocess.run(["bash", tmp_path / "job.sh"], env=env, capture_output=True, text=True,
                         check=True)  # fmt: skip
    assert run.stdout == f"{here}: 7: shards run {folder.folder} --shard {i}\n"
    del env["SLURM_ARRAY_TASK_ID"]
    assert subprocess.run(["bash", tmp_path / "job.sh"], env=env, check=False,
                          stderr=subprocess.DEVNULL).returncode != 0  # fmt: skip


def test_a_pod_of_kubernetes_runs_its_shard(folder: ShardFolder, tmp_path: Path) -> None:
    job = yaml.safe_load(script("kubernetes", folder, tmp_path, 7))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"  # backoffLimitPerIndex needs it, and Never
    assert spec["completions"] == spec["parallelism"] == 3
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    (tmp_path / "draftquant").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS: $*"\n')
    (tmp_path / "draftquant").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    run = subprocess.run(container["command"], env=env, capture_output=True, text=True, check=True)
    assert run.stdout == f"7: shards run {folder.folder} --shard 1\n"


def test_resources_are_asked_of_ray(
    folder: ShardFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["shards", "run", str(folder.folder), "--all", "--shard-gpus", "1"]
    assert main(given) == 2
    assert "--shard-gpus: is asked of Ray" in capsys.readouterr().err


def test_without_ray(
    folder: ShardFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["shards", "run", str(folder.folder), "--all", "--ray", "local"]) == 2
    assert "--ray: needs Ray, which is not installed" in capsys.readouterr().err


# On a target and its draft. The shares are sevenths, so that every shard has its own batch.


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, what one machine records of them, and a candidate."""
    folder = tmp_path_factory.mktemp("shards")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:14]), encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each test: sums of two threads are other sums
    assert main(recording(folder, "one")) == 0
    torch.set_num_threads(threads)
    quantize = ["quantize", str(PAIR / "draft"), "--recipe", "int4-channel"]
    assert main([*quantize, "--out", str(folder / "int4")]) == 0
    return folder


def recording(work: Path, out: str) -> list[str]:
    given = ["--prompts", str(work / "prompts.jsonl"), "--max-new-tokens", "64"]
    how = ["--batch-size", "2", "--fixed-batches", "--tables", "--temperature", "0.7"]
    pair = ["--target", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
    return ["record", *pair, *given, *how, "--out", str(work / out)]


def judging(work: Path, verb: str, out: str) -> list[str]:
    drafts = [str(PAIR / "draft"), str(work / "int4")]
    how = ["--traces", str(work / "one"), "-k", "3", "--batch-size", "2", "--no-cache"]
    return [verb, *drafts, *how, *([] if verb == "replay" else ["--report", str(work / out)])]


def plan(words: Sequence[str], out: Path, count: int) -> None:
    assert main(["shards", "plan", "--shards", str(count), "--out", str(out), "--", *words]) == 0


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 7])
def test_traces_of_shards_are_those_of_one_machine(work: Path, tmp_path: Path, count: int) -> None:
    out = f"{count}-parts"
    plan(recording(work, out), tmp_path / "jobs", count)
    for i in reversed(range(count)):
        assert main(["shards", "run", str(tmp_path / "jobs"), "--shard", str(i)]) == 0
    assert main(["shards", "merge", str(tmp_path / "jobs")]) == 0
    assert files(work / out) == files(work / "one")
    assert main(["shards", "merge", str(tmp_path / "jobs")]) == 2  # the folder exists


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["replay", "gate", "compare"])
@pytest.mark.parametrize("count", [3, 7])
def test_a_verdict_of_shards_is_that_of_one_machine(
    work: Path,
    tmp_path: Path,
    count: int,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    names = [f"{verb}-{count}-{who}.json" for who in ("one", "parts")]
    codes, printed = [], []
    capsys.readouterr()
    codes.append(main([*judging(work, verb, names[0]), "--json"]))
    printed.append(capsys.readouterr().out)
    plan(judging(work, verb, names[1]), tmp_path / "jobs", count)
    assert main(["shards", "run", str(tmp_path / "jobs"), "--all"]) == 0
    capsys.readouterr()
    codes.append(main(["shards", "merge", str(tmp_path / "jobs"), "--json"]))
    printed.append(capsys.readouterr().out)
    assert codes[0] == codes[1] == (3 if verb == "gate" else 0)
    assert printed[0] == printed[1] != ""
    if verb != "replay":
        assert (work / names[0]).read_bytes() == (work / names[1]).read_bytes()


@pytest.mark.slow
def test_a_killed_run_is_run_again(work: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    plan(recording(work, "killed"), jobs, 7)
    run = [sys.executable, "-m", "draftquant.scripts.cli", "shards", "run", str(jobs), "--all"]
    killed = subprocess.Popen(run, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = ShardFolder.open(jobs)
    while killed.poll() is None and not any(map(folder.is_done, folder.shards)):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = sum(map(folder.is_done, folder.shards))
    assert 1 <= done < 7
    assert main(["shards", "run", str(jobs), "--all"]) == 0
    assert main(["shards", "merge", str(jobs)]) == 0
    assert files(work / "killed") == files(work / "one")


@pytest.mark.slow
def test_a_killed_worker_of_ray_is_replaced(work: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    jobs = tmp_path / "jobs"
    plan(recording(work, "by-ray"), jobs, 7)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = ray.get_runtime_context().gcs_address
    run = [sys.executable, "-m", "draftquant.scripts.cli", "shards", "run", str(jobs), "--all"]
    driver = subprocess.Popen([*run, "--ray", port], env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = ShardFolder.open(jobs)
    while driver.poll() is None and not any(map(folder.is_done, folder.shards)):
        time.sleep(0.01)
    workers = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and b"ray::_run" in _command_line(path)
    ]
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    assert driver.wait() == 0
    ray.shutdown()
    assert main(["shards", "merge", str(jobs)]) == 0
    assert files(work / "by-ray") == files(work / "one")


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it ended
        return b""


@pytest.mark.slow
def test_inputs_that_changed_since_the_plan(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes((work / "prompts.jsonl").read_bytes())
    words = recording(work, "changed")
    words[words.index("--prompts") + 1] = str(prompts)
    plan(words, tmp_path / "jobs", 2)
    prompts.write_bytes(prompts.read_bytes().replace(b'"id": "', b'"id": "x', 1))
    assert main(["shards", "run", str(tmp_path / "jobs"), "--all"]) == 2
    assert "other inputs than those of this run: prompts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recording_without_fixed_batches_is_not_divided(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in recording(work, "x") if word != "--fixed-batches"]
    given = ["shards", "plan", "--shards", "2", "--out", str(tmp_path / "jobs"), "--"]
    assert main([*given, *words]) == 2
    assert "cannot be divided without --fixed-batches" in capsys.readouterr().err
