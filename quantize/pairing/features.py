"""What a draft reads of its target: hidden states of which layers, how wide, and which tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ..drafts.architectures import declared_architecture
from ..drafts.geometry import MAP, Geometry
from ..drafts.runtime_names import target_layers_named
from ..engines.contract import ENGINE_NAMES, TITLES, EngineCheck
from ..engines.engine_rows import explained, refuses_target
from ..engines.versions import newest_engines
from .pair import Pair, PairFinding, finding

# ---- Whether a target can feed a draft, by their configs: `record` refuses it, `check` says it

OTHER_TARGET = "give the target that this draft was trained for"


class _Sizes(Protocol):
    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


class Misfit(NamedTuple):
    """What a target cannot give a draft: about what, and in a sentence about the draft."""

    subject: str
    text: str


def misfits(
    geometry: Geometry, sizes: _Sizes, asked: Sequence[int] | None = None
) -> Iterator[Misfit]:
    """Vocabulary, width and layers that are not those that the draft was made for.

    A reduced vocabulary of its head, with its map, is no difference. `asked`: layers that are
    handed to the draft instead of its own.
    """
    if geometry.vocab_size != sizes.vocab_size:
        yield Misfit(
            "vocabulary",
            f"its vocabulary has {geometry.vocab_size} tokens, the target's {sizes.vocab_size}",
        )
    if not geometry.reads_features:
        return
    reads = geometry.num_aux_layers * geometry.target_hidden_size
    count = len(asked) if asked is not None else geometry.num_aux_layers
    if count * sizes.hidden_size != reads:
        yield Misfit(
            "hidden-size",
            f"it reads {geometry.num_aux_layers} x {geometry.target_hidden_size} = {reads} values,"
            f" the target gives {count} x {sizes.hidden_size} = {count * sizes.hidden_size}",
        )
    beyond = [i for i in geometry.aux_layer_ids or () if i >= sizes.num_layers]
    if asked is None and beyond:
        yield Misfit(
            "layers",
            f"it reads layer {beyond[0]}, the target has layers 0 to {sizes.num_layers - 1}",
        )


_WITHOUT = "serve the target with a draft that reads none of its layers: its MTP layer, or a model"
_WHY = {
    "hidden-size": "the draft's first linear has another number of columns",
    "layers": "fewer layers are captured than the draft's fc reads",
}


def features(pair: Pair) -> Iterator[PairFinding]:
    """A width or a layer that the target has not: arithmetic refuses it, whatever the engine."""
    for misfit in misfits(pair.geometry, pair.target):
        if misfit.subject in _WHY:
            why = _WHY[misfit.subject]
            yield finding("features", subject=misfit.subject, what=misfit.text, why=why)


def handed_out(pair: Pair, answer: EngineCheck) -> Iterator[PairFinding]:
    """Whether an engine's model of this target hands a draft the hidden states of its layers."""
    if pair.is_inside or not pair.geometry.reads_layers:
        return
    name = declared_architecture(pair.target.config)
    errors = {
        each.title: refuses_target(
            each.name,
            answer.version if each.name == answer.engine else each.version,
            each.own(pair.family.engine_traits).served_as.lower(),
            name,
        )
        for each in newest_engines()
    }
    title = TITLES[answer.engine]
    error, others = errors[title], [other for other, said in errors.items() if said == ""]
    if error:
        text = explained(error, engine=title, gpu=answer.gpu)
        remedy = f"serve the pair with {others[0]}" if others else _WITHOUT
        yield PairFinding("refused", "target", text, remedy, answer.engine)
    elif error is None and answer.verdict == "LOADS":
        yield finding("target-not-read", answer.engine, title=title, name=name or "model")


def depth(pair: Pair) -> Iterator[PairFinding]:
    """A number of layers in the draft's config.json that is another target's.

    SGLang 0.5.23 warns of it for DFlash and goes on with the served target's
    (`spec_aux_hidden_state.py:236`); vLLM 0.33 reads no such key.
    """
    named = None if pair.is_inside else target_layers_named(pair.draft.config)
    if named is None or named == pair.target.num_layers:
        return
    yield finding("depth", named=named, depth=pair.target.num_layers)


def default_layers(pair: Pair) -> Iterator[PairFinding]:
    """A draft that leaves the layers to the engines, which take inputs by the target's depth.

    vLLM 0.33 `interfaces.py:1751`, SGLang 0.5.23 `llama.py:936`.
    """
    geometry, depth = pair.geometry, pair.target.num_layers
    if pair.is_inside or not geometry.reads_layers or geometry.aux_layer_ids is not None:
        return
    yield finding("default-layers", outputs=[1, depth // 2 - 1, depth - 4])


def last_layer(pair: Pair) -> Iterator[PairFinding]:
    """SGLang captures inputs of layers, so that the last one's output has no place.

    Ids beyond the last layer are never met in `llama.py:491` of SGLang 0.5.23; vLLM 0.33 also takes
    the last output (`llama.py:440`). Other models of targets were not read.
    """
    ids = pair.geometry.aux_layer_ids if pair.geometry.reads_layers else None
    if ids and ids[-1] == pair.target.num_layers - 1:
        yield finding("last-layer", last=ids[-1])


def sizes(pair: Pair) -> Iterator[PairFinding]:
    """Vocabularies of two sizes: padding where a tokenizer shows it, else another target's.

    Source: vLLM 0.33 `config/speculative.py:2040`; SGLang 0.5.23 compares none.
    """
    own, theirs = pair.geometry.vocab_size, pair.target.vocab_size
    if own == theirs:
        return
    numbers = {"own": own, "theirs": theirs}
    if pair.is_whole_model:
        for engine in ENGINE_NAMES:
            yield finding(f"vocabulary-{engine}", **numbers)
        return
    tokenizer = pair.target_tokenizer
    if tokenizer is not None and tokenizer.size <= min(own, theirs):
        yield finding("vocabulary-padded", **numbers, size=tokenizer.size)
        return
    yield finding("vocabulary", **numbers)


def proposed_tokens(pair: Pair) -> Iterator[PairFinding]:
    """Tokens that the draft proposes or reads, and the target has not."""
    whole = pair.target.vocab_size
    mask = pair.geometry.mask_token_id
    if mask is not None and mask >= whole:
        yield finding("vocabulary-mask", mask=mask, whole=whole)
    table = next((t for t in pair.draft.tensors.values() if t.name.endswith(MAP)), None)
    if table is None or len(table.shape) != 1 or pair.geometry.vocab_size <= whole:
        return
    from ..stored.decoded_numbers import read_integers  # numpy: for this question alone

    offsets = read_integers(pair.draft, table)
    last = max((row + int(offset) for row, offset in enumerate(offsets)), default=0)
    if last >= whole:
        yield finding("d2t", last=last, whole=whole)


def tokenizers(pair: Pair) -> Iterator[PairFinding]:
    """Two tokenizers, where both folders have one: engines read the target's alone.

    Sources: vLLM 0.33 `config/speculative.py:1429` (the draft's for use_heterogeneous_vocab alone);
    SGLang 0.5.23 has one tokenizer for the server.
    """
    own, theirs = pair.own_tokenizer, pair.target_tokenizer
    if own is None or theirs is None or pair.is_inside:
        return
    difference = own.difference(theirs)
    if difference is not None:
        name = "tokenizer-of-model" if pair.is_whole_model else "tokenizer"
        yield finding(name, difference=difference)
    elif own.template != theirs.template and own.template is not None:
        yield finding("chat-template")


def special_tokens(pair: Pair) -> Iterator[PairFinding]:
    """Ids of special tokens in the draft's config.json: engines take the target's."""
    named = [
        (key, own, pair.target.text.get(key))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if (own := pair.config.get(key)) is not None
    ]
    unlike = [
        f"{key} {own} against {theirs}" for key, own, theirs in named if not _same(own, theirs)
    ]
    if unlike and not pair.is_inside:
        yield finding("special-tokens", unlike=", ".join(unlike))


def _same(own: object, theirs: object) -> bool:
    """The draft may name one of several ends of text; a target without the key names none."""
    return theirs is None or own == theirs or (isinstance(theirs, list) and own in theirs)
