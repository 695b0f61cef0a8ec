"""`RecordRun`: what to record of a target, how its text continues, and who runs it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ...quantize.files.hub import Reference
from ...recipes.errors import TraceError
from ...recipes.regular_file import AnyPath
from ..prompts.prompt_forms import ChosenPrompts
from ..traces.manifest import FeatureDtype, StorageChoice, TooLong


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
        from ..recording.target_shape import has_bf16_weights

        if self.dtype is None and has_bf16_weights(Path(self.target)):
            return "bfloat16"
        return self.computes_in

    @property
    def shares(self) -> bool:
        """True if a server writes what is recorded, into a folder that the recorder reads."""
        return bool(self.server) or self.print_server_args

    @override
    def check(self) -> None:
        for option, wrong, what, fix in (*self._of_engines(), *self._of_settings()):
            if wrong:
                raise TraceError(option, what, fix=fix)

    def _of_engines(self) -> Iterator[tuple[str, object, str, str]]:
        """Options, whether they are wrong with this engine, why, and the fix."""
        # SGLang 0.5.23, srt/arg_groups/fields/exec_.py:130 and validation_hook.py:697 (no pipeline
        # stages); srt/managers/scheduler_components/batch_result_processor.py:658 and 686
        # (Tensor.tolist).
        yield (
            "--engine sglang",
            self.engine == "sglang",
            "SGLang 0.5.23 captures layers without a draft (--enable-return-aux-hidden-states), but"
            " hands them out as numbers in JSON alone: 0.4 MB of text per token of 3 layers x 7168,"
            " made by its scheduler while all requests wait",
            "give --engine vllm, or let SpecForge dump with SGLang and import that: 'draftquant"
            " traces import --from specforge'",
        )
        for option, given in (
            ("--server", self.server),
            ("--shared", self.shared),
            ("--engine-arg", self.engine_args),
            ("--print-server-args", self.print_server_args),
        ):
            wrong = given and self.engine != "vllm"
            yield option, wrong, f"belongs to vLLM, not to {self.engine}", "add --engine vllm"
        yield (
            "--engine-arg",
            self.server and self.engine_args,
            "a running server has its arguments already",
            "leave it out, or give it with --print-server-args",
        )
        yield (
            "--shared",
            self.shares and not self.shared,
            "expected the folder that server and recorder share",
            "add --shared DIR",
        )
        yield (
            "--shared",
            self.shared and not self.shares,
            "an engine of our own writes beside the output",
            "leave it out, or add --server URL",
        )
        ours, what = self.engine == "transformers", f"{self.engine} chooses its batches itself"
        yield "--fixed-batches", self.fixed_batches and not ours, what, "leave it out"
        yield (
            "--ray",
            self.ray and not ours,
            f"divides what transformers records; {self.engine} spreads a target over GPUs and"
            " machines itself",
            "leave it out; give --engine-arg tensor_parallel_size=8, or several addresses behind"
            " --server",
        )

    def _of_settings(self) -> Iterator[tuple[str, object, str, str]]:
        remedy = "leave one of them out"
        what = "gives each task one device, and --device-map spreads a target over all"
        yield "--ray", self.ray and self.device_map, what, remedy
        yield (
            "--ray",
            self.ray and not self.fixed_batches,
            "needs fixed batches: in others, what runs beside a prompt depends on those before, and"
            " so do its bits",
            "add --fixed-batches",
        )
        what = "goes on behind the last turn, and --turns all begins with the first"
        yield "--continue", self.continued and self.turns == "all", what, remedy
        what = "needs the draft whose fc is applied"
        yield "--fused", self.fused and not self.draft, what, "add --draft DRAFT"
        what = "says which rows the tables carry"
        yield "--table-ids", self.table_ids and not self.tables, what, "add --tables"
        wrong = not self.out and not self.print_server_args
        fix = "add --out FOLDER, such as --out ./gate-traces"
        yield "--out", wrong, "expected the folder to create", fix
