"""Shards as tasks of Ray: placed by their resources, and run again where a worker dies.

Results go to the folder of the plan, which all nodes see; Ray's object store carries only whether a
shard was done already. Source: ray.remote of Ray 2.60, whose `max_retries` counts deaths of workers
and nodes, not errors of a task, and which sets OMP_NUM_THREADS of a worker by its CPUs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import DraftQuantError
from ...recipes.install_line import install_line
from ..api.listener import SILENT
from .divided_run import run_divided
from .divisions import Working
from .shard_folder import ShardFolder
from .work_shard import ShardError, WorkShard

RETRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What Ray reserves for a shard."""

    num_cpus: int
    num_gpus: int


def run_on_ray(
    folder: ShardFolder,
    shards: Sequence[WorkShard],
    address: str,
    resources: Resources,
    on_done: Callable[[WorkShard, bool], None],
) -> None:
    """Compute shards on a cluster.

    Args:
        folder: of the plan, at the same path on all nodes.
        shards: to compute.
        address: of the cluster, see `ray.init`.
        resources: of each shard.
        on_done: see `Working`.

    Raises:
        ShardError: Ray is not installed, no cluster answers, or a worker died again and again.
        DraftQuantError: as of the command, from any shard.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # this run tells nobody else
    try:
        import ray
    except ImportError as exc:
        raise ShardError("--ray", "needs Ray, which is not installed",
                         fix=install_line("ray")) from exc  # fmt: skip
    import torch

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as exc:
        fix = "give the address of a cluster, or local"
        raise ShardError(f"--ray {address}", f"no cluster: {exc}", fix=fix) from exc
    try:
        remote = ray.remote(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_retries=RETRIES
        )(_run)
        plan, here, threads = folder.folder.absolute(), Path.cwd(), torch.get_num_threads()
        tasks = {remote.remote(plan, shard.address, here, threads): shard for shard in shards}
        while tasks:
            (first, *_), _ = ray.wait(list(tasks))
            on_done(tasks.pop(first), ray.get(first))
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, DraftQuantError):
            raise exc.cause from exc
        raise
    except ray.exceptions.RayError as exc:
        raise ShardError(
            f"--ray {address}",
            f"a shard was lost {RETRIES + 1} times: {type(exc).__name__}",
            fix="give it more memory, and run the same command again: results so far are kept",
        ) from exc
    finally:
        ray.shutdown()


def _run(plan: Path, address: str, here: Path, num_threads: int) -> bool:
    """Compute a shard in a worker; whether somebody else was faster."""
    import torch

    os.chdir(here)
    torch.set_num_threads(num_threads)  # as on all other machines: see `arithmetic`
    folder = ShardFolder.open(plan)
    shard = next(shard for shard in folder.shards if shard.address == address)
    late: list[bool] = []
    if not folder.is_done(shard):
        work = Working(folder, [shard], lambda _shard, was_late: late.append(was_late))
        run_divided(folder.command, SILENT, work)
    return late != [False]
