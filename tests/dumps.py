"""Dumps of a target's hidden states in the layout of each trainer, from what the target really did.

What each builder writes is what the trainer's own code writes, by the lines named in the module of
`calibration/dumps` that reads it: keys, shapes, dtypes, names of files. The states are those of one
pass over the whole text, as all of them compute them.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftquant.calibration.dumps import DumpFormat, DumpImport
from draftquant.calibration.dumps.import_dump import ImportReport, import_asked
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Text:
    """One text: tokens [N], how many are the prompt, outputs of the layers and the last norm."""

    token_ids: Tensor
    start: int
    layers: tuple[Tensor, ...]
    normed: Tensor

    @property
    def mask(self) -> Tensor:
        return (torch.arange(len(self.token_ids)) >= self.start).long()

    def aux(self, layers: Sequence[int]) -> Tensor:
        return torch.cat([self.layers[i] for i in layers], dim=-1)


@torch.inference_mode()
def make_texts(target: Path, traces: TraceFolder, dtype: torch.dtype) -> list[Text]:
    """What the target computes over recorded traces, each in one pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    texts = []
    for trace in traces:
        kept.clear()
        normed = model.model(trace.token_ids[None]).last_hidden_state[0]
        layers = tuple(output[0].clone() for output in kept)
        texts.append(Text(trace.token_ids, trace.prompt_length, layers, normed))
    return texts


LAYERS = (0, 1, 2)
Builder = Callable[[Sequence[Text], Path, Sequence[int]], Path]


def specforge(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """Two to a batch, the shorter padded behind with token 0; every second file compressed."""
    folder = dump / "rows_0-2000"
    folder.mkdir(parents=True)
    longest = max(len(text.token_ids) for text in texts)
    for i, text in enumerate(texts):
        pad = longest + 2 - len(text.token_ids)
        state = nn.functional.pad(text.aux(layers), (0, 0, 0, pad))
        record = {
            "input_ids": nn.functional.pad(text.token_ids, (0, pad)),
            "loss_mask": nn.functional.pad(text.mask, (0, pad)),
            "aux_hidden_state": state[None],
            "hidden_state": nn.functional.pad(text.normed, (0, 0, 0, pad))[None],
        }
        if i % 2:
            with gzip.open(folder / f"data_{i}.ckpt.gz", "wb") as stream:
                torch.save(record, stream)
        else:
            torch.save(record, folder / f"data_{i}.ckpt")
    mapping = dump / "vocab_mapping"
    mapping.mkdir()
    torch.save({"d2t": torch.zeros(4), "t2d": torch.ones(4)}, mapping / "vocab_mapping.pt")
    return dump


def specforge_dflash(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """No last states: `hidden_states` are the aux ones."""
    folder = dump / "rows_0-2000"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        record = {
            "input_ids": text.token_ids,
            "loss_mask": text.mask,
            "hidden_states": text.aux(layers)[None],
        }
        torch.save(record, folder / f"data_{i}.ckpt")
    return dump


def torchspec(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """Last states before the norm, as its vLLM engine gives them."""
    dump.mkdir(parents=True)
    for i, text in enumerate(texts):
        record = {
            "input_ids": text.token_ids,
            "loss_mask": text.mask,
            "aux_hidden_states": text.aux(layers)[None],
            "hidden_states": text.layers[-1][None],
        }
        torch.save(record, dump / f"data_{i}.ckpt")
    return dump


def modelopt(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """From transformers: last states after the norm."""
    dump.mkdir(parents=True)
    for i, text in enumerate(texts):
        record = {
            "input_ids": text.token_ids,
            "hidden_states": text.normed,
            "aux_hidden_states": text.aux(layers),
            "loss_mask": text.mask,
            "conversation_id": f"conversation-{i}",
        }
        torch.save(record, dump / f"conversation-{i}.pt")
    return dump


def modelopt_vllm(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """From vLLM: last states before the norm, a view into the stack; a mask of ones."""
    dump.mkdir(parents=True)
    for i, text in enumerate(texts):
        stacked = torch.stack([*(text.layers[j] for j in layers), text.layers[-1]], dim=1)
        record = {
            "input_ids": text.token_ids,
            "hidden_states": stacked[:, -1, :],
            "aux_hidden_states": stacked[:, :-1, :].reshape(len(stacked), -1),
            "loss_mask": torch.ones_like(text.token_ids),
            "conversation_id": i,
        }
        torch.save(record, dump / f"{i}.pt")
    return dump


def angelslim(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    folder = dump / "rank_0" / "rows_0-5000"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        record = {
            "input_ids": text.token_ids[None],
            "loss_mask": text.mask[None],
            "hidden_states": text.aux(layers)[None],
            "target_hiddens": text.normed[None],
        }
        torch.save(record, folder / f"data_{i}.ckpt")
    torch.save({"d2t": torch.zeros(4), "t2d": torch.ones(4)}, dump / "vocab_mapping.pt")
    return dump


def angelslim_dflash(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """A batch padded behind to its longest text, then cut into samples; no last states."""
    dump.mkdir(parents=True)
    longest = max(len(text.token_ids) for text in texts)
    for i, text in enumerate(texts):
        pad = longest - len(text.token_ids)
        record = {
            "input_ids": nn.functional.pad(text.token_ids, (0, pad))[None],
            "hidden_states": nn.functional.pad(text.aux(layers), (0, 0, 0, pad))[None],
            "loss_mask": nn.functional.pad(text.mask, (0, pad))[None],
            "attention_mask": nn.functional.pad(torch.ones_like(text.mask), (0, pad))[None],
        }
        torch.save(record, dump / f"sample_{i:08d}_rank0.ckpt")
    return dump


def vllm(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """With include_output_tokens: all tokens but the last, the last layer's output in a slot."""
    dump.mkdir(parents=True)
    for i, text in enumerate(texts):
        _stack(text, layers, len(text.token_ids) - 1, dump / f"cmpl-{i}-0.safetensors")
        (dump / f"cmpl-{i}-0.safetensors.lock").touch()
    return dump


def speculators(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """`prepare-data` writes the rows with `datasets`; here Arrow's own stream of the same form."""
    import pyarrow
    import pyarrow.ipc

    folder = dump / "hidden_states"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        _stack(text, layers, len(text.token_ids), folder / f"hs_{i}.safetensors")
    rows = pyarrow.table(
        {
            "input_ids": [text.token_ids.tolist() for text in texts],
            "loss_mask": [text.mask.tolist() for text in texts],
            "seq_len": [len(text.token_ids) for text in texts],
        }
    )
    name = "data-00000-of-00001.arrow"
    with (dump / name).open("wb") as stream, pyarrow.ipc.new_stream(stream, rows.schema) as writer:
        for batch in rows.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    (dump / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name}]}), encoding="utf-8"
    )
    return dump


def _stack(text: Text, layers: Sequence[int], rows: int, file: Path) -> None:
    stacked = torch.stack([*(text.layers[i] for i in layers), text.layers[-1]], dim=1)
    tensors = {"hidden_states": stacked[:rows].contiguous(), "token_ids": text.token_ids[:rows]}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


BUILDERS: dict[str, Builder] = {
    "specforge": specforge,
    "torchspec": torchspec,
    "modelopt": modelopt,
    "angelslim": angelslim,
    "speculators": speculators,
    "vllm": vllm,
}


def prompts_of(traces: TraceFolder) -> list[Prompt]:
    """The prompts of recorded traces."""
    return [
        Prompt(
            id=trace.id,
            category=trace.category,
            token_ids=tuple(trace.token_ids[: trace.prompt_length].tolist()),
        )
        for trace in traces
    ]


def import_dump(
    written_by: DumpFormat,
    dump: Path,
    target: Path,
    out: Path,
    *,
    prompts: Sequence[Prompt] | None = None,
    **asked: Any,
) -> ImportReport:
    """Import as the command does; prompts are a file of their token ids."""
    file = None if prompts is None else out.with_name(f"{out.name}.jsonl")
    if file is not None and prompts is not None:
        rows = [{"id": p.id, "category": p.category, "token_ids": p.token_ids} for p in prompts]
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    how = DumpImport(dump, target, out, written_by=written_by, prompts=file, **asked)
    return import_asked(how)
