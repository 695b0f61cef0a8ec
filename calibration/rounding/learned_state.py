"""What learning keeps on disk: the state to resume from, and the best codes so far.

    OUT.rounding/
        rounding.json             what is learned from what: see `quantize.files.result_cache`
        state.safetensors         latents and the optimiser's moments, and in its header the
                                  validations so far; none of the tensors once learning is over
        codes-00040.safetensors   codes and scales of the best step; written before the state that
                                  names it

Files are replaced whole: an interrupted run leaves the state of its last validation or the one
before, never half of one.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...quantize.files.provenance import LearnedRounding, SeenPrompts
from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import Header, StoredTensor, read_header
from ...quantize.numerics.quantized_weight import QuantizedWeight
from ...recipes.errors import CalibrationError, CheckpointError, OutputError
from ...recipes.strict_json import JsonProblem, decode, parse_object


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """Settings that determine the result, besides draft, recipe and traces.

    Measured on the shipped Llama pair in NVFP4, with 128 prompts, as the divergence on 64 others in
    1e-3 nats: 2.68 before, 2.48 after 100 steps at 0.015 codes, 2.44 after as many at 0.03.

    First steps at the full rate may be worse than a good start, and recover as the rate
    falls. `max_overlap_drop` is what kept steps may lose of the first codes' overlap.
    """

    steps: int = 150
    sequences: int = 4
    learning_rate: float = 0.03  # of latents, in codes; Adam moves one by about as much in a step
    scale_learning_rate: float = 1e-3
    warmup_steps: int = 10  # over which both rates rise; a cosine then lowers them to zero
    depth_decay: float = 0.8
    missed_weight: float = 0.1  # of depths after one at which the unquantized draft errs
    validate_every: int = 10
    patience: int = 15  # validations without a better one before it stops
    max_overlap_drop: float = 0.005
    validation_share: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One validation on the held-out prompts, after a step; 0 = before the first."""

    step: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]  # tokens of each prompt, from all of its rows
    overlap: float  # mean over rows and depths of the sum of the smaller probabilities
    unquantized: float

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens, the mean over every position."""
        return 1 + sum(self.accepted) / sum(self.rows)


def best_of(validations: Sequence[Validation], settings: LearningSettings) -> Validation:
    """The validation whose codes are kept: each one is compared with the best before it.

    So the best is the last one or the previous best, whose codes exist. Validations whose
    overlap is clearly below that of the first codes are excluded. Acceptance lengths
    decide where they differ by more than two standard errors, else overlap, which a few prompts
    measure much more precisely.
    """
    least = validations[0].overlap - settings.max_overlap_drop
    best = validations[0]
    for validation in validations[1:]:
        if validation.overlap >= least and _is_better(validation, best):
            best = validation
    return best


def is_over(validations: Sequence[Validation], settings: LearningSettings) -> bool:
    """True after the last step, or where the last validations found nothing better."""
    since = len(validations) - 1 - validations.index(best_of(validations, settings))
    return validations[-1].step >= settings.steps or since >= settings.patience


def _is_better(validation: Validation, best: Validation) -> bool:
    gain, error = _gain(validation, best)
    if abs(gain) > 2 * error:
        return gain > 0
    return (validation.overlap, gain) > (best.overlap, 0)


def _gain(validation: Validation, other: Validation) -> tuple[float, float]:
    """The gain in acceptance length, and its standard error, prompt by prompt."""
    rows, count = sum(validation.rows), len(validation.rows)
    gains = [a - b for a, b in zip(validation.accepted, other.accepted, strict=True)]
    mean = sum(gains) / rows
    residuals = (gain - mean * n for gain, n in zip(gains, validation.rows, strict=True))
    error = math.sqrt(count / max(1, count - 1) * sum(r * r for r in residuals)) / rows
    return mean, error


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProgress:
    """The state of learning; `loss` of the last step, mean divergence per row and depth in nats."""

    step: int
    steps: int
    loss: float
    validation: Validation
    best: Validation


_STATE_FILE = "state.safetensors"
_KEY = "rounding"
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    validations: tuple[Validation, ...]


class KeptRounding:
    """The files of a folder that only this process writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def has_state(self) -> bool:
        """True if there is a state to resume from."""
        return (self._folder / _STATE_FILE).exists()

    def validations(self) -> tuple[Validation, ...]:
        """All so far; none where nothing is kept."""
        if not self.has_state:
            return ()
        text = self._header(_STATE_FILE).metadata.get(_KEY, "")
        try:
            done: _Done = decode(_Done, parse_object(text))
        except JsonProblem as exc:
            raise self._damaged(_STATE_FILE, str(exc)) from exc
        if not done.validations:
            raise self._damaged(_STATE_FILE, "it holds no validation")
        return done.validations

    def tensors(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the state, of the names and shapes of `expected`."""
        tensors = self._read(_STATE_FILE)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in expected.items()}:
            raise self._damaged(_STATE_FILE, "it holds other tensors than this draft's")
        return tensors

    def save(self, tensors: Mapping[str, Tensor], validations: tuple[Validation, ...]) -> None:
        """Replace the state."""
        done = json.dumps(dataclasses.asdict(_Done(validations=validations)))
        self._write(_STATE_FILE, tensors, {_KEY: done})

    def save_codes(self, step: int, codes: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the codes of a step, `Latent.parts` by module."""
        tensors = {
            f"{module}.{part}": tensor
            for module, parts in codes.items()
            for part, tensor in parts.items()
        }
        self._write(_codes_file(step), tensors, {})

    def remove_codes_but(self, step: int) -> None:
        """Remove the codes of other steps."""
        for path in self._folder.glob("codes-*.safetensors"):
            if path.name != _codes_file(step):
                path.unlink()

    def codes(self, step: int, module: str, group_size: int | None) -> QuantizedWeight:
        """The codes of a linear."""
        parts = self._parts(step, module, "codes", "scale")
        return QuantizedWeight(
            codes=parts["codes"],
            scale=parts["scale"],
            global_scale=parts.get("global_scale"),
            group_size=group_size,
        )

    def weight(self, step: int, module: str) -> Tensor:
        """The weight of a norm as it is to be stored."""
        return self._parts(step, module, "weights")["weights"]

    def _parts(self, step: int, module: str, *needed: str) -> dict[str, Tensor]:
        file, prefix = _codes_file(step), f"{module}."
        names = [t.name for t in self._header(file).tensors if t.name.startswith(prefix)]
        tensors = self._read(file, names)
        parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if not parts.keys() >= set(needed):
            what = f"it holds no learned {needed[0]} of {module}"
            fix = "run the learning again with the draft and the recipe that are given here"
            raise CalibrationError(self._folder / file, what, fix=fix)
        return parts

    def _header(self, file: str) -> Header:
        try:
            return read_header(self._folder, file)
        except CheckpointError as exc:
            raise self._damaged(file, exc.what) from exc

    def _read(self, file: str, names: list[str] | None = None) -> dict[str, Tensor]:
        wanted = [t.name for t in self._header(file).tensors] if names is None else names
        try:
            with safe_open(self._folder / file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in wanted}
        except (OSError, SafetensorError) as exc:
            raise self._damaged(file, str(exc)) from exc

    def _write(self, file: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        unfinished = self._folder / f"{file}.unfinished"
        stored = [
            StoredTensor(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        try:
            unfinished.unlink(missing_ok=True)
            with SafetensorsFile(unfinished, stored, metadata) as written:
                for name, tensor in tensors.items():
                    written.write(name, tensor.detach().cpu())
            unfinished.replace(self._folder / file)
        except OSError as exc:
            what = f"cannot be written: {exc.strerror or exc}"
            fix = "free some space and run again: what was learned before is kept"
            raise OutputError(self._folder, what, fix=fix) from exc

    def _damaged(self, file: str, what: str) -> CalibrationError:
        return CalibrationError(
            self._folder / file,
            f"this is not a state of an unfinished run: {what}",
            fix=f"rm -r {self._folder}, and run again",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedCodes:
    """`FoundCodes` of `quantize.algorithms`, in the files of a folder."""

    kept: KeptRounding
    origin: LearnedRounding
    validations: tuple[Validation, ...]
    prompts: SeenPrompts
    group_sizes: Mapping[str, int | None]

    def quantized(self, module: str) -> QuantizedWeight:
        """Codes and scales of a linear."""
        return self.kept.codes(self.origin.kept_step, module, self.group_sizes.get(module))

    def weight(self, module: str) -> Tensor:
        """The learned weight of a norm."""
        return self.kept.weight(self.origin.kept_step, module)


def _codes_file(step: int) -> str:
    return f"codes-{step:05d}.safetensors"
