"""Fixed batches that were recorded elsewhere, and written as one run would have written them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.manifest import FeatureSpec, TargetIdentity
from ..traces.prompt_trace import PromptTrace
from ..traces.writer import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch:
    """Prompts that run together, and with no others.

    Attributes:
        first: position of the first one among all prompts.
    """

    first: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A fixed batch that was recorded.

    Attributes:
        identity: of the target that it was recorded of.
        features: what was recorded of the target's hidden states.
        traces: with their positions among all prompts, in the order in which they ended.
    """

    identity: TargetIdentity
    features: FeatureSpec
    traces: tuple[tuple[int, PromptTrace], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTraces:
    """Takes traces as a `TraceWriter` does, and holds them.

    Attributes:
        staging: a folder for files without a name.
        traces: with their positions.
    """

    staging: Path
    traces: list[tuple[int, PromptTrace]] = field(default_factory=list)

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Hold one."""
        names = [each.name for each in dataclasses.fields(trace)]
        given = {name: getattr(trace, name) for name in names}
        # Tensors of prompts that ended together share memory, all of which each would travel with.
        own: dict[str, Any] = {n: x.clone() for n, x in given.items() if isinstance(x, Tensor)}
        self.traces.append((position, dataclasses.replace(trace, **own)))


def write_recorded(
    writer: TraceWriter,
    batches: Iterable[RecordedBatch],
    num_prompts: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Write batches in their order.

    Args:
        on_progress: called with (prompts that are written, prompts).

    Raises:
        TraceError: not all of them are of the same target, or one contradicts itself.
    """
    expected: RecordedBatch | None = None
    done = 0
    for batch in batches:
        expected = expected or batch
        if (batch.identity, batch.features) != (expected.identity, expected.features):
            raise TraceError(
                f"target {batch.identity.name}",
                "not all prompts were recorded of the same target: weights"
                f" {batch.identity.weights_sha256}, expected {expected.identity.weights_sha256}",
                fix="let the target's path name the same files wherever it is recorded",
            )
        for position, trace in batch.traces:
            writer.add(trace, position=position)
        done += len(batch.traces)
        on_progress(done, num_prompts)
