"""No draft is judged on prompts that were used to make it.

Neither on those that calibrated its quantization, nor on those that chose the rows of its head
(`draftquant vocab`). A prompt is recognised by its token ids, by those of the first turn of its
conversation, and, if it was slightly changed, by its sketch and that of its continuation.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...quantize.files.provenance import QuantizedProvenance, SeenPrompts, VocabularyCut
from ...recipes.errors import GateError, refused
from .near_duplicates import (
    PROMPT_WIDTH,
    SHARED_SHARE,
    WIDTH,
    Overlaps,
    RecordedPrompt,
    Shingled,
    Templates,
    largest_known,
    parsed_sketch,
    recorded_prompts,
)
from .trace_folder import TraceFolder

_OTHERS = "record traces of other prompts for the gate"


def check_held_out(
    candidate: QuantizedProvenance | None, traces: TraceFolder, cuts: Sequence[VocabularyCut] = ()
) -> tuple[str, ...]:
    """Compare the prompts of the traces, by their token ids, with those that made a draft.

    Returns what could not be compared with anything, in sentences without a full stop.
    """
    prompts = recorded_prompts(traces)
    _check_conversations(prompts, traces)
    made = _made(candidate, cuts)
    for seen, what in made:
        _check_unseen(prompts, seen, what, traces)
    said = _unsaid(candidate) if candidate and not candidate.calibration_prompts else ()
    if any(seen.sha256 and seen.sketches is None for seen, _ in made):
        said += (
            "the candidate's draftquant.json was written by an earlier version and has no sketches"
            " of the calibration prompts: near copies of them among the gate's prompts are not"
            " noticed",
        )
    return said


def check_held_out_measured(
    candidate: QuantizedProvenance | None,
    prompts: Sequence[tuple[str, str]],
    name: str,
    cuts: Sequence[VocabularyCut] = (),
) -> tuple[str, ...]:
    """The same for a measurement, which has (id, `prompt_sha256`) of each prompt and no tokens."""
    made = _made(candidate, cuts)
    for seen, what in made:
        known = set(seen.sha256)
        if ids := [id_ for id_, digest in prompts if digest in known]:
            fix = "measure both servers on other prompts"
            raise _refused(name, "seen", ids, len(prompts), what=what, fix=fix)
    if not any(seen.sha256 for seen, _ in made):
        return ()
    return (
        "measurements hold hashes of the prompts, not their text, so near copies of the prompts"
        " that calibrated or chose the candidate are not noticed",
    )


def _made(
    candidate: QuantizedProvenance | None, cuts: Sequence[VocabularyCut]
) -> list[tuple[SeenPrompts, str]]:
    made = [
        (cut.choice.prompts, "were used to choose the rows of the candidate's head (vocab)")
        for cut in cuts
    ]
    if candidate is not None:
        made.append((candidate.prompts, "were used to calibrate the candidate"))
    return made


def check_apart(traces: TraceFolder, seen: SeenPrompts, what: str) -> None:
    """Refuse traces that contain seen prompts, or near duplicates of them."""
    others = "judge by traces of other prompts"
    _check_unseen(recorded_prompts(traces), seen, what, traces, others)


def _check_conversations(prompts: Sequence[RecordedPrompt], traces: TraceFolder) -> None:
    """A prompt does not become another by naming a conversation that it does not belong to."""
    strange = [prompt.entry.id for prompt in prompts if not prompt.conversation_known]
    if strange:
        raise _refused(traces.folder, "no-first-turn", strange, len(prompts))


def _check_unseen(
    prompts: Sequence[RecordedPrompt],
    seen: SeenPrompts,
    what: str,
    traces: TraceFolder,
    others: str = _OTHERS,
) -> None:
    known = set(seen.sha256)
    ids = [prompt.entry.id for prompt in prompts if known.intersection(prompt.hashes)]
    if ids:
        raise _refused(traces.folder, "seen", ids, len(prompts), what=what, fix=others)
    if seen.sketches is None:
        return
    for own, minima, of in (
        (PROMPT_WIDTH, seen.sketches.minima, f"text ({PROMPT_WIDTH}"),
        (None, seen.sketches.continuations, f"continuations ({WIDTH}"),
    ):
        shares = _overlaps([one.text.shingled(own) for one in prompts], minima)
        near = [p.entry.id for p, s in zip(prompts, shares, strict=True) if s >= SHARED_SHARE]
        if near:
            facts = {"share": SHARED_SHARE, "of": of, "what": what, "others": others}
            raise _refused(traces.folder, "nearly-seen", near, len(prompts), **facts)


def _overlaps(
    texts: Sequence[Shingled], minima: Mapping[str, Sequence[str]]
) -> NDArray[np.float64]:
    """[N] the largest estimated share of the shorter that a text and a seen one have in common.

    Templates on either side are not counted.
    """
    sketches = {name: [parsed_sketch(text) for text in of] for name, of in minima.items()}
    templates = Templates(texts, sketches)
    overlaps = Overlaps([templates.own(each.values, each.category) for each in texts])
    largest = np.zeros(len(texts))
    for category, of_category in sketches.items():
        for sketch in of_category:
            known = largest_known(sketch)
            own = templates.own(sketch, category, sample=known is not None)
            largest = np.maximum(largest, overlaps.with_sketch(own, largest=known))
    return largest


def _refused(where: object, row: str, ids: Sequence[str], total: int, **facts: object) -> GateError:
    named = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
    counts = {"count": len(ids), "total": total}
    return refused(GateError, where, __file__, row, named=named, **counts, **facts)


def _unsaid(candidate: QuantizedProvenance) -> tuple[str, ...]:
    origin = candidate.input_scale_origin
    if origin in ("", "--input-scale"):
        return ()
    return (
        "the candidate's draftquant.json does not record on which prompts its input scales were"
        f" measured (it records {origin!r}), so the gate's prompts may be among them",
    )
