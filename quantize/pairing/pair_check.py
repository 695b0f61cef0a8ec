"""What engines do with a draft, alone or beside its target."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.packages import rows_beside
from ..asked import Checking
from ..drafts import read_config
from ..drafts.config_reader import with_text_config
from ..drafts.recognition import other_kind
from ..drafts.runtime_names import target_layers_named
from ..engines.contract import (
    ENGINE_NAMES,
    EXIT_CODES,
    FROM_WORST,
    TITLES,
    EngineCheck,
    EngineName,
    Verdict,
)
from ..engines.engine import Serving
from ..engines.engine_check import (
    CheckAsked,
    check_checkpoint,
    check_on_each,
    with_maths,
    with_values,
)
from ..engines.row_conditions import counts
from ..engines.versions import ENGINES
from ..files.checkpoint import Checkpoint
from ..files.finiteness import not_finite
from ..files.hub import resolve_draft, resolve_target
from ..gpus import architecture
from ..lints.catalogue import lints_of_maths
from ..stored.layouts import HF_QUANT_CONFIG
from . import dtypes, features, inherited, serving_limits
from .pair import (
    EnginePair,
    Pair,
    PairCheck,
    PairFinding,
    TargetArgs,
    in_order,
    tensor_parallel_size,
)
from .target import Target, Tokenizer, check_operands


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(Brief):
    """What engines do with a draft.

    Attributes:
        answers: one for each engine that was asked.
        pair: what the engines do with the draft beside its target; None without `target=`.
    """

    answers: tuple[EngineCheck, ...]
    pair: PairCheck | None = None

    @property
    def answer(self) -> EngineCheck:
        """The best of the answers, the first of equal ones."""
        return max(self.answers, key=lambda each: FROM_WORST.index(each.verdict))

    @property
    def verdict(self) -> Verdict:
        """LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN: for the pair, where a target is given."""
        return (self.pair or self.answer).verdict

    @property
    def remedy(self) -> str | None:
        """What to do where it does not load, None where it does."""
        return (self.pair or self.answer).remedy

    @property
    def exit_code(self) -> int:
        """0 LOADS in one of the engines, 1 LOADS BUT WRONG or REFUSED in all, 3 UNKNOWN."""
        return EXIT_CODES[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.pair is not None:
            return self.pair.to_mapping()
        answers = [dataclasses.asdict(each) for each in self.answers]
        for each in answers:
            each["findings"] = [finding._asdict() for finding in each["findings"]]
        return answers[0] if len(answers) == 1 else {"verdict": self.verdict, "engines": answers}

    @override
    def brief(self) -> Mapping[str, object]:
        if self.pair is None and len(self.answers) > 1:
            return {"verdict": self.verdict, **{a.title: a.verdict for a in self.answers}}
        return (self.pair or self.answer).brief()


_ITS_OWN_TARGET = "give the target that this draft was trained for"


def check_as_asked(asked: Checking, largest_feature: Callable[[], float | None]) -> CheckReport:
    """The answers of the engines for the draft alone, and for the pair."""
    folder = resolve_draft(str(asked.draft), asked.subtree).folder
    arch = architecture(asked.gpu) if asked.gpu else None
    if asked.target is not None:
        target = resolve_target(str(asked.target))
        check_operands(target, folder)  # what the Hub delivered too
        pair = check_pair(folder, target, asked, arch=arch, largest_feature=largest_feature())
        return CheckReport(answers=tuple(each.answer for each in pair.engines), pair=pair)
    draft = Checkpoint.open(folder)
    answers = _answers(draft, asked, arch)
    return CheckReport(answers=tuple(with_maths(each, draft) for each in answers))


def _answers(
    checkpoint: Checkpoint, asked: Checking, arch: str | None, pair: Pair | None = None
) -> tuple[EngineCheck, ...]:
    """What each engine that is asked does with the draft alone, its values included.

    Beside a target, whose launch line they then have, GPUs on which an engine differs have an
    answer each.
    """
    answers = []
    for engine in ENGINE_NAMES if asked.engine is None else (asked.engine,):
        about = CheckAsked(
            engine=engine,
            has_side_file=(checkpoint.folder / HF_QUANT_CONFIG).is_file(),
            tp=pair.tp if pair else asked.tp or 1,
            target_layers=_target_layers(pair) if pair else asked.target_layers,
            serving=_serving(pair, engine, str(asked.draft)) if pair else None,
        )
        answer = check_checkpoint(
            checkpoint, version=asked.version, arch=arch, gpu=asked.gpu, **about
        )
        split = ENGINES[engine].archs if pair and answer.by_gpu else ()
        answers += [*check_on_each(checkpoint, split, **about)] or [answer]
    broken = not_finite(checkpoint)
    return tuple(with_values(each, broken) for each in answers)


def check_pair(
    draft: Path,
    target: Path,
    asked: Checking,
    *,
    arch: str | None = None,
    largest_feature: float | None = None,
) -> PairCheck:
    """Predict what engines do with a draft beside its target, and how to serve the two.

    An engine has an answer for each GPU where none is named and they differ.

    Args:
        draft, target: local folders of what `asked` names.
        arch: of the GPU that `asked` names.

    Raises:
        CheckpointError: a folder cannot be read as a draft or as a target, or the words of
            `target_args` are not understood.
    """
    pair = _pair(draft, target, asked, largest_feature)
    answers = _answers(pair.draft, asked, arch, pair)
    engines, findings = _beside(pair, answers)
    return PairCheck(
        draft=str(asked.draft),
        target=pair.target.named,
        engines=engines,
        findings=findings,
        tensor_parallel=serving_limits.sizes_of_both(pair),
        not_compared=tuple(_not_compared(pair)),
    )


def loads_beside(folder: Path, target: Path) -> tuple[EnginePair, ...]:
    """What each known engine does with a draft beside its target, on each of the engine's GPUs."""
    pair = _pair(folder, target, Checking(folder, target=target))
    answers = [
        answer
        for name, engine in ENGINES.items()
        for answer in check_on_each(
            pair.draft,
            engine.gpus,
            engine=name,
            target_layers=_target_layers(pair),
            has_side_file=(folder / HF_QUANT_CONFIG).is_file(),
        )
    ]
    return _beside(pair, answers)[0]


def _pair(draft: Path, target: Path, asked: Checking, largest_feature: float | None = None) -> Pair:
    args, subtree = TargetArgs.parse(asked.target_args), asked.subtree
    tp = tensor_parallel_size(asked.tp, args)
    checkpoint = Checkpoint.open(draft, subtree=subtree, is_target=subtree is not None)
    kind = other_kind(checkpoint)  # each engine's answer says it
    family, geometry = read_config(checkpoint, as_declared=bool(kind and not kind.in_config))
    return Pair(
        draft=checkpoint,
        config=with_text_config(checkpoint.config),
        family=family,
        geometry=geometry,
        target=Target.read(target, str(asked.target)),
        args=args,
        tp=tp,
        own_tokenizer=Tokenizer.read(draft),
        target_tokenizer=Tokenizer.read(target),
        largest_feature=largest_feature,
    )


def _target_layers(pair: Pair) -> int | None:
    """None where config.json names a target of another depth."""
    known = target_layers_named(pair.draft.config) in (None, pair.target.num_layers)
    return pair.target.num_layers if known else None


def _beside(
    pair: Pair, answers: Sequence[EngineCheck]
) -> tuple[tuple[EnginePair, ...], tuple[PairFinding, ...]]:
    """The answers for the draft alone, each with what is found of the pair in its engine; all."""
    findings = list(_findings(pair, tuple(dict.fromkeys(each.engine for each in answers))))
    findings += [each for answer in answers for each in features.handed_out(pair, answer)]
    for lint in lints_of_maths(pair.draft):
        findings.append(PairFinding(lint.level, lint.name, lint.cause, lint.remedy))
    engines = tuple(
        EnginePair(
            answer=each,
            findings=in_order(f for f in findings if f.engine in (None, each.engine)),
            launch=each.launch,
        )
        for each in answers
    )
    return engines, in_order(findings)


def _findings(pair: Pair, engines: Sequence[EngineName]) -> Iterator[PairFinding]:
    """What the rows of findings.toml say, in their order; "each" applies to every engine singly."""
    common = {
        "is_whole_model": pair.is_whole_model,
        **features.facts(pair),
        **serving_limits.facts(pair),
        **dtypes.facts(pair, engines),
        **inherited.facts(pair),
    }
    facts: dict[EngineName | None, dict[str, Any]] = {None: common}
    for engine in engines:
        facts[engine] = {
            **common,
            "title": TITLES[engine],
            "is_narrow": dtypes.is_narrow(pair, engine),
            **serving_limits.facts_in(pair, engine),
            **inherited.facts_in(pair, engine),
        }
    for name, row in rows_beside(__file__, "findings").items():
        about = row.get("engine")
        for each in engines if about == "each" else {about} & facts.keys():
            if counts(row, known := facts[each]):
                text = row["text"].format_map(known)
                remedy = row.get("remedy", _ITS_OWN_TARGET).format_map(known)
                yield PairFinding(row["level"], row.get("subject", name), text, remedy, each)


def _serving(pair: Pair, engine: EngineName, draft: str) -> Serving:
    longer = serving_limits.is_too_short(pair, engine) and engine == "sglang"
    return Serving(
        draft=None if pair.is_inside else draft,
        target=pair.target.named,
        dtype=dtypes.launch_dtype(pair, engine),
        context=pair.args.context,
        cache_dtype=inherited.launch_cache(pair, engine),
        quantization=pair.args.quantization,
        target_cache_dtype=pair.args.cache_dtype,
        words=pair.args.words,
        environment=(serving_limits.LONGER,) if longer else (),
    )


def _not_compared(pair: Pair) -> Iterator[str]:
    if not pair.is_inside and None in (pair.own_tokenizer, pair.target_tokenizer):
        yield (
            f"tokenizers: the {'draft' if pair.own_tokenizer is None else 'target'} ships no"
            " tokenizer.json, so only the sizes of the vocabularies were compared"
        )
    if pair.target.checkpoint is None:
        yield (
            "the target's tensors: its shards are not there, so how its head and its MTP layers are"
            " stored is known by the names of its index alone"
            if pair.target.names
            else "the target's tensors: neither its shards nor its index are there"
        )
