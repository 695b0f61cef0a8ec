"""What a folder is made of, through every record that its draftquant.json holds."""

import dataclasses
from collections.abc import Iterator, Mapping

from .provenance import (
    CutProvenance,
    DequantizedProvenance,
    GraftedProvenance,
    Provenance,
    QuantizedProvenance,
    TensorBytes,
)
from .vocabulary_cut import VocabularyCut


def quantization_of(record: Provenance | None) -> QuantizedProvenance | None:
    """How its weights were quantized, where a record of this package says so.

    Of a folder that was cut or dequantized afterwards it is that of the folder before, with every
    cut, and the bytes that are left. Its source has the Hub id of the whole draft.
    """
    if isinstance(record, DequantizedProvenance | GraftedProvenance):
        return quantization_of(record.quantized_by)
    if isinstance(record, QuantizedProvenance):
        whole = record.cuts[0].source if record.cuts else record.source
        source = dataclasses.replace(record.source, hub_id=whole.hub_id, revision=whole.revision)
        return dataclasses.replace(record, source=source)
    if not isinstance(record, CutProvenance):
        return None
    before = quantization_of(record.quantized_by)
    if before is None:
        return None
    nbytes = TensorBytes(before=before.tensor_bytes.before, after=record.tensor_bytes.after)
    return dataclasses.replace(before, tensor_bytes=nbytes, cuts=(*before.cuts, *record.cuts))


def cuts_of(record: Provenance | None) -> tuple[VocabularyCut, ...]:
    """Every cut of its vocabulary, the first one first."""
    if isinstance(record, DequantizedProvenance | GraftedProvenance):
        return cuts_of(record.quantized_by)
    if isinstance(record, CutProvenance):
        return (*cuts_of(record.quantized_by), *record.cuts)
    return record.cuts if isinstance(record, QuantizedProvenance) else ()


def sources_of(record: Provenance | None) -> Iterator[Mapping[str, str]]:
    """The digests of every folder that it was made of in turn, the nearest one first."""
    if isinstance(record, DequantizedProvenance):
        yield record.source.digests
        yield from sources_of(record.quantized_by)
    elif isinstance(record, GraftedProvenance):
        yield from sources_of(record.quantized_by)
    elif isinstance(record, CutProvenance):
        yield from (cut.source.digests for cut in reversed(record.cuts))
        yield from sources_of(record.quantized_by)
    elif isinstance(record, QuantizedProvenance):
        yield record.source.digests
        yield from (cut.source.digests for cut in reversed(record.cuts))
