"""What tests of cut vocabularies share: a choice of rows, and the cut of a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftquant.calibration.vocabulary.cut_vocabulary import VocabularyReport, cut_vocabulary
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import VocabularyChoice
from tiny import edit_json, read_tensors, tiny_eagle3_llama, write_tensors

CHOICE = VocabularyChoice(
    method="frequency",
    traces_sha256="0" * 64,
    size=20,
    coverage_reached=0.5,
    calibration_prompts=("a" * 64,),
)
IDS = tuple(range(3, 63, 3))
"""Twenty tokens of 96."""


def cut(folder: Path, out: Path, ids: Sequence[int] = IDS, **arguments: Any) -> VocabularyReport:
    """A folder with rows for these tokens alone."""
    source = DraftSource(folder=folder)
    return cut_vocabulary(source, out, target_ids=ids, choice=CHOICE, **arguments)


def target(folder: Path, hidden: int = 64, vocab: int = 96) -> Path:
    """A target with a head."""
    model = tiny_eagle3_llama(folder, seed=7, hidden=hidden, vocab=vocab)
    tensors = read_tensors(model)
    names = ("embed_tokens.weight", "lm_head.weight")
    write_tensors(model, {f"model.{n}": tensors[n] for n in names}, metadata={})
    edit_json(model / "config.json", architectures=["LlamaForCausalLM"])
    return model
