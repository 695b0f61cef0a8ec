"""Runs divided into shards: the result is one machine's to the byte, and nothing else counts."""

import dataclasses
import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from draftquant.scripts.api.division import Division, Measuring
from draftquant.scripts.api.listener import SILENT
from draftquant.scripts.cli import main
from draftquant.scripts.shards import ray_tasks
from draftquant.scripts.shards.divided_run import first_asked
from draftquant.scripts.shards.divisions import DividedError, Merging, Working
from draftquant.scripts.shards.packed_folder import (
    packed_folder,
    packed_result,
    publish_packed,
    unpacked_folder,
)
from draftquant.scripts.shards.part_files import read_numbers, write_numbers
from draftquant.scripts.shards.parts import Divisible, Part, ShardError
from draftquant.scripts.shards.ray_tasks import Resources
from draftquant.scripts.shards.schedulers import script
from draftquant.scripts.shards.shard_folder import FirstAsked, ShardFolder
from draftquant.validate.tuning.measured_mixtures import Tasks

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
WORDS = ("replay", "A", "--traces", "T")
ARITHMETIC = {"torch": "2.13.0"}
RUN = Divisible(
    inputs={"traces": "1" * 64, "draft 1": "2" * 64},
    batches=[(0, 3), (1,), (2, 4), (5,), (6, 7)],
    in_order=False,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def asked(*divisible: Divisible, words: Sequence[str] = WORDS, last: bool = True) -> FirstAsked:
    return FirstAsked(command=tuple(words), divisible=divisible, last=last)


@pytest.fixture
def folder(tmp_path: Path) -> ShardFolder:
    return ShardFolder.create(tmp_path / "jobs", 3, [asked(RUN)])


def parts(folder: ShardFolder, run: int = 0, wave: int = 0) -> tuple[Part, ...]:
    """Of what a command asks for first."""
    return folder.waves(run)[wave].parts[0]


def publish(folder: ShardFolder, i: int, arithmetic: dict[str, str] = ARITHMETIC) -> Path:
    part = parts(folder)[i]
    with folder.publishing(part, arithmetic) as staging:
        (staging / "proposals.bin").write_bytes(bytes([i]))
    return folder.result(part)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("in_order", [False, True])
def test_each_batch_is_in_one_part(count: int, in_order: bool) -> None:
    run = Divisible(inputs=RUN.inputs, batches=RUN.batches, in_order=in_order)
    own = run.parts(count)
    held = [batch for part in own for batch in part.batches]
    assert sorted(held) == sorted(RUN.batches)
    assert all(part.batches for part in own)
    assert len({part.address for part in own}) == min(count, 5)
    assert (held == RUN.batches) or not in_order


def test_a_batch_is_never_cut(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"--shards: expected at most 5, the number of batches"):
        ShardFolder.create(tmp_path / "jobs", 6, [asked(RUN)])
    assert not (tmp_path / "jobs").exists()


def test_the_address_is_the_hash_of_what_is_stored(folder: ShardFolder) -> None:
    for path in (folder.folder / "parts").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    again = RUN.parts(3)
    assert parts(ShardFolder.open(folder.folder)) == parts(folder) == again
    other = Divisible(inputs={**RUN.inputs, "draft 1": "3" * 64}, batches=RUN.batches,
                      in_order=False)  # fmt: skip
    assert not {s.address for s in other.parts(3)} & {s.address for s in again}


def test_equal_work_of_two_commands_is_one_part(tmp_path: Path) -> None:
    other = Divisible(inputs={"draft": "b"}, batches=RUN.batches, in_order=False)
    short = Divisible(inputs={"draft": "c"}, batches=RUN.batches[:2], in_order=False)
    both = [asked(RUN, other), asked(RUN, short, words=("gate", "A", "C"))]
    folder = ShardFolder.create(tmp_path / "jobs", 3, both)
    assert len(list((folder.folder / "parts").iterdir())) == 3 + 3 + 2
    assert [len(folder.waiting(range(3), run)) for run in folder.runs] == [6, 5]
    publish(folder, 1)
    assert [len(folder.waiting([1], run)) for run in folder.runs] == [1, 1]
    assert [len(folder.waiting([2], run)) for run in folder.runs] == [2, 1]


def test_a_part_that_was_edited_is_refused(folder: ShardFolder) -> None:
    path = folder.folder / "parts" / f"{parts(folder)[1].address}.json"
    path.write_text(path.read_text().replace("2" * 64, "4" * 64))
    with pytest.raises(ShardError, match=r"was edited: it is part [0-9a-f]{12}, expected"):
        ShardFolder.open(folder.folder)
    path.unlink()
    with pytest.raises(ShardError, match="cannot be read"):
        ShardFolder.open(folder.folder)


@pytest.mark.parametrize(
    "text",
    ['{"shards": 0, "commands": [["a"]]}', '{"shards": 1, "commands": []}', "[]", "{",
     '{"shards": 1, "commands": [[]]}', '{"shards": 3, "commands": [["a"], ["b"]]}',
     '{"shards": 2, "commands": [["a"]]}', '{"shards": 3, "commands": [["clean", "."]]}'],
)  # fmt: skip
def test_a_plan_that_is_none_is_refused(folder: ShardFolder, text: str) -> None:
    (folder.folder / "plan.json").write_text(text)
    with pytest.raises(ShardError, match="fix: plan again into a new folder"):
        ShardFolder.open(folder.folder)


@pytest.mark.parametrize(
    "text", ['{"parts": [["../x"]], "last": true}', '{"parts": [[]], "last": true}', "{}", "["]
)
def test_a_wave_that_is_none_is_refused(folder: ShardFolder, text: str) -> None:
    (folder.folder / "waves" / "0-0.json").write_text(text)
    with pytest.raises(ShardError, match="fix: plan again into a new folder"):
        ShardFolder.open(folder.folder)


def test_a_search_ends_where_its_plan_does(folder: ShardFolder) -> None:
    with pytest.raises(ShardError, match="was planned with other inputs"):
        Merging(folder, 0).end()  # there is one more wave


class RayOfOneProcess:
    """Tasks that have a result when they are waited for."""

    def put(self, packed: object) -> object:
        return packed

    def remote(self, **_resources: int) -> Callable[[object], SimpleNamespace]:
        return lambda _run: SimpleNamespace(
            remote=lambda _packed, _number, addresses, *_others: tuple(addresses)
        )

    def wait(self, tasks: list[object]) -> tuple[list[object], list[object]]:
        return tasks[:1], tasks[1:]

    def get(self, task: Sequence[str]) -> dict[str, dict[str, bytes]]:
        return {address: {"result.json": b"{}"} for address in task}


@pytest.mark.parametrize("whole", [False, True])
def test_searches_that_wait_for_one_part_go_on_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Also where the first wave had all results before, and nobody planned the next."""
    both = [asked(RUN, words=("tune", name), last=False) for name in "AB"]
    folder = ShardFolder.create(tmp_path / "jobs", 3, both)
    for i in range(3 * whole):
        publish(folder, i)
    ends = lambda command, *_: folder.plan_wave("AB".index(command[1]), 1, (), last=True)  # noqa: E731
    monkeypatch.setattr(ray_tasks, "run_divided", ends)
    resources = ray_tasks.Resources(num_cpus=1, num_gpus=0)
    ray_tasks._Cluster(RayOfOneProcess(), folder, resources, lambda *_: None).compute(range(3))
    assert [len(folder.waiting(range(3), run)) for run in folder.runs] == [0, 0]
    assert [folder.waves(run)[-1].last for run in folder.runs] == [True, True]


def test_a_wave_is_planned_once_by_whoever_comes_first(folder: ShardFolder) -> None:
    more = Divisible(inputs={"draft": "b"}, batches=[(0,), (1,)], in_order=False)
    first = folder.plan_wave(0, 1, [more], last=False)
    before = {path: path.stat().st_mtime_ns for path in folder.folder.rglob("*.json")}
    assert folder.plan_wave(0, 1, [more], last=False) == first == folder.waves(0)[1]
    assert {path: path.stat().st_mtime_ns for path in folder.folder.rglob("*.json")} == before
    assert [number for number, _ in folder.waiting(range(3), 0)] == [0, 1, 2, 0, 1]
    assert not first.last


def test_a_plan_travels_with_the_results_of_earlier_waves(
    folder: ShardFolder, tmp_path: Path
) -> None:
    for i in range(3):
        publish(folder, i)
    (folder.folder / "results" / ".being-written").mkdir()
    more = Divisible(inputs={"draft": "b"}, batches=[(0,), (1,)], in_order=False)
    wave = folder.plan_wave(0, 1, [more], last=False)
    there = unpacked_folder(tmp_path / "there", packed_folder(folder, 0))
    assert there.waves(0) == folder.waves(0)
    assert [part for _, part in there.waiting(range(3), 0)] == list(wave.parts[0])
    with there.publishing(wave.parts[0][1], ARITHMETIC) as staging:
        (staging / "numbers.json").write_text("{}")
    result = packed_result(there, wave.parts[0][1].address)
    assert publish_packed(folder, wave.parts[0][1], result) is False
    assert publish_packed(folder, wave.parts[0][1], result) is True
    assert [part for _, part in folder.waiting(range(3), 0)] == [wave.parts[0][0]]
    assert packed_result(folder, wave.parts[0][1].address) == result


def search(division: Division) -> list[float]:
    """A verb that asks again with what it was told."""
    found: list[float] = [1.0]
    for _ in range(3):
        tasks = Tasks(
            identities=tuple(map(str, found)), compute=functools.partial(_measured, found)
        )
        asked = Measuring(tasks=tasks, inputs={"draft": "a"}, device=torch.device("cpu"))
        found += [numbers["found"] for numbers in division.numbers(asked)]
    nothing = Tasks(identities=(), compute=functools.partial(_measured, found))
    assert division.numbers(dataclasses.replace(asked, tasks=nothing)) == []
    division.end()
    return found


def _measured(values: Sequence[float], positions: Sequence[int]) -> list[Mapping[str, float]]:
    MEASURED.extend(values[i] for i in positions)
    return [{"found": values[i] / 3} for i in positions]


MEASURED: list[float] = []


@pytest.mark.parametrize(("order", "missing"), [((0, 1, 2), 0), ((2, 1, 0), 1)])
def test_a_search_goes_on_by_the_results_of_all(
    tmp_path: Path, order: Sequence[int], missing: int
) -> None:
    jobs = ShardFolder.create(tmp_path / "jobs", 3, [asked(RUN, last=False)])
    (jobs.folder / "waves" / "0-0.json").unlink()  # this one begins with measurements
    MEASURED.clear()
    told: list[tuple[int, bool]] = []
    for passes in (1, 2, 3):
        for number in order:
            work = Working(jobs, 0, lambda i, _part, own=number: i == own,
                           lambda i, _part, late: told.append((i, late)))  # fmt: skip
            with pytest.raises(DividedError):
                search(work)
        if passes == 1:
            with pytest.raises(ShardError, match=f"1 of its 3 shards have no .*: {missing}"):
                search(Merging(jobs, 0))
    assert len(MEASURED) == 1 + 2 + 4  # each once
    assert not any(late for _, late in told)
    assert {i for i, _ in told} == {0, 1, 2}
    alone = [1.0]
    for _ in range(3):
        alone += [x / 3 for x in alone]
    assert [wave.last for wave in jobs.waves(0)] == [False] * 3 + [True]  # none goes on with it
    assert search(Merging(jobs, 0)) == alone
    path = next((jobs.folder / "results").glob("*/numbers.json"))
    path.write_text('{"numbers": [{"found": true}]}')
    with pytest.raises(ShardError, match="is not as it was published"):
        search(Merging(jobs, 0))


@pytest.mark.parametrize(
    "text", ['{"numbers": [{"found": true}]}', '{"numbers": []}', "{}", "[", '{"numbers": 1}']
)
def test_numbers_that_are_none(tmp_path: Path, text: str) -> None:
    write_numbers(tmp_path, [{"found": 1 / 3}])
    assert read_numbers(tmp_path, [4]) == [{"found": 1 / 3}]
    (tmp_path / "numbers.json").write_text(text)
    with pytest.raises(ShardError, match="and run the shard again"):
        read_numbers(tmp_path, [4])


def test_missing_shards_are_named(folder: ShardFolder) -> None:
    publish(folder, 1)
    with pytest.raises(ShardError, match=r"2 of its 3 shards have no result yet: 0, 2") as caught:
        folder.check_whole(0)
    assert f"shards run {folder.folder} --shard 0" in str(caught.value)


def test_what_is_no_result_of_the_plan_is_named(folder: ShardFolder) -> None:
    for i in range(3):
        publish(folder, i)
    folder.check_whole(0)
    hidden = folder.folder / "results" / f".{parts(folder)[0].address}.1-2-0123456789ab.staging"
    hidden.mkdir()  # a run that was killed left it
    folder.check_whole(0)
    (folder.folder / "results" / "notes.txt").write_text("mine")
    with pytest.raises(ShardError, match=r"holds what is no result of this plan: notes\.txt"):
        folder.check_whole(0)


@pytest.mark.parametrize("how", ["edited", "cut", "gone", "more", "described otherwise"])
def test_a_result_that_was_changed_is_refused(folder: ShardFolder, how: str) -> None:
    results = [publish(folder, i) for i in range(3)]
    path = results[1] / "proposals.bin"
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
        folder.check_whole(0)


def test_results_of_two_arithmetics_are_not_joined(folder: ShardFolder) -> None:
    for i in range(3):
        publish(folder, i, {"torch": "2.13.0" if i < 2 else "2.8.0"})
    with pytest.raises(ShardError, match=r"of shard 2, was .*: torch: 2\.8\.0, expected 2\.13\.0"):
        folder.check_whole(0)


def test_a_run_of_other_inputs_is_refused(folder: ShardFolder) -> None:
    own = parts(folder)
    RUN.check(own, "here")
    with pytest.raises(ShardError, match=r"here: was planned with other inputs .*: draft 1\n"):
        Divisible(inputs={**RUN.inputs, "draft 1": "5" * 64}, batches=RUN.batches,
                  in_order=False).check(own, "here")  # fmt: skip
    for some in (own[:2], (*own, own[0]), ()):
        with pytest.raises(ShardError, match="the batches of prompts"):
            RUN.check(some, "here")


@pytest.mark.parametrize("words", [("quantize", "A"), (), ("verify",)])
def test_other_commands_are_not_divided(words: Sequence[str]) -> None:
    with pytest.raises(ShardError, match="COMMAND: expected one of record, replay, gate, compare"):
        first_asked(words, SILENT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: "),
        ("# nothing\n\n", "holds no command"),
        ("gate 'A", "commands.txt:1: No closing quotation"),
        ("replay A --traces T\ndraftquant replay A  --traces T  # again\n",
         "commands.txt:2: is the command of line 1 again"),
        ("push A\n", "COMMAND: expected one of record, replay, gate, compare, tune, got 'push'"),
    ],
)  # fmt: skip
def test_files_of_commands_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    file = tmp_path / "commands.txt"
    if text is not None:
        file.write_text(text)
    given = ["--shards", "2", "--out", str(tmp_path / "jobs"), "--commands", str(file)]
    assert main(["shards", "plan", *given]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("option", ["--report", "--html", "--overwrite --report"])
def test_two_commands_that_write_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """With --overwrite the second report would replace the first without a word."""
    file, out = tmp_path / "commands.txt", tmp_path / "out"
    lines = [f"gate A {name} --traces T {option} {path}" for name, path in
             (("B", out), ("C", tmp_path / "." / "x" / ".." / "out"))]  # fmt: skip
    file.write_text("\n".join(lines))
    given = ["--shards", "2", "--out", str(tmp_path / "jobs"), "--commands", str(file)]
    assert main(["shards", "plan", *given]) == 2
    assert "out: is written by command 2, and by command 1 already" in capsys.readouterr().err


def test_what_needs_no_traces_is_not_run_by_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path(__file__).parent / "no-such-report.json"
    command = ["compare", str(report), str(report), "--report", str(tmp_path / "out.json")]
    given = ["shards", "plan", "--shards", "2", "--out", str(tmp_path / "jobs"), "--"]
    assert main([*given, *command]) == 2
    assert "so there is nothing to divide" in capsys.readouterr().err


def test_a_command_or_a_file_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["shards", "plan", "--shards", "2", "--out", str(tmp_path / "jobs")]
    assert main(given) == 2
    assert "expected a command, or --commands FILE; got none" in capsys.readouterr().err
    assert main([*given, "--commands", "F", "--", *WORDS]) == 2
    assert "expected a command, or --commands FILE; got both" in capsys.readouterr().err


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


def test_a_folder_whose_name_has_two_lines(tmp_path: Path) -> None:
    folder = ShardFolder.create(tmp_path / "a\necho b", 2, [asked(RUN)])
    text = script("slurm", folder, tmp_path, 1)
    run = ["bash", "-c", f"exec() {{ :; }}; {text}"]
    env = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    assert subprocess.run(run, env=env, capture_output=True, check=True).stdout == b""


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


@pytest.mark.parametrize(
    ("has", "alive", "fits"),
    [({"CPU": 4.0, "GPU": 1.0}, True, True), ({"CPU": 4.0}, True, False),
     ({"CPU": 2.0, "GPU": 8.0}, True, False), ({"CPU": 4.0, "GPU": 1.0}, False, False)],
)  # fmt: skip
def test_nodes_that_are_large_enough(has: dict[str, float], alive: bool, fits: bool) -> None:
    resources = Resources(num_cpus=4, num_gpus=1)
    assert resources.fit({"Resources": has, "Alive": alive}) is fits
    assert str(resources) == "4 CPUs and 1 GPUs"


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
    while killed.poll() is None and not any(map(folder.is_done, parts(folder))):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = sum(map(folder.is_done, parts(folder)))
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
    while driver.poll() is None and not any(map(folder.is_done, parts(folder))):
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
