"""The part of `draftquant record` that lets a serving engine run the target."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes.strict_json import JsonProblem, parse_json
from ..console import print_document, print_json

if TYPE_CHECKING:
    import torch

    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.recording.decoding import Decoding
    from ...calibration.traces.folder import TraceFolder
    from ...calibration.vllm.plan import RecordingPlan
    from ...quantize.stored.loading import LoadedDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToRecord:
    """What is recorded of every prompt, whoever runs the target; fields as in `record_traces`."""

    decoding: "Decoding"
    aux_layer_ids: tuple[int, ...] | None
    fuse_with: "LoadedDraft | None"
    table_ids: tuple[int, ...] | None
    device: "torch.device"


_ENGINES = ("transformers", "vllm", "sglang")
_SGLANG = (
    # 0.5.23, srt/arg_groups/fields/exec_.py:130 and validation_hook.py:697 (no pipeline stages);
    # srt/managers/scheduler_components/batch_result_processor.py:658 and 686 (Tensor.tolist).
    "SGLang 0.5.23 captures layers without a draft (--enable-return-aux-hidden-states), but hands"
    " them out as numbers in JSON alone: 0.4 MB of text per token of 3 layers x 7168, made by its"
    " scheduler while all requests wait"
)
_OF_VLLM = ("server", "shared", "engine_arg", "print_server_args")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--engine` and what belongs to it."""
    parser.add_argument(
        "--engine",
        choices=_ENGINES,
        default="transformers",
        help="who runs the target (default transformers); vllm: any target and any number of GPUs"
        " that vLLM takes",
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        type=_assignment,
        metavar="NAME=VALUE",
        help="argument of vLLM, such as tensor_parallel_size=8; repeated for more",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="a running vLLM server, started with what --print-server-args prints; its key is read"
        " from DRAFTQUANT_SERVER_KEY",
    )
    parser.add_argument(
        "--shared",
        type=Path,
        metavar="FOLDER",
        help="folder that server and recorder share, for hidden states on their way",
    )
    parser.add_argument(
        "--print-server-args",
        action="store_true",
        help="print the command that starts such a server for these prompts, and end",
    )


def check_engine(options: argparse.Namespace) -> None:
    """Refuse arguments that do not belong together, and SGLang.

    Raises:
        TraceError: names the argument.
    """
    from ...calibration.errors import TraceError

    if options.engine == "sglang":
        raise TraceError(
            "--engine sglang",
            _SGLANG,
            fix="give --engine vllm, or let SpecForge dump with SGLang and import that:"
            " 'draftquant traces import --from specforge'",
        )
    given = [name for name in _OF_VLLM if getattr(options, name)]
    if options.engine != "vllm" and given:
        raise TraceError(_flag(given[0]), f"belongs to vLLM, not to {options.engine}",
                         fix="add --engine vllm")  # fmt: skip
    if options.server and options.engine_arg:
        raise TraceError("--engine-arg", "a running server has its arguments already",
                         fix="leave it out, or give it with --print-server-args")  # fmt: skip
    if (options.server or options.print_server_args) and not options.shared:
        raise TraceError("--shared", "expected the folder that server and recorder share",
                         fix="add --shared FOLDER")  # fmt: skip
    if options.shared and not (options.server or options.print_server_args):
        raise TraceError("--shared", "an engine of our own writes beside the output",
                         fix="leave it out, or add --server URL")  # fmt: skip
    if not options.out and not options.print_server_args:
        raise TraceError(
            "--out",
            "expected the folder to create",
            fix="add --out FOLDER, such as --out ./gate-traces",
        )


def print_server_command(
    how: HowToRecord, prompts: "Sequence[Prompt]", options: argparse.Namespace
) -> int:
    """For `--print-server-args`."""
    plan = _plan(how, prompts, options)
    command = plan.setup(options.shared, dict(options.engine_arg or ())).command()
    if options.json:
        print_json({"command": command})
    else:
        print_document(command)
    return 0


def record_from_engine(
    how: HowToRecord,
    prompts: "Sequence[Prompt]",
    options: argparse.Namespace,
    out: Path,
    on_progress: Callable[[int, int], None],
) -> "TraceFolder":
    """See `record_with_vllm`."""
    from ...calibration.vllm.record import Offline, Served, record_with_vllm

    source = (
        Served(url=options.server, folder=options.shared)
        if options.server
        else Offline(arguments=dict(options.engine_arg or ()))
    )
    plan = _plan(how, prompts, options)
    return record_with_vllm(plan, source, out, table_ids=how.table_ids, on_progress=on_progress)


def _plan(
    how: HowToRecord, prompts: "Sequence[Prompt]", options: argparse.Namespace
) -> "RecordingPlan":
    from ...calibration.recording.target_shape import TargetShape
    from ...calibration.vllm.plan import RecordingPlan

    return RecordingPlan(
        target=options.target,
        shape=TargetShape.read(options.target),
        prompts=prompts,
        max_new_tokens=options.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=options.dtype,
        most_in_flight=options.batch_size,
    )


def _assignment(text: str) -> tuple[str, object]:
    """NAME=VALUE; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    found: object = value
    with suppress(JsonProblem):
        found = parse_json(value)
    return name.strip().replace("-", "_"), found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
