"""`AcceptSettings`: what a release manager decides; all else is the default of each verb.

Whoever wants another setting of a step runs that step and gives its result: traces of `record`,
measurements of `measure`, findings of `parity`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

from typing_extensions import override

from ...quantize.pairing.target_args import TargetArgs, tensor_parallel_size
from ...recipes.bounds import AT_LEAST_1
from ...recipes.expectations import PolicyName
from ...validate.errors import GateError
from ...validate.measure.measurement import EngineName
from . import arguments
from .arguments import AnyPath, share
from .option import Argument, Option
from .references import Reference
from .settings import Settings

_OF_SERVERS = ("plain_server", "served_as", "tasks")


@dataclass(frozen=True, slots=True)
class AcceptSettings(Settings):
    """Which draft is to replace which, of what target, by what evidence, and into which folder."""

    draft: Annotated[Reference, Argument("the BF16 draft: a folder or a Hub id", "DRAFT")]
    quantized: Annotated[Reference, Argument("the quantized draft that is to replace it", "QUANT")]
    target: Annotated[AnyPath, Option("folder of the target of both drafts", "TARGET")]
    out: Annotated[
        AnyPath,
        Option("folder for every result; with one that an earlier run began, go on", "FOLDER"),
    ]
    _: KW_ONLY
    prompts: Annotated[
        AnyPath | None,
        Option(
            "prompts to record or to measure, none of which made QUANT; in the forms that 'record'"
            " takes",
            "PROMPTS",
        ),
    ] = None
    traces: Annotated[
        AnyPath | None, Option("judge by these traces; nothing is recorded", "TRACES")
    ] = None
    server: Annotated[
        Sequence[str] | None,
        Option(
            "measure two running servers instead of recording the target: with the BF16 and with"
            " the quantized draft, http://HOST:PORT each",
            "BF16_URL QUANT_URL",
            count=2,
        ),
    ] = None
    plain_server: Annotated[
        str | None,
        Option(
            "server of the target without a draft: the text of both others is compared with its",
            "URL",
        ),
    ] = None
    served_as: Annotated[
        Sequence[str] | None,
        Option(
            "what the two servers call their drafts, if not as the folders are called",
            "BF16_NAME QUANT_NAME",
            count=2,
        ),
    ] = None
    measured: Annotated[
        Sequence[AnyPath] | None,
        Option("judge by these measurements of servers with the BF16 and with the quantized draft",
               "A B", count=2),
    ] = None  # fmt: skip
    tasks: Annotated[
        Sequence[str],
        Option(
            "also let lm_eval run these tasks, such as gsm8k, on both servers, and compare scores",
            "TASK,...",
            several="commas",
        ),
    ] = ()
    max_score_drop: Annotated[
        float | None,
        Option(
            "largest tolerated drop of a task's score, such as 0.01 or 1%%", "MARGIN", reads=share
        ),
    ] = None
    parity: Annotated[
        Sequence[AnyPath],
        Option("reports of 'parity --report'; each finding enters the verdict", "FILE"),
    ] = ()
    engine: Annotated[
        EngineName | None,
        Option("engine that is to load QUANT, and that runs on the servers (default: any)"),
    ] = None
    arch: Annotated[
        str | None,
        Option("GPU that is to serve it, such as mi325x, h200 or b200 (default: any)", "GPU"),
    ] = None
    tp: Annotated[
        int | None, Option("tensor-parallel size (default 1)", "GPUS", bounds=AT_LEAST_1)
    ] = None
    target_args: Annotated[
        str | None,
        Option(
            "flags of the target's launch line, in one string in quotes, as 'check' takes them",
            "WORDS",
        ),
    ] = None
    num_draft_tokens: arguments.NumDraftTokens = None
    max_new_tokens: Annotated[
        int, Option("longest answer in tokens (default 128)", "TOKENS", bounds=AT_LEAST_1)
    ] = 128
    policy: Annotated[PolicyName, Option("set of limits to judge by (default: release)")] = (
        "release"
    )
    max_relative_drop: Annotated[
        float | None,
        Option(
            "largest tolerated relative drop of the acceptance length, such as 0.01 or 1%%"
            " (default: the policy's)",
            "SHARE",
            reads=share,
        ),
    ] = None
    foreign: Annotated[
        bool,
        Option("another tool made QUANT; you assert that it was not calibrated on these prompts"),
    ] = False
    base_model: Annotated[
        str | None,
        Option("for the card: Hub id of DRAFT, if it was a local folder", "OWNER/NAME"),
    ] = None
    license: Annotated[
        str | None, Option("for the card: licence of DRAFT, if its own card names none", "ID")
    ] = None
    device: arguments.Device = "auto"
    dtype: arguments.Dtype = "float32"
    dry_run: Annotated[
        bool, Option("list the steps and which of them are done, but carry out none")
    ] = False

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("server", "measured"),)

    @property
    def records(self) -> bool:
        """The target has to be recorded: nothing else is given that tells how drafts do."""
        return self.traces is None and self.server is None and self.measured is None

    @property
    def split(self) -> int:
        """In how many parts target and draft are split."""
        return tensor_parallel_size(self.tp, TargetArgs.parse(self.target_args))

    @override
    def check(self) -> None:
        _ = self.split  # or its two options contradict each other
        if self.prompts is None and (self.records or self.server):
            raise GateError(
                "--prompts",
                "is needed to record the target, or to measure servers",
                fix="add --prompts PROMPTS; or give --traces TRACES or --measured A B",
            )
        if self.server and self.engine is None:
            raise GateError(
                "--engine", "is needed to measure a server", fix="add --engine vllm or sglang"
            )
        idle = [name for name in _OF_SERVERS if getattr(self, name) and not self.server]
        if idle:
            raise GateError(
                f"--{idle[0].replace('_', '-')}",
                "is of use for running servers only, and none are given",
                fix="add --server BF16_URL QUANT_URL, or leave it out",
            )
        if bool(self.tasks) != (self.max_score_drop is not None):
            given, missing = ("--tasks", "--max-score-drop")[:: 1 if self.tasks else -1]
            raise GateError(
                given, f"expected {missing} beside it, without which it judges nothing",
                fix=f"add {missing}, or leave both out",
            )  # fmt: skip
