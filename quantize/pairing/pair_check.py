"""`check_pair`: a draft, its target, and what each engine does with the two."""

from collections.abc import Iterator
from pathlib import Path

from ..asked import Checking
from ..drafts import read_config
from ..drafts.config_reader import with_text_config
from ..drafts.recognition import other_kind
from ..drafts.runtime_names import target_layers_named
from ..engines.contract import ENGINE_NAMES, EngineName
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
    PairRule,
    TargetArgs,
    in_order,
    row_finding,
    tensor_parallel_size,
)
from .target import Target, Tokenizer

RULES: tuple[PairRule | str, ...] = (
    features.features,
    *("depth", "default-layers", "last-layer", "rotated"),
    *("vocabulary-vllm", "vocabulary-sglang", "vocabulary-tensorrt-llm", "vocabulary-padded"),
    *("vocabulary", "vocabulary-mask"),
    features.map_outside,
    *("tokenizer", "tokenizer-of-model", "chat-template", "special-tokens"),
    serving_limits.beyond_target,
    *("lengths-vllm-table", "lengths-vllm", "lengths-vllm-model", "lengths-sglang-table"),
    *("lengths-sglang", "lengths-tensorrt-llm", "rope", "overrides"),
    *("dtype-vllm", "dtype-vllm-float16", "dtype-sglang", "dtype-tensorrt-llm"),
    dtypes.float16,
    dtypes.activations,
    inherited.quantization,
    inherited.cache,
    *("shared-head-unknown", "shared-head-blocks", "shared-head"),
    serving_limits.tensor_parallel,
    *("mtp-missing", "mtp-transformers", "mtp-transformers-multimodal"),
    inherited.mixed_layer,
)
"""Everything that is asked of a pair: functions, and rows of findings.toml by name."""


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
    findings = list(_findings(pair))
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
        findings=in_order(f for f in findings if f.engine in (None, *engines)),
        tensor_parallel=serving_limits.sizes_of_both(pair),
        not_compared=tuple(_not_compared(pair)),
    )


def _findings(pair: Pair) -> Iterator[PairFinding]:
    facts = {"is_whole_model": pair.is_whole_model}
    for module in (features, serving_limits, dtypes, inherited):
        facts |= module.facts(pair)
    for rule in RULES:
        yield from row_finding(rule, facts) if isinstance(rule, str) else rule(pair)


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
