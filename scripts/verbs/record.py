"""`record`: what a target does on prompts, for calibration and replay."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...calibration.record_asked import RecordRun
from ...recipes.decode import AT_LEAST_0, AT_LEAST_1, MisfitError
from ...recipes.strict_json import JsonProblem, parse_json
from ..frame import arguments, reports
from ..frame.arguments import CHOSEN_PROMPTS
from ..frame.console import megabytes, print_document, stdout
from ..frame.settings import Option, Settings
from ..frame.verb import Command, verb
from .traces import print_written, written

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


def _assignment(text: str) -> Mapping[str, object]:
    """NAME=VALUE; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise MisfitError(f"expected NAME=VALUE, got {text!r}")
    found: object = value
    with suppress(JsonProblem):
        found = parse_json(value)
    return {name.strip().replace("-", "_"): found}


@dataclass(frozen=True)
class RecordSettings(Settings, RecordRun):
    """Which target on which prompts, what is kept of it, and who runs it."""

    options: ClassVar = {
        **CHOSEN_PROMPTS,
        "target": Option("folder of the target (safetensors, no remote code)", "TARGET"),
        "prompts": Option(
            "prompts: JSON lines with id, category and token_ids, text or messages; "
            "MT-Bench, ShareGPT, Alpaca or SPEED-Bench files (also Parquet); or a Hub"
            " data set, OWNER/NAME[@REVISION]",
            "PROMPTS",
        ),
        "out": Option("folder to create", "FOLDER"),
        "turns": Option(
            "turns of a conversation: the first only (default), or all, each after "
            "the target's own answers"
        ),
        "continued": Option(
            "go on behind the texts of a trace folder (--prompts), or behind begun answers",
            flag="--continue",
        ),
        "draft": Option(
            "draft whose config.json names the target layers and the mask token to record", "DRAFT"
        ),
        "fused": Option(
            "store hidden states after the draft's fc: smaller, but valid only for "
            "drafts with the same fc"
        ),
        "aux_layer_ids": Option(
            "target layers to record, counted from 0 (default: those of --draft)",
            "LAYER,...",
            flag="--aux-layers",
            several="commas",
        ),
        "tables": Option("store the target's embedding and head too, for drafts without their own"),
        "table_ids": arguments.TableIds,
        "feature_storage": Option("how hidden states are stored (default exact)"),
        "max_new_tokens": Option(
            "longest answer in tokens (default 128)", "TOKENS", bounds=AT_LEAST_1
        ),
        "ignore_eos": Option(
            "ignore the end-of-text token: every answer has --max-new-tokens tokens"
        ),
        "too_long": Option(
            "prompts too long for the target's context: stop (error, default), leave them"
            " out (skip), or keep their last tokens"
        ),
        "temperature": arguments.Temperature,
        "top_p": arguments.TopP,
        "top_k": arguments.TopK,
        "seed": arguments.SamplingSeed,
        "logprobs": Option("store log-probabilities (always stored when sampling)"),
        "top_logprobs": Option(
            "also store this many most likely tokens (default 0)", "TOKENS", bounds=AT_LEAST_0
        ),
        "dtype": Option(
            "dtype to compute and store in (default: bfloat16 with an engine; else float32, stored"
            " in bfloat16 if the target's weights are)"
        ),
        "batch_size": Option(
            "prompts per batch, or in flight (default 32)",
            "PROMPTS",
            bounds=AT_LEAST_1,
        ),
        "fixed_batches": Option("always the same --batch-size prompts together, alone"),
        "device": arguments.Device,
        "device_map": Option(
            "spread a large target over all GPUs, then CPU and disk (needs accelerate)"
        ),
        "ray": arguments.Ray,
        "engine": Option(
            "what runs the target (default transformers); vllm takes every target of"
            " vLLM, on any number of GPUs; sglang is always refused (traces import)"
        ),
        "engine_args": Option(
            "argument for vLLM, such as tensor_parallel_size=8; repeat for more",
            "NAME=VALUE",
            flag="--engine-arg",
            several="repeated",
            reads=_assignment,
        ),
        "server": Option(
            "vLLM servers started as --print-server-args says (API key: DRAFTQUANT_SERVER_KEY)",
            "URL",
        ),
        "shared": Option(
            "folder that the server and this machine share, for passing hidden states", "FOLDER"
        ),
        "print_server_args": Option("print the command that starts such a server, and exit"),
    }


@verb(RecordSettings)
def record(settings: RecordSettings) -> "reports.TraceFolder | str":
    """Let a target continue prompts, and record the hidden states that a draft reads.

    Example:
        >>> traces = dq.record(
        ...     "TARGET", "prompts.jsonl", "NEW", draft="DRAFT", max_new_tokens=8
        ... )
        >>> len(traces), traces.manifest.num_tokens > 0
        (2, True)

    Returns:
        The folder that was written, opened; its length is the number of traces. With
        `print_server_args=True` it is the command that starts a vLLM server to record from.

    Raises:
        DraftQuantError: the target, the draft, the prompts or a setting cannot be used, or the
            folder exists already.
    """
    from ...calibration.record_run import record_asked

    return record_asked(settings)


def _mapping(done: "TraceFolder | str", _settings: object) -> dict[str, Any]:
    return {"command": done} if isinstance(done, str) else written(done)


def _show(traces: "TraceFolder | str", _settings: object) -> None:
    """What was written, or the command of a server."""
    if isinstance(traces, str):
        print_document(traces)
        return
    print_written(traces)
    if tables := traces.manifest.tables:
        head = f"{traces.manifest.target.vocab_size:,} x {tables.width:,}"
        stdout().line(
            f"{tables.file}: embedding {tables.num_token_ids:,} x {tables.width:,}, head {head},"
            f" {megabytes(tables.nbytes)}"
        )


COMMAND = Command(record, _show, _mapping)
