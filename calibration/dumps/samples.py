"""The files of a dump: which ones, in which order, and what tensors they hold; hostile input."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...quantize.files.safetensors_header import read_header
from ...quantize.files.torch_file import TorchFileProblem, load_plain
from ...recipes.errors import CheckpointError, TraceError, short, visible
from ..prompts.prompt_file import Prompt

# ---- One text of a dump as plain tensors, whichever trainer wrote it

AGAIN = "dump again, or give the dump of another trainer its own name: --from"
TEXT_AGAIN = "dump this text again, with prefix caching and chunked prefill off"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One text and what its target computed, one row for each token.

    Attributes:
        id: of the text within the dump, from its file's name.
        file: for errors.
        token_ids: [N] int64.
        answered: [N] bool, the tokens that the dump calls the target's answers; None where it does
            not say.
        aux: [N, m * W], outputs of m layers side by side, floating point.
        last: [N, W], what the head reads or what the norm before it reads; None where absent.
        scales: [N] float32, of aux features that the dump rounded to FP8; None = not rounded.
    """

    id: str
    file: Path
    token_ids: Tensor
    answered: Tensor | None
    aux: Tensor
    last: Tensor | None
    scales: Tensor | None = None


class Pending(NamedTuple):
    """A sample that is still on the disk: its file, and what reads it."""

    file: Path
    read: Callable[[], Sample]


def make_sample(
    file: Path,
    name: str,
    *,
    token_ids: Tensor,
    answered: Tensor | None,
    aux: Tensor,
    last: Tensor | None,
    scales: Tensor | None = None,
) -> Sample:
    """A sample of tensors as they were stored: leading axes of 1 fall away.

    Args:
        token_ids: [N] or [1, N], whole numbers.
        answered: [N] or [1, N], 0 or 1 of any dtype.
        aux: [N, m * W] or [1, N, m * W], also [N, m, W].
        last: [N, W] or [1, N, W].
        scales: [N].

    Raises:
        TraceError: a shape, a dtype or a length says that the file is none of its kind, or cut off.
    """
    ids = _rows(file, "token ids", token_ids, axes=1)
    if ids.is_floating_point() or ids.is_complex() or not len(ids):
        raise TraceError(file, f"token ids: expected at least one whole number, got {_said(ids)}",
                         fix=AGAIN)  # fmt: skip
    sample = Sample(
        id=name,
        file=file,
        token_ids=ids.long(),
        answered=None if answered is None else _rows(file, "loss_mask", answered, axes=1) != 0,
        aux=_features(file, "aux hidden states", aux),
        last=None if last is None else _features(file, "last hidden states", last),
        scales=scales,
    )
    for what, rows in (
        ("the loss mask", sample.answered),
        ("the aux hidden states", sample.aux),
        ("the last hidden states", sample.last),
        ("the scales of the hidden states", sample.scales),
    ):
        if rows is not None and len(rows) != len(ids):
            raise TraceError(
                file,
                f"the text has {len(ids)} tokens, but {what} have {len(rows)} rows: the file"
                " is cut off, or they belong to another text",
                fix=TEXT_AGAIN,
            )
    return sample


def _features(file: Path, what: str, stored: Tensor) -> Tensor:
    rows = _rows(file, what, stored, axes=2)
    if not rows.is_floating_point() or rows.element_size() == 1 or not rows.shape[1]:
        raise TraceError(file, f"{what}: expected BF16, F16, F32 or F64 rows, got {_said(stored)}",
                         fix=AGAIN)  # fmt: skip
    return rows


def _rows(file: Path, what: str, stored: Tensor, *, axes: int) -> Tensor:
    """Without a batch axis of 1; the layers of a stack side by side."""
    rows = stored
    if rows.dim() == axes + 1 and rows.shape[0] == 1:
        rows = rows[0]
    if axes == 2 and rows.dim() == 3:
        rows = rows.flatten(1)
    if rows.dim() != axes:
        expected = f"expected a tensor of {axes} axes, or a batch of one"
        raise TraceError(file, f"{what}: {expected}, got {_said(stored)}",
                         fix="dump texts one by one, not in batches")  # fmt: skip
    return rows


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


MAX_NAME = 150  # characters; the number of a turn may follow
_NUMBER = re.compile(r"(\d+)")


def find_files(dump: Path, suffixes: tuple[str, ...], *, written_by: str) -> list[Path]:
    """The files of a dump, anywhere below its folder, numbers in their names counted as numbers.

    Args:
        dump: the folder, or one of its files.

    Raises:
        TraceError: there are none.
    """
    found = [dump] if dump.is_file() else [p for p in dump.rglob("*") if p.name.endswith(suffixes)]
    if not found:
        what = "no such folder" if not dump.is_dir() else f"holds no file *{' or *'.join(suffixes)}"
        raise TraceError(dump, what, fix=f"give the folder that {written_by} wrote")
    return sorted(found, key=_natural)


def pending(files: Iterable[Path], load: Callable[[Path], Sample]) -> tuple[Pending, ...]:
    """The samples of these files, one each, unread."""

    def later(file: Path) -> Pending:
        return Pending(file, lambda: load(file))

    return tuple(map(later, files))


def sample_name(file: Path, dump: Path) -> str:
    """What the file is called within its dump, without its suffixes: rows_0-2000/data_3."""
    inside = file.relative_to(dump) if file != dump else Path(file.name)
    return visible(str(inside.with_name(inside.name.split(".")[0])))[-MAX_NAME:]


def stored_sample(
    file: Path,
    dump: Path,
    loaded: Mapping[str, Any],
    *,
    aux: str,
    last: str,
    masked: bool = True,
) -> Sample:
    """The text of a file that holds input_ids, loss_mask and these states.

    Args:
        file: where `loaded` comes from.
        dump: the folder that it lies in, or itself.
        last: that with the last states; it may be absent.
        masked: a loss_mask must be there.

    Raises:
        TraceError: an entry is absent, or something else than a tensor of the right shape.
    """
    names = ("input_ids", *(("loss_mask",) if masked else ()), aux)
    token_ids, *_, states = tensors(file, loaded, *names)
    return make_sample(
        file,
        sample_name(file, dump),
        token_ids=token_ids,
        answered=optional_tensor(file, loaded, "loss_mask"),
        aux=states,
        last=optional_tensor(file, loaded, last),
    )


def load_tensors(file: Path) -> Mapping[str, Any]:
    """The dict that torch.save wrote to a file, without running any code of it.

    Raises:
        TraceError: it is cut off, holds objects, or is no dict.
    """
    try:
        loaded = load_plain(file)
    except TorchFileProblem as exc:
        raise TraceError(
            file,
            f"cannot be read as plain tensors: {exc}",
            fix="remove the file if a run was stopped while writing it; else dump tensors,"
            " numbers and text only",
        ) from exc
    if not isinstance(loaded, dict):
        raise TraceError(
            file, f"expected a dict of tensors, got {type(loaded).__name__}", fix=AGAIN
        )
    return loaded


def load_safetensors(
    file: Path, names: Iterable[str], *, beside: Iterable[str] = ()
) -> dict[str, Tensor]:
    """These tensors of a safetensors file, and those `beside` them that it has.

    Raises:
        TraceError: the file is cut off, or lacks one of them.
    """
    try:
        found = {tensor.name for tensor in read_header(file.parent, file.name).tensors}
        _demand(file, names, found)
        with safe_open(file, framework="pt") as opened:
            wanted = [*names, *(name for name in beside if name in found)]
            return {name: opened.get_tensor(name) for name in wanted}
    except (CheckpointError, SafetensorError) as exc:
        what = exc.what if isinstance(exc, CheckpointError) else str(exc)
        raise TraceError(
            file,
            what,
            fix="remove the file if a run was stopped while writing it, or dump this text again",
        ) from exc


def tensors(file: Path, loaded: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
    """Entries that must be plain tensors.

    Raises:
        TraceError: one is absent, or something else.
    """
    _demand(file, names, loaded)
    for name in names:
        if not _is_plain(loaded[name]):
            kind = type(loaded[name]).__name__
            raise TraceError(file, f"{name}: expected a dense tensor, got {kind}", fix=AGAIN)
    return tuple(loaded[name] for name in names)


def optional_tensor(file: Path, loaded: Mapping[str, Any], name: str) -> Tensor | None:
    """An entry that may be absent or None."""
    return None if loaded.get(name) is None else tensors(file, loaded, name)[0]


def _demand(file: Path, names: Iterable[str], found: Iterable[str]) -> None:
    absent = [name for name in names if name not in found]
    if absent:
        raise TraceError(
            file,
            f"holds no {', '.join(absent)}, but {short(sorted(map(str, found)))}",
            fix=AGAIN,
        )


def _is_plain(value: object) -> bool:
    """True for a dense tensor in memory that every operation of torch takes."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        and not value.is_quantized
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(str(path))]


# ---- The answers in a text: what the target is said to have written, each with all before as
# prompt
#
# A run of the loss mask is an answer, whatever stands between two of them: later turns of the
# user,
# or tokens inside an answer that training leaves out. Features look back only, so the beginning of
# a
# text with its features is a trace of its own.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Tokens `start` to `stop` - 1 of a sample, with the tokens before as their prompt.

    Attributes:
        id: of the sample, with the number of the turn where it has several answers.
        category: of the prompt file, else "all".
        first_start: prompt length of the sample's first answer: the conversation's own prompt.
    """

    id: str
    category: str
    sample: Sample
    start: int
    stop: int
    first_start: int


class Answers:
    """Finds the answers of samples.

    Args:
        ends: token ids that end an answer; what follows one in the mask is the template's.
        prompts: the prompts that the dump was made with, where given; a sample belongs to the
            longest that it begins with. They give ids, categories, and where prompts end if the
            dump does not.
    """

    def __init__(self, ends: Collection[int], prompts: Sequence[Prompt] | None) -> None:
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._prompts: Mapping[tuple[int, ...], Prompt] | None = (
            None if prompts is None else {prompt.token_ids: prompt for prompt in prompts}
        )
        self._lengths = sorted({len(ids) for ids in self._prompts or ()}, reverse=True)
        self._taken: set[str] = set()

    def of(self, sample: Sample) -> Iterator[Answer]:
        """The answers of one sample, in order; none where it has no answer with a token.

        Raises:
            TraceError: nothing says where its prompt ends.
        """
        prompt = self._prompt_of(sample)
        runs = self._runs(sample, prompt)
        name = sample.id if prompt is None else prompt.id
        if name in self._taken:
            name = f"{name}/{sample.id}"
        self._taken.add(name)
        for turn, (start, stop) in enumerate(runs, start=1):
            yield Answer(
                id=f"{name}/turn-{turn}" if len(runs) > 1 else name,
                category=prompt.category if prompt else "all",
                sample=sample,
                start=start,
                stop=stop,
                first_start=runs[0][0],
            )

    def _runs(self, sample: Sample, prompt: Prompt | None) -> list[tuple[int, int]]:
        answered, count = sample.answered, len(sample.token_ids)
        if answered is not None and not bool(answered.any()):
            return []
        if answered is None or bool(answered[0]):
            if prompt is None:
                why = "has no loss mask" if answered is None else "begins with an answer"
                raise TraceError(
                    sample.file,
                    f"the text {why}, so it is unknown where its prompt ends",
                    fix="give the prompts as they were sent, with their token ids: --prompts P",
                )
            answered = torch.arange(count) >= len(prompt.token_ids)
        steps = torch.diff(torch.nn.functional.pad(answered.long(), (1, 1)))
        starts, stops = ((steps == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        return [
            (start, self._end(sample, start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _end(self, sample: Sample, start: int, stop: int) -> int:
        """Up to and with the first token that ends an answer."""
        ends = torch.isin(sample.token_ids[start:stop], self._ends).nonzero()
        return start + int(ends[0]) + 1 if len(ends) else stop

    def _prompt_of(self, sample: Sample) -> Prompt | None:
        if self._prompts is None:
            return None
        for length in self._lengths:
            found = self._prompts.get(tuple(sample.token_ids[:length].tolist()))
            if found is not None:
                return found
        raise TraceError(
            sample.file,
            "the text begins with none of the prompts of --prompts",
            fix="give the prompts that were sent, with the same token ids: --prompts P",
        )
