"""What trainers write, one row each, read as plain tensors from any trainer; hostile input.

`specforge`: `rows_0-2000/data_0.ckpt`, or `.ckpt.gz` with --compress. eagle3 and p-eagle have
aux_hidden_state [1, N, 3 W]; for dflash and dspark hidden_states [1, N, m W] are aux ones. Texts
are captured in batches and padded at the end with token 0 to the longest, which the file does not
say: the loss mask is 0 there. Source: sgl-project/SpecForge a6b6b02, specforge/data/utils.py,
specforge/algorithms/*/providers.py, scripts/prepare_hidden_states.py.

`torchspec`: what its OfflineEagle3Dataset reads. TorchSpec itself writes none of these: its
features go through a store in memory. Last states are before the norm if vLLM computed them.
Source: torchspec-project/TorchSpec 6dda2bf, torchspec/data/preprocessing.py, utils/train_dump.py.

`modelopt`: `{conversation_id}.pt`; the mask is all 1 without --answer-only-loss, and absent from
TensorRT-LLM. Source: NVIDIA/Model-Optimizer a2fbac7, examples/speculative_decoding/
collect_hidden_states/.

`angelslim`: `rank_0/rows_0-5000/data_0.ckpt`, for DFlash `sample_0_rank0.ckpt` without last ones.
Source: Tencent/AngelSlim 67394ce, tools/generate_{hidden_for_draft_model,dflash_data}.py.

`vllm`: `{request}.safetensors` of the ExampleHiddenStatesConnector, a lock file beside it:

    token_ids       [N] int64, of the prompt; with include_output_tokens also of the answer, without
                    its last token, which was never read
    hidden_states   [N, m, W], one slot for each id in eagle_aux_hidden_state_layer_ids, which count
                    before the layer: the number of layers is the output of the last, unnormed

Nothing says where the prompt ends. speculators' FP8HiddenStatesConnector writes the same, rounded:

    hidden_states         F8_E4M3 [N, m, W]
    hidden_states_scales  F32 [N, 1, 1], the largest magnitude of the token in any slot / 448

A hidden state is code * scale. Here the product is taken in float32 and rounded once to BF16;
speculators' FP8Transfer rounds the scale to BF16 first, which moves a value by up to 0.8 %.
Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py;
hs-connectors 0.9.0, fp8_hidden_states_connector.py, fp8_utils.py, transfer.py.

`speculators`: a `datasets` folder with input_ids, loss_mask, seq_len; the states of row 3 in
`hidden_states/hs_3.safetensors`, as `vllm` has them, with the output of the last layer in one slot
more. Without the rows, or without pyarrow to read them, nothing says where prompts end.
Source: vllm-project/speculators c05b95b, cli/generate_offline_data.py, train/data.py.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...quantize.files.safetensors_header import read_header
from ...quantize.files.torch_file import TorchFileProblem, load_plain
from ...quantize.numerics.number_formats import FP8
from ...recipes.errors import CheckpointError, TraceError, short, visible
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_object
from ..prompts.prompt_file import import_pyarrow
from . import DumpFormat

AGAIN = "dump again, or give the dump of another trainer its own name: --from"
TEXT_AGAIN = "dump this text again, with prefix caching and chunked prefill off"
MAX_NAME = 150  # characters; the number of a turn may follow
_NUMBER = re.compile(r"(\d+)")
_SCALES = "hidden_states_scales"
_STATE = "state.json"  # `datasets`' file: names the files with the rows
_AUX_AND_LAST = ("aux_hidden_states", "hidden_states")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One text and what its target computed, one row for each token.

    `last` is what the head, or the norm before it, reads; None where absent.
    """

    id: str
    file: Path
    token_ids: Tensor  # [N] int64
    answered: Tensor | None  # [N] bool, in the target's answers; None = not given
    aux: Tensor  # [N, m * W], outputs of m layers side by side, floating point
    last: Tensor | None  # [N, W]
    scales: Tensor | None  # [N] float32, of aux features that the dump rounded to FP8


class Pending(NamedTuple):
    """A sample that is still on the disk."""

    file: Path
    read: Callable[[], Sample]


class Stored(NamedTuple):
    """The tensors of a text as a file has them: each may have a leading batch axis of 1."""

    token_ids: Tensor
    answered: Tensor | None
    aux: Tensor
    last: Tensor | None
    scales: Tensor | None = None


class _Layout(NamedTuple):
    """Files, the program that writes them, and the reader of a folder's files."""

    suffixes: tuple[str, ...]
    written_by: str
    reader: Callable[[Path], Callable[[Path], Stored]]


def samples_of(dump: Path, written_by: DumpFormat) -> Sequence[Pending]:
    """The samples of a folder, or of one file, unread; numbers in names sort as numbers."""
    layout = LAYOUTS[written_by]
    read = layout.reader(dump)
    files = [dump]
    if not dump.is_file():
        files = [path for path in dump.rglob("*") if path.name.endswith(layout.suffixes)]
    if not files:
        suffixes = " or *".join(layout.suffixes)
        what = f"holds no file *{suffixes}" if dump.is_dir() else "no such folder"
        raise TraceError(dump, what, fix=f"give the folder that {layout.written_by} wrote")
    return tuple(
        Pending(file, partial(_sample, file, dump, read)) for file in sorted(files, key=_natural)
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(str(path))]


def _sample(file: Path, dump: Path, read: Callable[[Path], Stored]) -> Sample:
    stored = read(file)
    ids = _rows(file, "token ids", stored.token_ids, axes=1)
    if ids.is_floating_point() or ids.is_complex() or not len(ids):
        raise TraceError(file, f"token ids: expected at least one whole number, got {_said(ids)}",
                         fix=AGAIN)  # fmt: skip
    answered, last = stored.answered, stored.last
    inside = file.relative_to(dump) if file != dump else Path(file.name)
    sample = Sample(
        id=visible(str(inside.with_name(inside.name.split(".")[0])))[-MAX_NAME:],
        file=file,
        token_ids=ids.long(),
        answered=None if answered is None else _rows(file, "loss_mask", answered, axes=1) != 0,
        aux=_features(file, "aux hidden states", stored.aux),
        last=None if last is None else _features(file, "last hidden states", last),
        scales=stored.scales,
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
                f"the text has {len(ids)} tokens, but {what} have {len(rows)} rows: the file is"
                " cut off, or they belong to another text",
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


def _saved(
    *entries: tuple[str, str], masked: bool = True, training: bool = False
) -> Callable[[Path], Callable[[Path], Stored]]:
    """From files of torch.save: the first of these (aux, last) whose aux entry exists.

    `masked`: a loss_mask must exist; `training`: the trainer also dumps batches, for debugging.
    """

    def read(file: Path) -> Stored:
        loaded = load_tensors(file)
        if training and {"batch", "batch_idx"} <= loaded.keys():
            what = "a debug dump of training: its tokens are shifted and padded"
            raise TraceError(file, what, fix="give the folder that training reads")
        aux, last = next((both for both in entries if both[0] in loaded), entries[-1])
        ids, *_, states = _tensors(
            file, loaded, "input_ids", *(("loss_mask",) if masked else ()), aux
        )
        mask, final = (
            None if loaded.get(name) is None else _tensors(file, loaded, name)[0]
            for name in ("loss_mask", last)
        )
        return Stored(ids, mask, states, final)

    return lambda _dump: read


def load_tensors(file: Path) -> Mapping[str, Any]:
    """The dict that torch.save wrote to a file, without running any code from it."""
    try:
        loaded = load_plain(file)
    except TorchFileProblem as exc:
        raise TraceError(
            file,
            f"cannot be read as plain tensors: {exc}",
            fix="remove the file if a run was stopped while writing it; else dump tensors, numbers"
            " and text only",
        ) from exc
    if not isinstance(loaded, dict):
        raise TraceError(
            file,
            f"expected a dict of tensors, got {type(loaded).__name__}",
            fix=AGAIN,
        )
    return loaded


def _tensors(file: Path, loaded: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
    """Entries that must be dense tensors in memory, which every operation of torch takes."""
    _demand(file, names, loaded)
    for name in names:
        value = loaded[name]
        plain = isinstance(value, Tensor) and value.layout is torch.strided
        if not plain or value.device.type != "cpu" or value.is_nested or value.is_quantized:
            kind = type(value).__name__
            raise TraceError(file, f"{name}: expected a dense tensor, got {kind}", fix=AGAIN)
    return tuple(loaded[name] for name in names)


def _demand(file: Path, names: Iterable[str], present: Iterable[str]) -> None:
    absent = [name for name in names if name not in present]
    if absent:
        raise TraceError(
            file,
            f"holds no {', '.join(absent)}, but {short(sorted(map(str, present)))}",
            fix=AGAIN,
        )


def load_safetensors(
    file: Path, names: Iterable[str], *, beside: Iterable[str]
) -> dict[str, Tensor]:
    """These tensors of a safetensors file, and those `beside` them that it has."""
    try:
        stored = {tensor.name for tensor in read_header(file.parent, file.name).tensors}
        _demand(file, names, stored)
        with safe_open(file, framework="pt") as opened:
            wanted = [*names, *(name for name in beside if name in stored)]
            return {name: opened.get_tensor(name) for name in wanted}
    except (CheckpointError, SafetensorError) as exc:
        what = exc.what if isinstance(exc, CheckpointError) else str(exc)
        raise TraceError(
            file,
            what,
            fix="remove the file if a run was stopped while writing it, or dump this text again",
        ) from exc


def load_states(file: Path) -> Stored:
    """A file of either vLLM connector, aux [N, m, W] in BF16 where it was rounded to FP8."""
    loaded = load_safetensors(file, ("token_ids", "hidden_states"), beside=(_SCALES,))
    ids, states, scales = loaded["token_ids"], loaded["hidden_states"], loaded.get(_SCALES)
    if (scales is None) != (states.dtype != FP8):
        dtype = str(states.dtype).removeprefix("torch.")
        what = f"hidden_states are {dtype}, {'with' if scales is not None else 'without'} {_SCALES}"
        raise TraceError(file, what, fix=AGAIN)
    if scales is None:
        return Stored(ids, None, states, None)
    expected = (len(states), 1, 1)
    if states.dim() != 3 or tuple(scales.shape) != expected or scales.dtype != torch.float32:
        what = f"{_SCALES}: expected F32 {list(expected)}, got {list(scales.shape)}"
        raise TraceError(file, what, fix=AGAIN)
    if not bool(((scales > 0) & torch.isfinite(scales)).all()):
        raise TraceError(file, f"{_SCALES}: expected positive numbers", fix=AGAIN)
    return Stored(ids, None, (states.float() * scales).bfloat16(), None, scales.flatten())


def _of_speculators(dump: Path) -> Callable[[Path], Stored]:
    folder = next((folder for folder in (dump, dump.parent) if (folder / _STATE).is_file()), None)
    rows = None if folder is None else _arrow_rows(folder)

    def loss_mask(file: Path, token_ids: Tensor) -> Tensor | None:
        """The mask [N] of the file's row, whose tokens must equal those of the file."""
        if rows is None:
            return None
        row = _row_of(file)
        values = rows.slice(row, 1).to_pydict()
        if values["input_ids"] != [token_ids.tolist()]:
            raise TraceError(
                file,
                f"its tokens are not those of row {row} of {folder}",
                fix="give the dataset that the hidden states were generated from",
            )
        return torch.tensor(values["loss_mask"][0])

    def read(file: Path) -> Stored:
        loaded = load_states(file)
        states = loaded.aux
        if states.dim() != 3 or states.shape[1] < 2:
            raise TraceError(
                file,
                f"hidden_states: expected [tokens, layers + 1, width], got {list(states.shape)}",
                fix="start vLLM with the ids of the layers and the number of layers, as"
                " launch_vllm.py does",
            )
        return loaded._replace(
            answered=loss_mask(file, loaded.token_ids),
            aux=states[:, :-1].flatten(1),
            last=states[:, -1].contiguous(),
        )

    return read


def _arrow_rows(folder: Path) -> Any:
    """The tokens and masks of a `datasets` folder, a table of Arrow."""
    try:
        listed = parse_object(read_text(folder / _STATE)).get("_data_files", [])
        files = [folder / Path(entry["filename"]).name for entry in listed]
    except (OSError, JsonProblem, TypeError, KeyError) as exc:
        raise TraceError(folder / _STATE, f"it lists no data files: {exc}",
                         fix="copy the dataset again") from exc  # fmt: skip
    pyarrow = import_pyarrow(folder)
    try:
        tables = []
        for file in files:
            with open_stream(file) as stream, pyarrow.ipc.open_stream(stream) as batches:
                tables.append(batches.read_all().select(["input_ids", "loss_mask"]))
        return pyarrow.concat_tables(tables)
    except (OSError, KeyError, pyarrow.ArrowException) as exc:
        what = f"cannot be read as Arrow rows with input_ids and loss_mask: {exc}"
        raise TraceError(folder, what, fix="copy the dataset again") from exc


def _row_of(file: Path) -> int:
    number = file.stem.removeprefix("hs_")
    if not number.isdecimal() or len(number) > 12:
        raise TraceError(file, "expected hs_ROW.safetensors", fix="keep the names of the files")
    return int(number)


LAYOUTS: Mapping[DumpFormat, _Layout] = {
    "specforge": _Layout(
        (".ckpt", ".ckpt.gz"),
        "prepare_hidden_states.py",
        _saved(
            ("aux_hidden_state", "hidden_state"), ("hidden_states", "target_last_hidden_states")
        ),
    ),
    "torchspec": _Layout(
        (".ckpt", ".pt"), "TorchSpec's preparation", _saved(_AUX_AND_LAST, training=True)
    ),
    "modelopt": _Layout(
        (".pt",), "compute_hidden_states_*.py", _saved(_AUX_AND_LAST, masked=False)
    ),
    "angelslim": _Layout(
        (".ckpt",),
        "generate_hidden_for_draft_model.py",
        _saved(("hidden_states", "target_hiddens")),
    ),
    "speculators": _Layout(
        (".safetensors",), "'speculators generate-offline-data'", _of_speculators
    ),
    "vllm": _Layout((".safetensors",), "vLLM", lambda _dump: load_states),
}
