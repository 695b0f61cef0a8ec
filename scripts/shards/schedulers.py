"""What Slurm and Kubernetes are given to run the shards of a plan: one task for each.

Sources: sbatch(1) of Slurm for `--array`, `--requeue` and SLURM_ARRAY_TASK_ID; the Job API
(batch/v1) of Kubernetes 1.33 for indexed Jobs, whose pods find JOB_COMPLETION_INDEX in their
environment, and `backoffLimitPerIndex`, which needs `restartPolicy: Never`.
"""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from ...recipes.errors import visible

if TYPE_CHECKING:
    from .shard_folder import ShardFolder

Scheduler = Literal["slurm", "kubernetes"]
RETRIES = 3
_AGAIN = (
    "# Submit it again while 'draftquant shards merge' names shards: a search goes on by results.\n"
)


def script(scheduler: Scheduler, folder: "ShardFolder", here: Path, num_threads: int) -> str:
    """The text to submit.

    Args:
        scheduler: that will read it.
        folder: of the plan.
        here: working folder of the plan's command, as all machines see it.
        num_threads: of the sums on a CPU, equal on all machines.
    """
    return _WRITERS[scheduler](folder, here, num_threads)


def _run(folder: "ShardFolder", here: Path, num_threads: int, index: str) -> str:
    return (
        f"export OMP_NUM_THREADS={num_threads}\n"
        f"cd {shlex.quote(str(here))}\n"
        f'exec draftquant shards run {shlex.quote(str(folder.folder))} --shard "${index}"\n'
    )


def _slurm(folder: "ShardFolder", here: Path, num_threads: int) -> str:
    merge = shlex.join(["draftquant", "shards", "merge", str(folder.folder)])
    return (
        "#!/bin/bash\n"
        "#SBATCH --job-name=draftquant-shards\n"
        f"#SBATCH --array=0-{folder.num_shards - 1}\n"
        f"#SBATCH --cpus-per-task={num_threads}\n"
        "#SBATCH --requeue\n"
        "# Add what your cluster asks for: --partition, --time, --mem, --gpus.\n"
        f"# Afterwards: {visible(merge)}\n"
        f"{_AGAIN}"
        "set -eu\n" + _run(folder, here, num_threads, "SLURM_ARRAY_TASK_ID")
    )


def _kubernetes(folder: "ShardFolder", here: Path, num_threads: int) -> str:
    count = folder.num_shards
    container = {
        "name": "shard",
        "image": "draftquant",
        "command": ["/bin/sh", "-euc", _run(folder, here, num_threads, "JOB_COMPLETION_INDEX")],
        "resources": {"requests": {"cpu": str(num_threads)}},
        "volumeMounts": [{"name": "shared", "mountPath": str(here)}],
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "draftquant"}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"draftquant-shards-{folder.waves(0)[0].parts[0][0].address[:8]}"},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": RETRIES,
            "template": {"spec": pod},
        },
    }
    head = "# Set the image, the volume that all pods share, and the resources of your cluster.\n"
    return head + _AGAIN + yaml.safe_dump(job, sort_keys=False)


_WRITERS: Mapping[Scheduler, Callable[["ShardFolder", Path, int], str]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}
