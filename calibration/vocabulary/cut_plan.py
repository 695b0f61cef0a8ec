"""What every tensor of a folder becomes when its vocabulary is cut, known from headers and maps.

Tensors with a row for each draft id keep the chosen rows, as bytes; nothing is computed. So the
cut of a quantized folder is the quantized cut, wherever a row's codes and scales are its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...quantize.drafts import Draft, Row, read_config, read_draft
from ...quantize.drafts.family import LAYER_CONFIG
from ...quantize.drafts.geometry import MAP, MASK, SIZE_KEY
from ...quantize.files.checkpoint import CONFIG_FILE, Checkpoint
from ...quantize.files.safetensors_header import StoredTensor, TensorInfo
from ...quantize.lints.value_lints import check_vocabulary_map, vocabulary_map
from ...quantize.making.rewriting import OutputPlan
from ...quantize.planning.outputs import copied
from ...quantize.stored.decoded_numbers import read_integers, read_whole
from ...quantize.stored.stored_declaration import stored_parts
from ...quantize.stored.stored_draft import StoredDraft
from ...quantize.stored.stored_tables import HEAD, StoredTables
from ...recipes.brief import first_of
from ...recipes.errors import CheckpointError, LayoutError, PlanError, short

TREE_WIDTH = 10
"""Most likely tokens that engines ask a draft for in one step: EAGLE-2's trees use 10."""
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The rows that a cut keeps.

    Attributes:
        target_ids: the rows' target ids, ascending, [N].
        rows: of the source, in the order of `target_ids`, [N].
        missing: requested ids without a row in the source.
    """

    target_ids: Ids
    rows: Ids
    size_before: int
    missing: int


def check_may_be_cut(draft: Draft) -> None:
    """Refuse a draft of a family whose drafts always have the target's whole vocabulary."""
    why = draft.family.whole_vocabulary
    if why is not None:
        raise PlanError(
            draft.checkpoint.folder,
            f"the vocabulary of {draft.family.name} cannot be cut: {why}",
            fix="quantize the head instead (draftquant recipes list), if it has one of its own",
        )


def stored_target_ids(draft: Draft) -> Ids:
    """The target id of every row of the head, in the order of the rows."""
    check_vocabulary_map(draft)
    for lint in vocabulary_map(draft):
        raise CheckpointError(draft.checkpoint.folder, lint.cause, fix=lint.remedy)
    row = draft.row(MAP)
    if row is None:
        return np.arange(draft.geometry.draft_vocab_size)
    offsets = read_integers(draft.checkpoint, row.tensor)
    return offsets + np.arange(len(offsets))


def kept_rows(draft: Draft, target_ids: Sequence[int]) -> KeptRows:
    """The rows of some tokens; tokens without a row are left out.

    PlanError: the ids are not a valid choice, or the family's vocabulary cannot be cut.
    """
    check_may_be_cut(draft)
    vocabulary, where = draft.geometry.vocab_size, draft.checkpoint.folder
    asked = np.asarray(target_ids, np.int64)
    _check_ids(asked, vocabulary, where)
    stored = stored_target_ids(draft)
    order = np.argsort(stored)
    places = np.searchsorted(stored, asked, sorter=order)
    rows = order[np.minimum(places, len(stored) - 1)]
    there = stored[rows] == asked
    kept = KeptRows(
        target_ids=asked[there],
        rows=rows[there],
        size_before=len(stored),
        missing=int(len(asked) - there.sum()),
    )
    _check_size(draft, kept)
    return kept


def _check_ids(asked: Ids, vocabulary: int, where: object) -> None:
    outside = asked[(asked < 0) | (asked >= vocabulary)]
    if len(outside):
        got = first_of([short(int(token)) for token in outside])
        raise PlanError(
            where,
            f"target ids: expected ids from 0 to {vocabulary - 1:,}, got {got}",
            fix="choose the rows by traces of this draft's target",
        )
    steps = np.diff(asked)
    if (steps <= 0).any():
        repeated = len(asked) - len(np.unique(asked))
        what = f"{repeated} of {len(asked)} stand there twice" if repeated else "not in that order"
        raise PlanError(
            where,
            f"target ids: expected distinct ids in ascending order, but {what}",
            fix="give each id once, sorted",
        )


def _check_size(draft: Draft, kept: KeptRows) -> None:
    where, size = draft.checkpoint.folder, len(kept.rows)
    least = max(TREE_WIDTH, draft.geometry.most_draft_tokens or 0)
    rows = f"{size:,} of {kept.size_before:,} rows"
    if kept.missing:
        rows += f" ({kept.missing:,} of the asked tokens have none here)"
    if size < least:
        raise PlanError(
            where,
            f"expected at least {least} kept rows, got {rows}: engines take the {TREE_WIDTH} most"
            " likely tokens of a step, or one for each of K draft tokens",
            fix="ask for a larger size, or cut the draft that has the whole vocabulary",
        )
    if size == kept.size_before:
        raise PlanError(
            where,
            f"all of its {size:,} rows would be kept, so there is nothing to cut",
            fix="ask for a smaller size, or use the draft as it is",
        )


_SHAPE = "weight_shape"  # compressed-tensors: rows and columns of packed codes
_DECLARATION = "quantization_config"
_TIED = "tie_word_embeddings"
_LAST_NORM = "norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """The kept rows of a tensor."""

    checkpoint: Checkpoint
    tensor: TensorInfo


Content = RowsOf | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan(OutputPlan):
    """What a folder becomes.

    Attributes:
        contents: those of the tensors that are written anew, by name.
        tables: of the target whose head the rows come from; None where the draft has a head.
    """

    kept: KeptRows
    config: Mapping[str, Any]
    contents: Mapping[str, Content]
    tables: StoredTables | None

    def result(self) -> Draft:
        """The draft that it will be read as, from headers; its bytes have no place yet."""
        tensors = {}
        for tensor, new in ((each.row.tensor, new) for each in self.outputs for new in each.stored):
            tensors[new.name] = replace(
                tensor, name=new.name, dtype=new.dtype, shape=new.shape, start=0, stop=new.nbytes
            )
        tensors = dict(sorted(tensors.items()))
        return read_draft(replace(self.source.checkpoint, config=self.config, tensors=tensors))


def plan_cut(source: StoredDraft, target_ids: Sequence[int], target: Path | None) -> CutPlan:
    """What a folder becomes, quantized or not; `target` only for a draft without its own head.

    PlanError: the vocabulary cannot be cut like this. LayoutError: rows of a quantized head share
    """
    draft = source.draft
    check_may_be_cut(draft)
    _check_untied(draft)
    kept = kept_rows(draft, target_ids)
    size = len(kept.rows)
    lent = draft.row(HEAD) is None and "head" in draft.family.shared_tables
    tables = _tables(draft, target) if lent else None
    config = cut_config(source.checkpoint.config, size)
    shrinking = _shrinking(draft, config)
    new = _maps(draft, kept)
    if tables is not None:
        new[HEAD] = _Written.rows(tables.checkpoint, replace(tables.lm_head, name=HEAD), size)
    written: dict[str, list[_Written]] = {}
    outputs = []
    for row in draft.rows:
        if row.canonical in (MAP, MASK):
            continue
        for part in _parts(source, row):
            outputs.append(copied(part))
            if row.canonical in shrinking:
                written[part.tensor.name] = [_cut_part(source, row, part.tensor, size)]
    # The scales of its KV cache do not belong to rows of the vocabulary.
    outputs += [
        copied(Row(tensor=tensor, canonical=tensor.name, role="attention"))
        for _, _, tensor in source.cache_tensors
    ]
    # New tensors go into the file of the head, or else of the last norm.
    heads, norm = [each.row for each in outputs if each.row.role == "head"], draft.row(_LAST_NORM)
    neighbour = (heads[0] if heads or norm is None else norm).tensor
    if neighbour.name not in written:
        written[neighbour.name] = [_Written.whole(source.checkpoint, neighbour)]
    written[neighbour.name] += new.values()
    return CutPlan(
        source=source,
        kept=kept,
        config=config,
        outputs=tuple(
            replace(each, stored=tuple(tensor.stored for tensor in anew), changed=True)
            if (anew := written.get(each.row.tensor.name))
            else each
            for each in outputs
        ),
        contents={t.stored.name: t.content for each in written.values() for t in each},
        tables=tables,
    )


class _Written(NamedTuple):
    stored: StoredTensor
    content: Content

    @classmethod
    def rows(cls, checkpoint: Checkpoint, tensor: TensorInfo, size: int) -> "_Written":
        """Some of its rows."""
        stored = replace(tensor.as_stored, shape=(size, *tensor.shape[1:]))
        return cls(stored, RowsOf(checkpoint=checkpoint, tensor=tensor))

    @classmethod
    def whole(cls, checkpoint: Checkpoint, tensor: TensorInfo) -> "_Written":
        """All of it: a small one, to whose file others are added."""
        return cls(tensor.as_stored, read_whole(checkpoint, tensor).tobytes())


def cut_config(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The config with its number of rows after `vocab_size`, wherever it was before.

    So it has the same place whether the draft is quantized before or after the cut.
    """
    if SIZE_KEY not in config and "vocab_size" not in config:  # in the speculators layout
        items = [(k, v) for k, v in config.items() if k != _DECLARATION]
        behind = [(k, v) for k, v in config.items() if k == _DECLARATION]
        return dict([*items, (SIZE_KEY, size), *behind])
    anchor = "vocab_size" if "vocab_size" in config else SIZE_KEY
    cut: dict[str, Any] = {}
    for name, value in config.items():
        if name == anchor:
            cut |= {name: value, SIZE_KEY: size}
        elif name != SIZE_KEY:
            cut[name] = value
    return cut


def _check_untied(draft: Draft) -> None:
    config = draft.checkpoint.config
    sections = (config, config.get(LAYER_CONFIG))
    if any(isinstance(each, Mapping) and each.get(_TIED) is True for each in sections):
        untie = "write tie_word_embeddings: false, if the lm_head of the folder is what was trained"
        another = "use a draft with a head of its own: this one's cannot be cut"
        raise PlanError(
            draft.checkpoint.folder / CONFIG_FILE,
            "tie_word_embeddings is true: the head is the embedding, which keeps a row for each"
            " token that the target can write",
            fix=another if draft.row(HEAD) is None else untie,
        )


def _tables(draft: Draft, target: Path | None) -> StoredTables:
    where = draft.checkpoint.folder
    if target is None:
        raise PlanError(
            where,
            "the draft stores no head: engines lend it the target's, of which they take every row",
            fix="give the target's folder (--target M): the kept rows of its head are stored in"
            " the cut draft",
        )
    tables, g = StoredTables.find(target), draft.geometry
    rows, width = tables.lm_head.shape
    if width != g.hidden_size or rows < g.vocab_size:
        raise PlanError(
            target,
            f"{tables.lm_head.name}: expected at least {g.vocab_size:,} rows of {g.hidden_size:,},"
            f" got {rows:,} of {width:,}",
            fix=f"give the target that {where} was trained for",
        )
    return tables


def _shrinking(draft: Draft, config: Mapping[str, Any]) -> frozenset[str]:
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        what = f"the vocabulary of this draft cannot be cut: {exc.what}"
        raise PlanError(exc.where, what, fix=exc.fix) from exc
    before = draft.family.tensor_specs(draft.geometry)
    after = draft.family.tensor_specs(geometry)
    return frozenset(
        name
        for name, spec in after.items()
        if name in before and before[name].shape[0].size != spec.shape[0].size
    )


def _maps(draft: Draft, kept: KeptRows) -> dict[str, _Written]:
    size, vocabulary = len(kept.rows), draft.geometry.vocab_size
    offsets = kept.target_ids - np.arange(size)
    mask = np.zeros(vocabulary, np.bool_)
    mask[kept.target_ids] = True
    tensors = {
        MAP: ("I64", offsets.astype("<i8").tobytes(), size),
        MASK: ("BOOL", mask.tobytes(), vocabulary),
    }
    named = {}
    for canonical, (dtype, data, rows) in tensors.items():
        row = draft.row(canonical)
        name = row.tensor.name if row else canonical
        named[canonical] = _Written(StoredTensor(name=name, dtype=dtype, shape=(rows,)), data)
    return named


def _parts(source: StoredDraft, row: Row) -> Iterator[Row]:
    if not source.is_quantized(row):
        yield row
        return
    module = row.canonical_module
    for suffix, tensor in source.parts(row).items():
        yield Row(tensor=tensor, canonical=f"{module}.{suffix}", role=row.role)


def _cut_part(source: StoredDraft, row: Row, tensor: TensorInfo, size: int) -> _Written:
    rows = _Written.rows(source.checkpoint, tensor, size)
    scheme = source.scheme_of(row)
    if scheme is None:
        return rows
    if scheme.scales_whole_matrix or scheme.transposed or scheme.granularity == "block":
        why = "one scale for all rows" if scheme.scales_whole_matrix else "several rows together"
        where = f"{source.checkpoint.folder}: {row.module}"
        raise LayoutError(
            where,
            f"{scheme} stores {why}, so the kept rows of this quantized head are not the head of"
            " the kept rows, quantized",
            fix="cut first, then quantize",
        )
    suffix = tensor.name.rpartition(".")[2]
    whole, columns = row.tensor.shape
    before, after = (stored_parts(scheme, n, columns)[suffix].shape for n in (whole, size))
    if suffix == _SHAPE:
        shape = np.array([size, columns], "<i8" if tensor.dtype == "I64" else "<i4")
        return _Written(tensor.as_stored, shape.tobytes())
    if before == after:  # a scale of inputs
        return _Written.whole(source.checkpoint, tensor)
    if before[0] == whole and after[0] == size:
        return rows
    stored = replace(tensor.as_stored, shape=after)  # zero points, all equal
    return _Written(stored, read_whole(source.checkpoint, tensor).tobytes()[: stored.nbytes])
