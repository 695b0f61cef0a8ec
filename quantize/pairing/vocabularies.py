"""Tokens of both: how many there are, what they are, and which of them the draft's tables name."""

from collections.abc import Iterator

from ..drafts.geometry import MAP
from ..stored.decoded_numbers import read_integers
from .features import OTHER_TARGET
from .pair import Pair, PairFinding

_TLI = (
    'add "use_heterogeneous_vocab": true to vLLM\'s --speculative-config: it proposes the tokens'
    " that both tokenizers have"
)


def sizes(pair: Pair) -> Iterator[PairFinding]:
    """Vocabularies of two sizes: padding where a tokenizer shows it, else another target's.

    Source: vLLM 0.33 `config/speculative.py:2040`; SGLang 0.5.23 compares none.
    """
    own, theirs = pair.geometry.vocab_size, pair.target.vocab_size
    if own == theirs:
        return
    differ = f"the draft's vocabulary has {own:,} tokens, the target's {theirs:,}"
    if pair.is_whole_model:
        error = "ValueError: Target and draft model should have the same vocabulary size."
        yield PairFinding("refused", "vocabulary", f"{differ} [{error}]", _TLI, "vllm")
        text = f"{differ}: SGLang hands token ids from one to the other as they are"
        remedy = "take a draft with the target's tokenizer, or serve the pair with vLLM"
        yield PairFinding("wrong", "vocabulary", text, remedy, "sglang")
        yield PairFinding("warning", "vocabulary", differ, OTHER_TARGET, "tensorrt-llm")
        return
    tokenizer = pair.target_tokenizer
    if tokenizer is not None and tokenizer.size <= min(own, theirs):
        text = f"{differ}, and its tokenizer {tokenizer.size:,}: the rest is padding"
        yield PairFinding("warning", "vocabulary", text, "make sure that the tokens are the same")
        return
    text = f"{differ}: the draft's tables have other rows than the target has tokens"
    yield PairFinding("wrong", "vocabulary", text, OTHER_TARGET)


def proposed_tokens(pair: Pair) -> Iterator[PairFinding]:
    """Tokens that the draft proposes or reads, and the target has not."""
    whole = pair.target.vocab_size
    mask = pair.geometry.mask_token_id
    if mask is not None and mask >= whole:
        text = (
            f"the draft's mask_token_id is {mask:,}, and the target's embedding has {whole:,} rows"
        )
        yield PairFinding("wrong", "vocabulary", text, OTHER_TARGET)
    table = next((t for t in pair.draft.tensors.values() if t.name.endswith(MAP)), None)
    if table is None or len(table.shape) != 1 or pair.geometry.vocab_size <= whole:
        return
    offsets = read_integers(pair.draft, table)
    last = max((row + int(offset) for row, offset in enumerate(offsets)), default=0)
    if last >= whole:
        text = f"d2t of the draft names token {last:,}, and the target has {whole:,}"
        yield PairFinding("wrong", "d2t", text, OTHER_TARGET)


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
        remedy = _TLI if pair.is_whole_model else OTHER_TARGET
        text = f"the draft's tokenizer is not the target's: {difference}"
        yield PairFinding("wrong", "tokenizer", text, remedy)
    elif own.template != theirs.template and own.template is not None:
        text = "the draft ships another chat template than its target: no engine reads it"
        remedy = "make sure that the draft was trained on prompts in the target's template"
        yield PairFinding("note", "chat-template", text, remedy)


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
        text = f"special tokens differ, the draft's against the target's: {', '.join(unlike)}"
        remedy = (
            "nothing to do if only the draft's config.json is careless: engines use the target's"
        )
        yield PairFinding("note", "special-tokens", text, remedy)


def _same(own: object, theirs: object) -> bool:
    """The draft may name one of several ends of text; a target without the key names none."""
    return theirs is None or own == theirs or (isinstance(theirs, list) and own in theirs)
