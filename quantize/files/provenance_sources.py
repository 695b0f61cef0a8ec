"""The folders that others are made of, as draftquant.json records them: by digests of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...recipes.schema import StoredLayoutName, WeightFormat


class Digested:
    """A record of tensors, each by the digest of its bytes; see `digests`.

    Attributes:
        tensor_digests: by name.
        tensor_sha256: in their place, in records of version 0.2 and before.
    """

    __slots__ = ()
    tensor_digests: Mapping[str, str]
    tensor_sha256: Mapping[str, str]

    @property
    def digests(self) -> Mapping[str, str]:
        """Of every tensor, as `Digest` spells them."""
        return self.tensor_digests or self.tensor_sha256

    def problem(self) -> str | None:
        """What two keys say of one thing differently, or None."""
        if bool(self.tensor_digests) == bool(self.tensor_sha256):
            return "tensor_digests: expected the digest of every tensor"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFolder:
    """Where a folder came from: Hub id and commit, None for a local one."""

    hub_id: str | None
    revision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraft(Digested, SourceFolder):
    """The unquantized draft that was quantized, with the digest of each of its tensors."""

    family: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSource(Digested, SourceFolder):
    """The quantized folder that was dequantized; `scheme` is what it declared."""

    family: str
    scheme: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodedFrom(Digested, SourceFolder):
    """The quantized folder whose codes and scales were written in another layout or carrier.

    Attributes:
        layout: of that folder.
        weights: in which format codes and scales were found at first: of several transcodings in a
            row, before the first one.
        scale_dtype: safetensors dtype to which the scales were rounded then.
    """

    layout: StoredLayoutName
    weights: WeightFormat
    scale_dtype: str
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
