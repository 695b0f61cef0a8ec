"""Shards as tasks of Ray: placed by their resources, and run again where a worker dies.

The plan goes to the workers, and results come back, through Ray's object store: the folder of the
plan is on the machine that starts the tasks alone. Source: Ray 2.60: `ray.remote`, whose
`max_retries` counts deaths of workers and nodes, not errors of a task, and which sets
OMP_NUM_THREADS of a worker by its CPUs; `ray.put`, for what several tasks read.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import DraftQuantError
from ...recipes.install_line import install_line
from ..api.listener import SILENT
from .divided_run import run_divided
from .divisions import Working
from .packed_folder import Packed, packed_folder, packed_result, publish_packed, unpacked_folder
from .parts import Part, ShardError
from .shard_folder import ShardFolder

RETRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What Ray reserves for a shard."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_cpus} CPUs and {self.num_gpus} GPUs"

    def fit(self, node: Mapping[str, Any]) -> bool:
        """Whether a node, as `ray.nodes` describes it, has so many."""
        has = node["Resources"] if node["Alive"] else {}
        return bool(has.get("CPU", 0) >= self.num_cpus and has.get("GPU", 0) >= self.num_gpus)


def run_on_ray(
    folder: ShardFolder,
    numbers: Collection[int],
    address: str,
    resources: Resources,
    on_done: Callable[[int, Part, bool], None],
    warn: Callable[[str], None],
) -> None:
    """Compute shards on a cluster.

    Args:
        folder: of the plan, on this machine.
        numbers: of the shards to compute.
        address: of the cluster, see `ray.init`.
        resources: of each shard.
        on_done: see `Working`.
        warn: is told that no node is large enough now; one may join.

    Raises:
        ShardError: Ray is not installed, no cluster answers, or a worker died again and again.
        DraftQuantError: as of the command, from any shard.
    """
    try:
        import ray
    except ImportError as exc:
        raise ShardError("--ray", "needs Ray, which is not installed",
                         fix=install_line("ray")) from exc  # fmt: skip
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as exc:
        fix = "give the address of a cluster, or local"
        raise ShardError(f"--ray {address}", f"no cluster: {exc}", fix=fix) from exc
    try:
        if not any(map(resources.fit, ray.nodes())):
            warn(f"no node of the cluster has {resources}: the shards wait until one joins")
        _Cluster(ray, folder, resources, on_done).compute(numbers)
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, DraftQuantError):
            raise exc.cause from exc
        raise ShardError(
            f"--ray {address}",
            f"a node cannot compute a shard: {type(exc.cause).__name__}: {exc.cause}",
            fix="install this draftquant on all nodes, and let them see the command's files and"
            f" {Path.cwd()}",
        ) from exc
    except ray.exceptions.RayError as exc:
        raise ShardError(
            f"--ray {address}",
            f"a shard was lost {RETRIES + 1} times: {type(exc).__name__}",
            fix="give it more memory, and run the same command again: results so far are kept",
        ) from exc
    finally:
        ray.shutdown()


class _Cluster:
    """Tasks in flight, and what becomes of their results."""

    def __init__(
        self,
        ray: Any,
        folder: ShardFolder,
        resources: Resources,
        on_done: Callable[[int, Part, bool], None],
    ) -> None:
        self._ray, self._folder, self._on_done = ray, folder, on_done
        self._remote = ray.remote(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_retries=RETRIES
        )(_run)
        self._tasks: dict[Any, tuple[int, list[Part]]] = {}

    def compute(self, numbers: Collection[int]) -> None:
        for run in self._folder.runs:
            self._plan_next(run)
            self._submit(run, numbers)
        while self._tasks:
            (first, *_), _ = self._ray.wait(list(self._tasks))
            number, parts = self._tasks.pop(first)
            results = self._ray.get(first)
            for part in parts:
                late = publish_packed(self._folder, part, results[part.address])
                self._on_done(number, part, late)
            for run in self._folder.runs:  # other commands may have waited for the same part
                if self._plan_next(run):
                    self._submit(run, numbers)

    def _submit(self, run: int, numbers: Collection[int]) -> None:
        """A task for each shard, of those parts that no other task computes."""
        import torch

        in_flight = {part.address for _, parts in self._tasks.values() for part in parts}
        waiting: dict[int, list[Part]] = {}
        for number, part in self._folder.waiting(numbers, run):
            if part.address not in in_flight:
                waiting.setdefault(number, []).append(part)
        if not waiting:
            return
        packed = self._ray.put(packed_folder(self._folder, run))
        here, threads = Path.cwd(), torch.get_num_threads()
        for number, parts in waiting.items():
            addresses = [part.address for part in parts]
            task = self._remote.remote(packed, run, addresses, here, threads)
            self._tasks[task] = number, parts

    def _plan_next(self, run: int) -> bool:
        """Plan the next wave of a search, where the one before is whole; whether it was."""
        every = range(self._folder.num_shards)
        if self._folder.waves(run)[-1].last or self._folder.waiting(every, run):
            return False
        nothing = Working(self._folder, run, lambda _number, _part: False, self._on_done)
        run_divided(self._folder.commands[run], SILENT, nothing)
        return True


def _run(
    packed: Packed, run: int, addresses: Collection[str], here: Path, num_threads: int
) -> dict[str, Packed]:
    """Compute parts in a worker: address -> files of the result."""
    import torch

    os.chdir(here)
    torch.set_num_threads(num_threads)  # as on all other machines: see `arithmetic`
    with tempfile.TemporaryDirectory(prefix="draftquant-shard-") as scratch:
        folder = unpacked_folder(Path(scratch) / "plan", packed)
        mine = Working(
            folder, run, lambda _number, part: part.address in addresses, lambda *_: None
        )
        run_divided(folder.commands[run], SILENT, mine)
        return {address: packed_result(folder, address) for address in addresses}
