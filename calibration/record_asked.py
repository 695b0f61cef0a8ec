"""`RecordRun`: what to record of a target, how its text continues, and who runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ..quantize.files.hub import Reference
from ..recipes.errors import TraceError
from ..recipes.packages import counts, rows_beside
from ..recipes.regular_file import AnyPath
from .prompts.prompt_forms import ChosenPrompts
from .traces.manifest import FeatureDtype, StorageChoice, TooLong


@dataclass(frozen=True)
class RecordRun(ChosenPrompts):
    """Which target on which prompts; fields are the options of `record`."""

    target: AnyPath
    prompts: AnyPath
    out: AnyPath | None = None
    _: KW_ONLY
    turns: Literal["first", "all"] = "first"
    continued: bool = False
    draft: Reference | None = None
    fused: bool = False
    aux_layer_ids: Sequence[int] | None = None
    tables: bool = False
    table_ids: Sequence[int] = ()
    feature_storage: StorageChoice = "exact"
    max_new_tokens: int = 128
    ignore_eos: bool = False
    too_long: TooLong = "error"
    temperature: float = 0
    top_p: float = 1
    top_k: int = 0
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    dtype: FeatureDtype | None = None
    batch_size: int = 32
    fixed_batches: bool = False
    device: str = "auto"
    device_map: Literal["auto"] | None = None
    ray: str | None = None
    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    engine_args: Mapping[str, object] | None = None
    server: Sequence[str] | None = None
    shared: AnyPath | None = None
    print_server_args: bool = False

    @property
    def computes_in(self) -> FeatureDtype:
        """The dtype of the computation, chosen here or by the engine."""
        return self.dtype or ("float32" if self.engine == "transformers" else "bfloat16")

    @property
    def stored_in(self) -> FeatureDtype:
        """The dtype of the traces: a BF16 target's output is rounded as where it serves."""
        from .recording.target_shape import has_bf16_weights

        if self.dtype is None and has_bf16_weights(Path(self.target)):
            return "bfloat16"
        return self.computes_in

    @property
    def shares(self) -> bool:
        """True if a server writes what is recorded, into a folder that the recorder reads."""
        return bool(self.server) or self.print_server_args

    @override
    def check(self) -> None:
        """Refuse settings that do not belong together, and SGLang."""
        rows = rows_beside(__file__, "record_asked")["misfit"]
        row = next((row for row in rows if counts(row, self)), None)
        if row is not None:
            raise TraceError(row["where"], row["what"].format(asked=self), fix=row["fix"])
