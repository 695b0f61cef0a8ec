"""Learned rounding for `quantize`, and what is said meanwhile."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.quantization_plan import Plan
from .watch import Bar, Watch

if TYPE_CHECKING:
    from ...calibration.linear_inputs.static_scales import StaticScales
    from ...calibration.rounding.learned_state import LearnedCodes
    from ...calibration.rounding.validation import LearningProgress
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft


def learn(
    stack: ExitStack,
    plan: Plan,
    draft: "LoadedDraft",
    traces: "TraceFolder",
    out: Path,
    *,
    num_draft_tokens: int,
    static: "StaticScales | None",
    watch: Watch,
) -> "LearnedCodes":
    """`learned_codes` with its default settings; they are there until the stack is left."""
    from ...calibration.rounding.learn import learned_codes
    from ...calibration.rounding.learning_settings import LearningSettings

    settings = LearningSettings()
    with watch.bar("learn", settings.steps) as bar:
        shown = StepsShown(bar)

        def show(progress: "LearningProgress") -> None:
            shown(progress)
            if progress.validation.step == progress.step:
                watch.note(_line(progress))

        found = stack.enter_context(
            learned_codes(
                plan,
                draft,
                traces,
                out,
                num_draft_tokens=num_draft_tokens,
                static=static,
                settings=settings,
                on_progress=show,
            )
        )
    origin = found.origin
    watch.note(
        f"codes of step {origin.kept_step}: acceptance length {origin.acceptance_length:.3f} on"
        f" {origin.validation_prompts} prompts that were held back, {origin.overlap:.2%} overlap"
        f" with the unquantized draft; before: {origin.acceptance_length_before:.3f},"
        f" {origin.overlap_before:.2%}; unquantized: {origin.acceptance_length_unquantized:.3f}"
    )
    return found


class StepsShown:
    """Shows the steps of this run: those that an earlier one did, and this goes on with, are not.

    Args:
        bar: in a phase of these steps.
    """

    def __init__(self, bar: Bar) -> None:
        self._bar, self._before = bar, 0
        self._has_begun = False

    def __call__(self, progress: "LearningProgress") -> None:
        """A step is done."""
        if not self._has_begun:
            self._has_begun, self._before = True, progress.step - 1
        self._bar.set(progress.step - self._before, progress.steps - self._before)


def _line(progress: "LearningProgress") -> str:
    found = progress.validation
    return (
        f"step {progress.step} of {progress.steps}: loss {progress.loss:.5f}, on prompts that are"
        f" held back acceptance length {found.acceptance_length:.3f} (unquantized"
        f" {found.unquantized:.3f}), {found.overlap:.2%} overlap; best so far: step"
        f" {progress.best.step}"
    )
