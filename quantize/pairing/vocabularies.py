"""Tokens of both: how many there are, what they are, and which of them the draft's tables name."""

from collections.abc import Iterator

from ..drafts.geometry import MAP
from ..engines.contract import ENGINE_NAMES
from ..stored.decoded_numbers import read_integers
from .pair import Pair, PairFinding, finding


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
