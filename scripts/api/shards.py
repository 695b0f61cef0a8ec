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
    from ..shards.parts import Part

Folder = Annotated[AnyPath, Argument("folder that 'shards plan' wrote", "FOLDER")]


@dataclass(frozen=True, slots=True)
class ShardsPlanSettings(Settings):
    """Which command lines, in how many parts, and where they are kept."""

    words: Annotated[
        Sequence[str],
        Argument(
            "record, replay, gate, compare or tune, with its arguments behind a -- sign",
            "COMMAND",
            count="*",
        ),
    ] = ()
    _: KW_ONLY
    out: OutFolder
    shards: Annotated[
        int,
        Option("number of parts", "SHARDS", bounds=AT_LEAST_1, fix="give --shards 4, for example"),
    ]
    commands: Annotated[
        AnyPath | None,
        Option(
            "file of several commands, one to a line: a gate for each draft and each trace folder,"
            " for example; what two of them have in common is computed once",
            "FILE",
        ),
    ] = None
    scheduler: Annotated[
        Scheduler | None,
        Option("print what runs the shards there: a job array, or an indexed Job", flag="--for"),
    ] = None

    def check(self) -> None:
        """Refuse a command beside a file of them."""
        from ..shards.parts import ShardError

        if bool(self.words) == (self.commands is not None):
            raise ShardError(
                "COMMAND",
                f"expected a command, or --commands FILE; got {'both' if self.words else 'none'}",
                fix="draftquant shards plan --shards 4 --out ./jobs -- replay A B --traces T",
            )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardsPlan(Brief):
    """Runs that were divided.

    Attributes:
        folder: that holds the plan and will hold the results.
        commands: the words of each command line.
        shards: of each, the addresses of its parts -> the number of their prompts.
        script: what a scheduler is given to run the shards; None where none was asked for.
    """

    folder: Path
    commands: tuple[tuple[str, ...], ...]
    shards: tuple[Mapping[str, int], ...]
    script: str | None = None

    @override
    def brief(self) -> Mapping[str, object]:
        parts = sum(map(len, self.shards))
        return {"folder": self.folder, "shards": len(self.shards), "parts": parts}


@verb(ShardsPlanSettings)
def shards_plan(settings: ShardsPlanSettings) -> ShardsPlan:
    """Divide the prompts of commands into shards, and write the plan.

    Returns:
        The plan. Its shards run in any order, on any machines that see the same files.

    Raises:
        DraftQuantError: a command is none that can be divided, all have fewer batches than shards
            are asked for, or an input cannot be read.
    """
    from ...quantize.files.staging import check_output
    from ..shards.divided_run import check_outputs, first_asked, read_commands
    from ..shards.schedulers import script
    from ..shards.shard_folder import ShardFolder

    out = Path(settings.out)
    check_output(out)
    given = settings.commands
    commands = (tuple(settings.words),) if given is None else read_commands(Path(given))
    check_outputs(commands, settings.listener)
    asked = [first_asked(command, settings.listener) for command in commands]
    folder = ShardFolder.create(out, settings.shards, asked)
    text = None
    if settings.scheduler is not None:
        import torch

        text = script(settings.scheduler, folder, Path.cwd(), torch.get_num_threads())
    shards: list[dict[str, int]] = [{} for _ in range(folder.num_shards)]
    for run in folder.runs:
        for number, part in folder.waiting(range(folder.num_shards), run):
            shards[number][part.address] = len(part.positions)
    return ShardsPlan(folder=out, commands=commands, shards=tuple(shards), script=text)


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
        from ..shards.parts import ShardError

        if self.ray is None and (self.shard_cpus, self.shard_gpus) != (1, 0):
            name = "--shard-cpus" if self.shard_cpus != 1 else "--shard-gpus"
            raise ShardError(name, "is asked of Ray", fix="add --ray ADDRESS, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardsRun(Brief):
    """Shards that have a result now.

    Attributes:
        folder: of the plan.
        computed: numbers of the shards that this run computed, or a part of them.
        present: numbers of the shards that had all their results already.
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

    What was computed already is left as it is. A run that was killed leaves no result, and runs
    again. Of a search, the next wave is planned as soon as all shards of the one before have
    results, so that `all` goes on to its end.

    Returns:
        Which shards were computed.

    Raises:
        DraftQuantError: there is no such shard, or the inputs are not those of the plan.
    """
    from ..shards.divided_run import run_divided
    from ..shards.divisions import Working
    from ..shards.parts import ShardError
    from ..shards.shard_folder import ShardFolder

    folder = ShardFolder.open(Path(settings.folder))
    total = folder.num_shards
    if settings.shard is not None and settings.shard >= total:
        raise ShardError("--shard", f"expected 0 to {total - 1}, got {settings.shard}",
                         fix=f"see {folder.folder}/plan.json")  # fmt: skip
    numbers = range(total) if settings.shard is None else [settings.shard]
    done: set[int] = set()

    def tell(number: int, part: "Part", late: bool) -> None:
        if not late:
            done.add(number)
        settings.listener.note(
            f"shard {number} of {total}, part {part.address[:12]} of {len(part.positions)}:"
            f" {'another run was faster' if late else 'done'}"
        )

    if settings.ray is not None:
        from ..shards.ray_tasks import Resources, run_on_ray

        resources = Resources(num_cpus=settings.shard_cpus, num_gpus=settings.shard_gpus)
        run_on_ray(folder, numbers, settings.ray, resources, tell, settings.listener.warning)
    else:
        for run in folder.runs:
            if folder.waiting(numbers, run) or not folder.waves(run)[-1].last:
                mine = Working(folder, run, lambda number, _part: number in numbers, tell)
                run_divided(folder.commands[run], settings.listener, mine)
    present = (number for number in numbers if number not in done)
    return ShardsRun(folder=folder.folder, computed=tuple(sorted(done)), present=tuple(present))


@dataclass(frozen=True, slots=True)
class ShardsMergeSettings(Settings):
    """Which plan."""

    folder: Folder


@verb(ShardsMergeSettings)
def shards_merge(settings: ShardsMergeSettings) -> Any:
    """Run the commands of a plan with the results of its shards in place of the computation.

    Files and reports are those that one machine gives, byte for byte. Of a search, whose results
    tell what it measures next, that is planned, and its shards have to run again.

    Returns:
        The report of the command's verb; of several commands, a tuple of them.

    Raises:
        DraftQuantError: a shard has no result, or one that is not as it was published; or the
            inputs are not those of the plan.
    """
    from ..shards.divided_run import run_divided
    from ..shards.divisions import Merging
    from ..shards.shard_folder import ShardFolder

    folder = ShardFolder.open(Path(settings.folder))
    for run in folder.runs:
        folder.check_present(run)
    reports = tuple(
        run_divided(folder.commands[run], settings.listener, Merging(folder, run))
        for run in folder.runs
    )
    return reports[0] if len(reports) == 1 else reports
