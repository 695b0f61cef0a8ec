"""Learned rounding, and what is said while it runs."""

from contextlib import ExitStack
from pathlib import Path

from ...quantize.planning.quantization_plan import Plan
from ...quantize.stored.loading import LoadedDraft
from ...recipes.listener import Bar, Listener
from ..linear_inputs.static_scales import StaticScales
from ..traces.trace_folder import TraceFolder
from .learn import learned_codes
from .learned_state import LearnedCodes, LearningProgress, LearningSettings

FEW_PROMPTS = 128
"""Fewer are said to be few before learning begins."""


def learn(
    stack: ExitStack,
    plan: Plan,
    draft: LoadedDraft,
    traces: TraceFolder,
    out: Path,
    *,
    num_draft_tokens: int,
    static: StaticScales | None,
    listener: Listener,
) -> LearnedCodes:
    """Codes by the default settings, which are there until the stack is left."""
    settings = LearningSettings()
    if len(traces) < FEW_PROMPTS:
        listener.note(
            f"learned rounding from {len(traces)} prompts, of which about"
            f" {settings.validation_share:.0%} are held back: from 256 prompts the draft comes"
            " closer to the unquantized one (draftquant record)"
        )
    with listener.bar("learn", settings.steps) as bar:
        shown = StepsShown(bar)
        measures = False

        def measuring(done: int, total: int) -> None:
            nonlocal measures
            if not measures:
                bar.phase("measure the linears' inputs", total, "work")
                measures = True
            bar.set(done, total)
            if done == total:
                bar.phase("learn", settings.steps)
                measures = False

        def show(progress: LearningProgress) -> None:
            shown(progress)
            if progress.validation.step == progress.step:
                listener.note(_line(progress))

        found = stack.enter_context(
            learned_codes(
                plan,
                draft,
                traces,
                out,
                num_draft_tokens=num_draft_tokens,
                static=static,
                settings=settings,
                on_measuring=measuring,
                on_progress=show,
            )
        )
    origin = found.origin
    listener.note(
        f"learned rounding keeps step {origin.kept_step}: on {origin.validation_prompts} prompts"
        f" held back the acceptance length is {origin.acceptance_length:.3f} (before learning"
        f" {origin.acceptance_length_before:.3f}, unquantized"
        f" {origin.acceptance_length_unquantized:.3f}) and the overlap with the unquantized draft"
        f" {origin.overlap:.2%} (before {origin.overlap_before:.2%})"
    )
    return found


class StepsShown:
    """Shows the steps of this run: those that an earlier one did, and this goes on with, are not.

    Args:
        bar: in a phase of these steps, which begins before the first of them.
    """

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._before: int | None = None

    def __call__(self, progress: LearningProgress) -> None:
        """A step is done."""
        if self._before is None:
            self._before = progress.step - 1
        self._bar.set(progress.step - self._before, progress.steps - self._before)


def _line(progress: LearningProgress) -> str:
    found = progress.validation
    return (
        f"step {progress.step} of {progress.steps}, loss {progress.loss:.5f}; on the prompts held"
        f" back the acceptance length is {found.acceptance_length:.3f} (unquantized"
        f" {found.unquantized:.3f}) and the overlap with the unquantized draft"
        f" {found.overlap:.2%}; the best so far is step {progress.best.step}"
    )
