"""No draft is judged on prompts that were used to make it.

Neither on those that calibrated its quantization or chose its recipe, nor on those that chose the
rows of its head (`draftquant vocab`). A prompt is recognised by its token ids, by those of the
first turn of its conversation, and by the sketches of related prompts. Prompts of which only the
continuation was seen are judged both ways, with them and without, as long as they are few.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...quantize.files.provenance import (
    QuantizedProvenance,
    SeenPrompts,
    SeenTarget,
    Sketches,
    VocabularyCut,
)
from ...recipes.errors import GateError
from .manifest import TraceEntry
from .prompt_trace import prompt_sha256
from .related_prompts import PromptText, related, sketched, text_of
from .trace_folder import TraceFolder

MOST_SEEN_SHARE = 0.2
"""Share of the prompts whose continuation may have been seen; simulated up to half of them."""
_NAMED = 10
_OTHERS = (
    "record other prompts; or split all of them anew, because a split keeps related ones on one"
    " side, and make the candidate again with the first part: draftquant traces merge USED THESE"
    " --out ALL (two folders only), draftquant traces split ALL --fraction 0.3 --out USED2 THESE2"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt of a folder.

    `conversation_known`: it is a first turn, or the folder has the first turn that it names, or its
    own token ids begin with that.
    """

    entry: TraceEntry
    text: PromptText
    sha256: str
    conversation_known: bool

    @property
    def hashes(self) -> tuple[str, str]:
        """Hashes of its own token ids, and of the first turn of its conversation."""
        return self.sha256, self.entry.conversation_sha256 or self.sha256


def recorded_prompts(traces: TraceFolder) -> list[RecordedPrompt]:
    """Every prompt, in order; reads token ids only."""
    texts = [(entry, text_of(entry, ids.tolist())) for entry, ids in traces.token_ids()]
    digests = [prompt_sha256(text.prompt) for _, text in texts]
    first_turns = {
        digest
        for (entry, _), digest in zip(texts, digests, strict=True)
        if entry.conversation_sha256 is None
    }
    return [
        RecordedPrompt(
            entry=entry,
            text=text,
            sha256=digest,
            conversation_known=(conversation := entry.conversation_sha256 or digest) in first_turns
            or _begins_with(text.prompt, conversation),
        )
        for (entry, text), digest in zip(texts, digests, strict=True)
    ]


def _begins_with(token_ids: Sequence[int], digest: str) -> bool:
    """Whether `digest` is the `prompt_sha256` of the first of these tokens, however many."""
    hashed = hashlib.sha256()
    for place, token in enumerate(token_ids):
        hashed.update(f"{',' if place else ''}{token}".encode())
        if hashed.hexdigest() == digest:
            return True
    return False


def seen_prompts(traces: TraceFolder) -> SeenPrompts:
    """The prompts of a folder, for the record of what they make."""
    prompts = recorded_prompts(traces)
    texts = [prompt.text for prompt in prompts]
    return SeenPrompts(
        sha256=tuple(sorted({digest for prompt in prompts for digest in prompt.hashes})),
        sketches=Sketches(
            method="64 minima of 4-token shingles, of 16-token ones of continuations, 2",
            minima=_by_category(sketched(texts, continued=False)),
            continuations=_by_category(sketched(texts, continued=True)),
        ),
        target=seen_target(traces),
    )


def seen_target(traces: TraceFolder) -> SeenTarget:
    """The target of a folder, for the same record."""
    target = traces.manifest.target
    return SeenTarget(
        name=target.name, config_sha256=target.config_sha256, weights_sha256=target.weights_sha256
    )


def _by_category(kept: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    by_category: dict[str, tuple[str, ...]] = {}
    for category, text in sorted(kept):
        by_category[category] = (*by_category.get(category, ()), text)
    return by_category


def _stored(sketches: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], int]:
    return {(category, text): 0 for category, texts in sketches.items() for text in texts}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a gate has to know of its prompts.

    Attributes:
        continuations: ids of prompts whose continuation made the draft; at most one in five.
        unknown: what could not be compared with anything, in sentences without a full stop.
    """

    continuations: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def check_held_out(
    candidate: QuantizedProvenance | None, traces: TraceFolder, cuts: Sequence[VocabularyCut] = ()
) -> HeldOut:
    """Compare the prompts of the traces with those that made a draft.

    GateError: one of them was seen itself, or the continuations of too many were.
    """
    made = _made(candidate, cuts)
    unknown = _unsaid(candidate) if candidate and not candidate.calibration_prompts else ()
    if any(seen.sha256 and seen.sketches is None for seen, _ in made):
        unknown += (
            "the candidate's draftquant.json was written by an earlier version and has no sketches"
            " of the calibration prompts: near copies of them among the gate's prompts are not"
            " noticed",
        )
    return HeldOut(continuations=seen_continuations(traces, made), unknown=unknown)


def check_held_out_measured(
    candidate: QuantizedProvenance | None,
    prompts: Sequence[tuple[str, str]],
    name: str,
    cuts: Sequence[VocabularyCut],
) -> tuple[str, ...]:
    """The same for a measurement, which has (id, `prompt_sha256`) of each prompt and no tokens."""
    made = _made(candidate, cuts)
    for seen, what in made:
        known = set(seen.sha256)
        ids = [id_ for id_, digest in prompts if digest in known]
        _refuse_any(name, ids, len(prompts), what, "measure both servers on other prompts")
    if not any(seen.sha256 for seen, _ in made):
        return ()
    return (
        "measurements hold hashes of the prompts, not their text, so prompts that are related to"
        " those that calibrated or chose the candidate are not noticed",
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
    if candidate is not None and candidate.chosen is not None:
        made.append((candidate.chosen.prompts, "chose the candidate's recipe (--recipe auto)"))
    return made


def seen_continuations(
    traces: TraceFolder, made: Sequence[tuple[SeenPrompts, str]]
) -> tuple[str, ...]:
    """Refuse traces with prompts that were seen; the ids of those whose continuation was."""
    prompts = recorded_prompts(traces)
    where, total = traces.folder, len(prompts)
    ids, texts = [prompt.entry.id for prompt in prompts], [prompt.text for prompt in prompts]
    strange = [prompt.entry.id for prompt in prompts if not prompt.conversation_known]
    _refuse_any(
        where,
        strange,
        total,
        "name a conversation (conversation_sha256) whose first turn is not in the folder, and their"
        " tokens do not begin with any first turn",
        "merge the traces of the first turns (traces merge), or record the conversations whole"
        " (record --turns all)",
    )
    again_said: dict[int, str] = {}
    for seen, what in made:
        known = set(seen.sha256)
        again = [prompt.entry.id for prompt in prompts if known.intersection(prompt.hashes)]
        _refuse_any(where, again, total, what, _OTHERS)
        if seen.sketches is None:
            continue
        prompts_known, answers = map(_stored, (seen.sketches.minima, seen.sketches.continuations))
        near = sorted({i for _, i in related(prompts_known, texts, continued=False)})
        repeated = sorted({i for _, i in related(answers, texts, continued=True)})
        share = "share 90% or more of their text (4-token shingles) with prompts that"
        _refuse_any(where, [ids[i] for i in near], total, f"{share} {what}", _OTHERS)
        again_said |= dict.fromkeys(repeated, what)
    repeats = [ids[i] for i in sorted(again_said)]
    if len(repeats) > MOST_SEEN_SHARE * total:
        _refuse_any(
            where,
            repeats,
            total,
            "share 90% or more of their continuations (16-token shingles) with prompts that"
            f" {', or '.join(dict.fromkeys(again_said.values()))}, more than the"
            f" {MOST_SEEN_SHARE:.0%} that are judged with and without them",
            _OTHERS,
        )
    return tuple(repeats)


def _refuse_any(where: object, ids: Sequence[str], total: int, what: str, fix: str) -> None:
    if ids:
        named = ", ".join(ids[:_NAMED]) + (", ..." if len(ids) > _NAMED else "")
        problem = f"{len(ids)} of its {total} prompts {what}: {named}"
        raise GateError(where, problem, fix=fix, ids=ids)


def _unsaid(candidate: QuantizedProvenance) -> tuple[str, ...]:
    origin = candidate.input_scale_origin
    if origin in ("", "--input-scale"):
        return ()
    return (
        "the candidate's draftquant.json does not record on which prompts its input scales were"
        f" measured (it records {origin!r}), so the gate's prompts may be among them",
    )
