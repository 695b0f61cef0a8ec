"""`check_checkpoint`: one folder, one engine, one verdict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ..drafts.engine_traits import AskedGpu, Finding
from ..drafts.geometry import usual_draft_tokens
from ..drafts.recognition import fitting_name, missing_name, other_kind
from ..drafts.runtime_names import known_target_layers
from ..files.checkpoint import Checkpoint
from ..gpus import gpu_name, gpu_names
from ..stored.stored_declaration import quantized_looking
from . import config_rules as rules
from .contract import (
    TRY,
    VERDICTS,
    Captures,
    DraftForm,
    EngineCheck,
    EngineName,
    Linears,
    Question,
    explained,
    shown,
)
from .declared_forms import Declaration, read_declaration
from .engine import BuildingEngine, Engine, Serving
from .executed import form_of, of_other_form
from .folder_findings import absent_tables
from .linear_findings import Walk
from .versions import ENGINES

_BIASES = ("attention_bias", "mlp_bias")
"""Keys of config.json; a family that knows them reads them."""


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
        place = replace(place, arch=arch, gpu=gpu_name(arch, gpu))
    if version not in (None, known.version):
        why = f"The rules of {known.title} {version} are not known, only those of {known.version}"
        answer = _unknown(place, why)
        return replace(answer, version=version, evidence="this version was never executed")
    if arch is None:
        return _agreed(place, list(check_on_each(checkpoint, known.archs, **asked)))
    if arch not in known.checked_gpus:
        why = f"Loading in {known.title} was never executed on {place.gpu}"
        return replace(_unknown(place, why), evidence="")
    return _answer(place, _found(checkpoint, place, AskedGpu(arch=arch)))


def check_on_each(
    checkpoint: Checkpoint, archs: Iterable[str], **asked: Unpack[CheckAsked]
) -> Iterator[EngineCheck]:
    """One answer for each GPU: GPUs that answer the questions of rules alike share the work."""
    place, known = _place(checkpoint, asked), list[tuple[AskedGpu, _Found]]()
    for arch in archs:
        found = next((found for gpu, found in known if gpu.answers_for(arch)), None)
        if found is None:
            gpu = AskedGpu(arch=arch)
            found = _found(checkpoint, place, gpu)
            known.append((gpu, found))
        yield _answer(replace(place, arch=arch, gpu=gpu_name(arch)), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where and with what a draft is to be served; `gpu` is for people."""

    engine: Engine
    arch: str | None
    gpu: str
    tp: int
    first_layer: int | None
    has_side_file: bool
    serving: Serving | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What GPUs share that answer alike; the findings in the engine's words, if there are any.

    Attributes:
        kind: what the draft is, where no family reads it.
    """

    findings: Sequence[Finding]
    linears: Linears = field(default_factory=dict)
    launch: str | None = None
    captures: Captures = None
    notes: tuple[str, ...] = ()
    form: DraftForm | None = None
    kind: Kind | None = None


def _place(checkpoint: Checkpoint, asked: CheckAsked) -> _Place:
    engine = ENGINES[asked["engine"]]
    return _Place(
        engine=engine,
        arch=None,
        gpu=gpu_names(engine.archs),
        tp=asked.get("tp", 1),
        first_layer=known_target_layers(checkpoint, asked.get("target_layers")),
        has_side_file=asked["has_side_file"],
        serving=asked.get("serving"),
    )


def _found(checkpoint: Checkpoint, place: _Place, gpu: AskedGpu) -> _Found:
    kind = other_kind(checkpoint)
    try:
        found = _found_in_family(checkpoint, place, gpu)
    except CheckpointError:
        if kind is None:
            raise
        found = _unknown_because(f"Loading {kind.name} was never executed")
    if kind is not None:
        return _Found(findings=found.findings, kind=kind)
    asks_no_tensors = found.launch is not None and not isinstance(place.engine, BuildingEngine)
    if not found.findings or asks_no_tensors:
        return found
    return _of_name(place.engine, checkpoint, found)


def _of_kind(engine: Engine, kind: Kind, first: Finding | None) -> Finding:
    """What the draft is, instead of findings about single tensors and keys."""
    if first is None or first.stage == "load":  # of a family's names, not its own
        text = f"What {engine.title} computes with it was never executed"
        first = Finding("unknown", text, "")
    text = f"The draft is {kind.name}, which no family of draftquant reads. {first.text}"
    return Finding(first.stage, text, engine.untried if first.stage == "unknown" else kind.fix)


def _of_name(engine: Engine, checkpoint: Checkpoint, found: _Found) -> _Found:
    """An architecture that does not fit the tensors, instead of what the tensors lack."""
    first, declared = _in_order(found.findings)[0], declared_architecture(checkpoint.config)
    fitting = fitting_name(checkpoint)
    if fitting is None and first.remedy:
        return found
    known = fitting_name(checkpoint, engine.architectures, misnamed=fitting is not None)
    name, remedy = fitting or declared, SUPPORTED
    having = [each.title for each in ENGINES.values() if name in each.architectures]
    if known is not None:
        remedy = f"set architectures to {known}, whose tensors these are"
    elif not declared or nested_eagle_keys(checkpoint.config) is not None:
        remedy = missing_name(checkpoint)
    elif having:
        remedy = f"serve it with {having[0]}, as {name}: {engine.title} has no such draft"
    return _Found(findings=[first._replace(remedy=remedy)])


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
    taken = declaration and engine.taken(declaration)
    if taken is not None and (refused := engine.declaration_problem(taken, gpu)) is not None:
        return refused
    if taken is not None and not taken.method:  # most go on as if nothing were declared
        looks = quantized_looking(checkpoint.tensors.values())
        return engine.rule("method", says_nothing=not looks) or (checkpoint, None)
    return checkpoint, taken


def _found_in_family(checkpoint: Checkpoint, place: _Place, gpu: AskedGpu) -> _Found:
    engine, written = place.engine, checkpoint.config
    as_read = _as_read(engine, checkpoint, gpu)
    if isinstance(as_read, Finding):
        return _Found(findings=[as_read])
    checkpoint, declaration = as_read
    config = checkpoint.config
    try:
        family, read = read_config(checkpoint, as_declared=True)
    except CheckpointError:
        if not any(config.get(key) is True for key in _BIASES):
            raise
        return _unknown_because("Loading such a draft with biases was never executed")
    in_engine, name = engine.own(family.engine_traits), declared_architecture(config)
    if name not in in_engine.architectures:
        if declaration is None and (executed := in_engine.as_another.get(name)) is not None:
            return _Found(findings=[executed])
        wanted = OTHER_NAMES.get(name)
        remedy = f"set architectures to {wanted}" if wanted in in_engine.architectures else TRY
        return _unknown_because(f"Loading {family.name} as {name} was never executed", remedy)
    geometry = rules.as_built(engine, family, read, config)
    if isinstance(geometry, Finding):
        return _Found(findings=[geometry])
    question = Question(
        checkpoint=checkpoint,
        family=family,
        own=in_engine,
        geometry=geometry,
        declaration=declaration,
        has_side_file=place.has_side_file,
        first_layer=place.first_layer,
        gpu=gpu,
        tp=place.tp,
    )
    serving = place.serving or Serving(draft=str(checkpoint.folder))
    if serving.cache_dtype is None and declaration is not None:
        serving = replace(serving, cache_dtype=declaration.cache_dtype)
    launch = engine.launch(question, usual_draft_tokens(geometry), serving)
    problem = engine.config_problem(question)
    if not isinstance(engine, BuildingEngine):
        return _Found(findings=[problem] if problem else [], launch=launch)
    linears, findings = Walk(engine, question).linears_and_findings()
    captures, ids = engine.captures(question.config) if read.fuses else None, read.aux_layer_ids
    misread = rules.misread_layers(engine.title, captures, ids, place.first_layer)
    if read.fuses and misread is not None:
        findings.append(Finding("wrong", misread, rules.remedy_of_layers(config, ids)))
    rotation = None if in_engine.mtp else rules.rope_problem(question, engine)
    findings = [*filter(None, (rotation, problem)), *findings]
    form = form_of(question, linears, written)
    if not findings and (other := of_other_form(engine, form)) is not None:
        findings = [other]
    return _Found(
        findings=findings,
        linears=linears,
        launch=launch,
        captures=captures,
        notes=tuple(absent_tables(engine, question)),
        form=form,
    )


def _answer(place: _Place, found: _Found) -> EngineCheck:
    """The verdict of the deciding finding; findings in that order, each in words for people."""
    engine = place.engine
    findings = [
        Finding(
            each.stage,
            explained(shown(each.text), engine=engine.title, gpu=place.gpu),
            shown(each.remedy.replace(TRY, engine.untried)),
        )
        for each in _in_order(found.findings)
    ]
    if found.kind is not None:
        findings = [_of_kind(engine, found.kind, next(iter(findings), None))]
    first, evidence = next(iter(findings), None), engine.evidence
    verdict = VERDICTS[first.stage] if first else "LOADS"
    if first is None and found.form is not None:
        evidence = f"{evidence}. Its form: {found.form.in_words}"
    return EngineCheck(
        engine=engine.name,
        version=engine.version,
        arch=place.arch,
        gpu=place.gpu,
        tp=place.tp,
        verdict=verdict,
        evidence=evidence,
        error=first.text if first else None,
        remedy=first.remedy if first else None,
        linears=found.linears,
        launch=found.launch,
        launch_note=engine.launch_note if found.launch else None,
        findings=tuple(dict.fromkeys(findings)),
        captures=found.captures,
        notes=found.notes if verdict != "REFUSED" else (),
        form=found.form,
    )


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The deciding one first."""
    return sorted(findings, key=lambda each: [*VERDICTS].index(each.stage))


def _unknown_because(why: str, remedy: str = TRY) -> _Found:
    return _Found(findings=[Finding("unknown", why, remedy)])


def _unknown(place: _Place, why: str) -> EngineCheck:
    return _answer(place, _unknown_because(why))


def _agreed(place: _Place, answers: Sequence[EngineCheck]) -> EngineCheck:
    """One answer for all GPUs; where they differ, the answer depends on the GPU."""
    if len({answer.verdict for answer in answers}) == 1:
        return replace(answers[0], arch=None, gpu=place.gpu)
    by_gpu = {answer.gpu: answer.verdict for answer in answers}
    each = "; ".join(
        f"{verdict} on {', '.join(gpu for gpu in by_gpu if by_gpu[gpu] == verdict)}"
        for verdict in dict.fromkeys(by_gpu.values())
    )
    first = next(answer for answer in answers if answer.verdict != "LOADS")
    finding = Finding("unknown", f"Depends on the GPU: {each}", "name yours with --gpu")
    return replace(
        _answer(place, _Found(findings=[finding, *first.findings], launch=first.launch)),
        verdict="UNKNOWN",
        error=finding.text,
        remedy=finding.remedy,
        by_gpu=by_gpu,
    )
