"""`check_checkpoint`: one folder, one engine, one verdict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Required, TypedDict, Unpack

from ...recipes.errors import CheckpointError
from ..drafts import read_config
from ..drafts.architectures import (
    OTHER_NAMES,
    SUPPORTED,
    Kind,
    declared_architecture,
    nested_eagle_keys,
)
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import Finding
from ..drafts.geometry import usual_draft_tokens
from ..drafts.recognition import fitting_name, missing_name, other_kind
from ..drafts.runtime_names import known_target_layers
from ..files.checkpoint import Checkpoint
from ..gpus import gpu_name, gpu_names
from ..stored.stored_declaration import quantized_looking
from . import config_rules as rules
from .asked_gpu import AskedGpu
from .contract import TRY, VERDICTS, EngineCheck, EngineName, Layer, Question, explained, shown
from .declared_forms import Declaration, read_declaration
from .engine import Engine, Serving
from .executed import form_of, of_other_form
from .folder_findings import absent_tables, head_notes
from .linear_findings import Walk
from .versions import ENGINES


class CheckAsked(TypedDict, total=False):
    """What is asked about a draft, besides the GPU.

    Attributes:
        has_side_file: hf_quant_config.json is beside config.json.
        tp: number of tensor-parallel shards, at least 1, the default.
        target_layers: decoder layers of the target, after which vLLM numbers the draft's; None = as
            config.json says in num_target_layers, if it does.
        serving: parts of the launch line; None = the draft, and placeholders for the rest.
    """

    engine: Required[EngineName]
    has_side_file: Required[bool]
    tp: int
    target_layers: int | None
    serving: Serving | None


def with_maths(answer: EngineCheck, checkpoint: Checkpoint) -> EngineCheck:
    """The answer with the lints on what a draft computes, if the engine computes anything."""
    from ..lints.catalogue import lints_of_maths

    lints = lints_of_maths(checkpoint) if answer.verdict != "REFUSED" else ()
    notes = (f"{lint.cause}: {lint.remedy}" for lint in lints)
    return replace(answer, notes=(*answer.notes, *notes))


def with_values(answer: EngineCheck, problems: Mapping[str, str]) -> EngineCheck:
    """An answer from headers alone, updated with what the tensors hold.

    Args:
        problems: its tensors with NaN or infinity, as `not_finite` returns them.
    """
    from ..files.finiteness import MEND, lines_of

    if not problems:
        return answer
    text = f"The draft computes NaN, which no engine looks for. {'; '.join(lines_of(problems))}"
    broken = replace(answer, findings=(*answer.findings, Finding("wrong", text, MEND)))
    if answer.verdict != "LOADS":  # what decided it still does
        return broken
    return replace(broken, verdict="LOADS BUT WRONG", error=text, remedy=MEND)


def check_checkpoint(
    checkpoint: Checkpoint,
    *,
    version: str | None = None,
    arch: str | None = None,
    gpu: str | None = None,
    **asked: Unpack[CheckAsked],
) -> EngineCheck:
    """Predict what an engine does with a draft, from headers alone; its folder may not exist yet.

    Args:
        version: of the engine; of any other than the known one the answer is UNKNOWN.
        arch: "gfx942", "sm90", ... (see `gpus`); None = the answer that all of them share.
        gpu: the user's name for the GPU, which the answer uses.

    Raises:
        CheckpointError: it cannot be read as a draft, or `target_layers` is not what config.json
            says.
    """
    place = _place(checkpoint, asked)
    known = place.engine
    if arch is not None:
        place = replace(place, gpu=AskedGpu(arch, gpu_name(arch, gpu)))
    if version not in (None, known.version):
        why = f"The rules of {known.title} {version} are not known, only those of {known.version}"
        answer = _unknown(place, why)
        return replace(answer, version=version, evidence="this version was never executed")
    if arch is None:
        return _agreed(place, list(check_on_each(checkpoint, known.archs, **asked)))
    if arch not in known.checked_gpus:
        why = f"Loading in {known.title} was never executed on {place.gpu}"
        return replace(_unknown(place, why), evidence="")
    return _check(checkpoint, place)


def check_on_each(
    checkpoint: Checkpoint, archs: Iterable[str], **asked: Unpack[CheckAsked]
) -> Iterator[EngineCheck]:
    """One answer for each GPU: GPUs that the rules ask the same share the work."""
    place, known = _place(checkpoint, asked), list[tuple[AskedGpu, EngineCheck]]()
    for arch in archs:
        gpu = AskedGpu(arch, gpu_name(arch))
        answer = next((answer for other, answer in known if other.is_like(gpu)), None)
        if answer is None:
            answer = _check(checkpoint, replace(place, gpu=gpu))
            known.append((gpu, answer))
        yield replace(answer, arch=gpu.arch, gpu=gpu.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where and with what a draft is to be served."""

    engine: Engine
    gpu: AskedGpu
    tp: int
    first_layer: int | None
    has_side_file: bool
    serving: Serving | None


def _place(checkpoint: Checkpoint, asked: CheckAsked) -> _Place:
    engine = ENGINES[asked["engine"]]
    return _Place(
        engine=engine,
        gpu=AskedGpu(None, gpu_names(engine.archs)),
        tp=asked.get("tp", 1),
        first_layer=known_target_layers(checkpoint, asked.get("target_layers")),
        has_side_file=asked["has_side_file"],
        serving=asked.get("serving"),
    )


def _check(checkpoint: Checkpoint, place: _Place) -> EngineCheck:
    kind = other_kind(checkpoint)
    try:
        answer = _check_family(checkpoint, place)
    except CheckpointError:
        if kind is None:
            raise
        answer = _unknown(place, f"Loading {kind.name} was never executed")
    if kind is not None:
        return _of_kind(place, kind, answer)
    return answer if answer.verdict == "LOADS" else _of_name(place, checkpoint, answer)


def _of_kind(place: _Place, kind: Kind, answer: EngineCheck) -> EngineCheck:
    """What the draft is, instead of findings about single tensors and keys."""
    untried = f"What {place.engine.title} computes with it was never executed"
    first = next(iter(answer.findings), Finding("load", "", ""))
    if first.stage == "load":  # of a family's names, not its own
        first = Finding("unknown", untried, "")
    text = f"The draft is {kind.name}, which no family of draftquant reads. {first.text}"
    remedy = TRY if first.stage == "unknown" else kind.fix
    return _answer(place, [Finding(first.stage, text, remedy)])


def _of_name(place: _Place, checkpoint: Checkpoint, answer: EngineCheck) -> EngineCheck:
    """An architecture that does not fit the tensors, instead of what the tensors lack."""
    engine, first = place.engine, answer.findings[0]
    fitting, declared = fitting_name(checkpoint), declared_architecture(checkpoint.config)
    if fitting is None and first.remedy:
        return answer
    known = fitting_name(checkpoint, engine.architectures, misnamed=fitting is not None)
    name, remedy = fitting or declared, SUPPORTED
    having = [each.title for each in ENGINES.values() if name in each.architectures]
    if known is not None:
        remedy = f"set architectures to {known}, whose tensors these are"
    elif not declared or nested_eagle_keys(checkpoint.config) is not None:
        remedy = missing_name(checkpoint)
    elif having:
        remedy = f"serve it with {having[0]}, as {name}: {engine.title} has no such draft"
    return _answer(place, [first._replace(remedy=remedy)])


def _as_read(
    engine: Engine, checkpoint: Checkpoint, gpu: AskedGpu
) -> tuple[Checkpoint, Declaration | None] | Finding:
    """A folder with config.json as the engine reads it, and the declaration that it takes.

    In the order in which an engine reads them; or neither, where it refuses.
    """
    problem = engine.form_problem(checkpoint.config)
    config = problem or engine.plain_config(checkpoint.config)
    if isinstance(config, Finding):
        return config
    name = declared_architecture(config)
    if name in engine.unserved or not config.get("architectures"):
        problem = engine.rule("architecture", name=name)
    if problem is not None:
        return problem
    if name not in engine.architectures:
        what = f"a draft of architectures {config.get('architectures')!r}"
        return Finding("unknown", f"Loading {what} was never executed", TRY)
    checkpoint = replace(checkpoint, config=engine.as_declared(config))
    declaration = read_declaration(checkpoint)
    taken = declaration and engine.taken(declaration, gpu)
    if isinstance(taken, Finding):
        return taken
    if taken is not None and not taken.method:  # most go on as if nothing were declared
        looks = quantized_looking(checkpoint.tensors.values())
        return engine.rule("method", says_nothing=not looks) or (checkpoint, None)
    return checkpoint, taken


def _check_family(checkpoint: Checkpoint, place: _Place) -> EngineCheck:
    engine, written = place.engine, checkpoint.config
    as_read = _as_read(engine, checkpoint, place.gpu)
    if isinstance(as_read, Finding):
        return _answer(place, [as_read])
    checkpoint, declaration = as_read
    config = checkpoint.config
    plain = replace(checkpoint, config=rules.without_biases(config))
    family, read = read_config(plain, as_declared=True)
    in_engine, name = engine.own(family.engine_traits), declared_architecture(config)
    if name not in in_engine.architectures:
        wanted = OTHER_NAMES.get(name)
        remedy = f"set architectures to {wanted}" if wanted in in_engine.architectures else TRY
        return _unknown(place, f"Loading {family.name} as {name} was never executed", remedy)
    fusion = rules.fusion_of(in_engine, read)
    geometry = rules.as_built(engine, family, read, config, fusion)
    if isinstance(geometry, Finding):
        return _answer(place, [geometry])
    stored = checkpoint.tensors.values()
    heads = (t for t in stored if family.canonical_name(t.name) == "lm_head.weight")
    question = Question(
        traits=family.engine_traits,
        own=in_engine,
        config=with_text_config(config),
        declaration=declaration,
        has_side_file=place.has_side_file,
        tensor_names=frozenset(checkpoint.tensors),
        head_rows=next((t.shape[0] for t in heads if len(t.shape) == 2), None),
        num_layers=geometry.num_layers,
        first_layer=place.first_layer,
        normed_heads=geometry.normed_heads,
        fuses=geometry.fuses,
        inside_target=checkpoint.subtree is not None,
        stacks_experts=checkpoint.stacks_experts,
        is_mixture=getattr(geometry, "mixture", None) is not None,
        arch=place.gpu,
        tp=place.tp,
    )
    problem = engine.config_problem(question)
    walk = Walk(
        engine=engine,
        question=question,
        checkpoint=checkpoint,
        family=family,
        geometry=geometry,
        specs=family.tensor_specs(geometry),
    )
    layers, findings = walk.layers_and_findings()
    captures = engine.captures(question) if read.fuses else ()
    fused, ids = geometry.num_aux_layers if fusion else None, read.aux_layer_ids
    misread = [rules.misread_layers(each, ids, place.first_layer, fused) for each in captures]
    layers_remedy = rules.remedy_of_layers(config, ids, fused)
    if misread and misread[0] is not None:
        findings.append(Finding("wrong", misread[0], layers_remedy))
    serving = place.serving or Serving(draft=str(checkpoint.folder))
    if serving.cache_dtype is None and declaration is not None:
        serving = replace(serving, cache_dtype=declaration.cache_dtype)
    launch = engine.launch(question, usual_draft_tokens(geometry), serving)
    rotation = None if in_engine.mtp else rules.rope_problem(question, engine)
    findings = [*filter(None, (rotation, problem)), *findings]
    form = form_of(walk, layers, written)
    if not findings and (other := of_other_form(engine, form)) is not None:
        findings = [other]
    answer = replace(_answer(place, findings, layers, launch), form=form)
    if answer.verdict == "LOADS":
        answer = replace(answer, evidence=f"{answer.evidence}. Its form: {form.in_words}")
    notes = [f"{text}: {layers_remedy}" for text in misread[1:] if text is not None]
    notes += [*absent_tables(walk), *head_notes(walk, answer.verdict)]
    return replace(answer, captures=captures, notes=tuple(notes))


def _answer(
    place: _Place,
    findings: Sequence[Finding],
    layers: Sequence[Layer] = (),
    launch: str | None = None,
) -> EngineCheck:
    """The verdict of the deciding finding; findings in that order, each in words for people."""
    engine = place.engine
    readable = dict.fromkeys(
        Finding(
            each.stage,
            explained(shown(each.text), engine=engine.title, gpu=place.gpu),
            shown(each.remedy.replace(TRY, engine.untried)),
        )
        for each in findings
    )
    ordered = sorted(readable, key=lambda finding: [*VERDICTS].index(finding.stage))
    first = ordered[0] if ordered else None
    return EngineCheck(
        engine=engine.name,
        version=engine.version,
        arch=place.gpu.arch,
        gpu=place.gpu.name,
        tp=place.tp,
        verdict=VERDICTS[first.stage] if first else "LOADS",
        evidence=engine.evidence,
        error=first.text if first else None,
        remedy=first.remedy if first else None,
        layers=tuple(layers),
        launch=launch,
        launch_note=engine.launch_note if launch else None,
        findings=tuple(ordered),
    )


def _unknown(place: _Place, why: str, remedy: str = TRY) -> EngineCheck:
    return _answer(place, [Finding("unknown", why, remedy)])


def _agreed(place: _Place, answers: Sequence[EngineCheck]) -> EngineCheck:
    """One answer for all GPUs; where they differ, the answer depends on the GPU."""
    if len({answer.verdict for answer in answers}) == 1:
        return replace(answers[0], arch=None, gpu=place.gpu.name)
    by_gpu = {answer.gpu: answer.verdict for answer in answers}
    each = "; ".join(
        f"{verdict} on {', '.join(gpu for gpu in by_gpu if by_gpu[gpu] == verdict)}"
        for verdict in dict.fromkeys(by_gpu.values())
    )
    first = next(answer for answer in answers if answer.verdict != "LOADS")
    finding = Finding("unknown", f"Depends on the GPU: {each}", "name yours with --gpu")
    return replace(
        _answer(place, [finding, *first.findings], launch=first.launch),
        verdict="UNKNOWN",
        error=finding.text,
        remedy=finding.remedy,
        by_gpu=by_gpu,
        archs=tuple(answer.arch for answer in answers if answer.arch is not None),
    )
