"""The held-out rule: a draft is never judged on prompts that its quantization looked at."""

from ..calibration.traces.folder import TraceFolder
from ..quantize.files.provenance import QuantizedProvenance
from .errors import GateError


def check_held_out(candidate: QuantizedProvenance | None, traces: TraceFolder) -> tuple[str, ...]:
    """Hold the prompts of the traces, by their token ids, against those that calibrated a draft.

    Args:
        candidate: how it was quantized; None where nothing says it.
        traces: of the gate. Their ids and their folder do not matter.

    Returns:
        What could not be held against anything, in sentences without a full stop.

    Raises:
        GateError: a prompt calibrated the candidate.
        TraceError: a trace is damaged.
    """
    if candidate is None:
        return ()
    seen = set(candidate.calibration_prompts)
    if not seen:
        return _unsaid(candidate, traces)
    ids = [entry.id for entry, prompt in traces.prompt_sha256s() if prompt in seen]
    if ids:
        named = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
        raise GateError(
            traces.folder,
            f"{len(ids)} of its {len(traces)} prompts calibrated the candidate: {named}",
            fix="record traces of other prompts for the gate",
        )
    return ()


def _unsaid(candidate: QuantizedProvenance, traces: TraceFolder) -> tuple[str, ...]:
    """Folders of earlier versions name the trace folder, not its prompts."""
    origin = candidate.input_scale_origin
    if origin in ("", "--input-scale"):
        return ()
    if origin and traces.sha256 in origin:
        raise GateError(
            traces.folder,
            "the candidate's input scales were calibrated on these very traces",
            fix="record traces of other prompts for the gate",
        )
    return (
        "the candidate's draftquant.json does not say which prompts its input scales were measured"
        f" on (it says {origin!r}): whether the gate's prompts are among them is not known",
    )
