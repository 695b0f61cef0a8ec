"""foreign_sample.json: headers of some foreign folders, and what the engines did with them.

The ordinary tests hold `check` against it, without the tools, the engines and the folders.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftquant.quantize.engines.contract import EngineCheck
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.safetensors_header import TensorInfo

SAMPLE_FILE = Path(__file__).resolve().parent / "foreign_sample.json"
SIDE_FILE = "hf_quant_config.json"
NUM_TARGET_LAYERS = 8
_NO_MATTER = ("dtype", "tokenizer_class", "transformers_version")
_SCALARS = ("weight_scale_2", "weight_global_scale")
"""Of NVFP4: tensors of one number, whose values `check` reads."""
Row = Mapping[str, Any]


def write_sample(out: Path, drafts: Path, outcomes: Sequence[Row]) -> None:
    """One folder of each scheme of each tool, with as many kinds of answers as there are.

    Args:
        out: folder of the file.
        drafts: where the folders lie.
        outcomes: of the loaders; those that could not tell are left out.
    """
    told: dict[str, list[Row]] = {}
    for outcome in outcomes:
        if outcome["verdict"] != "UNKNOWN":
            told.setdefault(outcome["draft"], []).append(outcome)
    by_scheme: dict[str, list[str]] = {}
    for draft in sorted(told):
        by_scheme.setdefault(draft.rpartition("/")[2], []).append(draft)

    def worth(draft: str) -> tuple[int, int]:
        """Kinds of answers; of as many, the smallest draft."""
        kinds = {outcome["verdict"] for outcome in told[draft]}
        return len(kinds), -len(Checkpoint.open(drafts / draft).tensors)

    chosen = [max(found, key=worth) for found in by_scheme.values()]
    rows = [
        json.dumps(sample_row(drafts / draft, told[draft]), separators=(",", ":"))
        for draft in chosen
    ]
    (out / SAMPLE_FILE.name).write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def sample_row(folder: Path, outcomes: Sequence[Row]) -> Row:
    """Headers of a folder, and what the engines did with it."""
    checkpoint = Checkpoint.open(folder)
    config = {key: checkpoint.config[key] for key in checkpoint.config if key not in _NO_MATTER}
    tensors = {t.name: [t.dtype, *t.shape] for t in checkpoint.tensors.values()}
    values = {
        tensor.name: (folder / tensor.file).read_bytes()[tensor.start : tensor.stop].hex()
        for tensor in checkpoint.tensors.values()
        if tensor.name.endswith(_SCALARS)
    }
    answers: dict[str, list[str]] = {}
    for outcome in outcomes:
        asked = f"{outcome['engine']} {outcome['arch']} {outcome['tp']}"
        answers.setdefault(outcome["verdict"], []).append(asked)
    return {
        "draft": f"{folder.parent.name}/{folder.name}",
        "config": config,
        "side_file": (folder / SIDE_FILE).is_file(),
        "tensors": tensors,
        "values": values,
        "answers": answers,
    }


def read_sample(file: Path = SAMPLE_FILE) -> list[Row]:
    """The rows of the file, or of another one like it."""
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def predictions(row: Row, folder: Path) -> Iterator[tuple[str, str, EngineCheck]]:
    """What an engine was asked, what it did, and what `check` says.

    Args:
        row: of the file.
        folder: for the few values that `check` reads.
    """
    values = folder / "values"
    values.write_bytes(bytes.fromhex("".join(row["values"].values())))
    places = {name: 4 * i for i, name in enumerate(row["values"])}
    tensors = {
        name: TensorInfo(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            file=values.name,
            start=places.get(name, 0),
            stop=places.get(name, 0) + 4,
        )
        for name, (dtype, *shape) in row["tensors"].items()
    }
    checkpoint = Checkpoint(
        folder=folder, config=row["config"], tensors=tensors, headers={}, index=None
    )
    for verdict, questions in row["answers"].items():
        for asked in questions:
            engine, arch, tp = asked.split()
            said = check_checkpoint(
                checkpoint,
                engine=engine,
                arch=arch,
                tp=int(tp),
                target_layers=NUM_TARGET_LAYERS,
                has_side_file=row["side_file"],
            )
            yield f"{row['draft']}: {asked}", verdict, said
