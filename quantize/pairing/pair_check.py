"""`check_pair`: a draft, its target, and what each engine does with the two."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...recipes.packages import counts, rows_beside
from ..asked import Checking
from ..drafts import read_config
from ..drafts.config_reader import with_text_config
from ..drafts.recognition import other_kind
from ..drafts.runtime_names import target_layers_named
from ..engines.contract import ENGINE_NAMES, TITLES, EngineName, Facts
from ..engines.engine import Serving
from ..engines.engine_check import check_checkpoint, with_values
from ..files.checkpoint import Checkpoint
from ..files.digests import not_finite
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
from .target import Target, Tokenizer


def check_pair(
    draft: Path,
    target: Path,
    asked: Checking,
    *,
    arch: str | None = None,
    largest_feature: float | None = None,
) -> PairCheck:
    """Predict what engines do with a draft beside its target, and say how to serve the two.

    Args:
        draft, target: the folders that `asked` names, where they lie here.
        arch: of the GPU that `asked` names.

    Raises:
        CheckpointError: a folder cannot be read as a draft or as a target, or the words of
            `target_args` are not understood.
    """
    args, subtree = TargetArgs.parse(asked.target_args), asked.subtree
    tp = tensor_parallel_size(asked.tp, args)
    checkpoint = Checkpoint.open(draft, subtree=subtree, is_target=subtree is not None)
    kind = other_kind(checkpoint)  # which each engine's answer says
    family, geometry = read_config(checkpoint, as_declared=bool(kind and not kind.in_config))
    pair = Pair(
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
    engines: tuple[EngineName, ...] = ENGINE_NAMES if asked.engine is None else (asked.engine,)
    known = target_layers_named(checkpoint.config) in (None, pair.target.num_layers)
    broken = not_finite(checkpoint)
    alone = (
        check_checkpoint(
            checkpoint,
            engine=each,
            version=asked.version,
            arch=arch,
            tp=tp,
            target_layers=pair.target.num_layers if known else None,
            asked=asked.gpu,
            has_side_file=(checkpoint.folder / HF_QUANT_CONFIG).is_file(),
            serving=_serving(pair, each, str(asked.draft)),
        )
        for each in engines
    )
    answers = [with_values(answer, broken) for answer in alone]
    findings = list(_findings(pair, engines))
    findings += [each for answer in answers for each in features.handed_out(pair, answer)]
    return PairCheck(
        draft=str(asked.draft),
        target=pair.target.named,
        engines=tuple(
            EnginePair(
                answer=each,
                findings=in_order(f for f in findings if f.engine in (None, each.engine)),
                launch=each.launch,
            )
            for each in answers
        ),
        findings=in_order(findings),
        tensor_parallel=serving_limits.sizes_of_both(pair),
        not_compared=tuple(_not_compared(pair)),
    )


def _findings(pair: Pair, engines: Sequence[EngineName]) -> Iterator[PairFinding]:
    """What the rows of findings.toml say, in their order; "each" is every engine by itself."""
    common = {
        "is_whole_model": pair.is_whole_model,
        **features.facts(pair),
        **serving_limits.facts(pair),
        **dtypes.facts(pair, engines),
        **inherited.facts(pair),
    }
    of_engine = {each: {**common, **_facts_in(pair, each)} for each in engines}
    for name, row in rows_beside(__file__, "findings").items():
        about = row.get("engine")
        for engine in engines if about == "each" else [about]:
            facts = of_engine.get(engine) if engine else common
            if facts is not None and counts(row, facts):
                text, remedy = (row.get(key, "").format(**facts) for key in ("text", "remedy"))
                yield PairFinding(row["level"], row.get("subject", name), text, remedy, engine)


def _facts_in(pair: Pair, engine: EngineName) -> Facts:
    return {
        "title": TITLES[engine],
        "is_narrow": dtypes.is_narrow(pair, engine),
        **serving_limits.facts_in(pair, engine),
        **inherited.facts_in(pair, engine),
    }


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
    if not pair.is_inside:
        ships = {"draft": pair.own_tokenizer, "target": pair.target_tokenizer}
        for name, tokenizer in ships.items():
            if tokenizer is None:
                yield (
                    f"tokenizers: the {name} ships no tokenizer.json, so only the sizes of the"
                    " vocabularies were compared"
                )
                break
    if pair.target.checkpoint is None:
        yield (
            "the target's tensors: its shards are not there, so how its head and its MTP layers are"
            " stored is known by the names of its index alone"
            if pair.target.names
            else "the target's tensors: neither its shards nor its index are there"
        )
