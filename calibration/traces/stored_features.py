"""How the features of a trace lie in a shard: as they are, rounded to FP8, or packed by zstd.

`features.storage` of trace.json says which; without it they are stored as they are. In every
storage a prompt has rows = N - 1 positions, and is read in blocks of `BLOCK_TOKENS`:

    (none)           "ID.features"        [rows, width], dtype of the manifest
    fp8-per-token    "ID.features"        F8_E4M3 [rows, width]
                     "ID.feature_scales"  F32 [rows], of each row: feature = code * scale
    zstd             "ID.features"        U8, one zstd frame for each block of rows: the first bytes
                                          of all its elements, then all second bytes, and so on
                     "ID.feature_frames"  I32 [number of blocks], the length of each frame in bytes

Rounding to FP8 loses precision once: a trace that is read keeps its scales, by which it is written
again bit for bit. zstd loses nothing. Frames: RFC 8878; they carry their unpacked size, which must
be the one that trace.json implies before anything is unpacked.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...quantize.numerics.number_formats import FP8, fp8_codes, fp8_scale
from ...recipes.errors import TraceError
from ...recipes.installing import imported
from .manifest import FeatureSpec, FeatureStorage, StorageChoice
from .prompt_trace import FEATURE_DTYPES
from .target_tables import ANY_LENGTH, TensorTable

BLOCK_TOKENS = 1024
"""Positions that are packed together, and unpacked at a time; part of the format."""

_LEVEL = 1  # of zstd: on shuffled BF16 the higher ones take longer and pack no better
_MOST_EXPANSION = 16  # hidden states become 1.5 times as many bytes; zstd itself allows 30,000
_SMALL = 2**24  # bytes that may be unpacked of however few

_AGAIN = "copy the folder again, or record again"


def storage_of(choice: StorageChoice) -> FeatureStorage | None:
    """What trace.json says of a choice."""
    return None if choice == "exact" else choice


def stored_tensors(spec: FeatureSpec, rows: int) -> TensorTable:
    """Names without the prompt's id, dtypes and shapes of what a shard holds of `rows` features."""
    shape = (rows, spec.width)
    if spec.storage == "fp8-per-token":
        return {"features": ("F8_E4M3", shape), "feature_scales": ("F32", (rows,))}
    if spec.storage == "zstd":
        frames = ("I32", (len(list(_blocks(rows))),))
        return {"features": ("U8", (ANY_LENGTH,)), "feature_frames": frames}
    return {"features": (FEATURE_DTYPES[spec.dtype][1], shape)}


def check_storage(storage: FeatureStorage | None) -> None:
    """Nothing that the storage needs is missing; asked before a target runs."""
    if storage == "zstd":
        _zstandard("feature storage zstd")


def encoded(features: Tensor, scales: Tensor | None, spec: FeatureSpec) -> dict[str, Tensor]:
    """Features [rows, width] as they are stored, with their scales where they were read out of FP8.

    Without scales the largest magnitude of a row becomes 448.
    """
    if spec.storage == "fp8-per-token":
        if scales is None:
            largest = [features[block].abs().amax(dim=1) for block in _blocks(len(features))]
            scales = fp8_scale(torch.cat(largest))
        codes = torch.empty(features.shape, dtype=FP8)
        for block in _blocks(len(features)):
            codes[block] = fp8_codes(features[block], scales[block, None])
        return {"features": codes, "feature_scales": scales}
    if spec.storage == "zstd":
        packer = _zstandard("feature storage zstd").ZstdCompressor(level=_LEVEL)
        frames = [packer.compress(_planes(features[block])) for block in _blocks(len(features))]
        return {
            "features": torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8),
            "feature_frames": torch.tensor([len(frame) for frame in frames], dtype=torch.int32),
        }
    return {"features": features.contiguous()}


def decoded(
    stored: Mapping[str, Tensor], spec: FeatureSpec, rows: int, where: object
) -> tuple[Tensor, Tensor | None]:
    """The inverse of `encoded`, one block at a time, of tensors whose dtypes and shapes are right.

    NaN and infinity are for `check_trace` to find.
    """
    codes = stored["features"]
    if spec.storage is None:
        return codes, None
    dtype = FEATURE_DTYPES[spec.dtype][0]
    if spec.storage == "fp8-per-token":
        scales = stored["feature_scales"]
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise TraceError(where, "feature_scales: expected positive numbers", fix=_AGAIN)
        features = torch.empty((rows, spec.width), dtype=dtype)
        for block in _blocks(rows):
            features[block] = codes[block].float() * scales[block, None]
        return features, scales
    return _unpacked(codes, stored["feature_frames"].tolist(), (rows, spec.width), dtype, where)


def _unpacked(
    packed: Tensor, lengths: list[int], shape: tuple[int, int], dtype: torch.dtype, where: object
) -> tuple[Tensor, None]:
    zstandard = _zstandard(where)
    if min(lengths) < 1 or sum(lengths) != len(packed):
        what = f"feature_frames: {sum(lengths):,} bytes, but features have {len(packed):,}"
        raise TraceError(where, what, fix=_AGAIN)
    rows, width = shape
    nbytes = rows * width * dtype.itemsize
    if nbytes > max(_SMALL, _MOST_EXPANSION * len(packed)):
        what = f"{len(packed):,} packed bytes would become {nbytes:,}: no hidden states pack so"
        raise TraceError(where, what, fix=_AGAIN)
    features = torch.empty(shape, dtype=dtype)
    buffer, start = packed.numpy().data, 0
    for block, length in zip(_blocks(rows), lengths, strict=True):
        target = features[block]
        frame, start = buffer[start : start + length], start + length
        target.view(torch.uint8).view(-1, dtype.itemsize).copy_(
            _frame(zstandard, frame, target.nbytes, where).view(dtype.itemsize, -1).T
        )
    return features, None


def _frame(zstandard: Any, frame: memoryview, nbytes: int, where: object) -> Tensor:
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != nbytes:
            unknown = declared == zstandard.CONTENTSIZE_UNKNOWN
            problem = "does not declare its size" if unknown else f"declares {declared:,} bytes"
            what = f"a zstd frame {problem}, expected {nbytes:,}"
            raise TraceError(where, what, fix=_AGAIN)
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise TraceError(where, f"a zstd frame is damaged: {exc}", fix=_AGAIN) from exc
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _planes(features: Tensor) -> bytes:
    """First bytes of all elements, then second bytes: the exponents lie together and pack well."""
    elements = features.contiguous().view(torch.uint8).view(-1, features.dtype.itemsize)
    return elements.T.contiguous().numpy().tobytes()


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(at, min(at + BLOCK_TOKENS, rows)) for at in range(0, rows, BLOCK_TOKENS))


def _zstandard(where: object) -> Any:
    what = "features are stored by zstd, which needs the package zstandard"
    return imported("zstandard", "zstd", where, what, TraceError)
