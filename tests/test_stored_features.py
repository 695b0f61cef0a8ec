"""Hidden states of traces in fewer bytes: what is lost, what is not, and what lies is refused."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from draftquant.calibration.passes.on_traces import open_traces
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces import stored_features
from draftquant.calibration.traces.manifest import FeatureSpec, FeatureStorage
from draftquant.calibration.traces.prompt_trace import FEATURE_DTYPES, PromptTrace
from draftquant.calibration.traces.sets import merge_traces, split_traces, store_traces
from draftquant.calibration.traces.stored_features import decoded, encoded, storage_of
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.recipes.errors import OutputError, TraceError
from draftquant.recipes.installing import install_line
from draftquant.recipes.listener import Listener
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file
from test_traces import AUX, TARGET, TRACES, WIDTH, make_trace, same
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_packed_features_are_the_same_bits(dtype: str) -> None:
    kind: Any = dtype
    features = rows(FEATURE_DTYPES[kind][0])
    features[0, 0] = -0.0
    stored = encoded(features, None, spec("zstd", dtype=kind))
    assert stored["feature_frames"].shape == (3,)  # of 1024, 1024 and 452 positions
    assert int(stored["feature_frames"].sum()) == len(stored["features"]) < features.nbytes
    got, scales = decoded(stored, spec("zstd", dtype=kind), len(features), "here")
    assert scales is None
    assert got.dtype == features.dtype
    assert torch.equal(got.view(torch.uint8), features.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounded_features_are_near_and_are_rounded_once(dtype: Any) -> None:
    features, how = rows(FEATURE_DTYPES[dtype][0]), spec("fp8-per-token", dtype=dtype)
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
    others = scales * 1.37
    theirs = {"features": codes, "feature_scales": others}
    got, kept = decoded(theirs, spec("fp8-per-token", dtype="float32"), len(features), "here")
    again = encoded(got, kept, how)
    assert torch.equal(again["features"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again["feature_scales"], others)


def test_a_folder_says_how_it_is_stored_and_exact_ones_say_nothing(tmp_path: Path) -> None:
    exact, packed = write(tmp_path / "e", None), write(tmp_path / "z", "zstd")
    rounded = write(tmp_path / "f", "fp8-per-token")
    keys = [json.loads((f.folder / "trace.json").read_text())["features"] for f in
            (exact, packed, rounded)]  # fmt: skip
    assert "storage" not in keys[0]
    assert [one["storage"] for one in keys[1:]] == ["zstd", "fp8-per-token"]
    assert all(same(got, expected) for got, expected in zip(packed, TRACES, strict=True))
    assert len({exact.sha256, packed.sha256, rounded.sha256}) == 3
    for got, expected in zip(rounded, TRACES, strict=True):
        assert torch.equal(got.token_ids, expected.token_ids)
        assert not torch.equal(got.features, expected.features)
        assert got.feature_scales is not None
    names = {"token_ids", "features", "target_top1"}
    for folder, more in ((packed, {"feature_frames"}), (rounded, {"feature_scales"})):
        stored = load_file(folder.folder / SHARD)
        assert {name.removeprefix("b.") for name in stored if name[:2] == "b."} == names | more


def test_stored_another_way_and_back(tmp_path: Path) -> None:
    exact = write(tmp_path / "exact", None)
    report = store_traces(exact, tmp_path / "packed", "zstd")
    assert report.nbytes == (tmp_path / "packed" / SHARD).stat().st_size
    assert report.nbytes_before == (tmp_path / "exact" / SHARD).stat().st_size
    assert "packed" in repr(report)
    store_traces(report.traces, tmp_path / "back", "exact")
    assert files(tmp_path / "back") == files(tmp_path / "exact")
    rounded = store_traces(report.traces, tmp_path / "rounded", "fp8-per-token").traces
    directly = write(tmp_path / "directly", "fp8-per-token")
    assert files(rounded.folder) == files(directly.folder)
    assert storage_of("exact") is None
    with pytest.raises(TraceError, match="stored as zstd already"):
        store_traces(report.traces, tmp_path / "n", "zstd")
    for choice in ("exact", "zstd"):
        with pytest.raises(TraceError, match="rounded to FP8: what they were before is lost"):
            store_traces(rounded, tmp_path / "n", choice)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="already exists"):
        store_traces(exact, tmp_path / "packed", "zstd")
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("storage", ["zstd", "fp8-per-token"])
def test_split_and_merged_they_stay_bit_for_bit(tmp_path: Path, storage: FeatureStorage) -> None:
    traces = write(tmp_path / "all", storage, *(make_trace(f"p{i}", seed=i) for i in range(6)))
    split = split_traces(traces, tmp_path / "a", tmp_path / "b", count=3)
    merged = merge_traces([split.first, split.second], tmp_path / "m").traces
    assert merged.manifest.features.storage == storage
    before, after = load_file(traces.folder / SHARD), load_file(merged.folder / SHARD)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    exact = write(tmp_path / "exact", None, make_trace("q", seed=9))
    with pytest.raises(TraceError, match=r"another features than .*storage"):
        merge_traces([traces, exact], tmp_path / "n")


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


def instead(**tensors: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda old: old.update({f"b.{name}": tensor for name, tensor in tensors.items()})


def frame(content: bytes, **how: Any) -> Mapping[str, Tensor]:
    packed = zstandard.ZstdCompressor(**how).compress(content)
    return {"features": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
            "feature_frames": torch.tensor([len(packed)], dtype=torch.int32)}  # fmt: skip


OWN = 3 * WIDTH * 2  # bytes of b's features


LIES: Sequence[tuple[FeatureStorage, Callable[[dict[str, Tensor]], object], str]] = (
    ("fp8-per-token", put("b.feature_scales", 1, 0.0), "expected positive numbers"),
    ("fp8-per-token", put("b.feature_scales", 1, torch.nan), "expected positive numbers"),
    ("fp8-per-token", put("b.feature_scales", 1, torch.inf), "expected positive numbers"),
    ("fp8-per-token", put("b.feature_scales", 1, 3e38), "NaN or infinity"),
    ("fp8-per-token", put("b.features", 1, torch.nan), "NaN or infinity"),
    ("fp8-per-token", instead(feature_scales=torch.ones(3, 1)), r"got F32 \[3, 1\]"),
    ("fp8-per-token", lambda t: t.pop("b.feature_scales"), "got no such tensor"),
    ("fp8-per-token", instead(features=torch.ones(3, WIDTH)), "features: expected F8_E4M3"),
    ("zstd", put("b.features", 0, 7), "is damaged"),
    ("zstd", instead(features=torch.ones(5, dtype=torch.uint8)), "but features have 5"),
    ("zstd", put("b.feature_frames", 0, -1), "feature_frames: -1 bytes"),
    ("zstd", instead(**frame(bytes(OWN + 1))), f"declares {OWN + 1} bytes, expected {OWN}"),
    ("zstd", instead(**frame(b"x" * OWN, write_content_size=False)), "not declare its size"),
    ("zstd", instead(**frame(bytes(2**26))), "declares 67,108,864 bytes, expected 72"),
    ("zstd", instead(features=torch.ones(3, 2, dtype=torch.uint8)), r"expected U8 \[any\]"),
)


def test_what_lies_is_refused(tmp_path: Path) -> None:
    for number, (storage, edit, said) in enumerate(LIES):
        folder = write(tmp_path / str(number), storage).folder
        with pytest.raises(TraceError, match=said):
            list(edited(folder, edit))


@pytest.mark.parametrize("more", [-2, 2])
def test_cut_frames_and_what_follows_them_are_refused(more: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "traces", "zstd").folder

    def edit(tensors: dict[str, Tensor]) -> None:
        longer = torch.cat([tensors["b.features"], torch.ones(2, dtype=torch.uint8)])
        tensors["b.features"] = longer[: len(longer) - 2 + more].clone()
        tensors["b.feature_frames"] += more

    with pytest.raises(TraceError, match="prompt b: a zstd frame is damaged"):
        list(edited(folder, edit))


def test_a_bomb_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "traces", "zstd").folder / "trace.json"
    path.write_text(path.read_text().replace(f'"width": {WIDTH}', '"width": 300000000'))
    with pytest.raises(TraceError, match="no hidden states pack so"):
        list(TraceFolder.open(path.parent))


def test_storage_and_dtype_that_do_not_go_together(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float16):
        name: Any = str(dtype).removeprefix("torch.")
        other = spec("fp8-per-token", dtype=name)
        trace = dataclasses.replace(TRACES[0], features=TRACES[0].features.to(dtype))
        with (
            pytest.raises(TraceError, match=f"keeps bfloat16 or float32, not {name}"),
            trace_output(tmp_path / "t", GREEDY.manifest(TARGET, other)) as writer,
        ):
            writer.add(trace, position=0)
    folder = write(tmp_path / "z", "zstd").folder
    text = (folder / "trace.json").read_text()
    (folder / "trace.json").write_text(text.replace('"zstd"', '"gzip"'))
    with pytest.raises(TraceError, match="storage"):
        TraceFolder.open(folder)


def test_without_zstandard_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = write(tmp_path / "z", "zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match="needs the package zstandard") as caught:
        traces.load(traces.manifest.prompts[0])
    assert caught.value.fix == install_line("zstd")
    with pytest.raises(TraceError, match="needs the package zstandard"):
        write(tmp_path / "n", "zstd")
    assert not (tmp_path / "n").exists()
    assert stored_features.check_storage(None) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact, out = write(tmp_path / "exact", None).folder, tmp_path / "small"
    asked = ["traces", "store", str(exact), "--feature-storage", "fp8-per-token", "--out"]
    assert main([*asked, str(out)]) == 0
    assert "shards: " in capsys.readouterr().out
    assert main([*asked, str(tmp_path / "j"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["feature_storage"] == "fp8-per-token"
    assert report["nbytes"] == (out / SHARD).stat().st_size
    assert main(["traces", "info", str(out)]) == 0
    assert "bfloat16, rounded to FP8 per token" in capsys.readouterr().out


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
    assert [tmp_path.name in text and "zstd, without loss" in text for text in heard.notes] == [
        True
    ]
    assert ["were rounded to FP8" in text for text in heard.warnings] == [True]
