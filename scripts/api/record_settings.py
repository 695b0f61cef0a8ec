"""`RecordSettings`: what is recorded of a target, how its text goes on, and who runs it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from ...calibration.traces.manifest import FeatureDtype
from ...calibration.traces.too_long import TooLong
from ...recipes.bounds import AT_LEAST_0, AT_LEAST_1
from ...recipes.decode import MisfitError
from ...recipes.strict_json import JsonProblem, parse_json
from . import arguments
from .opening import Reference
from .option import Option, spelling
from .prompt_settings import ChosenPrompts
from .settings import options_of

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
        Option("transformers folder of the target (safetensors, no remote code)", "TARGET"),
    ]
    prompts: Annotated[
        arguments.AnyPath,
        Option(
            'JSON lines: {"id", "category", and token_ids, text or messages}; also files of'
            " MT-Bench, ShareGPT, Alpaca and SPEED-Bench (parquet too); or a data set of the Hub,"
            " OWNER/NAME[@REVISION]",
            "PROMPTS",
        ),
    ]
    out: Annotated[arguments.AnyPath | None, Option("folder to create", "FOLDER")] = None
    _: KW_ONLY
    turns: Annotated[
        Literal["first", "all"],
        Option(
            "of conversations: all = the target answers each turn on top of its own answers"
            " (default first)"
        ),
    ] = "first"
    draft: Annotated[
        Reference | None,
        Option("read the target layers, and the mask token, from this draft's config", "DRAFT"),
    ] = None
    fused: Annotated[
        bool,
        Option(
            "store the features after the draft's fc: narrower, for drafts with the same fc only"
        ),
    ] = False
    aux_layer_ids: Annotated[
        Sequence[int] | None,
        Option(
            "target layers whose outputs are recorded, 0-based",
            "LAYER,...",
            flag="--aux-layers",
            several="commas",
        ),
    ] = None
    tables: Annotated[
        bool,
        Option(
            "carry the target's embedding and head too: drafts without them then need no target"
        ),
    ] = False
    table_ids: arguments.TableIds = ()
    max_new_tokens: Annotated[
        int, Option("of each answer (default 128)", "TOKENS", bounds=AT_LEAST_1)
    ] = 128
    ignore_eos: Annotated[
        bool,
        Option("continue each prompt to --max-new-tokens, behind the target's end of text"),
    ] = False
    too_long: Annotated[
        TooLong,
        Option(
            "prompts that leave too few positions for their answer: name them all and stop, leave"
            " them out, or keep their last tokens (default error)"
        ),
    ] = "error"
    temperature: arguments.Temperature = 0
    top_p: arguments.TopP = 1
    top_k: arguments.TopK = 0
    seed: arguments.SamplingSeed = 0
    logprobs: Annotated[
        bool,
        Option("keep log-probabilities of emitted tokens; of drawn ones they are always kept"),
    ] = False
    top_logprobs: Annotated[
        int, Option("keep the N most likely tokens too", "TOKENS", bounds=AT_LEAST_0)
    ] = 0
    dtype: Annotated[
        FeatureDtype | None,
        Option("what the target computes in (default float32, of an engine bfloat16)"),
    ] = None
    batch_size: Annotated[
        int,
        Option(
            "prompts run together, or handed to an engine at a time (default 32)",
            "PROMPTS",
            bounds=AT_LEAST_1,
        ),
    ] = 32
    device: arguments.Device = "auto"
    device_map: Annotated[
        Literal["auto"] | None,
        Option(
            "spread a target that is too large for one GPU over all of them, then the CPU and the"
            " disk (needs accelerate)"
        ),
    ] = None
    engine: Annotated[
        Literal["transformers", "vllm", "sglang"],
        Option(
            "who runs the target (default transformers); vllm: any target and any number of GPUs"
            " that vLLM takes"
        ),
    ] = "transformers"
    engine_args: Annotated[
        Mapping[str, object] | None,
        Option(
            "argument of vLLM, such as tensor_parallel_size=8; repeated for more",
            "NAME=VALUE",
            flag="--engine-arg",
            several="repeated",
            reads=_assignment,
        ),
    ] = None
    server: Annotated[
        str | None,
        Option(
            "a running vLLM server, started with what --print-server-args prints; its key is read"
            " from DRAFTQUANT_SERVER_KEY",
            "URL",
        ),
    ] = None
    shared: Annotated[
        arguments.AnyPath | None,
        Option("folder that server and recorder share, for hidden states on their way", "FOLDER"),
    ] = None
    print_server_args: Annotated[
        bool, Option("print the command that starts such a server for these prompts, and end")
    ] = False

    @property
    def computes_in(self) -> FeatureDtype:
        """The dtype, chosen or by the engine."""
        return self.dtype or ("float32" if self.engine == "transformers" else "bfloat16")

    def check(self) -> None:
        """Refuse settings that do not belong together, and SGLang."""
        from ...calibration.errors import TraceError

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
