"""The trace format: round trip, and an error for every way in which a folder can lie."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.held_out import recorded_prompts
from draftquant.calibration.traces.manifest import (
    DatasetSource,
    FeatureSpec,
    LogprobSpec,
    Sampling,
    TargetIdentity,
    TooLongPrompts,
    TraceManifest,
)
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.sets import merge_traces, split_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.trace_info import trace_info
from draftquant.calibration.traces.writer import trace_output
from draftquant.recipes.errors import OutputError, TraceError
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file

TARGET = TargetIdentity(
    name="tiny", config_sha256="a" * 64, weights_sha256="b" * 64, num_layers=8, vocab_size=50
)
WIDTH = 12
AUX = FeatureSpec(
    kind="aux", width=WIDTH, dtype="bfloat16", aux_layer_ids=(1, 3, 4), fusion_sha256=None
)


def make_trace(
    name: str, prompt_length: int = 4, new_tokens: int = 6, seed: int = 0
) -> PromptTrace:
    generator = torch.Generator().manual_seed(seed)
    count = prompt_length + new_tokens
    token_ids = torch.randint(50, (count,), generator=generator)
    top1 = torch.randint(50, (count - 1,), generator=generator)
    top1[prompt_length - 1 :] = token_ids[prompt_length:]
    features = torch.randn((count - 1, WIDTH), generator=generator).bfloat16()
    kept = {"token_ids": token_ids, "features": features, "target_top1": top1}
    category = "code" if seed % 2 else "chat"
    return PromptTrace(id=name, category=category, prompt_length=prompt_length, **kept)


TRACES = [make_trace("json/tool.py:12"), make_trace("b", 1, 3, seed=1), make_trace("ü", 9, seed=2)]
TRACES[1] = dataclasses.replace(TRACES[1], cluster="manual", conversation_sha256="5" * 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "traces", *((trace, i) for i, trace in reversed(list(enumerate(TRACES)))))
    return tmp_path / "traces"


def test_what_is_written_is_read(folder: Path) -> None:
    traces = TraceFolder.open(folder)
    assert len(traces) == 3
    assert traces.manifest.target == TARGET
    assert traces.manifest.features == AUX
    assert all(equal(got, expected) for got, expected in zip(traces, TRACES, strict=True))
    assert traces.sha256 == hashlib.sha256((folder / "trace.json").read_bytes()).hexdigest()
    assert [len(trace.continuation) for trace in traces] == [6, 3, 6]


def write(out: Path, *traces: tuple[PromptTrace, int]) -> None:
    with trace_output(out, GREEDY.manifest(TARGET, AUX)) as writer:
        for trace, position in traces:
            writer.add(trace, position=position)


def test_nothing_or_doubled_ids_are_not_written(tmp_path: Path) -> None:
    both = (TRACES[1], 0), (TRACES[0], 0)  # ends in the middle
    for traces in ((), ((TRACES[1], 0), (TRACES[1], 1)), both):
        with pytest.raises(TraceError):
            write(tmp_path / "out", *traces)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    """Not greedy, too narrow, and too wide."""
    ids, features = TRACES[1].token_ids, TRACES[1].features
    wrong = {"token_ids": (ids + 1) % 50}, {"features": features[:, 1:]}
    for changes in (*wrong, {"features": features.float()}):
        with pytest.raises(TraceError):
            write(tmp_path / "out", (dataclasses.replace(TRACES[1], **changes), 0))
    assert list(tmp_path.iterdir()) == []


FILE = "traces-0000{}.safetensors"
Change = tuple[str, Any]
BAD_MANIFESTS: tuple[Change, ...] = (
    ("format", "zip"), ("version", 2), ("temperature", 1), ("target x", 1),
    ("features aux_semantics", "pre_layer"), ("features aux_layer_ids", [4, 3, 1]),
    ("features aux_layer_ids", [1, 3, 8]), ("features width", 13), ("features kind", "fused"),
    ("target config_sha256", "zz"), ("prompts", []), ("prompts 0 id", "b"),
    ("prompts 0 id", "a\nb"), ("shards 0 file", "../x"), ("prompts 0 file", FILE.format(2)),
    ("shards 1", {"file": FILE.format(2)}), ("shards 1", {}), ("num_tokens", 1),
    ("prompts 0 prompt_length", 10), ("prompts 0 num_tokens", 11), ("features dtype", "float16"),
    ("prompts 0 id", "c"), ("shards 0 nbytes", 1), ("datasets", []),
    ("prompts 1 conversation_sha256", "zz"),
    ("datasets", [{"name": "a\nb", "revision": "0" * 40, "config": "c", "split": "s"}]),
)  # fmt: skip
"""What each is told is kept in told/traces.txt."""


def edit(manifest: dict[str, Any], keys: str, value: Any) -> None:
    """Another value at a place, or none for `...`; behind a list's end, its first one changed."""
    at: Any = manifest
    *outer, last = (int(key) if key.isdigit() else key for key in keys.split())
    for key in outer:
        at = at[key]
    if isinstance(at, list) and last == len(at):
        at.append(at[0] | value)
    elif value is ...:
        del at[last]
    else:
        at[last] = value


def refused(folder: Path, changes: Iterable[Change]) -> None:
    whole = (folder / "trace.json").read_text(encoding="utf-8")
    for keys, value in changes:
        manifest = json.loads(whole)
        edit(manifest, keys, value)
        tokens = sum(prompt["num_tokens"] for prompt in manifest["prompts"])
        manifest["num_tokens"] = value if keys == "num_tokens" else tokens
        (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(TraceError, match="fix: "):
            TraceFolder.open(folder)


def test_a_manifest_that_lies_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(folder, BAD_MANIFESTS)
    refused(write_sampled(tmp_path / "sampled", sampled_trace()).folder, (
        ("sampling", ...), ("temperature", 0), ("sampling top_p", 1.5), ("logprobs num_top", 51),
        ("logprobs", ...), ("logprobs num_top", 2), ("recorded_by", "\n"),
    ))  # fmt: skip
    for data in (b"[]", b'{"a": 1, "a": 2}', b"[" * 100_000, b"\xff\xfe"):
        (folder / "trace.json").write_bytes(data)
        with pytest.raises(TraceError):
            TraceFolder.open(folder)
    prompts = folder.parent / "my prompts.jsonl"
    prompts.write_text("{}\n", "utf-8")
    for path in (folder.parent / "nothing", prompts):
        with pytest.raises(TraceError):
            TraceFolder.open(path)


def test_changed_tensor_bytes_are_noticed(folder: Path) -> None:
    path = folder / "traces-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    traces = TraceFolder.open(folder)
    with pytest.raises(TraceError, match="sha256 differs"):
        next(iter(traces))
    path.write_bytes(raw[:-1])
    with pytest.raises(TraceError, match="bytes, got"):
        TraceFolder.open(folder)


@pytest.mark.parametrize("file", ["traces-00001.safetensors", "trace.json"])
def test_a_link_out_of_the_folder_is_not_followed(file: str, folder: Path, tmp_path: Path) -> None:
    path = folder / file
    path.symlink_to(path.rename(folder / "own"))
    TraceFolder.open(folder)
    path.unlink()
    path.symlink_to((folder / "own").rename(tmp_path / "elsewhere"))
    with pytest.raises(TraceError, match="elsewhere, elsewhere") as caught:
        TraceFolder.open(folder)
    assert caught.value.where == str(path)


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> TraceFolder:
    """Change one tensor and make sizes and hashes agree again: only the contents contradict."""
    path = folder / "traces-00001.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, path)
    manifest = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["shards"][0] |= {"nbytes": path.stat().st_size, "sha256": digest}
    (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
    return TraceFolder.open(folder)


def put(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return change


def impossible(folder: Path, values: Iterable[tuple[str, int, float]]) -> None:
    """Each value alone is refused when it is read."""
    path = folder / "traces-00001.safetensors"
    whole = path.read_bytes()
    for name, place, value in values:
        path.write_bytes(whole)
        with pytest.raises(TraceError):
            list(rewrite(folder, name, put(place, value)))


def test_values_that_no_trace_has(folder: Path, tmp_path: Path) -> None:
    impossible(folder, (
        ("b.target_top1", 2, 49), ("b.token_ids", 0, 50), ("b.token_ids", 0, -1),
        ("b.target_top1", 0, 2**31 - 1), ("b.features", 0, math.inf),
    ))  # fmt: skip
    impossible(write_sampled(tmp_path / "sampled", sampled_trace()).folder, (
        *(("a.token_logprob", 0, value) for value in (0.1, math.nan, -math.inf)),
        ("a.top_logprobs", 0, 1.0), ("a.top_token_ids", 0, 50),
    ))  # fmt: skip


# ---- sampled text, and log-probabilities beside the tokens

SPEC = LogprobSpec(kind="processed", num_top=3)
SAMPLING = Sampling(top_p=0.9, top_k=40, seed=7)


def sampled_trace(name: str = "a") -> PromptTrace:
    """Six new tokens, the target's argmax known of none."""
    trace = make_trace(name)
    generator = torch.Generator().manual_seed(1)
    return dataclasses.replace(
        trace,
        target_top1=torch.full_like(trace.target_top1, -1),
        token_logprob=-torch.rand(6, generator=generator),
        top_token_ids=torch.randint(50, (6, 3), generator=generator),
        top_logprobs=-torch.rand((6, 3), generator=generator),
    )


def write_sampled(
    out: Path, trace: PromptTrace, logprobs: LogprobSpec | None = SPEC
) -> TraceFolder:
    how = {"sampling": SAMPLING, "logprobs": logprobs, "recorded_by": "vllm 0.32.0"}
    return written(out, [trace], temperature=0.6, **how)


def test_sampled_text_is_written_and_read(tmp_path: Path) -> None:
    trace = sampled_trace()
    traces = write_sampled(tmp_path / "traces", trace)
    assert [equal(trace, read) for read in traces] == [True]
    manifest = traces.manifest
    assert (manifest.temperature, manifest.sampling) == (0.6, SAMPLING)
    assert (manifest.logprobs, manifest.recorded_by) == (SPEC, "vllm 0.32.0")
    assert manifest.sampled
    asked = itertools.product(("processed", "raw"), (1, 0.6), (1, 0.9), (0, 50))
    for kind, temperature, top_p, top_k in asked:
        sampling, spec = Sampling(top_p=top_p, top_k=top_k), LogprobSpec(kind=kind)
        own = {"temperature": temperature, "sampling": sampling, "logprobs": spec}
        one = dataclasses.replace(manifest, **own)
        unchanged = temperature == 1 and top_p == 1 and top_k == 0
        assert one.logprobs_as_sampled == (kind == "processed" or unchanged)


def test_what_is_declared_has_to_be_there(tmp_path: Path) -> None:
    processed = LogprobSpec(kind="processed")
    for trace, logprobs in ((make_trace("a"), SPEC), (sampled_trace(), processed)):
        with pytest.raises(TraceError):
            write_sampled(tmp_path / "traces", trace, logprobs)
    assert not (tmp_path / "traces").exists()


# ---- splits and merges: nothing lost or doubled, and together what belongs together


def saying(name: str, prompt: Sequence[int], category: str = "a", **fields: Any) -> PromptTrace:
    """Six tokens more; the continuation is of the name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    token_ids = torch.cat([torch.tensor(prompt), torch.randint(50, (6,), generator=generator)])
    top1 = torch.full((len(token_ids) - 1,), -1)
    top1[len(prompt) - 1 :] = token_ids[len(prompt) :]
    features = torch.randn((len(token_ids) - 1, WIDTH), generator=generator).bfloat16()
    kept = {"token_ids": token_ids, "features": features, "target_top1": top1, **fields}
    return PromptTrace(id=name, category=category, prompt_length=len(prompt), **kept)


def written(out: Path, traces: Sequence[PromptTrace], **options: Any) -> TraceFolder:
    head = TraceManifest(**{"temperature": 0, "target": TARGET, "features": AUX} | options)
    with trace_output(out, head) as writer:
        for position, trace in enumerate(traces):
            writer.add(trace, position=position)
    return TraceFolder.open(out)


def body(first: int, length: int = 10) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(length)]


def plain(count: int, category: str = "a") -> list[PromptTrace]:
    return [saying(f"{category}{i}", body(i), category) for i in range(count)]


def ids(traces: TraceFolder) -> list[str]:
    return [trace.id for trace in traces]


def equal(one: PromptTrace, other: PromptTrace) -> bool:
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)]
    return all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
    )


# ---- split


def test_a_split_has_every_trace_once(tmp_path: Path) -> None:
    others = [saying(f"zz{i}", body(i + 30), "b") for i in range(6)]
    traces = written(tmp_path / "t", plain(12) + others)
    report, again, other = (
        split_traces(traces, tmp_path / f"x{i}", tmp_path / f"y{i}", count=7, seed=seed)
        for i, seed in enumerate((0, 0, 4))
    )  # 4.7 and 2.3
    assert (report.first.sha256, report.second.sha256) == (again.first.sha256, again.second.sha256)
    assert ids(report.first) != ids(other.first)
    assert report.by_category == {"a": (5, 7), "b": (2, 4)}
    whole = split_traces(traces, tmp_path / "a", tmp_path / "b", categories=["a"])
    assert whole.by_category == {"a": (12, 0), "b": (0, 6)}
    assert len(report.first) == 7
    assert sorted(ids(report.first) + ids(report.second)) == sorted(ids(traces))
    by_id = {trace.id: trace for trace in traces}
    for side in (report.first, report.second):
        assert all(equal(trace, by_id[trace.id]) for trace in side)
        assert side.manifest.target == traces.manifest.target
    assert ids(report.second) == [i for i in ids(traces) if i not in ids(report.first)]


def test_a_declared_cluster_stays_together(tmp_path: Path) -> None:
    """And is kept by the folders, and by a merge of them, as prompts that were left out are."""
    own = [
        dataclasses.replace(trace, cluster="manual" if i % 3 else None)
        for i, trace in enumerate(plain(12))
    ]
    traces = written(tmp_path / "t", own, too_long=TooLongPrompts(skipped=("p",)))
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=9)
    assert report.second.manifest.too_long == TooLongPrompts(skipped=("p",))
    manual = {trace.id for trace in own if trace.cluster}
    assert len(manual & set(ids(report.first))) in (0, len(manual))
    merged = merge_traces([report.first, report.second], tmp_path / "merged").traces
    assert {t.id for t in merged if t.cluster == "manual"} == manual
    assert merged.manifest.too_long == report.second.manifest.too_long
    info = trace_info(merged)
    assert (info.num_clusters, info.num_independent) == (1, 5)


def test_what_belongs_together_stays_together(tmp_path: Path) -> None:
    """Copies, whatever their category; near duplicates; turns of a conversation."""
    first = saying("talk/turn-1", body(3, 12))
    second = saying("talk/turn-2", body(8, 30), conversation_sha256=first.prompt_sha256)
    third = saying("talk/turn-3", body(17, 30), conversation_sha256=first.prompt_sha256)
    again = saying("copy", body(3, 12), "b")
    near = saying("near", [*body(20, 19), 1])
    nearly = saying("nearly", [*body(20, 19), 2])
    others = [saying(f"c{i}", [49, *body(i)], "c") for i in range(10)]
    traces = written(tmp_path / "t", [first, second, third, again, near, nearly, *others])
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=8)
    assert len(report.first) <= 8
    for group in ({"talk/turn-1", "talk/turn-2", "talk/turn-3", "copy"}, {"near", "nearly"}):
        assert len(group & set(ids(report.first))) in (0, len(group))
    assert (report.num_groups, report.largest_group, report.lopsided) == (12, 4, False)
    of_b = split_traces(traces, tmp_path / "of-b", tmp_path / "others", categories=["b"])
    assert {*ids(of_b.first)} == {"talk/turn-1", "talk/turn-2", "talk/turn-3", "copy"}
    assert trace_info(traces).known_top1 == 0  # none is recorded
    hashes = [{prompt.hashes[1] for prompt in recorded_prompts(side)} for side in
              (report.first, report.second)]  # fmt: skip
    assert not hashes[0] & hashes[1]


def test_splits_that_are_none(tmp_path: Path) -> None:
    traces = written(tmp_path / "t", plain(4))
    x, y = tmp_path / "x", tmp_path / "y"
    for how in (*({"count": n} for n in (0, 4, 9)), *({"categories": [name]} for name in "ba")):
        with pytest.raises(TraceError):
            split_traces(traces, x, y, **how)  # type: ignore[arg-type]
    for second in (x, tmp_path / "t", tmp_path / "t" / "y"):
        with pytest.raises((TraceError, OutputError)):
            split_traces(traces, x, second, count=2)
    assert not x.exists()


# ---- merge


def test_folders_that_do_not_fit_together(tmp_path: Path) -> None:
    one, two = (written(tmp_path / name, plain(2)[:n]) for n, name in ((2, "one"), (1, "two")))
    for name, changes in (
        ("target", {"target": dataclasses.replace(TARGET, weights_sha256=None)}),
        ("features", {"features": dataclasses.replace(AUX, aux_layer_ids=(1, 3, 5))}),
    ):
        other = written(tmp_path / name, [saying("z", body(44))], **changes)
        with pytest.raises(TraceError, match=f"another {name} than"):
            merge_traces([one, other], tmp_path / "m")
    for folders in ([one, one], [one, two, two], [one]):
        with pytest.raises(TraceError):
            merge_traces(folders, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_commands_say_of_traces(tmp_path: Path) -> None:
    """Of drawn text, of ids that exist twice, of what was too long, and of data sets."""
    own: Any = {"name": "a/b", "revision": "c" * 40, "config": "d", "split": "e"}
    columns = (("text", 7), (None, None))
    datasets = tuple(DatasetSource(**own, column=column, seed=seed) for column, seed in columns)
    too_long = TooLongPrompts(skipped=("p", "q"), truncated=("r",))
    how = {"sampling": SAMPLING, "logprobs": SPEC, "temperature": 0.6, "recorded_by": "vllm 0.32.0"}
    first = written(tmp_path / "first", [sampled_trace("a"), sampled_trace("b")],
                    too_long=too_long, datasets=datasets, ignore_eos=True, **how)  # fmt: skip
    other = dataclasses.replace(SAMPLING, seed=None)
    again = dataclasses.replace(sampled_trace("b"), cluster="c")
    written(tmp_path / "again", [again], **(how | {"sampling": other, "ignore_eos": True}))
    names = [str(tmp_path / name) for name in ("first", "again", "both", "small")]
    for words in (["info", names[0]], ["info", names[1]], ["merge", *names[:2], "--out", names[2]],
                  ["store", names[2], "--feature-storage", "fp8-per-token", "--out", names[3]],
                  ["info", names[3]]):  # fmt: skip
        assert main(["traces", *words]) == 0
    (tmp_path / "x").mkdir()
    last = dataclasses.replace(again, cluster="e")
    written(tmp_path / "x" / "both", [last], ignore_eos=True, **how)
    doubled = [*names[:3], str(tmp_path / "x" / "both"), "--out", str(tmp_path / "no")]
    assert main(["traces", "merge", *doubled]) == 2
    assert trace_info(first).num_clusters == 0


def test_a_split_says_what_one_large_group_means(tmp_path: Path) -> None:
    """Six of ten prompts have one continuation."""
    own = [make_trace(f"p{i}", 20, 40, seed=i) for i in range(10)]
    for one in own[1:6]:
        one.token_ids[20:] = own[0].token_ids[20:]
        one.target_top1[19:] = own[0].target_top1[19:]
    write(tmp_path / "t", *((trace, i) for i, trace in enumerate(own)))
    outs = [str(tmp_path / name) for name in "xy"]
    assert main(["traces", "split", str(tmp_path / "t"), "--out", *outs, "--count", "3"]) == 0
