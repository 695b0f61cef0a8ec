"""`RecordSettings`: what is recorded of a target, how its text goes on, and who runs it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..calibration.traces.manifest import FeatureDtype, StorageChoice, TooLong
from ..quantize.files.hub import Reference
from ..recipes.decode import AT_LEAST_0, AT_LEAST_1, MisfitError
from ..recipes.strict_json import JsonProblem, parse_json
from .frame import arguments
from .frame.arguments import ChosenPrompts
from .frame.settings import Option, options_of, spelling

_SGLANG = (
    # 0.5.23, srt/arg_groups/fields/exec_.py:130 and validation_hook.py:697 (no pipeline stages);
    # srt/managers/scheduler_components/batch_result_processor.py:658 and 686 (Tensor.tolist).
    "SGLang 0.5.23 captures layers without a draft (--enable-return-aux-hidden-states), but hands"
    " them out as numbers in JSON alone: 0.4 MB of text per token of 3 layers x 7168, made by its"
    " scheduler while all requests wait"
)
_OF_VLLM = ("server", "shared", "engine_args", "print_server_args")


def _assignment(text: str) -> Mapping[str, object]:
    """NAME=VALUE; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise MisfitError(f"expected NAME=VALUE, got {text!r}")
    found: object = value
    with suppress(JsonProblem):
        found = parse_json(value)
    return {name.strip().replace("-", "_"): found}


@dataclass(frozen=True, slots=True)
class RecordSettings(ChosenPrompts):
    """Which target on which prompts, what is kept of it, and who runs it."""

    target: Annotated[
        arguments.AnyPath,
        Option("folder of the target (safetensors, no remote code)", "TARGET"),
    ]
    prompts: Annotated[
        arguments.AnyPath,
        Option(
            "prompts: JSON lines with id, category and token_ids, text or messages; "
            "MT-Bench, ShareGPT, Alpaca or SPEED-Bench files (also Parquet); or a Hub"
            " data set, OWNER/NAME[@REVISION]",
            "PROMPTS",
        ),
    ]
    out: Annotated[arguments.AnyPath | None, Option("folder to create", "FOLDER")] = None
    _: KW_ONLY
    turns: Annotated[
        Literal["first", "all"],
        Option(
            "turns of a conversation: the first only (default), or all, each after "
            "the target's own answers"
        ),
    ] = "first"
    continued: Annotated[
        bool,
        Option(
            "go on behind the texts of a trace folder (--prompts), or behind begun answers",
            flag="--continue",
        ),
    ] = False
    draft: Annotated[
        Reference | None,
        Option(
            "draft whose config.json names the target layers and the mask token to record", "DRAFT"
        ),
    ] = None
    fused: Annotated[
        bool,
        Option(
            "store hidden states after the draft's fc: smaller, but valid only for "
            "drafts with the same fc"
        ),
    ] = False
    aux_layer_ids: Annotated[
        Sequence[int] | None,
        Option(
            "target layers to record, counted from 0 (default: those of --draft)",
            "LAYER,...",
            flag="--aux-layers",
            several="commas",
        ),
    ] = None
    tables: Annotated[
        bool,
        Option("store the target's embedding and head too, for drafts without their own"),
    ] = False
    table_ids: arguments.TableIds = ()
    feature_storage: Annotated[
        StorageChoice,
        Option("how hidden states are stored (default exact)"),
    ] = "exact"
    max_new_tokens: Annotated[
        int, Option("longest answer in tokens (default 128)", "TOKENS", bounds=AT_LEAST_1)
    ] = 128
    ignore_eos: Annotated[
        bool,
        Option("ignore the end-of-text token: every answer has --max-new-tokens tokens"),
    ] = False
    too_long: Annotated[
        TooLong,
        Option(
            "prompts too long for the target's context: stop (error, default), leave them"
            " out (skip), or keep their last tokens"
        ),
    ] = "error"
    temperature: arguments.Temperature = 0
    top_p: arguments.TopP = 1
    top_k: arguments.TopK = 0
    seed: arguments.SamplingSeed = 0
    logprobs: Annotated[
        bool,
        Option("store log-probabilities (always stored when sampling)"),
    ] = False
    top_logprobs: Annotated[
        int,
        Option("also store this many most likely tokens (default 0)", "TOKENS", bounds=AT_LEAST_0),
    ] = 0
    dtype: Annotated[
        FeatureDtype | None,
        Option(
            "dtype to compute and store in (default: bfloat16 with an engine; else float32, stored"
            " in bfloat16 if the target's weights are)"
        ),
    ] = None
    batch_size: Annotated[
        int,
        Option(
            "prompts per batch, or in flight (default 32)",
            "PROMPTS",
            bounds=AT_LEAST_1,
        ),
    ] = 32
    fixed_batches: Annotated[
        bool,
        Option("always the same --batch-size prompts together, alone"),
    ] = False
    device: arguments.Device = "auto"
    device_map: Annotated[
        Literal["auto"] | None,
        Option("spread a large target over all GPUs, then CPU and disk (needs accelerate)"),
    ] = None
    ray: arguments.Ray = None
    engine: Annotated[
        Literal["transformers", "vllm", "sglang"],
        Option(
            "what runs the target (default transformers); vllm takes every target of"
            " vLLM, on any number of GPUs; sglang is always refused (traces import)"
        ),
    ] = "transformers"
    engine_args: Annotated[
        Mapping[str, object] | None,
        Option(
            "argument for vLLM, such as tensor_parallel_size=8; repeat for more",
            "NAME=VALUE",
            flag="--engine-arg",
            several="repeated",
            reads=_assignment,
        ),
    ] = None
    server: Annotated[
        Sequence[str] | None,
        Option(
            "vLLM servers started as --print-server-args says (API key: DRAFTQUANT_SERVER_KEY)",
            "URL",
        ),
    ] = None
    shared: Annotated[
        arguments.AnyPath | None,
        Option(
            "folder that the server and this machine share, for passing hidden states", "FOLDER"
        ),
    ] = None
    print_server_args: Annotated[
        bool, Option("print the command that starts such a server, and exit")
    ] = False

    @property
    def computes_in(self) -> FeatureDtype:
        """The dtype, chosen or by the engine."""
        return self.dtype or ("float32" if self.engine == "transformers" else "bfloat16")

    @property
    def stored_in(self) -> FeatureDtype:
        """The dtype of the traces: what a BF16 target gives is rounded as it is where it serves."""
        from ..calibration.recording.target_shape import has_bf16_weights

        if self.dtype is None and has_bf16_weights(Path(self.target)):
            return "bfloat16"
        return self.computes_in

    def check(self) -> None:
        """Refuse settings that do not belong together, and SGLang."""
        from ..recipes.errors import TraceError

        if self.engine == "sglang":
            raise TraceError(
                "--engine sglang",
                _SGLANG,
                fix="give --engine vllm, or let SpecForge dump with SGLang and import that:"
                " 'draftquant traces import --from specforge'",
            )
        options = options_of(type(self))
        given = [spelling(name, options[name]) for name in _OF_VLLM if getattr(self, name)]
        if self.engine != "vllm" and given:
            raise TraceError(given[0], f"belongs to vLLM, not to {self.engine}",
                             fix="add --engine vllm")  # fmt: skip
        if self.server and self.engine_args:
            raise TraceError("--engine-arg", "a running server has its arguments already",
                             fix="leave it out, or give it with --print-server-args")  # fmt: skip
        shares = bool(self.server) or self.print_server_args
        if shares and not self.shared:
            raise TraceError("--shared", "expected the folder that server and recorder share",
                             fix="add --shared DIR")  # fmt: skip
        if self.shared and not shares:
            raise TraceError("--shared", "an engine of our own writes beside the output",
                             fix="leave it out, or add --server URL")  # fmt: skip
        if self.fixed_batches and self.engine != "transformers":
            raise TraceError("--fixed-batches", f"{self.engine} chooses its batches itself",
                             fix="leave it out")  # fmt: skip
        if self.ray:
            self._check_ray()
        if self.continued and self.turns == "all":
            raise TraceError("--continue", "goes on behind the last turn, and --turns all begins"
                             " with the first", fix="leave one of them out")  # fmt: skip
        if self.fused and not self.draft:
            raise TraceError(
                "--fused", "needs the draft whose fc is applied", fix="add --draft DRAFT"
            )
        if self.table_ids and not self.tables:
            raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")
        if self.out is None and not self.print_server_args:
            raise TraceError(
                "--out",
                "expected the folder to create",
                fix="add --out FOLDER, such as --out ./gate-traces",
            )

    def _check_ray(self) -> None:
        """Refuse what Ray does not divide, or not into equal bytes."""
        from ..recipes.errors import TraceError

        if self.engine != "transformers":
            raise TraceError(
                "--ray",
                f"divides what transformers records; {self.engine} spreads a target over GPUs and"
                " machines itself",
                fix="leave it out; give --engine-arg tensor_parallel_size=8, or several addresses"
                " behind --server",
            )
        if self.device_map:
            raise TraceError(
                "--ray",
                "gives each task one device, and --device-map spreads a target over all",
                fix="leave one of them out",
            )
        if not self.fixed_batches:
            raise TraceError(
                "--ray",
                "needs fixed batches: in others, what runs beside a prompt depends on those before,"
                " and so do its bits",
                fix="add --fixed-batches",
            )
