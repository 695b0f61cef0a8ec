"""The drafts of mixtures, made exactly as `quantize` makes them, one at a time.

So what is measured of a mixture is measured of the bytes that an engine would load.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ...calibration.linear_inputs.plan_inputs import PlanInputs, measured_inputs
from ...calibration.rounding.sequences import split_prompts
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts import Draft, Row
from ...quantize.engines.contract import EngineCheck, EngineName
from ...quantize.engines.preview import planned_verdicts
from ...quantize.errors import LayoutError, PlanError
from ...quantize.files.hub import DraftSource
from ...quantize.gpus import gpu_name
from ...quantize.quantization_plan import Plan, make_plan
from ...quantize.quantize_draft import quantize_draft
from ...quantize.stored.loading import LoadedDraft, load_draft
from ...recipes.expectations import LoadsOn
from ...recipes.schema import Recipe
from ...recipes.seen_prompts import NO_PROMPTS, SeenPrompts
from .draft_mixture import Mixture, Unit, recipe_of

ResultT = TypeVar("ResultT")
NAME = "tuned"
MOST_TOGETHER = 8
"""Drafts that are measured together; more would save no more time."""
CALIBRATION_SHARE = 0.5
"""Of the prompts, where scales or codes are found by them: the others judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The engine and GPU that a mixture must load on.

    Attributes:
        target_layers: decoder layers of the target; None = as config.json says.
    """

    engine: EngineName
    arch: str
    target_layers: int | None = None

    def __str__(self) -> str:
        return f"{self.engine} on {gpu_name(self.arch)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A draft, and what its mixtures are made with.

    Attributes:
        draft: to quantize. source: where it came from. reference: it, loaded.
        base: layout, algorithm and rules; see `recipe_of`.
        serving: where mixtures must load.
        calibration: for static scales and algorithms that look at inputs; None if none does.
        num_draft_tokens: K.
        shared: the target's tables, for drafts that ship none.
        allow_zero_rows, fix_config: see `quantize_draft`. precise: see `InputMoments`.
    """

    draft: Draft
    source: DraftSource
    reference: LoadedDraft
    base: Recipe
    serving: Serving
    calibration: TraceFolder | None
    num_draft_tokens: int
    shared: Mapping[str, Tensor] | None = None
    allow_zero_rows: bool = False
    precise: bool = False
    fix_config: bool = False

    def plan(self, mixture: Mixture, name: str = NAME) -> Plan:
        """What the mixture's recipe makes of the draft.

        Raises:
            PlanError, LayoutError: a shape does not go with a format, or the layout cannot declare
                the formats together.
        """
        recipe = recipe_of(self.base, mixture, name)
        return make_plan(recipe, self.draft, target_layers=self.serving.target_layers)

    def problem(self, mixture: Mixture) -> str | None:
        """Why a mixture is out of the question, or None: the layout's reason, or the engine's.

        It must quantize something.
        """
        try:
            plan = self.plan(mixture)
        except (PlanError, LayoutError) as exc:
            return str(exc).splitlines()[0]
        for one in self._verdicts(plan, self.serving.arch):
            if one.engine == self.serving.engine:
                if one.verdict == "LOADS":
                    return None
                return f"{self.serving}: {one.verdict}: {one.error or one.remedy}"
        return f"{self.serving.engine} is not known on {gpu_name(self.serving.arch)}"

    def recipe(self, mixture: Mixture, name: str, chosen_on: SeenPrompts = NO_PROMPTS) -> Recipe:
        """The mixture's recipe, with where it loads as `check` says of the result.

        Args:
            mixture: a format of each unit.
            name: of the recipe.
            chosen_on: the prompts on which the mixture was found to be good.
        """
        plan = self.plan(mixture, name)
        archs: dict[EngineName, list[str]] = {}
        for one in self._verdicts(plan, None):
            if one.verdict == "LOADS" and one.arch:
                archs.setdefault(one.engine, []).append(one.arch)
        family = (self.draft.family.name,)
        loads_on = (
            LoadsOn(engine=engine, arch=tuple(each), family=family)
            for engine, each in archs.items()
        )
        return dataclasses.replace(plan.recipe, loads_on=tuple(loads_on), chosen_on=chosen_on)

    @contextmanager
    def loaded(self, mixture: Mixture) -> Iterator[LoadedDraft]:
        """The draft of a mixture: written, verified, loaded; its folder ends with the block.

        Raises:
            DraftQuantError: as `quantize_draft` and `load_draft`.
        """
        plan = self.plan(mixture)
        with tempfile.TemporaryDirectory(prefix="draftquant-tune-") as scratch:
            inputs = self._inputs(plan, Path(scratch))
            out = Path(scratch) / "draft"
            quantize_draft(
                plan,
                out,
                source=self.source,
                measured=inputs.measured,
                allow_zero_rows=self.allow_zero_rows,
                fix_config=self.fix_config,
                device=lambda: self.reference.device,
            )
            yield load_draft(
                out,
                device=self.reference.device,
                compact=True,
                like=self.reference,
                shared=self.shared,
            )

    def measured(
        self,
        mixtures: Mapping[str, Mixture],
        of_drafts: Callable[[Sequence[LoadedDraft]], Sequence[ResultT]],
        on_progress: Callable[[str], None],
    ) -> list[ResultT]:
        """What is measured of the drafts of mixtures, in their order.

        Drafts are loaded in groups that share one reading of the traces. A group takes no more
        memory than the unquantized draft, or is one draft.

        Args:
            mixtures: of which drafts are made, by what they are called.
            of_drafts: measures some drafts together, each as if it were alone.
            on_progress: called with what is made next.
        """
        results: list[ResultT] = []
        for group in self._groups(mixtures):
            with ExitStack() as stack:
                drafts: list[LoadedDraft] = []
                for name in group:
                    on_progress(name)
                    drafts.append(stack.enter_context(self.loaded(mixtures[name])))
                # One that rounds its inputs under one scale of a whole call would let the others
                # run prompt by prompt, which rounds their logits otherwise.
                found: dict[int, ResultT] = {}
                for alone in (True, False):
                    own = [i for i, draft in enumerate(drafts) if draft.rounds_alone is alone]
                    if own:
                        found |= dict(zip(own, of_drafts([drafts[i] for i in own]), strict=True))
                results += [found[i] for i in range(len(group))]
        return results

    def _groups(self, mixtures: Mapping[str, Mixture]) -> Iterator[Sequence[str]]:
        most = sum(row.tensor.nbytes for row in self.draft.rows)
        group: list[str] = []
        held = 0
        for name, mixture in mixtures.items():
            steps = self.plan(mixture).steps
            own = sum(step.bytes_after for step in steps if step.action == "quantize")
            if group and (held + own > most or len(group) == MOST_TOGETHER):
                yield group
                group, held = [], 0
            group.append(name)
            held += own
        if group:
            yield group

    def _verdicts(self, plan: Plan, arch: str | None) -> tuple[EngineCheck, ...]:
        return planned_verdicts(
            plan, arch=arch, target_layers=plan.target_layers, fix_config=self.fix_config
        )

    def _inputs(self, plan: Plan, scratch: Path) -> PlanInputs:
        if self.calibration is None:
            return PlanInputs()
        spool = scratch / "moments"
        spool.mkdir()
        return measured_inputs(
            plan,
            self.reference,
            self.calibration,
            num_draft_tokens=self.num_draft_tokens,
            spool=spool,
            precise=self.precise,
        )


def divided(
    traces: TraceFolder, recipes: Sequence[Recipe], num_draft_tokens: int
) -> tuple[TraceFolder | None, TraceFolder]:
    """The prompts that calibrate candidates, None where none must, and those that judge them."""
    if not any(one.algorithm.rounding == "gptq" or one.needs_input_scales for one in recipes):
        return None, traces
    split = split_prompts(traces, num_draft_tokens, share=1 - CALIBRATION_SHARE, seed=0)
    return traces.only(split.learned), traces.only(split.held_back)


def bytes_of(plan: Plan, unit: Unit) -> int:
    """What the linears of a unit become, in bytes."""
    return sum(step.bytes_after for step in plan.steps if _is_of(step.row, unit))


def kept_bytes_of(draft: Draft, unit: Unit) -> int:
    """What the linears of a unit are, in bytes."""
    return sum(row.tensor.nbytes for row in draft.rows if _is_of(row, unit))


def _is_of(row: Row, unit: Unit) -> bool:
    return row.canonical.endswith(tuple(f".{leaf}.weight" for leaf in unit.leaves))
