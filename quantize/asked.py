"""What a caller asks of a run over drafts, and who hears of it; settings of verbs explain it."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from typing_extensions import override

from ..recipes.chosen_recipe import AnyRecipe, RecipeChoice
from ..recipes.errors import CheckpointError, SettingsError
from ..recipes.formats import KvCacheScales
from ..recipes.listener import Heard
from ..recipes.regular_file import AnyPath
from ..recipes.schema import BackendName, EngineName, InputCorrection
from .files.hub import Reference


@dataclass(frozen=True)
class Planning(Heard):
    """Which draft, by which recipe, computed by which backend."""

    draft: Reference
    recipe: AnyRecipe
    _: KW_ONLY
    subtree: str | None = None
    backend: BackendName | None = None
    algorithm: str | None = None
    input_correction: InputCorrection | None = None
    kv_cache: KvCacheScales | None = None
    target_layers: int | None = None
    roles: Sequence[str] = ()

    @property
    def choice(self) -> RecipeChoice:
        """The recipe that the caller asks for."""
        return RecipeChoice(
            self.recipe, self.backend, self.algorithm, self.input_correction, self.kv_cache
        )


AUTO = "auto"
"""Instead of a recipe: the fastest of the built-in ones whose draft passes."""
_OF_AUTO = ("engine", "gpu", "head", "context", "concurrency", "tp", "target_step_ms", "html")
_NOT_OF_AUTO = ("subtree", "backend", "algorithm", "input_correction", "kv_cache",
                "input_scale", "vocab_size")  # fmt: skip
_NEEDED_BY_AUTO = {"engine": "vllm", "gpu": "h200", "traces": "T, which draftquant record writes"}


@dataclass(frozen=True)
class Quantizing(Planning):
    """The same, with the output folder and the inputs to use.

    Attributes:
        input_scale: one static activation scale for all linears, which is then not measured.
        num_draft_tokens: K in serving; None = the draft's own.
        vocab_size: rows that the head keeps.
        precise: compute factors of GPTQ in float64.
        engine, gpu: where recipe `AUTO` looks for the fastest draft that passes; and how it is
            served there. head: recipes that round the head too.
    """

    out: AnyPath
    _: KW_ONLY
    traces: AnyPath | None = None
    input_scale: float | None = None
    num_draft_tokens: int | None = None
    vocab_size: int | None = None
    precise: bool = False
    device: str = "auto"
    target: AnyPath | None = None
    allow_zero_rows: bool = False
    fix_config: bool = False
    engine: EngineName | None = None
    gpu: str | None = None
    head: bool = False
    context: int | None = None
    concurrency: int = 1
    tp: int = 1
    target_step_ms: float | None = None
    html: AnyPath | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the recipe is to be found."""
        return isinstance(self.recipe, str | Path) and str(self.recipe) == AUTO

    @override
    def check(self) -> None:
        """Refuse to choose rows without text, and what is not of the way to the recipe."""
        idle = _NOT_OF_AUTO if self.is_auto else _OF_AUTO
        for name in idle:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                what = "chooses among the built-in recipes as they are, for a whole draft"
                what = (
                    f"--recipe {AUTO} {what}" if self.is_auto else f"is for --recipe {AUTO} alone"
                )
                raise SettingsError(f"--{name.replace('_', '-')}", what, fix="leave it out")
        for name, given in _NEEDED_BY_AUTO.items():
            if self.is_auto and getattr(self, name) is None:
                what = (
                    f"is missing: --recipe {AUTO} finds the fastest draft that an engine loads on"
                )
                what += " a GPU, on prompts of your traffic"
                raise SettingsError(f"--{name}", what, fix=f"for example --{name} {given}")
        if self.vocab_size is not None and self.traces is None:
            raise SettingsError(
                "--vocab-size",
                "rows are chosen by what the target says in recorded traces, also where the recipe"
                " needs none, and there are none",
                fix="give traces of other prompts than the gate's: --traces TRACES",
            )


@dataclass(frozen=True)
class Estimating(Heard):
    """Which draft, by which recipes, on which GPUs, beside which target.

    Attributes:
        recipes: empty = all built-in ones that fit. gpus: empty = the usual ones.
        context: positions per sequence; None = the usual number.
        efficiency: share of the data sheet's bandwidth and peak.
        target_step_ms: measured time of the target's verify step.
    """

    draft: Reference
    _: KW_ONLY
    recipes: Sequence[AnyRecipe] = ()
    gpus: Sequence[str] = ()
    num_draft_tokens: int | None = None
    context: int | None = None
    concurrency: int = 1
    tp: int = 1
    efficiency: float = 0.75
    target_step_ms: float | None = None
    target_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Listing(Heard):
    """Where the results of listed recipes should load; None = anywhere."""

    engine: EngineName | None = None
    gpu: str | None = None
    family: str | None = None


@dataclass(frozen=True)
class Checking(Heard):
    """Which draft, in which engine, on which GPU; None = all engines, the usual GPUs.

    Attributes:
        target_args: flags of the target's launch line, in any engine's spelling.
        traces: whose hidden states are scanned for values beyond float16's range.
        target_layers: the target's number of layers; vLLM numbers the draft's after them.
        ask: the interpreter that has the engine, or its environment; None = no engine is run.
    """

    draft: Reference
    engine: EngineName | None = None
    _: KW_ONLY
    version: str | None = None
    target: Reference | None = None
    target_args: str | None = None
    traces: AnyPath | None = None
    subtree: str | None = None
    tp: int | None = None
    target_layers: int | None = None
    gpu: str | None = None
    ask: AnyPath | None = None
    ask_seconds: int = 600

    @override
    def check(self) -> None:
        """A version is of one engine; options of a pair are only given for a pair."""
        if self.ask is not None:
            self._check_ask()
        if self.engine is None and self.version is not None:
            what = "is of one engine, and all are asked"
            raise CheckpointError("--version", what, fix="add --engine vllm")
        of_pairs = {"target-args": self.target_args, "traces": self.traces, "subtree": self.subtree}
        given = next((name for name, value in of_pairs.items() if value is not None), None)
        if self.target is None and given is not None:
            what = "without --target, no pair is checked"
            raise CheckpointError(f"--{given}", what, fix="add --target TARGET")

    def _check_ask(self) -> None:
        """An installed engine has its version and its GPU, and loads the draft once, alone."""
        if self.engine not in ("vllm", "sglang"):
            what = f"expected --engine vllm or sglang, got {self.engine or 'none'}"
            raise CheckpointError("--ask", what, fix="name the engine that is installed there")
        beside = {"version": self.version, "gpu": self.gpu, "tp": self.tp, "traces": self.traces,
                  "target-args": self.target_args, "subtree": self.subtree}  # fmt: skip
        given = [f"--{name}" for name, value in beside.items() if value is not None]
        if given:
            what = "the engine answers as it is installed, on its GPU, for one draft folder"
            raise CheckpointError("--ask", what, fix=f"leave out {', '.join(given)}")


@dataclass(frozen=True)
class Verifying(Heard):
    """Which folder, and against which source.

    Attributes:
        subtree: part of `against`, or of `layer` where that is given.
        foreign: another tool made the folder.
        layer: the layer that a target's folder contains.
        target: the target whose tables are compared again with those that the folder shares.
    """

    output: Reference
    against: Reference
    _: KW_ONLY
    subtree: str | None = None
    foreign: bool = False
    layer: Reference | None = None
    target: AnyPath | None = None
