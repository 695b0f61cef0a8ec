"""`shards`: a run divided into parts that any machine computes, and joined; a verb for each."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...recipes.bounds import AT_LEAST_0, AT_LEAST_1
from ...recipes.brief import Brief
from ..shards.schedulers import Scheduler
from .arguments import AnyPath, OutFolder
from .option import Argument, Option
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ..shards.work_shard import WorkShard

Folder = Annotated[AnyPath, Argument("folder that 'shards plan' wrote", "FOLDER")]


@dataclass(frozen=True, slots=True)
class ShardsPlanSettings(Settings):
    """Which command line, in how many parts, and where they are kept."""

    words: Annotated[
        Sequence[str],
        Argument("record, replay, gate or compare, with its arguments behind a -- sign", "COMMAND"),
    ]
    out: OutFolder
    _: KW_ONLY
    shards: Annotated[
        int,
        Option("number of parts", "SHARDS", bounds=AT_LEAST_1, fix="give --shards 4, for example"),
    ]
    scheduler: Annotated[
        Scheduler | None,
        Option("print what runs the shards there: a job array, or an indexed Job", flag="--for"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardsPlan(Brief):
    """A run that was divided.

    Attributes:
        folder: that holds the plan and will hold the results.
        command: the words of the command line.
        shards: address of each part -> the number of its prompts.
        script: what a scheduler is given to run the shards; None where none was asked for.
    """

    folder: Path
    command: tuple[str, ...]
    shards: Mapping[str, int]
    script: str | None = None

    @override
    def brief(self) -> Mapping[str, object]:
        prompts = sum(self.shards.values())
        return {"folder": self.folder, "shards": len(self.shards), "prompts": prompts}


@verb(ShardsPlanSettings)
def shards_plan(settings: ShardsPlanSettings) -> ShardsPlan:
    """Divide the prompts of a command into shards, and write the plan.

    Returns:
        The plan. Its shards run in any order, on any machines that see the same files.

    Raises:
        DraftQuantError: the command is none that can be divided, has fewer batches than shards are
            asked for, or its inputs cannot be read.
    """
    from ...quantize.files.staging import check_output
    from ..shards.divided_run import planned
    from ..shards.schedulers import script
    from ..shards.shard_folder import ShardFolder

    out, command = Path(settings.out), tuple(settings.words)
    check_output(out)
    run = planned(command, settings.listener)
    folder = ShardFolder.create(out, run.shards(settings.shards, command))
    text = None
    if settings.scheduler is not None:
        import torch

        text = script(settings.scheduler, folder, Path.cwd(), torch.get_num_threads())
    return ShardsPlan(
        folder=out,
        command=command,
        shards={shard.address: shard.num_prompts for shard in folder.shards},
        script=text,
    )


@dataclass(frozen=True, slots=True)
class ShardsRunSettings(Settings):
    """Which shards of which plan."""

    folder: Folder
    _: KW_ONLY
    shard: Annotated[
        int | None, Option("the shard to run, counted from 0", "NUMBER", bounds=AT_LEAST_0)
    ] = None
    all: Annotated[bool, Option("run all shards that have no result yet")] = False
    ray: Annotated[
        str | None,
        Option(
            "run them as tasks of the Ray cluster at this address: HOST:PORT, auto, or local for"
            " one that is started here",
            "ADDRESS",
        ),
    ] = None
    shard_cpus: Annotated[
        int, Option("CPUs of a task of Ray (default 1)", "CPUS", bounds=AT_LEAST_1)
    ] = 1
    shard_gpus: Annotated[
        int, Option("GPUs of a task of Ray (default 0)", "GPUS", bounds=AT_LEAST_0)
    ] = 0

    one_of = (("shard", "all"),)

    def check(self) -> None:
        """Refuse resources that nobody is asked for."""
        from ..shards.work_shard import ShardError

        if self.ray is None and (self.shard_cpus, self.shard_gpus) != (1, 0):
            name = "--shard-cpus" if self.shard_cpus != 1 else "--shard-gpus"
            raise ShardError(name, "is asked of Ray", fix="add --ray ADDRESS, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardsRun(Brief):
    """Shards that have a result now.

    Attributes:
        folder: of the plan.
        computed: numbers of the shards that this run computed.
        present: numbers of those that had a result already.
    """

    folder: Path
    computed: tuple[int, ...]
    present: tuple[int, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        return {"folder": self.folder, "computed": len(self.computed), "present": len(self.present)}


@verb(ShardsRunSettings)
def shards_run(settings: ShardsRunSettings) -> ShardsRun:
    """Compute shards, and publish their results.

    A shard that was computed already is left as it is. One that was killed leaves no result, and
    runs again.

    Returns:
        Which shards were computed.

    Raises:
        DraftQuantError: there is no such shard, or the inputs are not those of the plan.
    """
    from ..shards.divided_run import run_divided
    from ..shards.divisions import Working
    from ..shards.shard_folder import ShardFolder
    from ..shards.work_shard import ShardError

    folder = ShardFolder.open(Path(settings.folder))
    numbers = {shard.address: i for i, shard in enumerate(folder.shards)}
    if settings.shard is not None and settings.shard >= len(folder.shards):
        raise ShardError("--shard", f"expected 0 to {len(folder.shards) - 1}, got {settings.shard}",
                         fix=f"see {folder.folder}/plan.json")  # fmt: skip
    asked = range(len(folder.shards)) if settings.shard is None else [settings.shard]
    done: list[int] = []
    present = [i for i in asked if folder.is_done(folder.shards[i])]

    def tell(shard: "WorkShard", late: bool) -> None:
        i = numbers[shard.address]
        (present if late else done).append(i)
        settings.listener.note(
            f"shard {i} of {len(folder.shards)}, {shard.num_prompts} prompts:"
            f" {'another run was faster' if late else 'done'}"
        )

    waiting = [folder.shards[i] for i in asked if i not in present]
    if waiting and settings.ray is not None:
        from ..shards.ray_tasks import Resources, run_on_ray

        resources = Resources(num_cpus=settings.shard_cpus, num_gpus=settings.shard_gpus)
        run_on_ray(folder, waiting, settings.ray, resources, tell)
    elif waiting:
        run_divided(folder.command, settings.listener, Working(folder, waiting, tell))
    return ShardsRun(folder=folder.folder, computed=tuple(done), present=tuple(sorted(present)))


@dataclass(frozen=True, slots=True)
class ShardsMergeSettings(Settings):
    """Which plan."""

    folder: Folder


@verb(ShardsMergeSettings)
def shards_merge(settings: ShardsMergeSettings) -> Any:
    """Run the command of a plan with the results of its shards in place of the computation.

    Files and report are those that one machine gives, byte for byte.

    Returns:
        The report of the command's verb.

    Raises:
        DraftQuantError: a shard has no result, or one that is not as it was published; or the
            inputs are not those of the plan.
    """
    from ..shards.divided_run import run_divided
    from ..shards.divisions import Merging
    from ..shards.shard_folder import ShardFolder

    folder = ShardFolder.open(Path(settings.folder))
    folder.check_whole()
    return run_divided(folder.command, settings.listener, Merging(folder))
