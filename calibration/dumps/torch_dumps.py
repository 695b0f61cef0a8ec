"""Dumps that trainers write with torch.save, one file a text: which entries hold what.

`specforge`: `rows_0-2000/data_0.ckpt`, or `.ckpt.gz` with --compress. eagle3 and p-eagle have
aux_hidden_state [1, N, 3 W]; of dflash and dspark hidden_states [1, N, m W] are the aux ones. Texts
are captured in batches and padded behind with token 0 up to the longest, without a word in the
file: the loss mask is 0 there. Source: sgl-project/SpecForge a6b6b02, specforge/data/utils.py,
specforge/algorithms/*/providers.py, scripts/prepare_hidden_states.py.

`torchspec`: what its OfflineEagle3Dataset reads. TorchSpec itself writes none of these, its
features go through a store in memory. Last states are before the norm where vLLM computed them.
Source: torchspec-project/TorchSpec 6dda2bf, torchspec/data/preprocessing.py, utils/train_dump.py.

`modelopt`: `{conversation_id}.pt`; the mask is all 1 without --answer-only-loss, and absent from
TensorRT-LLM. Source: NVIDIA/Model-Optimizer a2fbac7, examples/speculative_decoding/
collect_hidden_states/.

`angelslim`: `rank_0/rows_0-5000/data_0.ckpt`, for DFlash `sample_0_rank0.ckpt` without last ones.
Source: Tencent/AngelSlim 67394ce, tools/generate_{hidden_for_draft_model,dflash_data}.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...recipes.errors import TraceError
from .samples import Pending, Sample, find_files, load_tensors, pending, stored_sample


class _Layout(NamedTuple):
    """Files, the program that writes them, and entries (aux, last): the first that are there."""

    suffixes: tuple[str, ...]
    written_by: str
    entries: tuple[tuple[str, str], ...]
    masked: bool = True


_AUX_AND_LAST = ("aux_hidden_states", "hidden_states")
LAYOUTS: Mapping[str, _Layout] = {
    "specforge": _Layout(
        (".ckpt", ".ckpt.gz"),
        "prepare_hidden_states.py",
        (
            ("aux_hidden_state", "hidden_state"),
            ("hidden_states", "target_last_hidden_states"),
        ),
    ),
    "torchspec": _Layout((".ckpt", ".pt"), "TorchSpec's preparation", (_AUX_AND_LAST,)),
    "modelopt": _Layout((".pt",), "compute_hidden_states_*.py", (_AUX_AND_LAST,), masked=False),
    "angelslim": _Layout(
        (".ckpt",), "generate_hidden_for_draft_model.py", (("hidden_states", "target_hiddens"),)
    ),
}


def samples(dump: Path, name: str) -> Sequence[Pending]:
    """The texts of a dump of this layout, unread."""
    layout = LAYOUTS[name]

    def load(file: Path) -> Sample:
        loaded = load_tensors(file)
        if name == "torchspec" and {"batch", "batch_idx"} <= loaded.keys():
            raise TraceError(
                file,
                "a debug dump of training: its tokens are shifted and padded",
                fix="give the folder that training reads",
            )
        there = (entries for entries in layout.entries if entries[0] in loaded)
        aux, last = next(there, layout.entries[-1])
        return stored_sample(file, dump, loaded, aux=aux, last=last, masked=layout.masked)

    return pending(find_files(dump, layout.suffixes, written_by=layout.written_by), load)
