"""`check_checkpoint`: one folder, one engine, one verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Required, TypedDict, Unpack

from ...recipes.errors import CheckpointError
from ..drafts import Family, read_config
from ..drafts.architectures import (
    OTHER_NAMES,
    SUPPORTED,
    Kind,
    declared_architecture,
    nested_eagle_keys,
)
from ..drafts.engine_traits import Finding
from ..drafts.geometry import usual_draft_tokens
from ..drafts.recognition import (
    fitting_name,
    missing_name,
    other_kind,
)
from ..drafts.runtime_names import known_target_layers
from ..files.checkpoint import Checkpoint
from ..gpus import gpu_name, gpu_names
from ..stored.stored_declaration import quantized_looking
from .config_rules import (
    misread_layers,
    remedy_of_layers,
    rope_problem,
    with_built_fc,
    with_norms,
    without_biases,
)
from .contract import (
    ENGINE_NAMES,
    STAGES,
    TRY,
    VERDICTS,
    EngineCheck,
    EngineName,
    Layer,
    Question,
    explained,
    shown,
)
from .declared_forms import Declaration, read_declaration
from .engine import Engine, Serving
from .executed import form_of, of_other_form
from .folder_findings import head_notes, unshared
from .linear_findings import Walk
from .versions import ENGINES


class CheckAsked(TypedDict, total=False):
    """What is asked about a draft.

    Attributes:
        version: of the engine; of any other than the known one the answer is UNKNOWN.
        arch: "gfx942", "sm90", ... (see `gpus`); None = the answer that all of them share.
        tp: number of tensor-parallel shards, at least 1, the default.
        target_layers: decoder layers of the target, after which vLLM numbers the draft's; None = as
            config.json says in num_target_layers, if it does.
        asked: the user's name for the GPU, which the answer uses.
        serving: parts of the launch line; None = the draft, and placeholders for the rest.
    """

    engine: Required[EngineName]
    version: str | None
    arch: str | None
    tp: int
    target_layers: int | None
    asked: str | None
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
    checkpoint: Checkpoint, *, has_side_file: bool, **asked: Unpack[CheckAsked]
) -> EngineCheck:
    """Predict what an engine does with a draft, from headers alone; its folder may not exist yet.

    `has_side_file`: hf_quant_config.json is beside config.json.

    Raises:
        CheckpointError: it cannot be read as a draft, there is no such engine, or `target_layers`
            is not what config.json says.
    """
    _check_asked(asked)
    engine, version, arch = asked["engine"], asked.get("version"), asked.get("arch")
    known = ENGINES[engine]
    place = _Place(
        engine=known,
        arch=arch,
        tp=asked.get("tp", 1),
        gpu=gpu_name(arch, asked.get("asked")) if arch is not None else gpu_names(known.archs),
        first_layer=known_target_layers(checkpoint, asked.get("target_layers")),
        has_side_file=has_side_file,
        serving=asked.get("serving"),
    )
    if version not in (None, known.version):
        why = f"The rules of {known.title} {version} are not known, only those of {known.version}"
        answer = _unknown(place, why)
        return replace(answer, version=version, evidence="this version was never executed")
    if arch is None:
        every = (replace(place, arch=each, gpu=gpu_name(each)) for each in known.archs)
        return _agreed(place, [_check(checkpoint, each) for each in every])
    if arch not in known.checked_gpus:
        why = f"Loading in {known.title} was never executed on {place.gpu}"
        return replace(_unknown(place, why), evidence="")
    return _check(checkpoint, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where and with what a draft is to be served; `gpu` is the name of `arch` for people."""

    engine: Engine
    arch: str | None
    tp: int
    gpu: str
    first_layer: int | None
    has_side_file: bool
    serving: Serving | None


def _check_asked(asked: CheckAsked) -> None:
    engine, tp = asked["engine"], asked.get("tp", 1)
    if engine not in ENGINE_NAMES:
        fix = f"engines: {', '.join(ENGINE_NAMES)}"
        raise CheckpointError("--engine", f"no engine is called {engine!r}", fix=fix)
    if tp < 1:
        what = f"expected a number of GPUs, at least 1, got {tp}"
        raise CheckpointError("--tp", what, fix="leave it out for one GPU")


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
    first = Finding("unknown", untried, "")
    if answer.findings and answer.findings[0].stage != "load":  # of a family's names, not its own
        first = answer.findings[0]
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
    name = fitting or declared
    having = [each.title for each in ENGINES.values() if name in each.architectures]
    if known is not None:
        remedy = f"set architectures to {known}, whose tensors these are"
    elif not declared or nested_eagle_keys(checkpoint.config) is not None:
        remedy = missing_name(checkpoint)
    elif having:
        remedy = f"serve it with {having[0]}, as {name}: {engine.title} has no such draft"
    else:
        remedy = SUPPORTED
    return _answer(place, [first._replace(remedy=remedy)])


def _as_read(
    engine: Engine, checkpoint: Checkpoint, arch: str
) -> tuple[Checkpoint, Declaration | None] | Finding:
    """A folder with config.json as the engine reads it, and the declaration that it takes.

    In the order in which an engine reads them; or neither, where it refuses.
    """
    config = engine.plain_config(checkpoint.config)
    if isinstance(config, Finding):
        return config
    if (problem := engine.architecture_problem(config)) is not None:
        return problem
    if declared_architecture(config) not in engine.architectures:
        what = f"a draft of architectures {config.get('architectures')!r}"
        return Finding("unknown", f"Loading {what} was never executed", TRY)
    checkpoint = replace(checkpoint, config=engine.as_declared(config))
    declaration = read_declaration(checkpoint)
    taken = declaration and engine.taken(declaration, arch)
    if isinstance(taken, Finding):
        return taken
    if taken is not None and not taken.method:  # most go on as if nothing were declared
        looks = quantized_looking(checkpoint.tensors.values())
        return engine.rule("method", says_nothing=not looks) or (checkpoint, None)
    return checkpoint, taken


def _check_family(checkpoint: Checkpoint, place: _Place) -> EngineCheck:
    """The check by the family that reads the draft."""
    engine, arch, written = place.engine, place.arch or "", checkpoint.config
    as_read = _as_read(engine, checkpoint, arch)
    if isinstance(as_read, Finding):
        return _answer(place, [as_read])
    checkpoint, declaration = as_read
    config = checkpoint.config
    plain = replace(checkpoint, config=without_biases(config))
    family, read = read_config(plain, as_declared=True)
    in_engine = engine.own(family.engine_traits)
    name = declared_architecture(config)
    if name not in in_engine.architectures:
        wanted = OTHER_NAMES.get(name)
        remedy = f"set architectures to {wanted}" if wanted in in_engine.architectures else TRY
        return _unknown(place, f"Loading {family.name} as {name} was never executed", remedy)
    fusion = (in_engine.normed_fusion if read.normed_heads else None) or in_engine.fusion
    fusion = fusion if read.fuses else None
    geometry: Any = with_built_fc(fusion, read, config) if fusion else read
    if isinstance(geometry, Finding):
        return _answer(place, [geometry])
    geometry = with_norms(engine, family, geometry, checkpoint.config)
    stored = checkpoint.tensors.values()
    heads = (t for t in stored if family.canonical_name(t.name) == "lm_head.weight")
    question = engine.question(
        checkpoint,
        family.engine_traits,
        geometry,
        declaration=declaration,
        has_side_file=place.has_side_file,
        head_rows=next((t.shape[0] for t in heads if len(t.shape) == 2), None),
        first_layer=place.first_layer,
        arch=arch,
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
    fused = geometry.num_aux_layers if fusion else None
    ids = read.aux_layer_ids
    misread = [misread_layers(each, ids, place.first_layer, fused) for each in captures]
    layers_remedy = remedy_of_layers(config, ids, fused)
    if misread and misread[0] is not None:
        findings = [*findings, Finding("wrong", misread[0], layers_remedy)]
    serving = place.serving or Serving(draft=str(checkpoint.folder))
    serving = serving.with_cache(declaration.cache_dtype if declaration else None)
    launch = engine.launch(question, usual_draft_tokens(geometry), serving)
    rotation = None if in_engine.mtp else rope_problem(question, engine)
    findings = [*filter(None, (rotation, problem)), *findings]
    answer = _answer(place, findings, layers, launch or None)
    answer = _as_executed(place, replace(answer, form=form_of(walk, layers, written)))
    notes = [f"{text}: {layers_remedy}" for text in misread[1:] if text is not None]
    notes += _absent_tables(engine, question, family)
    notes += head_notes(walk, answer.verdict)
    return replace(answer, captures=captures, notes=tuple(notes))


def _as_executed(place: _Place, answer: EngineCheck) -> EngineCheck:
    """LOADS for an executed form alone, which the evidence names."""
    form = answer.form
    if answer.verdict != "LOADS" or form is None:
        return answer
    if (other := of_other_form(place.engine, form)) is None:
        return replace(answer, evidence=f"{answer.evidence}. Its form: {form.in_words}")
    return replace(_answer(place, [other], answer.layers, answer.launch), form=form)


def _absent_tables(engine: Engine, question: Question, family: Family) -> list[str]:
    names = question.tensor_names
    stored = {family.canonical_name(name).rpartition(".")[0] for name in names}
    tied = question.config.get("tie_word_embeddings") is True
    is_served = engine.rule("unshared_head", **unshared(question)) is None
    unneeded = {"lm_head"} if tied or not is_served else set()
    return [text for table, text in engine.absent_tables.items() if table not in stored | unneeded]


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
    ordered = sorted(readable, key=lambda finding: STAGES.index(finding.stage))
    first = ordered[0] if ordered else None
    return EngineCheck(
        engine=engine.name,
        version=engine.version,
        arch=place.arch,
        gpu=place.gpu,
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
        return replace(answers[0], arch=None, gpu=place.gpu)
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
