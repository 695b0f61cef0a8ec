"""The folder of a plan on its way to a machine that does not see it, and results on their way back.

Everything is the bytes of files by their names.
"""

from collections.abc import Mapping
from pathlib import Path

from ...quantize.errors import OutputError
from ...quantize.files.staging import staged_output, sync
from ...recipes.regular_file import open_stream
from .parts import Part
from .shard_folder import PARTS, PLAN_FILE, RESULTS, WAVES, ShardFolder

Packed = Mapping[str, bytes]
"""Name below a folder -> content."""


def packed_folder(folder: ShardFolder, run: int) -> Packed:
    """What a machine needs to compute parts of a command: the plan and results of earlier waves."""
    earlier = (part for wave in folder.waves(run)[:-1] for own in wave.parts for part in own)
    packed = _packed(folder.folder, folder.folder / PLAN_FILE)
    for each in (folder.folder / WAVES, folder.folder / PARTS, *map(folder.result, earlier)):
        packed |= _packed(folder.folder, *_files(each))
    return packed


def unpacked_folder(folder: Path, packed: Packed) -> ShardFolder:
    """Write what was packed into a folder to create."""
    (folder / RESULTS).mkdir(parents=True)
    _write(folder, packed)
    return ShardFolder.open(folder)


def packed_result(folder: ShardFolder, address: str) -> Packed:
    """The result of a part."""
    result = folder.folder / RESULTS / address
    return _packed(result, *_files(result))


def publish_packed(folder: ShardFolder, part: Part, packed: Packed) -> bool:
    """Publish a result; whether somebody else was faster.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with staged_output(folder.result(part)) as staging:
            _write(staging, packed)
    except OutputError:
        if not folder.is_done(part):
            raise
        return True
    return False


def _files(folder: Path) -> list[Path]:
    """All files, but for what is hidden: it is being written."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [p for p in paths if not any(n[:1] == "." for n in p.relative_to(folder).parts)]


def _packed(folder: Path, *paths: Path) -> dict[str, bytes]:
    packed: dict[str, bytes] = {}
    for path in paths:
        with open_stream(path) as stream:
            packed[path.relative_to(folder).as_posix()] = stream.read()
    return packed


def _write(folder: Path, packed: Packed) -> None:
    for name, content in packed.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sync(path)
