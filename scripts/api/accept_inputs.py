"""What an acceptance is given, and hashes of it: a changed input is not mixed with old results.

Each hash is made once, when a step first asks for it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import CONFIG_FILE, Checkpoint
from ...quantize.files.digests import tensor_digests, tensors_sha256
from ...quantize.files.hub import no_target
from .accept_settings import AcceptSettings
from .references import folder_of

TRACES, BF16, QUANTIZED, PLAIN = "traces", "bf16.jsonl", "quantized.jsonl", "plain.jsonl"
"""What is recorded and measured, by name in the folder."""
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files of a model that are not its weights."""


class Given:
    """The drafts, the target and the evidence of an acceptance.

    Args:
        settings: of the whole.
        folder: in which its outputs lie.
    """

    def __init__(self, settings: AcceptSettings, folder: Path) -> None:
        self.settings = settings
        self.target = Path(settings.target)
        self.folder = folder

    @property
    def prompts(self) -> Path:
        """Those that are recorded or measured; `AcceptSettings.check` has seen that they are."""
        assert self.settings.prompts is not None
        return Path(self.settings.prompts)

    @property
    def traces(self) -> Path | None:
        """Given, or recorded here."""
        if self.settings.traces is not None:
            return Path(self.settings.traces)
        return self.folder / TRACES if self.settings.records else None

    @property
    def measured(self) -> tuple[Path, Path] | None:
        """Of the BF16 and of the quantized draft: given, or measured here."""
        if self.settings.measured:
            first, second = self.settings.measured
            return Path(first), Path(second)
        if self.settings.server:
            return self.folder / BF16, self.folder / QUANTIZED
        return None

    @cached_property
    def draft_sha256(self) -> str:
        """Of its tensors and its configs."""
        return _draft_sha256(folder_of(self.settings.draft))

    @cached_property
    def quantized_sha256(self) -> str:
        """Likewise."""
        return _draft_sha256(folder_of(self.settings.quantized))

    @cached_property
    def target_sha256(self) -> str:
        """Of its configs and its tokenizer; of its weights the names and sizes, no byte is read."""
        weights = sorted(self.target.glob("*.safetensors"))
        sizes = (f"{path.name} {path.stat().st_size}" for path in weights)
        return _sha256([*_small_files(self.target), *sizes])

    def drafts(self) -> dict[str, object]:
        """Both."""
        return {"DRAFT": self.draft_sha256, "QUANT": self.quantized_sha256}

    def evidence(self) -> dict[str, object]:
        """Both drafts, and what they are judged on."""
        from ...calibration.traces.trace_folder import TraceFolder

        found = self.drafts()
        if self.traces is not None:
            found["--traces"] = TraceFolder.open(self.traces).sha256
            found["--target"] = self.target_sha256
        for name, path in zip(
            ("BF16 measured", "QUANT measured"), self.measured or (), strict=False
        ):
            found[name] = hash_of(path)
        return found

    def options(self, *names: str) -> dict[str, object]:
        """Options of the whole that a step passes on, as the command line names them."""
        values = {name: getattr(self.settings, name) for name in names}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


def check_target(target: Path) -> None:
    """Refuse what is no folder of a model, before any work.

    Raises:
        CheckpointError: it holds no config.json.
    """
    if not (target / CONFIG_FILE).is_file():
        raise CheckpointError("--target", f"{target} holds no {CONFIG_FILE}", fix=no_target(target))


def hash_of(path: Path) -> str:
    """Of a file's bytes, or of every file below a folder; what is neither is what it is called.

    A data set of the Hub is neither.
    """
    if path.is_file():
        return _file_sha256(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    named = (f"{each.relative_to(path)} {_file_sha256(each)}" for each in files)
    return _sha256(named) if files else str(path)


def hash_of_all(files: Iterable[Path]) -> str:
    """Of several files; one that is not there counts as such."""
    return _sha256(
        f"{path.name} {_file_sha256(path) if path.is_file() else 'missing'}" for path in files
    )


def _draft_sha256(folder: Path) -> str:
    weights = tensors_sha256(tensor_digests(Checkpoint.open(folder)))
    return _sha256([weights, *_small_files(folder)])


def _small_files(folder: Path) -> Iterator[str]:
    paths = sorted(path for path in folder.iterdir() if path.suffix in _SMALL and path.is_file())
    return (f"{path.name} {_file_sha256(path)}" for path in paths)


def _file_sha256(path: Path) -> str:
    from ...calibration.traces.trace_folder import file_sha256

    return file_sha256(path)


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
