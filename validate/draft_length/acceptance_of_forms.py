"""Which recorded acceptance is whose: the files of --acceptance, and the forms of an estimate."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...quantize.drafts.family import Draft
from ..errors import CompareError
from .recorded_lengths import RecordedDraft, read_recorded


def acceptance_of_forms(
    given: Sequence[str], draft: Draft, forms: Sequence[str]
) -> Mapping[str, RecordedDraft]:
    """Name of a form -> what it was measured to accept.

    Args:
        given: FILE, of which the first draft is the draft as it is, and a report's candidate that
            of its recipe; or FORM=FILE, whose last draft is that form's. Several files of one form
            hold several numbers of draft tokens.
        draft: that is estimated.
        forms: their names, that of the draft as it is first.

    Raises:
        CompareError: a file is of another draft or of other prompts, or none is of the draft as it
            is; see also `read_recorded`.
    """
    blocks = draft.geometry.block_size is not None
    found: dict[str, RecordedDraft] = {}
    for text in given:
        name, path = _named(text, forms)
        for form, recorded in _chosen(read_recorded(path, blocks=blocks), name, forms):
            _check(recorded, draft)
            if form == forms[0]:
                _check_as_it_is(recorded, draft)
            known = found.get(form)
            found[form] = known.joined(recorded) if known else recorded
    if found and forms[0] not in found:
        raise CompareError(
            "--acceptance",
            f"no file is of the draft as it is ({forms[0]})",
            fix="replay it as well, and give that file without a name in front",
        )
    return found


def check_recorded(num_draft_tokens: int | None, recorded: Mapping[str, RecordedDraft]) -> None:
    """Refuse a number of draft tokens of which nothing was measured.

    Raises:
        CompareError: more tokens are asked for than were drafted.
    """
    for draft in recorded.values():
        if num_draft_tokens is not None and num_draft_tokens > draft.longest:
            raise CompareError(
                "--num-draft-tokens",
                f"{num_draft_tokens}, but {draft.where} counts up to {draft.longest}",
                fix=f"replay with -k {num_draft_tokens}, or ask for fewer",
            )


def _named(text: str, forms: Sequence[str]) -> tuple[str | None, Path]:
    name, given, path = text.partition("=")
    if given and name in forms:
        return name, Path(path)
    if given and not Path(text).exists():
        raise CompareError(
            "--acceptance",
            f"{name!r} is no form that is compared: {', '.join(forms)}",
            fix="give FORM=FILE with one of these names, or FILE alone for the draft as it is",
        )
    return None, Path(text)


def _chosen(
    drafts: Sequence[RecordedDraft], name: str | None, forms: Sequence[str]
) -> Iterable[tuple[str, RecordedDraft]]:
    if name is not None:
        yield name, drafts[-1]
        return
    yield forms[0], drafts[0]
    for other in drafts[1:]:
        if other.recipe is not None and other.recipe in forms[1:]:
            yield other.recipe, other


def _check_as_it_is(recorded: RecordedDraft, draft: Draft) -> None:
    """What is given without a name accepts what the draft that is estimated does."""
    rows, own = recorded.draft_vocab_size, draft.geometry.draft_vocab_size
    if recorded.head_online is not None:
        what = f"with the head that vLLM makes of it ({recorded.head_online})"
    elif recorded.kv_cache is not None:
        what = f"with its KV cache in {recorded.kv_cache}"
    elif recorded.quantized:
        what = "which is quantized"
    elif rows not in (None, own):
        what = f"whose head has {rows:,} rows, and that of {draft.checkpoint.folder} has {own:,}"
    else:
        return
    raise CompareError(
        recorded.where,
        f"is of {recorded.name}, {what}: not of the draft as it is",
        fix="replay the draft as it is, or name the form in front: FORM=FILE",
    )


def _check(recorded: RecordedDraft, draft: Draft) -> None:
    g, family = draft.geometry, draft.family.name
    if recorded.family not in ("", family):
        raise CompareError(
            recorded.where,
            f"is of another draft: {recorded.name} is {recorded.family}, and"
            f" {draft.checkpoint.folder} is {family}",
            fix="replay the draft that is estimated",
        )
    if recorded.vocab_size not in (None, g.vocab_size):
        raise CompareError(
            recorded.where,
            f"is of another draft: its target has {recorded.vocab_size:,} tokens, and"
            f" {draft.checkpoint.folder} is for one of {g.vocab_size:,}",
            fix="replay the draft that is estimated",
        )
    if g.most_draft_tokens is not None and recorded.longest > g.most_draft_tokens:
        raise CompareError(
            recorded.where,
            f"is of another draft: it drafts {recorded.longest} tokens, and"
            f" {draft.checkpoint.folder} at most {g.most_draft_tokens}",
            fix="replay the draft that is estimated",
        )
