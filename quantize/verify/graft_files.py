"""The files beside the tensors of a target's folder with a layer in it."""

from collections.abc import Iterator

from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, Checkpoint
from ..files.files_of_folder import entries
from ..stored.declarations import HF_QUANT_CONFIG
from .unowned_files import same_bytes
from .verify_report import Fault

_OWN = frozenset({CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, HF_QUANT_CONFIG})
_OF_THE_HUB = frozenset({".gitattributes", "model.sig"})


def file_faults(before: Checkpoint, after: Checkpoint, config_file: str) -> Iterator[Fault]:
    """The target's side files are there, byte for byte, and no file is nobody's."""
    travel = set(before.side_files()) - _OWN
    for file in sorted(travel):
        here, there = before.folder / file, after.folder / file
        if not there.is_file():
            yield Fault(where=file, expected="the target's file", got="none")
        elif not same_bytes(here, there):
            yield Fault(where=file, expected="the target's bytes", got="others")
    side = {HF_QUANT_CONFIG} & set(before.side_files())
    known = {*travel, *(_OWN - {HF_QUANT_CONFIG}), *side, *_OF_THE_HUB, config_file, *after.headers}
    for file, _ in entries(after.folder):
        if file not in known:
            yield Fault(where=file, expected="a file of the target or the layer", got="neither")
