"""`record`: what a target does on prompts, for calibration and replay."""

from typing import TYPE_CHECKING

from ...calibration.runs.record_asked import RecordRun
from ..frame import reports
from ..frame.console import megabytes, print_document, stdout
from ..frame.verb import Command, verb
from .traces import print_written, written

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


@verb(RecordRun)
def record(settings: RecordRun) -> "reports.TraceFolder | str":
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
    from ...calibration.runs.record_run import record_asked

    return record_asked(settings)


def _show(traces: "TraceFolder | str", _settings: object) -> None:
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


COMMAND = Command(
    record, _show, lambda done, _: {"command": done} if isinstance(done, str) else written(done)
)
