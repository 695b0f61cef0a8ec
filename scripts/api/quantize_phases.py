"""The stages of a run of `quantize`, shown."""

from typing import TYPE_CHECKING

from ...quantize.quantization_plan import Plan, Step

if TYPE_CHECKING:
    from .listener import Bar, Listener

TOOLKITS = {"torch": "PyTorch", "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt"}
"""Backend -> what it loads."""
_A_COLUMN = 3_000_000
"""Multiplications that take as long as what a column costs GPTQ whatever its size."""


class Phases:
    """Shows the stages of a run, and how far each is.

    Attributes:
        bar: that shows them; there is none before the run begins.
    """

    bar: "Bar | None" = None

    def __init__(self, plan: Plan, listener: "Listener") -> None:
        self._plan, self._listener = plan, listener
        self._left = sum(self._work(step) for step in plan.steps)
        self._written: set[str] = set()
        self._is_measuring = False

    def begin(self, stage: str) -> None:
        """The next stage."""
        self._listener.stage(stage)
        plan, bar = self._plan, self.bar
        assert bar is not None  # the run has begun
        if stage == "write" and plan.recipe.algorithm.rounding == "gptq":
            self._measure()
        elif stage == "write":
            bar.phase("quantize", plan.bytes_before, "bytes")
        elif stage == "start":
            bar.phase(f"load {TOOLKITS[plan.recipe.backend]}")
        elif stage == "verify":
            bar.phase("verify", plan.bytes_before + plan.bytes_after, "bytes")
        else:
            bar.phase("write to the disk")

    def measured(self, done: int, total: int) -> None:
        """So much of the traces has run through the draft, for the inputs of its linears."""
        if self.bar is None:
            return
        if not self._is_measuring:
            self._measure()
        self.bar.set(done, total)
        if done == total:
            self._is_measuring = False
            self._listener.stage("write")
            self.bar.phase("quantize", self._left, "work")

    def _measure(self) -> None:
        assert self.bar is not None  # the run has begun
        self._is_measuring = True
        self._listener.stage("measure")
        self.bar.phase("measure the linears' inputs", 1, "work")

    def written(self, step: Step) -> None:
        """A tensor is written; those that GPTQ rounds at the same time count when all are."""
        assert self.bar is not None  # the run has begun
        done = [step]
        if self._plan.recipe.algorithm.rounding == "gptq":
            done = self._finished_with(step)
        if done:
            work = sum(map(self._work, done))
            self._left -= work
            self.bar.advance(work)

    def _finished_with(self, step: Step) -> list[Step]:
        """The stage that ends with a step; nothing where one of its steps still runs."""
        self._written.add(step.row.tensor.name)
        stage = next(stage for stage in self._plan.stages() if step in stage)
        is_over = all(one.row.tensor.name in self._written for one in stage)
        return list(stage) if is_over else []

    def _work(self, step: Step) -> int:
        """Bytes; of a weight that GPTQ rounds, column by column, multiplications."""
        if step.action != "quantize" or self._plan.recipe_of(step).algorithm.rounding != "gptq":
            return step.bytes_before
        rows, columns = step.row.tensor.shape
        return step.bytes_before + columns * (_A_COLUMN + columns * (rows + columns))
