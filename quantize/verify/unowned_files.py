"""The files of an output: each belongs to somebody, the source's with the source's bytes."""

from collections.abc import Collection
from pathlib import Path

from ...recipes.regular_file import open_stream
from ..files.card_text import CARD_FILE
from ..files.checkpoint import CONFIG_FILE, HIDDEN, INDEX_FILE, PROVENANCE_FILE, Checkpoint
from ..files.files_of_folder import SIGNATURE_FILE, entries, looks_like_weights
from ..files.provenance import QuantizedProvenance
from ..stored.declarations import HF_QUANT_CONFIG
from .verify_report import Fault

ONLY_OURS = frozenset({PROVENANCE_FILE})
"""Of a source that was cut: it says nothing true of what is made of it."""
QUANTIZED_ONLY = ONLY_OURS | {HF_QUANT_CONFIG}
"""Nor does an empty declaration of a BF16 draft of what is quantized."""
_SAVED_ANEW = ("added_tokens.json", "generation_config.json", "special_tokens_map.json",
               "tokenizer_config.json", "chat_template.jinja")  # fmt: skip
"""What transformers writes beside the weights of a model whenever it saves one."""
_RECORDS = ("quant_config.json", "quant_log.csv", "quantization_config.json",
            "quantize_config.json", "recipe.yaml")  # fmt: skip
"""Of AutoAWQ, GPTQModel, AutoRound and llm-compressor; engines read config.json before these."""
_OF_THE_HUB = (CARD_FILE, ".gitattributes", SIGNATURE_FILE)  # repositories there have them
_DOWNLOADED = ".cache/huggingface/"  # what a download from the Hub notes beside the files


def side_file_faults(
    source: Checkpoint,
    output: Checkpoint,
    *,
    without: Collection[str] = (),
    foreign: bool = False,
) -> list[Fault]:
    """Every side file of the source is there, byte for byte; README.md may be a new card.

    Args:
        source: the folder that the output was made from; weights in other formats do not travel.
        without: files that do not travel either.
        foreign: another tool wrote the output, which may say the same of the tokenizer otherwise.
    """
    faults = []
    for file in _travelling(source, without):
        if file == CARD_FILE:  # `draftquant card` writes another one
            continue
        path = output.folder / file
        if not path.is_file():
            faults.append(Fault(where=file, expected="the source's file", got="none"))
        elif not same_bytes(source.folder / file, path) and not (foreign and file in _SAVED_ANEW):
            faults.append(Fault(where=file, expected="the source's bytes", got="other bytes"))
    return faults


def card_faults(output: Checkpoint, recorded: QuantizedProvenance | None) -> list[Fault]:
    """README.md is there, whatever it says, if one was written or travelled."""
    if recorded is None or not recorded.card or (output.folder / CARD_FILE).is_file():
        return []
    return [Fault(where=CARD_FILE, expected="the model card that was written", got="none")]


def unowned_faults(
    source: Checkpoint,
    output: Checkpoint,
    *,
    config_file: str = CONFIG_FILE,
    own: Collection[str] = (),
    without: Collection[str] = (),
    foreign: bool = False,
) -> list[Fault]:
    """There is nothing that neither the source nor the layout has: engines read files by name.

    Args:
        source: see `side_file_faults`.
        without: see `side_file_faults`.
        foreign: likewise; tools leave records of how they quantized.
    """
    owned = {config_file, INDEX_FILE, *output.headers, *own, *_OF_THE_HUB}
    owned.update({*_SAVED_ANEW, *_RECORDS} if foreign else ())
    owned.update(_travelling(source, without))
    faults: dict[str, Fault] = {}
    for file, problem in entries(output.folder):
        top = Path(file).parts[0]
        if problem is not None:
            expected = "a file of the folder" if file in owned else "no such file"
            faults[file] = Fault(where=file, expected=expected, got=problem)
        elif top in HIDDEN and not file.startswith(_DOWNLOADED):
            faults[top] = Fault(where=f"{top}/", expected="no such folder", got=f"{file} in it")
        elif file not in owned and top not in HIDDEN:
            got = "a file of neither the source nor the layout"
            faults[file] = Fault(where=file, expected="no such file", got=got)
    return [faults[file] for file in sorted(faults)]


def own_files(side_file: str | None) -> tuple[str, ...]:
    """Files of a quantized folder besides config.json, index and tensors; `side_file` by layout."""
    return (PROVENANCE_FILE, *((side_file,) if side_file else ()))


def _travelling(source: Checkpoint, without: Collection[str]) -> list[str]:
    side_files = source.side_files()
    return [f for f in side_files if f not in without and not looks_like_weights(f)]


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two files are equal, read a piece at a time."""
    if a.stat().st_size != b.stat().st_size:
        return False
    with open_stream(a) as first, open_stream(b) as second:
        while block := first.read(2**20):
            if block != second.read(len(block)):
                return False
    return True
