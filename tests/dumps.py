"""Dumps of a target's hidden states in the layout of each trainer, from what the target really did.

What each builder writes is what the trainer's own code writes, by the lines named in
`calibration/dumps/dump_layouts`: keys, shapes, dtypes, names of files. The states are those of one
pass over the whole text, as all of them compute them.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """One text: tokens [N], how many are the prompt, outputs of the layers and the last norm.

    `stop`: where the mask ends; None = with the text.
    """

    token_ids: Tensor
    start: int
    layers: tuple[Tensor, ...]
    normed: Tensor
    stop: int | None = None

    @property
    def mask(self) -> Tensor:
        mask = torch.zeros_like(self.token_ids)
        mask[self.start : self.stop] = 1
        return mask

    def aux(self, layers: Sequence[int]) -> Tensor:
        return torch.cat([self.layers[i] for i in layers], dim=-1)

    def stack(self, layers: Sequence[int]) -> Tensor:
        """[N, m + 1, W]: the last layer's output in one slot more."""
        return torch.stack([*(self.layers[i] for i in layers), self.layers[-1]], dim=1)


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


def roll(text: Text, by: int) -> Text:
    """Its rows are those of earlier tokens."""
    layers = tuple(layer.roll(by, 0) for layer in text.layers)
    return replace(text, layers=layers, normed=text.normed.roll(by, 0))


LAYERS = (0, 1, 2)
Builder = Callable[..., Path]


def _saving(name: str, record: Callable[[Text, Sequence[int]], Mapping[str, Any]]) -> Builder:
    """A builder by the name of text i's file and what is saved of it, ".gz" for every second."""

    def build(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
        for i, text in enumerate(texts):
            file = dump / name.format(i)
            file.parent.mkdir(parents=True, exist_ok=True)
            saved = dict(record(text, layers))
            if file.suffix == ".gz" and i % 2 == 0:
                torch.save(saved, file.with_suffix(""))
            elif file.suffix == ".gz":
                with gzip.open(file, "wb") as stream:
                    torch.save(saved, stream)
            else:
                torch.save(saved, file)
        return dump

    return build


def _padded(states: Tensor, pad: int = 2) -> Tensor:
    return nn.functional.pad(states, (0,) * 2 * (states.dim() - 1) + (0, pad))


specforge = _saving("rows_0-2000/data_{}.ckpt.gz", lambda text, layers: {  # each padded behind
    "input_ids": _padded(text.token_ids), "loss_mask": _padded(text.mask),
    "aux_hidden_state": _padded(text.aux(layers))[None], "hidden_state": _padded(text.normed)[None],
})  # fmt: skip
specforge_dflash = _saving("rows_0-2000/data_{}.ckpt", lambda text, layers: {
    "input_ids": text.token_ids, "loss_mask": text.mask, "hidden_states": text.aux(layers)[None],
})  # fmt: skip
# Last states before the norm, as its vLLM engine gives them.
torchspec = _saving("data_{}.ckpt", lambda text, layers: {
    "input_ids": text.token_ids, "loss_mask": text.mask,
    "aux_hidden_states": text.aux(layers)[None], "hidden_states": text.layers[-1][None],
})  # fmt: skip
# From transformers: last states after the norm.
modelopt = _saving("conversation-{}.pt", lambda text, layers: {
    "input_ids": text.token_ids, "hidden_states": text.normed, "loss_mask": text.mask,
    "aux_hidden_states": text.aux(layers), "conversation_id": "conversation",
})  # fmt: skip
# From vLLM: last states before the norm, a view into the stack; a mask of ones.
modelopt_vllm = _saving("{}.pt", lambda text, layers: {
    "input_ids": text.token_ids, "hidden_states": text.stack(layers)[:, -1, :],
    "aux_hidden_states": text.stack(layers)[:, :-1, :].flatten(1),
    "loss_mask": torch.ones_like(text.token_ids), "conversation_id": 0,
})  # fmt: skip
angelslim = _saving("rank_0/rows_0-5000/data_{}.ckpt", lambda text, layers: {
    "input_ids": text.token_ids[None], "loss_mask": text.mask[None],
    "hidden_states": text.aux(layers)[None], "target_hiddens": text.normed[None],
})  # fmt: skip
angelslim_dflash = _saving("sample_{:08d}_rank0.ckpt", lambda text, layers: {
    "input_ids": _padded(text.token_ids)[None], "hidden_states": _padded(text.aux(layers))[None],
    "loss_mask": _padded(text.mask)[None],
    "attention_mask": _padded(torch.ones_like(text.mask))[None],
})  # fmt: skip


def vllm(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """With include_output_tokens: all tokens but the last, the last layer's output in a slot."""
    dump.mkdir(parents=True)
    for i, text in enumerate(texts):
        _write_stack(text, layers, len(text.token_ids) - 1, dump / f"cmpl-{i}-0.safetensors")
        (dump / f"cmpl-{i}-0.safetensors.lock").touch()
    return dump


def speculators(texts: Sequence[Text], dump: Path, layers: Sequence[int] = LAYERS) -> Path:
    """`prepare-data` writes the rows with `datasets`; here Arrow's own stream of the same form."""
    import pyarrow
    import pyarrow.ipc

    folder = dump / "hidden_states"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        _write_stack(text, layers, len(text.token_ids), folder / f"hs_{i}.safetensors")
    columns = {
        "input_ids": [text.token_ids.tolist() for text in texts],
        "loss_mask": [text.mask.tolist() for text in texts],
        "seq_len": [len(text.token_ids) for text in texts],
    }
    rows = pyarrow.table(columns)
    name = "data-00000-of-00001.arrow"
    with (dump / name).open("wb") as stream, pyarrow.ipc.new_stream(stream, rows.schema) as writer:
        for batch in rows.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    (dump / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}), "utf-8")
    return dump


def _write_stack(text: Text, layers: Sequence[int], rows: int, file: Path) -> None:
    tensors = {"hidden_states": text.stack(layers)[:rows], "token_ids": text.token_ids[:rows]}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


BUILDERS: Mapping[str, tuple[DumpFormat, Builder]] = {
    "specforge": ("specforge", specforge),
    "specforge for dflash": ("specforge", specforge_dflash),
    "torchspec": ("torchspec", torchspec),
    "modelopt": ("modelopt", modelopt),
    "modelopt by vllm": ("modelopt", modelopt_vllm),
    "angelslim": ("angelslim", angelslim),
    "angelslim for dflash": ("angelslim", angelslim_dflash),
    "speculators": ("speculators", speculators),
    "vllm": ("vllm", vllm),
}


def prompts_of(texts: Sequence[Text]) -> list[Prompt]:
    """The prompts of the texts."""
    return [
        Prompt(id=f"p{i}", category="c", token_ids=tuple(text.token_ids[: text.start].tolist()))
        for i, text in enumerate(texts)
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
    file = None if prompts is None else out.with_name(f"{out.name}.jsonl")
    if file is not None and prompts is not None:
        rows = [{"id": p.id, "category": p.category, "token_ids": p.token_ids} for p in prompts]
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return import_asked(DumpImport(dump, target, out, written_by=written_by, prompts=file, **asked))
