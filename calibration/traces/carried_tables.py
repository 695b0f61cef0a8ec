"""The tables that trace folders carry, written again beside copies of their traces."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import StoredTensor
from ..errors import TraceError
from .manifest import TablesFile
from .trace_folder import TraceFolder, file_sha256


class CarriedTables:
    """The tables of trace folders of one target, together.

    Args:
        folders: at least one; each carries tables.
    """

    def __init__(self, folders: Sequence[TraceFolder]) -> None:
        self._folders = folders

    @property
    def nbytes(self) -> int:
        """What they need on the disk, at most."""
        return sum(listed.nbytes for _, listed in self._listed())

    def write(self, path: Path) -> TablesFile:
        """Write a tables file with every embedding that one of the folders carries.

        Raises:
            TraceError: two folders carry different tables, so their targets differ; or a file is
                damaged.
        """
        first, listed = self._listed()[0]
        tensors = first.stored_tables()
        rows = _rows(tensors)
        for other, theirs in self._listed()[1:]:
            self._join(rows, tensors, listed, other, theirs)
        token_ids = sorted(rows)
        tensors |= {
            "token_ids": torch.tensor(token_ids, dtype=torch.int32),
            "embed_tokens": torch.stack([rows[token] for token in token_ids]),
        }
        dtypes = {
            "token_ids": "I32",
            "embed_tokens": listed.embed_tokens_dtype,
            "lm_head": listed.lm_head_dtype,
            "norm": listed.norm_dtype,
        }
        stored = [
            StoredTensor(name=name, dtype=str(dtypes[name]), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        with SafetensorsFile(path, stored, {}) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
        return TablesFile(
            nbytes=path.stat().st_size,
            sha256=file_sha256(path),
            num_token_ids=len(token_ids),
            width=listed.width,
            embed_tokens_dtype=listed.embed_tokens_dtype,
            lm_head_dtype=listed.lm_head_dtype,
            norm_dtype=listed.norm_dtype,
        )

    def _listed(self) -> list[tuple[TraceFolder, TablesFile]]:
        return [(f, f.manifest.tables) for f in self._folders if f.manifest.tables is not None]

    def _join(
        self,
        rows: dict[int, Tensor],
        tensors: dict[str, Tensor],
        listed: TablesFile,
        other: TraceFolder,
        theirs: TablesFile,
    ) -> None:
        """Take in the rows of another folder, whose tables must be the same."""
        found = other.stored_tables()
        forms = (listed.width, listed.embed_tokens_dtype, listed.lm_head_dtype, listed.norm_dtype)
        same = forms == (
            theirs.width,
            theirs.embed_tokens_dtype,
            theirs.lm_head_dtype,
            theirs.norm_dtype,
        ) and all(
            torch.equal(found[name], tensors[name]) for name in ("lm_head", "norm") if name in found
        )
        for token, row in _rows(found).items():
            same = same and torch.equal(rows.setdefault(token, row), row)
        if not same:
            raise TraceError(
                other.folder,
                f"its embedding and head differ from those of {self._folders[0].folder}: it"
                " was recorded from another target",
                fix="merge traces of one target",
            )


def _rows(tensors: dict[str, Tensor]) -> dict[int, Tensor]:
    return dict(zip(tensors["token_ids"].tolist(), tensors["embed_tokens"], strict=True))
