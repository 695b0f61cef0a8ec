"""`--ray`: tasks of a Ray cluster compute batches of prompts, instead of this process.

Results come in the order of the batches, so that they equal those of this machine
alone. Each worker opens what its tasks need once, by the paths that the command names. Source: Ray
2.60: `ray.remote`, whose `max_retries` counts deaths of workers and nodes, not errors of a task.
"""

import platform
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch

from ...recipes.errors import DraftQuantError, first_line
from ...recipes.installing import imported
from ...recipes.packages import package_version
from .computing import computing

Job = TypeVar("Job")
Result = TypeVar("Result")
Opening = Callable[[], AbstractContextManager[Callable[[Job], Result]]]
"""Opens what jobs need, and returns a function that computes one of them."""
Placed = Callable[[Sequence[Job]], Iterator[Result]]
"""Computes jobs somewhere, and yields their results in the order of the jobs."""

_RETRIES = 3
_PATIENCE = 10.0  # seconds for a cluster to accept a connection
_OPENED, _STACK = dict[str, Callable[[Any], Any]](), ExitStack()
"""What this worker has opened, by the run that it works for; held until the worker ends."""


class ClusterError(DraftQuantError):
    """A Ray cluster cannot be reached, or does not compute what this machine would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedWork(Generic[Job, Result]):
    """What all tasks of a run read; `machine` started it."""

    run: str
    open_: Opening[Job, Result]
    num_threads: int
    device: torch.device
    machine: Mapping[str, object]


@contextmanager
def ray_tasks(
    address: str, device: torch.device, open_: Opening[Job, Result]
) -> Iterator[Placed[Job, Result]]:
    """Inside the block, a cluster computes the jobs: HOST:PORT, auto, or local for its own one.

    A task has a device of the same kind, and as many CPUs as torch has threads here.

    Raises:
        ClusterError: there is no Ray, no cluster, or no node that is large enough; while results
            are read, a task is lost again and again, or a node cannot compute it.
    """
    ray = imported("ray", "ray", "--ray", "needs Ray, which is not installed", ClusterError)
    where = f"--ray {address}"
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as exc:
        fix = "give the HOST:PORT of a cluster (and its RAY_AUTH_TOKEN), auto, or local"
        raise ClusterError(where, f"no cluster answers: {first_line(exc)}", fix=fix) from exc
    num_threads, num_gpus = torch.get_num_threads(), int(device.type == "cuda")
    try:
        _check_nodes(where, ray.nodes(), num_threads, num_gpus)
        remote = ray.remote(num_cpus=num_threads, num_gpus=num_gpus, max_retries=_RETRIES)
        work = _SharedWork(
            run=uuid.uuid4().hex,
            open_=open_,
            num_threads=num_threads,
            device=torch.device(device.type),
            machine=machine_of(device),
        )
        with redirect_stdout(sys.stderr):  # Ray prints which workers died, whatever the settings
            yield partial(_results, where, ray, remote(_compute), ray.put(work))
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Connect to HOST:PORT and leave: Ray itself tries for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


def _check_nodes(where: str, nodes: Sequence[Any], num_cpus: int, num_gpus: int) -> None:
    """Refuse a cluster where tasks would wait forever, by its nodes as `ray.nodes` lists them."""
    have = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(h.get("CPU", 0) >= num_cpus and h.get("GPU", 0) >= num_gpus for h in have):
        what = f"no node of {len(have)} has {num_cpus} CPUs{' and a GPU' * num_gpus} for a task"
        fix = "start such nodes, or set OMP_NUM_THREADS to the CPUs that a task may take"
        raise ClusterError(where, what, fix=fix)


def _results(where: str, ray: Any, remote: Any, work: Any, jobs: Sequence[Any]) -> Iterator[Any]:
    """Results of tasks, in the order of their jobs; errors in our own words."""
    tasks = [remote.remote(work, job) for job in jobs]
    try:
        while tasks:
            yield ray.get(tasks.pop(0))
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, DraftQuantError):
            raise exc.cause from exc
        what = f"a node cannot compute a batch: {type(exc.cause).__name__}: {first_line(exc.cause)}"
        fix = "install this draftquant and its packages on all nodes"
        raise ClusterError(where, what, fix=fix) from exc
    except ray.exceptions.RayError as exc:
        what = f"a batch was lost {_RETRIES + 1} times: {type(exc).__name__}"
        fix = "let fewer tasks run on a node (OMP_NUM_THREADS), or give a smaller --batch-size"
        raise ClusterError(where, what, fix=fix) from exc


def _compute(work: _SharedWork[Job, Result], job: Job) -> Result:
    """A task: one job, computed with what its worker has opened."""
    torch.set_num_threads(work.num_threads)
    if work.run not in _OPENED:
        check_equal("it", machine_of(work.device), work.machine)
        _OPENED[work.run] = _STACK.enter_context(work.open_())
    return cast("Result", _OPENED[work.run](job))


def machine_of(device: torch.device) -> Mapping[str, object]:
    """What a machine must have in common with another to give the same bits."""
    return {**computing(device), "transformers": package_version("transformers")}


def check_equal(what: str, got: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Refuse a node that would give other results than the machine that started the tasks."""
    if got != expected:
        other = [f"{n} {got[n]}, expected {e}" for n, e in expected.items() if got[n] != e]
        raise ClusterError(
            f"node {platform.node()}",
            f"{what} differs from the machine that started its tasks: {'; '.join(other)}",
            fix="start the command on a machine like the nodes, with the same packages, and let"
            " the paths of draft, target and traces name the same files everywhere",
        )
