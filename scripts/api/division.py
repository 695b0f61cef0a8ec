"""`Division`: who computes what a verb would, where its work is divided over machines.

A verb asks for it at the one place where it computes along prompts; a search (`tune`) asks again
and again, and says where it ends. It is set around a run of the verb (`dividing`), as the command
line is, so that no verb has an argument for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ...calibration.passes.predictions import Proposals
    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.replay_cache import Question
    from ...validate.tuning.measured_mixtures import Numbers, Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Prompts that a verb would record.

    Attributes:
        prompts: all of them.
        batch_size: of the fixed batches.
        inputs: what else decides about the traces -> its identity.
        device: of the target's inputs.
        record: records some prompts, which are whole batches, into a folder to create.
        join: joins the parts, in the order of the prompts, into the folder that was asked for.
    """

    prompts: "Sequence[Prompt]"
    batch_size: int
    inputs: Mapping[str, str]
    device: "torch.device"
    record: "Callable[[Sequence[Prompt], Path], TraceFolder]"
    join: "Callable[[Sequence[TraceFolder]], TraceFolder]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Mixtures that a search would measure next, none of which waits for another.

    Attributes:
        tasks: what is measured of each.
        inputs: what else decides about the numbers -> its identity.
        device: of the drafts.
    """

    tasks: "Tasks"
    inputs: Mapping[str, str]
    device: "torch.device"


class Division(Protocol):
    """Plans the parts of a run, computes some of them, or joins what others computed."""

    def proposals(
        self, asked: "Sequence[Question]", *, last: bool = True
    ) -> "Sequence[Sequence[Proposals]]":
        """What each draft proposes along every prompt; see `replay_drafts`.

        Args:
            asked: a question for each draft, of the same batches of prompts.
            last: the verb asks for nothing more.
        """

    def numbers(self, asked: Measuring) -> "Sequence[Numbers]":
        """What is measured of mixtures; the verb asks for more, or says that it is the end."""

    def end(self) -> None:
        """A search asks for nothing more."""

    def traces(self, asked: Recording) -> "TraceFolder":
        """The traces of all prompts."""


_RUNNING: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def dividing(division: Division) -> Iterator[None]:
    """Inside, verbs ask `division` for what they would compute along prompts."""
    token = _RUNNING.set(division)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_division() -> Division | None:
    """Whom to ask; None = the verb computes by itself."""
    return _RUNNING.get()
