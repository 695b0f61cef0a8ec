"""`retune`: a quantized draft taught by its target, and the BF16 draft taught alike."""

import dataclasses
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.command_line import running_argv
from ...quantize.quantization_plan import make_plan
from ...recipes import Recipe
from . import reports
from .arguments import (
    AllowZeroRows,
    AnyPath,
    Device,
    NumDraftTokens,
    Target,
    TargetLayers,
)
from .opening import AnyRecipe, Reference, draft_on_traces, named_recipe, open_draft, optional_path
from .option import Argument, Option
from .settings import Settings
from .verb import verb
from .watch import SILENT, Bar, Watch

if TYPE_CHECKING:
    from ...calibration.rounding.retune_draft import Side
    from ...calibration.rounding.validation import LearningProgress


@dataclass(frozen=True, slots=True)
class RetuneSettings(Settings):
    """Of which draft, in which format, taught by what, into which two folders."""

    draft: Annotated[Reference, Argument("BF16 draft folder or Hub id (owner/name)", "DRAFT")]
    recipe: Annotated[AnyRecipe, Option("format: built-in name or .yaml path", "RECIPE")]
    traces: Annotated[
        AnyPath,
        Option(
            "what the target did on prompts that the gate will not judge, 160 or more", "TRACES"
        ),
    ]
    out: Annotated[AnyPath, Option("quantized draft folder to create", "FOLDER")]
    baseline: Annotated[
        AnyPath,
        Option(
            "folder to create, of the BF16 draft taught alike: what --out is compared with; one"
            " that the same traces and settings gave is used again",
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
    from ...calibration.traces.trace_folder import TraceFolder

    source, draft = open_draft(settings.draft)
    recipe = retuned_recipe(settings.recipe, settings.watch)
    plan = make_plan(recipe, draft, target_layers=settings.target_layers)
    traces = TraceFolder.open(Path(settings.traces))
    loaded, _, num_draft_tokens = draft_on_traces(
        source.folder,
        traces,
        device=settings.device,
        target=optional_path(settings.target),
        num_draft_tokens=settings.num_draft_tokens,
    )
    with settings.watch.bar("retune", 2 * learning.RETUNING.steps) as bar:
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
            on_progress=_Shown(bar, settings.watch),
        )
    settings.watch.note(f"memory: {peak_bytes(loaded.device) / 1e9:.2f} GB at its peak")
    return report


def retuned_recipe(reference: AnyRecipe, watch: Watch = SILENT) -> Recipe:
    """A recipe whose codes the target is to teach, from where it says that scales start."""
    recipe = named_recipe(reference, watch)
    algorithm = dataclasses.replace(recipe.algorithm, rounding="retuned")
    if recipe.algorithm.rounding == "nearest":
        algorithm = dataclasses.replace(algorithm, scale="mse")
    return dataclasses.replace(recipe, algorithm=algorithm, backend="torch")


class _Shown:
    """Both sides in one bar, and a line for every look at the prompts that are held back."""

    def __init__(self, bar: Bar, watch: Watch) -> None:
        self._bar, self._watch = bar, watch

    def __call__(self, side: "Side", progress: "LearningProgress") -> None:
        done = progress.step if side == "baseline" else progress.steps + progress.step
        self._bar.set(done, 2 * progress.steps)
        found = progress.validation
        if found.step != progress.step:
            return
        name = "BF16 baseline" if side == "baseline" else "quantized"
        self._watch.note(
            f"{name}, step {progress.step} of {progress.steps}: loss {progress.loss:.4f}, on"
            f" prompts that are held back acceptance length {found.acceptance_length:.3f} (as"
            f" released {found.unquantized:.3f}), {found.overlap:.2%} overlap with the draft as"
            f" released; best so far: step {progress.best.step}"
        )
