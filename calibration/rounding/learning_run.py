"""A run of learning, kept beside the output that it is for.

Memory, for P weights that are learned, beside the draft as it is stored: latents, two moments and
a gradient, 16 P bytes; codes times scales, their gradient and what the straight-through estimators
hold, another 16 P; and the passes of one trace. Logits are held for some rows only. That is 25 to
30 GB for the 0.7 G weights of a Kimi draft. On the disk the state takes 12 P bytes.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...quantize.drafts.forward import OnInput
from ...quantize.files.how_rounded import LearnedRounding
from ...quantize.files.package_version import package_version
from ...quantize.files.resumable import resumable_folder
from ...quantize.stored.loading import LoadedDraft
from ..errors import CalibrationError
from ..passes.draft_inputs import check_trace_fits
from ..passes.predictions import num_draft_tokens_fault
from ..traces.recorded_prompts import seen_prompts
from ..traces.trace_folder import TraceFolder
from .latent_weight import Latent
from .learned_state import KeptRounding, LearnedCodes
from .learning_loop import Learning
from .learning_settings import LearningSettings
from .sequences import PromptSplit, split_prompts
from .validation import LearningProgress, Validation, best_of, is_over

ROUNDING = ".rounding"
"""Behind the name of the output."""
SAVE_SECONDS = 60.0
"""Between two states, at least: at real shape one takes 8 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """What is learned from what.

    Attributes:
        draft: unquantized, computing in float32; on a GPU products are of BF16.
        traces: recorded for calibration, not the ones that the gate judges on.
        num_draft_tokens: K, as it will be served.
        settings: how.
        what: what else decides the result, as JSON says it.
        group_sizes: of the formats of the codes, by canonical module name.
    """

    draft: LoadedDraft
    traces: TraceFolder
    num_draft_tokens: int
    settings: LearningSettings
    what: Mapping[str, Any]
    group_sizes: Mapping[str, int | None]

    def check(self) -> None:
        """Fail unless the draft can learn from the traces.

        Raises:
            TraceError: the traces do not fit the draft.
            CalibrationError: the draft cannot propose K tokens.
        """
        fault = num_draft_tokens_fault(self.draft.geometry, self.num_draft_tokens)
        if fault:
            raise CalibrationError(f"{self.draft.name}: num_draft_tokens", fault[0], fix=fault[1])
        check_trace_fits(self.draft, self.traces)

    def split(self) -> PromptSplit:
        """The prompts to learn from, and those to judge by.

        Raises:
            CalibrationError: there are too few of them.
        """
        settings = self.settings
        return split_prompts(
            self.traces,
            self.num_draft_tokens,
            share=settings.validation_share,
            seed=settings.seed,
        )


class Start(NamedTuple):
    """Where learning starts.

    Attributes:
        draft: unquantized, weights balanced as the codes are to be.
        latents: of the linears that learn, by canonical module name.
        rounding: how inputs are rounded when served; gradients go through.
        others: what linears that do not learn multiply by, where it is not what the draft has.
    """

    draft: LoadedDraft
    latents: Mapping[str, Latent]
    rounding: OnInput
    others: Mapping[str, torch.Tensor] = MappingProxyType({})


@contextmanager
def learned_beside(
    out: Path,
    task: LearningTask,
    start: Callable[[], Start],
    *,
    save_seconds: float = SAVE_SECONDS,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
) -> Iterator[LearnedCodes]:
    """Learn, or go on where it was left.

    What is learned lies in `out` + ".rounding" until the block is left without an exception: a run
    that is cut short goes on there when it is called with the same arguments, and ends with the
    same bytes as one that was not (on a CPU; a GPU adds up in another order each time).

    Args:
        out: the folder that the codes are for; nothing is written into it here.
        start: called where anything is left to learn.
        save_seconds: at least between two states on the disk.
        on_progress: called after every step.

    Yields:
        What was learned, readable while the block lasts.

    Raises:
        OutputError: another run was begun for the output or is at it, or nothing can be written.
        TraceError: a trace is damaged.
        CalibrationError: there are too few prompts, the draft computes NaN or infinity, or what was
            kept is damaged.
    """
    split = task.split()
    folder = rounding_folder(out)
    described = {
        **task.what,
        "draft": _weights_sha256(task.draft),
        "traces": task.traces.sha256,
        "num_draft_tokens": task.num_draft_tokens,
        "settings": asdict(task.settings),
        "device": task.draft.device.type,
        "versions": {name: package_version(name) for name in ("draftquant", "torch")},
    }
    with resumable_folder(folder, "rounding", described):
        kept = KeptRounding(folder)
        try:
            validations = kept.validations()
            if not validations or not is_over(validations, task.settings):
                begun = start()
                learning = Learning(
                    begun.draft,
                    begun.latents,
                    begun.rounding,
                    task.traces,
                    split,
                    others=begun.others,
                    num_draft_tokens=task.num_draft_tokens,
                    settings=task.settings,
                    kept=kept,
                )
                validations = learning.run(
                    validations, save_seconds=save_seconds, on_progress=on_progress
                )
            yield LearnedCodes(
                kept=kept,
                origin=_origin(task, split, validations),
                validations=validations,
                prompts=seen_prompts(task.traces),
                group_sizes=task.group_sizes,
            )
        except BaseException:
            if not kept.has_state:  # nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def rounding_folder(out: Path) -> Path:
    """Where what is learned for an output lies until that is complete."""
    return out.with_name(out.name + ROUNDING)


def _origin(
    task: LearningTask, split: PromptSplit, validations: tuple[Validation, ...]
) -> LearnedRounding:
    settings = task.settings
    first, best = validations[0], best_of(validations, settings)
    return LearnedRounding(
        traces_sha256=task.traces.sha256,
        num_draft_tokens=task.num_draft_tokens,
        steps=settings.steps,
        sequences=settings.sequences,
        seed=settings.seed,
        validation_prompts=len(split.held_back),
        kept_step=best.step,
        acceptance_length=best.acceptance_length,
        overlap=best.overlap,
        acceptance_length_before=first.acceptance_length,
        overlap_before=first.overlap,
        acceptance_length_unquantized=first.unquantized,
    )


def _weights_sha256(draft: LoadedDraft) -> str:
    """Of everything that the draft computes with."""
    digest = hashlib.sha256()
    for name, weight in sorted(draft.weights.items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
