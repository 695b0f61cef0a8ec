"""Hidden states of traces in fewer bytes: what is lost, what is not, and what lies is refused."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from draftquant.calibration.passes.on_traces import open_traces
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.manifest import FeatureSpec, FeatureStorage
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.sets import copy_traces, store_traces
from draftquant.calibration.traces.stored_features import check_storage, decoded, encoded
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.recipes.errors import TraceError
from draftquant.recipes.listener import Listener
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file
from test_traces import AUX, TARGET, TRACES, WIDTH, equal
from torch import Tensor

SHARD = "traces-00001.safetensors"
FP8_STEP = 2**-4
"""Half a step of E4M3 is at most 1/16 of a value, or 2^-10 of the scale below 2^-6."""


def spec(storage: FeatureStorage | None, **others: Any) -> FeatureSpec:
    return dataclasses.replace(AUX, storage=storage, **others)


def write(out: Path, storage: FeatureStorage | None, *traces: PromptTrace) -> TraceFolder:
    with trace_output(out, GREEDY.manifest(TARGET, spec(storage))) as writer:
        for position, trace in enumerate(traces or TRACES):
            writer.add(trace, position=position)
    return TraceFolder.open(out)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(dtype: torch.dtype, count: int = 2500) -> Tensor:
    """Of very different sizes, some of them zero or a power of two."""
    values = torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-3, 3, count)[:, None]
    values[7], values[8, 1:], values[9, 3] = 0, 0, -1024.0
    return values.to(dtype)


def test_packed_features_are_the_same_bits() -> None:
    features = rows(torch.bfloat16)
    features[0, 0] = -0.0
    stored = encoded(features, None, spec("zstd"))
    assert stored["feature_frames"].shape == (3,)  # of 1024, 1024 and 452 positions
    assert int(stored["feature_frames"].sum()) == len(stored["features"]) < features.nbytes
    got, scales = decoded(stored, spec("zstd"), len(features), "here")
    assert scales is None
    assert got.dtype == features.dtype
    assert torch.equal(got.view(torch.uint8), features.view(torch.uint8))


def test_rounded_features_are_near_and_are_rounded_once() -> None:
    features, how = rows(torch.float32), spec("fp8-per-token", dtype="float32")
    stored = encoded(features, None, how)
    codes, scales = stored["features"], stored["feature_scales"]
    assert codes.nbytes + scales.nbytes == features.numel() + 4 * len(features)
    absmax = features.float().abs().amax(dim=1)
    assert torch.equal(scales, torch.where(absmax > 0, absmax / 448, 1))
    got, kept = decoded(stored, how, len(features), "here")
    assert kept is not None
    assert torch.equal(kept, scales)
    bound = (features.float().abs() * FP8_STEP).maximum(scales[:, None] * 2**-10)
    assert bool(((got.float() - features.float()).abs() <= bound * (1 + 2**-7)).all())
    again = encoded(got, kept, how)
    assert torch.equal(again["features"].view(torch.uint8), codes.view(torch.uint8))
    # Scales of another tool, whatever they are, are kept likewise.
    got, kept = decoded({**stored, "feature_scales": scales * 1.37}, how, len(features), "here")
    again = encoded(got, kept, how)
    assert torch.equal(again["features"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again["feature_scales"], scales * 1.37)


def test_stored_another_way_and_back(tmp_path: Path) -> None:
    exact = write(tmp_path / "exact", None)
    assert "storage" not in (exact.folder / "trace.json").read_text()
    report = store_traces(exact, tmp_path / "packed", "zstd")
    assert report.nbytes == (tmp_path / "packed" / SHARD).stat().st_size
    assert report.nbytes_before == (tmp_path / "exact" / SHARD).stat().st_size
    assert all(equal(got, wanted) for got, wanted in zip(report.traces, TRACES, strict=True))
    store_traces(report.traces, tmp_path / "back", "exact")
    assert files(tmp_path / "back") == files(tmp_path / "exact")
    rounded = store_traces(report.traces, tmp_path / "rounded", "fp8-per-token").traces
    assert files(rounded.folder) == files(write(tmp_path / "directly", "fp8-per-token").folder)
    assert len({exact.sha256, report.traces.sha256, rounded.sha256}) == 3
    with pytest.raises(TraceError, match="stored as zstd already"):
        store_traces(report.traces, tmp_path / "n", "zstd")
    for choice in ("exact", "zstd"):
        with pytest.raises(TraceError, match="rounded to FP8: what they were before is lost"):
            store_traces(rounded, tmp_path / "n", choice)  # type: ignore[arg-type]
    assert not (tmp_path / "n").exists()

    def rescale(tensors: dict[str, Tensor]) -> None:
        """As another tool might."""
        tensors |= {n: t * 1.37 for n, t in tensors.items() if n.endswith("scales")}

    other = edited(rounded.folder, rescale)
    copies = copy_traces([other], tmp_path / "copies", list(other)).folder
    own, kept = (load_file(folder / SHARD) for folder in (other.folder, copies))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in own.items())


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> TraceFolder:
    """The folder with other tensors, and hashes that fit them: whoever lies can hash."""
    shard = folder / SHARD
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard)
    manifest = json.loads((folder / "trace.json").read_text())
    listed = manifest["shards"][0]
    listed["nbytes"], data = shard.stat().st_size, shard.read_bytes()
    listed["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "trace.json").write_text(json.dumps(manifest))
    return TraceFolder.open(folder)


def put(name: str, at: int, value: float) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[at] = value

    return edit


def longer(by: int) -> Callable[[dict[str, Tensor]], object]:
    """A frame that is cut, or followed by bytes."""

    def edit(tensors: dict[str, Tensor]) -> None:
        whole = torch.cat([tensors["b.features"], torch.ones(2, dtype=torch.uint8)])
        tensors["b.features"] = whole[: len(whole) - 2 + by].clone()
        tensors["b.feature_frames"] += by

    return edit


def instead(**tensors: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda old: old.update({f"b.{name}": tensor for name, tensor in tensors.items()})


def test_a_missing_package_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for storage in (None, "fp8-per-token"):
        check_storage(storage)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="feature storage zstd"):
        check_storage("zstd")


def frame(content: bytes, **how: Any) -> Mapping[str, Tensor]:
    packed = zstandard.ZstdCompressor(**how).compress(content)
    return {"features": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
            "feature_frames": torch.tensor([len(packed)], dtype=torch.int32)}  # fmt: skip


OWN = 3 * WIDTH * 2  # bytes of b's features


def test_what_lies_is_refused(tmp_path: Path) -> None:
    for number, (storage, edit) in enumerate((
        *(("fp8-per-token", put("b.feature_scales", 1, scale)) for scale in (0.0, torch.inf, 3e38)),
        ("fp8-per-token", instead(feature_scales=torch.ones(3, 1))),
        ("fp8-per-token", lambda t: t.pop("b.feature_scales")),
        ("zstd", put("b.features", 0, 7)), ("zstd", longer(-2)), ("zstd", longer(2)),
        ("zstd", put("b.feature_frames", 0, -1)), ("zstd", put("b.feature_frames", 0, 5)),
        ("zstd", instead(**frame(bytes(OWN + 1)))),
        ("zstd", instead(**frame(b"x" * OWN, write_content_size=False))),
    )):  # fmt: skip
        folder = write(tmp_path / str(number), storage).folder
        with pytest.raises(TraceError):
            list(edited(folder, edit))


def test_what_does_not_go_together_and_bombs_are_refused(tmp_path: Path) -> None:
    trace = dataclasses.replace(TRACES[0], features=TRACES[0].features.half())
    half = spec("fp8-per-token", dtype="float16")
    with (
        pytest.raises(TraceError, match="keeps bfloat16 or float32, not float16"),
        trace_output(tmp_path / "t", GREEDY.manifest(TARGET, half)) as writer,
    ):
        writer.add(trace, position=0)
    path = write(tmp_path / "z", "zstd").folder / "trace.json"
    text = path.read_text()
    wide = (f'"width": {WIDTH}', '"width": 300000000')  # refused before there is memory for it
    for old, new in (wide, ('"zstd"', '"gzip"')):
        path.write_text(text.replace(old, new))
        with pytest.raises(TraceError):
            list(TraceFolder.open(path.parent))


def test_the_command(tmp_path: Path) -> None:
    exact, out = write(tmp_path / "exact", None).folder, tmp_path / "small"
    asked = ["traces", "store", str(exact), "--feature-storage", "fp8-per-token", "--out", str(out)]
    assert main([*asked, "--json"]) == 0
    assert main(["traces", "info", str(out)]) == 0


class Heard(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def test_what_computes_on_traces_says_how_they_are_stored(tmp_path: Path) -> None:
    heard = Heard()
    for name, storage in (("e", None), ("z", "zstd"), ("f", "fp8-per-token")):
        chosen: Any = storage
        written = write(tmp_path / name, chosen)
        assert open_traces(tmp_path / name, heard).sha256 == written.sha256
    assert [tmp_path.name in t and "zstd, without loss" in t for t in heard.notes] == [True]
    assert ["were rounded to FP8" in text for text in heard.warnings] == [True]
