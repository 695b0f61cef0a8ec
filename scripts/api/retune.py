"""`retune`: a quantized draft taught by its target, and the BF16 draft taught alike."""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.command_line import running_argv
from ...quantize.quantization_plan import make_plan
from . import reports
from .arguments import (
    AllowZeroRows,
    AnyPath,
    Device,
    NumDraftTokens,
    Target,
    TargetLayers,
)
from .learning import StepsShown
from .listener import SILENT, Bar, Listener
from .opened_traces import open_traces
from .opening import draft_on_traces, named_recipe, open_draft
from .option import Argument, Option
from .references import AnyRecipe, Reference, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...calibration.rounding.retune_draft import Side
    from ...calibration.rounding.validation import LearningProgress
    from ...recipes import Recipe


@dataclass(frozen=True, slots=True)
class RetuneSettings(Settings):
    """Of which draft, in which format, taught by what, into which two folders."""

    draft: Annotated[Reference, Argument("BF16 draft: a folder or a Hub id (owner/name)", "DRAFT")]
    recipe: Annotated[
        AnyRecipe, Option("recipe with the format: a built-in name or a .yaml file", "RECIPE")
    ]
    traces: Annotated[
        AnyPath,
        Option(
            "traces to fine-tune on: 160 prompts or more, none of which the gate will judge",
            "TRACES",
        ),
    ]
    out: Annotated[AnyPath, Option("folder to create for the quantized draft", "FOLDER")]
    baseline: Annotated[
        AnyPath,
        Option(
            "folder to create for the BF16 draft that is fine-tuned identically "
            "(control), which the gate compares with; an existing one from the same "
            "traces and settings is reused",
            "FOLDER",
        ),
    ]
    _: KW_ONLY
    num_draft_tokens: NumDraftTokens = None
    device: Device = "auto"
    target: Target = None
    target_layers: TargetLayers = None
    allow_zero_rows: AllowZeroRows = False


@verb(RetuneSettings)
def retune(settings: RetuneSettings) -> "reports.RetuneReport":
    """Fine-tune a quantized draft on its target's outputs, and BF16 identically as a control.

    Returns:
        Both folders, and how both learned.

    Raises:
        DraftQuantError: a stage failed. An interrupted run continues when the call is repeated.
    """
    from ...calibration.passes.devices import peak_bytes
    from ...calibration.rounding import learning_settings as learning
    from ...calibration.rounding.retune_draft import retune_draft

    source, draft = open_draft(settings.draft)
    recipe = retuned_recipe(settings.recipe, settings.listener)
    plan = make_plan(recipe, draft, target_layers=settings.target_layers)
    traces = open_traces(settings.traces, settings.listener)
    loaded, _, num_draft_tokens = draft_on_traces(
        source.folder,
        traces,
        device=settings.device,
        target=optional_path(settings.target),
        num_draft_tokens=settings.num_draft_tokens,
    )
    with settings.listener.bar("fine-tune", learning.RETUNING.steps) as bar:
        report = retune_draft(
            plan,
            loaded,
            traces,
            Path(settings.out),
            Path(settings.baseline),
            source=source,
            num_draft_tokens=num_draft_tokens,
            settings=learning.RETUNING,
            allow_zero_rows=settings.allow_zero_rows,
            argv=running_argv(),
            on_progress=_Shown(bar, settings.listener),
        )
    settings.listener.note(f"memory: {peak_bytes(loaded.device) / 1e9:.2f} GB at its peak")
    return report


def retuned_recipe(reference: AnyRecipe, listener: Listener = SILENT) -> "Recipe":
    """A recipe whose codes the target is to teach, from where it says that scales start."""
    recipe = named_recipe(reference, listener)
    algorithm = recipe.algorithm.rounded("retuned")
    if recipe.algorithm.rounding == "nearest":
        algorithm = dataclasses.replace(algorithm, scale="mse")
    return dataclasses.replace(recipe, algorithm=algorithm, backend="torch")


_SIDES: "Mapping[Side, str]" = {"baseline": "BF16 control", "quantized": "quantized draft"}


class _Shown:
    """Each side as a phase of the bar, and a line for every validation on prompts held back."""

    def __init__(self, bar: Bar, listener: Listener) -> None:
        self._bar, self._listener = bar, listener
        self._sides: dict[Side, StepsShown] = {}

    def __call__(self, side: "Side", progress: "LearningProgress") -> None:
        if side not in self._sides:
            what = f"fine-tune the {_SIDES[side]}"
            is_second = bool(self._sides)
            if is_second:
                self._bar.phase(what, progress.steps)
            else:
                self._bar.label(what)
            self._sides[side] = StepsShown(self._bar, behind_first=is_second)
        self._sides[side](progress)
        if progress.step == progress.steps:
            self._bar.phase(f"write the {_SIDES[side]}")
        found = progress.validation
        if found.step != progress.step:
            return
        self._listener.note(
            f"{_SIDES[side]}: step {progress.step} of {progress.steps}, loss {progress.loss:.4f};"
            f" on the prompts held back its acceptance length is {found.acceptance_length:.3f}"
            f" (released draft: {found.unquantized:.3f}) and its overlap with the released draft"
            f" {found.overlap:.2%}; the best so far is step {progress.best.step}"
        )
