"""`RecordRun`: what is recorded of a target, how its text goes on, and who runs it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ..quantize.files.hub import Reference
from ..recipes.errors import TraceError
from ..recipes.regular_file import AnyPath
from .prompts.prompt_forms import ChosenPrompts
from .traces.manifest import FeatureDtype, StorageChoice, TooLong

_SGLANG = (
    # 0.5.23, srt/arg_groups/fields/exec_.py:130 and validation_hook.py:697 (no pipeline stages);
    # srt/managers/scheduler_components/batch_result_processor.py:658 and 686 (Tensor.tolist).
    "SGLang 0.5.23 captures layers without a draft (--enable-return-aux-hidden-states), but hands"
    " them out as numbers in JSON alone: 0.4 MB of text per token of 3 layers x 7168, made by its"
    " scheduler while all requests wait"
)
_OF_VLLM = {
    "server": "--server",
    "shared": "--shared",
    "engine_args": "--engine-arg",
    "print_server_args": "--print-server-args",
}


@dataclass(frozen=True)
class RecordRun(ChosenPrompts):
    """Which target on which prompts; fields as the options of `record`."""

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
        """The dtype, chosen or by the engine."""
        return self.dtype or ("float32" if self.engine == "transformers" else "bfloat16")

    @property
    def stored_in(self) -> FeatureDtype:
        """The dtype of the traces: what a BF16 target gives is rounded as it is where it serves."""
        from .recording.target_shape import has_bf16_weights

        if self.dtype is None and has_bf16_weights(Path(self.target)):
            return "bfloat16"
        return self.computes_in

    @override
    def check(self) -> None:
        """Refuse what does not belong together, and SGLang."""
        for where, what, fix in self._problems():
            raise TraceError(where, what, fix=fix)

    def _problems(self) -> Iterator[tuple[str, str, str]]:
        if self.engine == "sglang":
            fix = (
                "give --engine vllm, or let SpecForge dump with SGLang and import that:"
                " 'draftquant traces import --from specforge'"
            )
            yield "--engine sglang", _SGLANG, fix
        given = [option for name, option in _OF_VLLM.items() if getattr(self, name)]
        if self.engine != "vllm" and given:
            yield given[0], f"belongs to vLLM, not to {self.engine}", "add --engine vllm"
        if self.server and self.engine_args:
            what = "a running server has its arguments already"
            yield "--engine-arg", what, "leave it out, or give it with --print-server-args"
        shares = bool(self.server) or self.print_server_args
        if shares and not self.shared:
            what = "expected the folder that server and recorder share"
            yield "--shared", what, "add --shared DIR"
        if self.shared and not shares:
            what = "an engine of our own writes beside the output"
            yield "--shared", what, "leave it out, or add --server URL"
        if self.fixed_batches and self.engine != "transformers":
            yield "--fixed-batches", f"{self.engine} chooses its batches itself", "leave it out"
        if self.ray:
            yield from self._ray_problems()
        if self.continued and self.turns == "all":
            what = "goes on behind the last turn, and --turns all begins with the first"
            yield "--continue", what, "leave one of them out"
        if self.fused and not self.draft:
            yield "--fused", "needs the draft whose fc is applied", "add --draft DRAFT"
        if self.table_ids and not self.tables:
            yield "--table-ids", "says which rows the tables carry", "add --tables"
        if self.out is None and not self.print_server_args:
            fix = "add --out FOLDER, such as --out ./gate-traces"
            yield "--out", "expected the folder to create", fix

    def _ray_problems(self) -> Iterator[tuple[str, str, str]]:
        if self.engine != "transformers":
            what = (
                f"divides what transformers records; {self.engine} spreads a target over GPUs and"
            )
            fix = "leave it out; give --engine-arg tensor_parallel_size=8, or several addresses"
            yield "--ray", f"{what} machines itself", f"{fix} behind --server"
        if self.device_map:
            what = "gives each task one device, and --device-map spreads a target over all"
            yield "--ray", what, "leave one of them out"
        if not self.fixed_batches:
            what = (
                "needs fixed batches: in others, what runs beside a prompt depends on those before,"
                " and so do its bits"
            )
            yield "--ray", what, "add --fixed-batches"
