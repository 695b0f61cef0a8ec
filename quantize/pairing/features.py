"""What a draft reads from its target: hidden states of which layers, how wide, and which tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..drafts.architectures import declared_architecture
from ..drafts.geometry import Geometry
from ..drafts.runtime_names import target_layers_named
from ..engines.contract import TITLES, TRY, EngineCheck, data_file
from ..engines.versions import ENGINES
from .pair import Pair, PairFinding

# ---- Whether a target can feed a draft, by their configs: `record` refuses it, `check` says it

OTHER_TARGET = "give the target that this draft was trained for"


def misfits(
    geometry: Geometry,
    num_layers: int,
    vocab_size: int,
    hidden_size: int,
    asked: Sequence[int] | None = None,
) -> Iterator[tuple[str, str]]:
    """The subject, and a sentence about the draft, of each thing that a target cannot give it.

    A cut vocabulary of its head, with its map, is no difference. `asked`: layers that the draft
    gets instead of its own.
    """
    if geometry.vocab_size != vocab_size:
        tokens = f"its vocabulary has {geometry.vocab_size} tokens, the target's {vocab_size}"
        yield "vocabulary", tokens
    if not geometry.reads_features:
        return
    reads = geometry.num_aux_layers * geometry.target_hidden_size
    count = len(asked) if asked is not None else geometry.num_aux_layers
    if count * hidden_size != reads:
        yield (
            "hidden-size",
            f"it reads {geometry.num_aux_layers} x {geometry.target_hidden_size} = {reads} values,"
            f" the target gives {count} x {hidden_size} = {count * hidden_size}",
        )
    beyond = [i for i in geometry.aux_layer_ids or () if i >= num_layers]
    if asked is None and beyond:
        last = num_layers - 1
        yield "layers", f"it reads layer {beyond[0]}, the target has layers 0 to {last}"


def handed_out(pair: Pair, answer: EngineCheck) -> Iterator[PairFinding]:
    """Whether an engine's model of this target gives a draft the hidden states of its layers."""
    if pair.is_inside or not pair.geometry.reads_layers or answer.verdict != "LOADS":
        return
    name = declared_architecture(pair.target.config)
    method = ENGINES[answer.engine].own(pair.family.engine_traits).served_as.lower()
    asked = {"engine": answer.engine, "version": answer.version}
    rows = (row for row in data_file("targets")["row"] if asked.items() <= row.items())
    if not any(method in row["serves"] and name in row["classes"].split() for row in rows):
        named = f"{TITLES[answer.engine]} was not seen to hand out the hidden states of"
        text = f"{named} {name or 'such a model'}"
        yield PairFinding("unknown", "target", text, TRY, answer.engine)


def facts(pair: Pair) -> dict[str, Any]:
    """Facts on a draft's layers and tokens beside its target's."""
    geometry, target, config = pair.geometry, pair.target, pair.draft.config
    ids = geometry.aux_layer_ids if geometry.reads_layers else None
    whole, tokenizer, mask = target.vocab_size, pair.target_tokenizer, geometry.mask_token_id
    own = None if pair.is_inside or tokenizer is None else pair.own_tokenizer
    named = target_layers_named(config)
    unfit = dict(misfits(geometry, target.num_layers, whole, target.hidden_size))
    return {
        "unfit_width": unfit.get("hidden-size"),
        "unfit_layers": unfit.get("layers"),
        "named": named,
        "depth": target.num_layers,
        "is_of_other_depth": not pair.is_inside and named not in (None, target.num_layers),
        "outputs": [1, target.num_layers // 2 - 1, target.num_layers - 4],
        "takes_default_layers": not pair.is_inside and geometry.reads_layers and ids is None,
        "own_tokens": geometry.vocab_size,
        "their_tokens": whole,
        "has_other_tokens": geometry.vocab_size != whole,
        "size": tokenizer.size if tokenizer else None,
        "is_padded": tokenizer is not None and tokenizer.size <= min(geometry.vocab_size, whole),
        "mask": mask,
        "mask_is_outside": mask is not None and mask >= whole,
        "last_mapped": _last_mapped(pair) if geometry.vocab_size > whole else None,
        "difference": own.difference(tokenizer) if own and tokenizer else None,
    }


def _last_mapped(pair: Pair) -> int | None:
    """The largest token in the draft's map, where it is not a token of the target."""
    from ..lints.vocabulary_map import VocabularyMap  # numpy: only for this question

    tables = pair.draft.tensors.items()
    table = VocabularyMap.read(pair.draft, {pair.family.canonical_name(n): t for n, t in tables})
    last = int(table.ids.max(initial=0)) if table else 0
    return last if last >= pair.target.vocab_size else None
