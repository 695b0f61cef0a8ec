"""`RecordSettings`: what is recorded of a target, how its text goes on, and who runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .opening import Reference

if TYPE_CHECKING:
    from ...calibration.recording.prompt_fit import TooLong
    from ...calibration.traces.manifest import FeatureDtype

RecordEngine = Literal["transformers", "vllm", "sglang"]
Turns = Literal["first", "all"]
_SGLANG = (
    # 0.5.23, srt/arg_groups/fields/exec_.py:130 and validation_hook.py:697 (no pipeline stages);
    # srt/managers/scheduler_components/batch_result_processor.py:658 and 686 (Tensor.tolist).
    "SGLang 0.5.23 captures layers without a draft (--enable-return-aux-hidden-states), but hands"
    " them out as numbers in JSON alone: 0.4 MB of text per token of 3 layers x 7168, made by its"
    " scheduler while all requests wait"
)
_OF_VLLM = ("server", "shared", "engine_args")
_FLAGS = {"engine_args": "--engine-arg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """How a target is recorded.

    Attributes:
        draft: from whose config the target layers and the mask token are read.
        fused: store the features after that draft's fc: narrower, for drafts with the same fc only.
        aux_layer_ids: target layers whose outputs are recorded, 0-based, instead of the draft's.
        tables: carry the target's embedding and head too: drafts without them then need no target.
        table_ids: tokens whose embedding is carried beside those of the traces.
        turns: of conversations: the first one, or all, each on top of the target's own answers.
        too_long: what becomes of a prompt that leaves too few positions for its continuation.
            "error" ends the run before the target is loaded and names all of them, "skip" leaves
            it out, "truncate" keeps its last tokens; trace.json says which.
        max_new_tokens: per prompt or turn, at least 1.
        ignore_eos: each is continued to that length, behind the target's end of text.
        temperature: 0 = greedy.
        top_p: in (0, 1]; 1 = all tokens.
        top_k: 0 = all tokens.
        seed: of the draws.
        logprobs: keep log-probabilities of emitted tokens; of drawn ones they are always kept.
        top_logprobs: how many of the most likely tokens are kept too.
        dtype: what the target computes in; None = float32, of an engine bfloat16.
        batch_size: prompts run together, or handed to an engine at a time.
        device: "auto", "cpu", "cuda" or "cuda:I".
        device_map: "auto" spreads a target over all GPUs, the CPU and the disk.
        engine: who runs the target.
        engine_args: arguments of vLLM, such as {"tensor_parallel_size": 8}.
        server: URL of a running vLLM server, whose key is in DRAFTQUANT_SERVER_KEY.
        shared: folder that such a server and the recorder share.
    """

    draft: Reference | None = None
    fused: bool = False
    aux_layer_ids: tuple[int, ...] | None = None
    tables: bool = False
    table_ids: tuple[int, ...] = ()
    turns: Turns = "first"
    too_long: "TooLong" = "error"
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0
    top_p: float = 1
    top_k: int = 0
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    dtype: "FeatureDtype | None" = None
    batch_size: int = 32
    device: str = "auto"
    device_map: Literal["auto"] | None = None
    engine: RecordEngine = "transformers"
    engine_args: Mapping[str, object] = field(default_factory=dict)
    server: str | None = None
    shared: Path | None = None

    @property
    def computes_in(self) -> "FeatureDtype":
        """The dtype, chosen or by the engine."""
        return self.dtype or ("float32" if self.engine == "transformers" else "bfloat16")

    def check(self, *, starts_server: bool = False) -> None:
        """Refuse settings that do not belong together, and SGLang.

        Args:
            starts_server: the command of a server is asked for, not a recording.

        Raises:
            TraceError: names the argument.
        """
        from ...calibration.errors import TraceError

        if self.engine == "sglang":
            raise TraceError(
                "--engine sglang",
                _SGLANG,
                fix="give --engine vllm, or let SpecForge dump with SGLang and import that:"
                " 'draftquant traces import --from specforge'",
            )
        given = [_FLAGS.get(n, f"--{n}") for n in _OF_VLLM if getattr(self, n)]
        if starts_server:
            given.append("--print-server-args")
        if self.engine != "vllm" and given:
            raise TraceError(given[0], f"belongs to vLLM, not to {self.engine}",
                             fix="add --engine vllm")  # fmt: skip
        if self.server and self.engine_args:
            raise TraceError("--engine-arg", "a running server has its arguments already",
                             fix="leave it out, or give it with --print-server-args")  # fmt: skip
        if (self.server or starts_server) and not self.shared:
            raise TraceError("--shared", "expected the folder that server and recorder share",
                             fix="add --shared DIR")  # fmt: skip
        if self.shared and not (self.server or starts_server):
            raise TraceError("--shared", "an engine of our own writes beside the output",
                             fix="leave it out, or add --server URL")  # fmt: skip
        if self.fused and not self.draft:
            raise TraceError(
                "--fused", "needs the draft whose fc is applied", fix="add --draft DRAFT"
            )
        if self.table_ids and not self.tables:
            raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")
