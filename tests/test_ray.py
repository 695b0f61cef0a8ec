"""Batches on a Ray cluster: the result is one machine's to the byte, whatever dies meanwhile."""

import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from draftquant import api as dq
from draftquant.calibration.passes import ray_tasks as on_ray
from draftquant.calibration.passes.ray_tasks import ClusterError, ray_tasks
from draftquant.calibration.recording.record_traces import RecordedBatch, write_recorded
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from draftquant.validate.counting import replaying as ray_replay

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_opened() -> Iterator[None]:
    yield
    on_ray._OPENED.clear()
    on_ray._STACK.close()


# ---- the door, with a Ray that computes in this process


class TaskError(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__("a traceback")
        self.cause = cause


class FakeRay(ModuleType):
    """As much of Ray as is used; tasks travel as Ray lets them, and run where they are asked."""

    _nodes: Sequence[Mapping[str, Any]] = ({"Alive": True, "Resources": {"CPU": 2.0}},)
    _dies: Exception | None = None

    _refuses: Exception | None = None

    def __init__(self) -> None:
        super().__init__("ray")
        ray_error = type("RayError", (Exception,), {})
        self.exceptions = SimpleNamespace(RayError=ray_error, RayTaskError=TaskError)
        self.asked: dict[str, Any] = {}
        self.told: list[str] = []
        self.is_up = False

    def init(self, *, address: str, **_: object) -> None:
        if self._refuses is not None:
            raise self._refuses
        self.is_up = True
        self.asked["address"] = address

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        return self._nodes

    def put(self, value: object) -> bytes:
        return pickle.dumps(value)

    def remote(self, **resources: int) -> Callable[[Callable[..., Any]], SimpleNamespace]:
        self.asked |= resources
        return lambda compute: SimpleNamespace(
            remote=lambda work, job: partial(self._run, compute, work, pickle.dumps(job))
        )

    def get(self, task: Callable[[], bytes]) -> object:
        if self._dies is not None:
            raise self._dies
        return pickle.loads(task())  # noqa: S301 - of this process

    def _run(self, compute: Callable[..., Any], work: bytes, job: bytes) -> bytes:
        try:
            return pickle.dumps(compute(pickle.loads(work), pickle.loads(job)))  # noqa: S301
        except Exception as exc:
            raise TaskError(exc) from exc


OPENED: list[str] = []


def squares() -> AbstractContextManager[Callable[[int], int]]:
    OPENED.append("squares")
    return nullcontext(square)


def square(job: int) -> int:
    if job < 0:
        raise TraceError("job", f"expected no negative number, got {job}", fix="give another")
    if job > 99:
        raise KeyError(job)
    return job * job


def computed(jobs: Sequence[int], device: str = "cpu", address: str = "auto") -> list[int]:
    with ray_tasks(address, torch.device(device), squares) as placed:
        print("(raylet) a worker died")
        return list(placed(jobs))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_results_come_in_the_order_of_the_jobs_and_a_worker_opens_once(
    ray: FakeRay, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    OPENED.clear()
    assert computed([5, 3, 8, 3]) == [25, 9, 64, 9]
    assert OPENED == ["squares"]
    assert ray.asked == {"address": "auto", "num_cpus": 1, "num_gpus": 0, "max_retries": 3}
    assert not ray.is_up
    assert capsys.readouterr() == ("", "(raylet) a worker died\n")  # which is no result
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "H100")
    ray._nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    assert computed([2], "cuda:1") == [4]
    assert ray.asked["num_gpus"] == 1


def test_what_no_cluster_computes(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"--ray \[::1\]:1: no cluster answers: "):
        computed([1], address="[::1]:1")  # where nobody listens
    assert ray.asked == {}
    with pytest.raises(TraceError, match="expected no negative number, got -1"):
        computed([1, -1])
    ray._dies = type("WorkerCrashedError", (ray.exceptions.RayError,), {})()
    with pytest.raises(ClusterError, match="a batch was lost 4 times: WorkerCrashedError"):
        computed([1])
    for alive, resources, count in ((False, {"CPU": 8.0}, 0), (True, {"memory": 1.0}, 1)):
        ray._nodes = [{"Alive": alive, "Resources": resources}]
        with pytest.raises(ClusterError, match=f"no node of {count} has 1 CPUs for a task"):
            computed([1])
    ray._refuses = RuntimeError("Could not connect\nmany lines")
    with pytest.raises(ClusterError, match="--ray auto: no cluster answers: Could not connect\n"):
        computed([1])
    assert not ray.is_up
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match="--ray: needs Ray, which is not installed"):
        computed([1])


def test_a_node_that_rounds_otherwise_is_refused(ray: FakeRay) -> None:
    found = on_ray.machine_of(CPU)
    other = {**found, "torch": "1.0"}
    with pytest.raises(ClusterError, match=r"it differs from the machine .*: torch .*, expected 1"):
        on_ray.check_equal("it", found, other)
    on_ray.check_equal("it", found, dict(found))
    work: on_ray._SharedWork[int, int] = on_ray._SharedWork(
        run="x", open_=squares, num_threads=1, device=CPU, machine=other
    )
    with pytest.raises(ClusterError, match="start the command on a machine like the nodes"):
        on_ray._compute(work, 1)
    assert ray.asked == {}


# ---- verbs


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, the longest first, what one machine records of them greedily, and a candidate."""
    folder = tmp_path_factory.mktemp("ray")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    asked = [json.loads(line) for line in lines[:5]]
    for i, one in enumerate(asked):
        one["token_ids"] = one["token_ids"][6 * i :]
        del one["text"]  # which is that of all of them
    text = "".join(f"{json.dumps(one)}\n" for one in asked)
    (folder / "5.jsonl").write_text(text, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each test: sums of two threads are other sums
    assert main(recording(folder, "one")) == 0
    torch.set_num_threads(threads)
    quantize = ["quantize", str(PAIR / "draft"), "--recipe", "int4-channel"]
    assert main([*quantize, "--out", str(folder / "int4")]) == 0
    return folder


def recording(work: Path, out: str, *more: str) -> list[str]:
    given = ["--prompts", str(work / "5.jsonl"), "--max-new-tokens", "32"]
    how = ["--batch-size", "2", "--fixed-batches", *more]
    pair = ["--target", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
    return ["record", *pair, *given, *how, "--out", str(work / out)]


def judging(work: Path, verb: str, traces: str, *more: str) -> list[str]:
    drafts = [str(PAIR / "draft"), str(work / "int4")]
    return [verb, *drafts, "--traces", str(work / traces), "-k", "3", "--batch-size", "2", *more]


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.slow
def test_traces_of_batches_are_those_of_one_machine(
    work: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths, and --tables, which are written where the traces are."""
    monkeypatch.chdir(PAIR)
    words = recording(work, "by-ray", "--ray", "local")
    words[words.index("--target") + 1 : words.index("--target") + 4] = [
        "target", "--draft", "draft"
    ]  # fmt: skip
    assert main(words) == 0
    assert files(work / "by-ray") == files(work / "one")
    assert ray.asked["address"] == "local"


@contextmanager
def counting(found: list[object], address: str, device: torch.device, open_: Any) -> Iterator[Any]:
    """A plain mapper at the door, that notes the jobs."""
    assert address == "local"
    assert device == CPU
    with open_() as compute:
        yield lambda jobs: map(compute, [found.append(job) or job for job in jobs])


def test_a_gate_divides_both_replays_and_the_cache_stays_here(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    jobs: list[object] = []
    monkeypatch.setattr(ray_replay, "ray_tasks", partial(counting, jobs))
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "cache"))
    how = ("--policy", "screening", "--min-prompts", "2")
    assert main([*judging(work, "gate", "one", *how), "--no-cache", "--json"]) == 3
    alone = json.loads(capsys.readouterr().out)
    for notes in (False, True):
        assert main([*judging(work, "gate", "one", *how), "--ray", "local", "--json"]) == 3
        said = capsys.readouterr()
        report = json.loads(said.out)
        for one in (report, alone):
            one.pop("argv", None)
        assert report == alone
        assert ("its replay was kept" in said.err) is notes
    assert len(jobs) == 2 * 3  # the quantized draft each time, the BF16 draft in the first jobs
    jobs.clear()
    dq.replay([PAIR / "draft"], work / "one", num_draft_tokens=3, batch_size=2, ray="local")
    assert jobs == []  # what is known here is not asked of a cluster


def test_other_drafts_or_traces_at_the_same_paths_are_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch, ray: FakeRay
) -> None:
    load = ray_replay.load_for_replay  # which replay has by its name: this is a worker's
    monkeypatch.setattr(
        ray_replay, "load_for_replay", lambda _folders, *how: load([PAIR / "draft"] * 2, *how)
    )
    assert main([*judging(work, "replay", "one"), "--ray", "local"]) == 2
    assert ray.asked["num_cpus"] == 1


def test_batches_of_two_targets_or_of_other_features_are_not_one_recording() -> None:
    def batch(weights: str, kind: str = "aux") -> RecordedBatch:
        target: Any = SimpleNamespace(name="T", weights_sha256=weights)
        features: Any = kind
        return RecordedBatch(identity=target, features=features, traces=((7, trace),))

    writer, trace = Mock(), Mock()
    for other in (batch("b"), batch("a", "last")):
        with pytest.raises(TraceError, match="target T: not all prompts were recorded of"):
            write_recorded(writer, [batch("a"), other], 2, lambda *_: None)
    assert writer.add.mock_calls == [call(trace, position=7)] * 2


# ---- Ray itself
