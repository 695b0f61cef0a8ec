"""Folders as rows: headers, config.json, and what engines did with them.

`FILES` hold them, and everyday tests hold `check` against them without the engines. A loader minds
names, dtypes and shapes, not codes: `experiments/run folder_rows [FILE...]` writes each folder
again with random ones, asks the loaders, and prints every answer that is another one now, and every
one that `check` does not give. `--write` keeps them; `--add FOLDER...` makes rows of other folders.

Keys of a row: "of" names another of its file, of which it has all but what it says itself and what
stands in "without". "subtree": an MTP layer inside its target, which is the folder. "reads": layers
whose inputs the draft reads, and "proposes": what its head says; a draft of which the engine read
or proposed others is wrong, and stays so. "target_layers": where check is not told of 8. "errors":
parts of reasons, by engine or question. "modules": those of the engine's model.
"""

import argparse
import json
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(HERE / "foreign")]

import asking  # noqa: E402
import numpy as np  # noqa: E402
from asked_pairs import check_pair  # noqa: E402
from draftquant.quantize.engines.contract import EngineCheck  # noqa: E402
from draftquant.quantize.engines.engine_check import check_checkpoint  # noqa: E402
from draftquant.quantize.files.checkpoint import Checkpoint  # noqa: E402
from draftquant.quantize.files.safetensors_header import DTYPE_BYTES, TensorInfo  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402
from reasons import own_text  # noqa: E402
from tiny import Stored, store, write_tensors  # noqa: E402

SAMPLE_FILE = HERE / "foreign_sample.json"
FILES = {
    "made by tools": SAMPLE_FILE,
    "drawn at random": HERE / "foreign_mix.json",
    "imitated by hand": HERE / "kinds.json",
    "names and model types": HERE / "names.json",
    "broken on purpose": HERE / "broken.json",
    "heads of fewer rows": HERE / "cut.json",
    "scales of a KV cache": HERE / "cache_scales.json",
    "MTP layers": HERE / "mtp.json",
    "MTP layers in targets": HERE / "inside.json",
    "of Laguna": HERE / "laguna.json",
}
DRAWN_FILE = HERE / "drawn.json"
"""LOADS is said of executed forms alone, which these hold: others than those of `FILES`."""
SIDE_FILE = "hf_quant_config.json"
PLATFORMS = ("vllm sm90 1", "sglang sm90 1", "sglang sm100 1", "sglang gfx942 1")
_NO_MATTER = ("dtype", "tokenizer_class", "transformers_version")
_SCALARS = ("weight_scale_2", "weight_global_scale")
"""Of NVFP4: tensors of one number, whose values `check` reads."""
_MERGED = ("config", "tensors", "values")
_OWN = ("draft", "answers", "errors", "modules", "proposes")
"""Keys that a row never has of another one."""
Row = Mapping[str, Any]


def read_rows(file: Path = SAMPLE_FILE) -> list[Row]:
    """The rows of a file, each whole."""
    found = json.loads(file.read_text(encoding="utf-8"))
    rows: list[Row] = found["rows"] if isinstance(found, dict) else found
    by_name = {row["draft"]: row for row in rows}
    return [_whole(row, by_name[row["of"]]) if "of" in row else row for row in rows]


def _whole(row: Row, base: Row) -> Row:
    whole = {key: said for key, said in base.items() if key not in _OWN} | dict(row)
    for key in _MERGED:
        own, gone = row.get(key, {}), row.get("without", ())
        both = {**base[key], **own}
        whole[key] = {name: said for name, said in both.items() if name in own or name not in gone}
    return whole


def _apart(row: Row, base: Row) -> Row:
    """What `_whole` makes whole again."""
    kept: dict[str, Any] = {}
    for key, said in row.items():
        if key in _MERGED:
            others = {n: v for n, v in said.items() if n not in base[key] or base[key][n] != v}
            kept |= {key: others} if others else {}
        elif key in (*_OWN, "of") or base.get(key) != said:
            kept[key] = said
    gone = [name for key in _MERGED for name in base[key] if name not in row[key]]
    return kept | {"without": gone} if gone else {k: v for k, v in kept.items() if k != "without"}


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """One line for each; foreign_mix.json keeps its counts."""
    by_name = {row["draft"]: row for row in rows}
    apart = (_apart(row, by_name[row["of"]]) if row.get("of") in by_name else row for row in rows)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in apart)
    text = f"[\n{lines}\n]"
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if "counts" in old:
        counts = ",\n".join(json.dumps(row) for row in old["counts"])
        text = f'{{"counts": [\n{counts}\n], "rows": {text}}}'
    file.write_text(text + "\n", encoding="utf-8")


def row_of(folder: Path) -> dict[str, Any]:
    """Headers of a folder, before engines answer."""
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.tensors.values()
    side_file = folder / SIDE_FILE
    return {
        "draft": f"{folder.parent.name}/{folder.name}",
        "answers": {},
        "config": {key: said for key, said in checkpoint.config.items() if key not in _NO_MATTER},
        "side_file": json.loads(side_file.read_text("utf-8")) if side_file.is_file() else False,
        "tensors": {tensor.name: [tensor.dtype, *tensor.shape] for tensor in tensors},
        "values": {
            tensor.name: (folder / tensor.file).read_bytes()[tensor.start : tensor.stop].hex()
            for tensor in tensors
            if tensor.name.endswith(_SCALARS)
        },
    }


def checkpoint_of(row: Row, folder: Path) -> Checkpoint:
    """The folder of a row as `check` opens it; `folder`: for what is read besides headers."""
    values = {name: bytes.fromhex(said) for name, said in row["values"].items()}
    (folder / "values").write_bytes(b"".join(values.values()))
    (folder / SIDE_FILE).unlink(missing_ok=True)
    if isinstance(row["side_file"], dict):
        (folder / SIDE_FILE).write_text(json.dumps(row["side_file"]), encoding="utf-8")
    tensors, start = {}, 0
    for name in (*values, *(name for name in row["tensors"] if name not in values)):
        dtype, *shape = row["tensors"][name]
        size = len(values.get(name, b""))
        tensors[name] = TensorInfo(
            name=name, dtype=dtype, shape=tuple(shape), file="values", start=start,
            stop=start + size,
        )  # fmt: skip
        start += size
    tensors = {name: tensors[name] for name in row["tensors"]}
    return Checkpoint(folder=folder, config=row["config"], tensors=tensors, headers={}, index=None)


def predictions(row: Row, folder: Path) -> Iterator[tuple[str, str, EngineCheck]]:
    """What an engine was asked, what it did, and what `check` says."""
    inside = row.get("subtree")
    given = write_folder(row, folder / row["draft"]) if inside else None
    checkpoint = checkpoint_of(row, folder)
    for verdict, questions in row["answers"].items():
        for asked in questions:
            engine, arch, tp = asked.split()
            if given is not None:
                pair = check_pair(given, given, engine=engine, arch=arch, subtree=inside)
                yield asked, verdict, replace(pair.engines[0].answer, verdict=pair.verdict)
                continue
            layers = row.get("target_layers", asking.NUM_TARGET_LAYERS)
            how: Any = {"engine": engine, "arch": arch, "tp": int(tp), "target_layers": layers}
            how["has_side_file"] = bool(row["side_file"])
            yield asked, verdict, check_checkpoint(checkpoint, **how)


def write_folder(row: Row, folder: Path) -> Path:
    """The folder of a row, with random codes and scales; a map of tokens has those of the first."""
    tensors = {
        name: Stored(dtype, tuple(shape), bytes.fromhex(row["values"][name]))
        if name in row["values"]
        else _random_tensor(name, dtype, tuple(shape), row["tensors"])
        for name, (dtype, *shape) in row["tensors"].items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(row["config"], indent=2) + "\n", "utf-8")
    if row["side_file"]:
        said = {} if row["side_file"] is True else row["side_file"]
        (folder / SIDE_FILE).write_text(json.dumps(said) + "\n", encoding="utf-8")
    write_tensors(folder, tensors, metadata={"format": "pt"})
    return folder


def _random_tensor(
    name: str, dtype: str, shape: tuple[int, ...], others: Mapping[str, Sequence[Any]]
) -> Stored:
    """Codes of any bits but those that mean NaN in FP8; scales that are small and positive.

    A head has the same first rows whatever their number is: "proposes" was computed by them.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if dtype in ("BF16", "F16", "F32"):
        constant = shape in ((), (1,)) or name.endswith(("k_scale", "v_scale"))
        span = (-0.5, 0.5) if name == "lm_head.weight" else (0.005, 0.02)
        values = np.full(shape, 0.01) if constant else rng.uniform(*span, shape)
        return store(np.asarray(values), dtype)
    size = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    if name.endswith("g_idx"):
        return Stored(dtype, shape, (np.arange(shape[0], dtype=np.int32) // 128).tobytes())
    if dtype == "BOOL":
        kept = others.get("d2t", [dtype, *shape])[1]
        return Stored(dtype, shape, (np.arange(shape[0]) < kept).tobytes())
    if name == "d2t" or "zero_point" in name:
        return Stored(dtype, shape, bytes(size))
    exponents = dtype == "F8_E8M0" or (dtype == "U8" and name.endswith("weight_scale"))
    low, high = (110, 130) if exponents else (0, 0x70) if dtype == "F8_E4M3" else (0, 256)
    return Stored(dtype, shape, rng.integers(low, high, size, dtype=np.uint8).tobytes())


def write_target(row: Row, folder: Path) -> None:
    """A target that the draft of a row fits; an MTP layer's has its own config.json."""
    layers = {**row["config"], **(row["config"].get("transformer_layer_config") or {})}
    if any("mtp" in name or "eh_proj" in name for name in row["tensors"]):
        folder.mkdir()
        said = {key: row["config"][key] for key in row["config"] if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(said) + "\n", encoding="utf-8")
    else:
        asking.write_target(folder, layers.get("hidden_size", 256), layers.get("vocab_size", 512))


def asked_again(rows: Sequence[Row], work: Path) -> list[dict[str, Any]]:
    """The rows with what the loaders say of them today, on the platforms of their answers."""
    folders: dict[tuple[str, bool], list[tuple[int, Path]]] = {}
    for number, row in enumerate(rows):
        folder = write_folder(row, work / str(number) / "draft")
        write_target(row, folder.parent / asking.TARGET_FOLDER)
        for asked in [a for said in row["answers"].values() for a in said] or PLATFORMS:
            folders.setdefault((asked, "subtree" in row), []).append((number, folder))
    told: list[list[Row]] = [[] for _ in rows]
    for (asked, inside), found in sorted(folders.items()):
        engine, arch, tp = asked.split()
        outcomes = asking.loaded(
            engine, [folder for _, folder in found], arch=arch, tp=int(tp),
            target=Path("/layer") if inside else None,
        )  # fmt: skip
        for (number, _), outcome in zip(found, outcomes, strict=True):
            told[number].append(_with_what_stays(outcome, rows[number], asked))
    return [{**row, **_said(said, row)} for row, said in zip(rows, told, strict=True)]


def _with_what_stays(outcome: Row, row: Row, asked: str) -> Row:
    """What was wrong by the layers that an engine reads, or by its proposals, loads here."""
    was_wrong = asked in row["answers"].get("LOADS BUT WRONG", ())
    stays = was_wrong and ("reads" in row or "proposes" in row) and outcome["verdict"] == "LOADS"
    return {**outcome, "verdict": "LOADS BUT WRONG"} if stays else outcome


def _said(outcomes: Sequence[Row], row: Row) -> dict[str, Any]:
    """Answers, and where a row has them the engines' own errors."""
    answers: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome["verdict"] != "UNKNOWN":
            question = f"{outcome['engine']} {outcome['arch']} {outcome['tp']}"
            answers.setdefault(outcome["verdict"], []).append(question)
    found: dict[str, Any] = {"answers": answers}
    if "errors" in row:
        errors = {key: o["error"] for o in outcomes if o["error"] for key in (o["engine"],)}
        found["errors"] = {**errors, **row["errors"]}
    return found


def is_reason(row: Row, asked: str, said: EngineCheck) -> bool:
    """Whether `check` gives the engine's own error, by its first words, or a part that is kept.

    Of several parameters that are not filled an engine names any one, and of a tensor without one
    `check` says that in a sentence of its own.
    """
    errors = row.get("errors", {})
    theirs: str = errors.get(asked, errors.get(asked.split()[0], ""))
    ours = own_text(said.error)
    if theirs and "it has no parameter for" in ours:
        return re.search("KeyError|no module or parameter|has no parameter", theirs) is not None
    return said.verdict == "LOADS" or theirs in (said.error or "") or ours[:30] == theirs[:30]


def differences(old: Sequence[Row], new: Sequence[Row], folder: Path) -> Iterator[str]:
    """Answers that are others than they were, and those that `check` does not give."""
    counts: Counter[str] = Counter()
    for before, after in zip(old, new, strict=True):
        was = {asked: verdict for verdict, said in before["answers"].items() for asked in said}
        try:
            for asked, verdict, said in predictions(after, folder):
                where, known = f"{after['draft']}: {asked}", was.get(asked)
                if known not in (None, verdict):
                    yield f"{where}: {verdict}, was {known}"
                counts["right" if said.verdict == verdict else said.verdict] += 1
                if said.verdict != verdict:
                    yield f"{where}: check says {said.verdict}, not {verdict}: {said.error}"
        except DraftQuantError as exc:
            yield f"{after['draft']}: check ends with 2: {exc.what}"
    yield f"check: {dict(counts)}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path, help="all of them, where none is named")
    parser.add_argument("--only", default="", help="part of a row's name")
    parser.add_argument("--add", nargs="+", default=[], type=Path, help="folders to add to a file")
    parser.add_argument("--write", action="store_true", help="keep what is answered today")
    given = parser.parse_args()
    for file in given.files or (*FILES.values(), DRAWN_FILE):
        rows = [row for row in read_rows(file) if given.only in row["draft"]]
        rows += [row_of(folder) for folder in given.add]
        with tempfile.TemporaryDirectory() as work:
            again = asked_again(rows, Path(work))
            print(*differences(rows, again, Path(work)), sep="\n")
        if given.write:
            others = [row for row in read_rows(file) if given.only not in row["draft"]]
            write_rows(file, [*others, *again])
    return 0


if __name__ == "__main__":
    sys.exit(main())
