"""Splits and merges: nothing lost, nothing doubled, nothing on both sides that belongs together."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.manifest import (
    LogprobSpec,
    Sampling,
    TooLongPrompts,
    TraceManifest,
)
from draftquant.calibration.traces.near_duplicates import recorded_prompts
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.sets import merge_traces, split_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.trace_info import trace_info
from draftquant.calibration.traces.writer import trace_output
from draftquant.recipes.errors import OutputError, TraceError
from recorded import record_traces
from test_traces import AUX, TARGET, WIDTH
from tied_pair import prompt_tokens, save_target


def make_trace(name: str, prompt: Sequence[int], category: str = "a", **fields: Any) -> PromptTrace:
    """Six tokens more; the continuation is of the name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    token_ids = torch.cat([torch.tensor(prompt), torch.randint(50, (6,), generator=generator)])
    top1 = torch.full((len(token_ids) - 1,), -1)
    top1[len(prompt) - 1 :] = token_ids[len(prompt) :]
    return PromptTrace(
        id=name,
        category=category,
        prompt_length=len(prompt),
        token_ids=token_ids,
        features=torch.randn((len(token_ids) - 1, WIDTH), generator=generator).bfloat16(),
        target_top1=top1,
        **fields,
    )


def write(out: Path, traces: Sequence[PromptTrace], **options: Any) -> TraceFolder:
    head = TraceManifest(**{"temperature": 0, "target": TARGET, "features": AUX} | options)
    with trace_output(out, head) as writer:
        for position, trace in enumerate(traces):
            writer.add(trace, position=position)
    return TraceFolder.open(out)


def body(first: int, length: int = 10) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(length)]


def plain(count: int, category: str = "a") -> list[PromptTrace]:
    return [make_trace(f"{category}{i}", body(i), category) for i in range(count)]


def ids(traces: TraceFolder) -> list[str]:
    return [trace.id for trace in traces]


def same(one: PromptTrace, other: PromptTrace) -> bool:
    pairs = [
        (getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
    ]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


# ---- split


def test_a_split_has_every_trace_once(tmp_path: Path) -> None:
    others = [make_trace(f"zz{i}", body(i + 30), "b") for i in range(6)]
    traces = write(tmp_path / "t", plain(12) + others)
    report, again, other = (
        split_traces(traces, tmp_path / f"x{i}", tmp_path / f"y{i}", count=7, seed=seed)
        for i, seed in enumerate((0, 0, 4))
    )  # 4.7 and 2.3
    assert (report.first.sha256, report.second.sha256) == (again.first.sha256, again.second.sha256)
    assert ids(report.first) != ids(other.first)
    assert report.by_category == {"a": (5, 7), "b": (2, 4)}
    assert len(report.first) == 7
    assert sorted(ids(report.first) + ids(report.second)) == sorted(ids(traces))
    by_id = {trace.id: trace for trace in traces}
    for side in (report.first, report.second):
        assert all(same(trace, by_id[trace.id]) for trace in side)
        assert side.manifest.target == traces.manifest.target
    assert ids(report.second) == [i for i in ids(traces) if i not in ids(report.first)]


def test_a_split_by_categories_takes_what_belongs_to_them_along(tmp_path: Path) -> None:
    copy = make_trace("copy", body(0), "b")  # of the first one of category a
    alone = [make_trace(f"{c}{i}", body(first + i), c) for c, first in (("k", 10), ("x", 30))
             for i in range(3)]  # fmt: skip
    traces = write(tmp_path / "t", [*plain(4), copy, *alone])
    found = split_traces(traces, tmp_path / "x", tmp_path / "y", categories=["b", "k"])
    assert set(ids(found.first)) == {"a0", "copy", "k0", "k1", "k2"}
    assert found.by_category == {"a": (1, 3), "b": (1, 0), "k": (3, 0), "x": (0, 3)}


def test_a_declared_cluster_stays_together(tmp_path: Path) -> None:
    """And is kept by the folders, and by a merge of them, as prompts that were left out are."""
    own = [
        dataclasses.replace(trace, cluster="manual" if i % 3 else None)
        for i, trace in enumerate(plain(12))
    ]
    traces = write(tmp_path / "t", own, too_long=TooLongPrompts(skipped=("p",)))
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=9)
    assert report.second.manifest.too_long == TooLongPrompts(skipped=("p",))
    manual = {trace.id for trace in own if trace.cluster}
    assert len(manual & set(ids(report.first))) in (0, len(manual))
    merged = merge_traces([report.first, report.second], tmp_path / "merged").traces
    assert {t.id for t in merged if t.cluster == "manual"} == manual
    assert merged.manifest.too_long == report.second.manifest.too_long
    info = trace_info(merged)
    assert (info.num_clusters, info.num_independent) == (1, 5)


@pytest.mark.parametrize("seed", range(2))
def test_what_belongs_together_stays_together(seed: int, tmp_path: Path) -> None:
    """Copies, whatever their category; near duplicates; turns of a conversation."""
    first = make_trace("talk/turn-1", body(3, 12))
    second = make_trace("talk/turn-2", body(8, 30), conversation_sha256=first.prompt_sha256)
    third = make_trace("talk/turn-3", body(17, 30), conversation_sha256=first.prompt_sha256)
    again = make_trace("copy", body(3, 12), "b")
    near = make_trace("near", [*body(20, 19), 1])
    nearly = make_trace("nearly", [*body(20, 19), 2])
    others = [make_trace(f"c{i}", [49, *body(i)], "c") for i in range(10)]
    everything = [first, second, third, again, near, nearly, *others]
    traces = write(tmp_path / "t", everything)
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=8, seed=seed)
    assert len(report.first) <= 8
    for group in ({"talk/turn-1", "talk/turn-2", "talk/turn-3", "copy"}, {"near", "nearly"}):
        assert len(group & set(ids(report.first))) in (0, len(group))
    assert report.num_kept_together == 4
    hashes = [{prompt.hashes[1] for prompt in recorded_prompts(side)} for side in
              (report.first, report.second)]  # fmt: skip
    assert not hashes[0] & hashes[1]


def record(out: Path, seed: int = 0, **asked: Any) -> TraceFolder:
    """Of a target of this seed, if it is not there yet."""
    target = out.with_name(f"target{seed}")
    if not target.exists():
        save_target(target, seed=seed)
    prompts = [Prompt(id=f"{out.name}{i}", category="a", token_ids=ids)
               for i, ids in enumerate(prompt_tokens(3, 9, seed=len(out.name)))]  # fmt: skip
    return record_traces(target, prompts, out, max_new_tokens=2, **asked)


def test_tables_go_to_both_sides(tmp_path: Path) -> None:
    traces = record(tmp_path / "t", table_ids=(7,))
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=1)
    for side in (report.first, report.second):
        assert side.manifest.tables is not None
        for name, table in traces.tables().items():
            assert torch.equal(side.tables()[name].nan_to_num(9), table.nan_to_num(9))
    merged = merge_traces([report.first, report.second], tmp_path / "m").traces
    assert merged.manifest.tables is not None
    assert torch.equal(
        merged.tables()["embed_tokens.weight"].nan_to_num(9),
        traces.tables()["embed_tokens.weight"].nan_to_num(9),
    )
    without = merge_traces([traces, record(tmp_path / "tt")], tmp_path / "n")
    assert without.traces.manifest.tables is None
    assert without.without_tables == (tmp_path / "tt",)
    folders = [traces, record(tmp_path / "other", seed=1, table_ids=(7,))]
    unknown = dataclasses.replace(traces.manifest.target, weights_sha256=None, name="x")
    for folder in folders:  # as dumps of a target whose weights nobody read
        folder.manifest = dataclasses.replace(folder.manifest, target=unknown)
    with pytest.raises(TraceError, match=r"its embedding and head differ from those of .*: it was"):
        merge_traces(folders, tmp_path / "z")


def test_splits_that_are_none(tmp_path: Path) -> None:
    traces = write(tmp_path / "t", plain(4))
    x, y = tmp_path / "x", tmp_path / "y"
    for count in (0, 4, 9):
        with pytest.raises(TraceError, match=r"of its 4 prompts would be in .*\n.*") as caught:
            split_traces(traces, x, y, count=count)
        assert "4 groups" in str(caught.value)
    with pytest.raises(TraceError, match=r"no prompt has the category 'b'.*\n.*use some of: a"):
        split_traces(traces, x, y, categories=["b"])
    with pytest.raises(TraceError, match=r"4 of its 4 prompts would be in .* with a wanted"):
        split_traces(traces, x, y, categories=["a"])
    with pytest.raises(TraceError, match="given twice"):
        split_traces(traces, x, x, count=2)
    for second, what in ((tmp_path / "t", "already exists"), (tmp_path / "t" / "y", "overlaps")):
        with pytest.raises(OutputError, match=what):
            split_traces(traces, x, second, count=2)
    assert not x.exists()


# ---- merge


def test_an_id_that_is_taken_gets_the_name_of_its_folder(tmp_path: Path) -> None:
    one = write(tmp_path / "one", plain(2))
    two = write(tmp_path / "two", [make_trace("a0", body(30)), make_trace("x", body(40))])
    report = merge_traces([one, two], tmp_path / "m")
    assert ids(report.traces) == ["a0", "a1", "two/a0", "x"]
    assert dict(report.renamed) == {"a0": "two/a0"}
    merged = [*report.traces]
    kept = zip([*merged[:2], merged[3]], [*one, [*two][1]], strict=True)
    assert all(same(a, b) for a, b in kept)
    three = write(tmp_path / "three", [make_trace("two/a0", body(9)), make_trace("y", body(2))])
    with pytest.raises(TraceError, match="prompt a0: its id is taken, and so is two/a0"):
        merge_traces([one, three, two], tmp_path / "n")


def test_seeds_may_differ_and_are_then_not_known(tmp_path: Path) -> None:
    def sampled(name: str, seed: int) -> TraceFolder:
        trace = make_trace(name, body(seed), token_logprob=torch.full((6,), -1.0))
        return write(
            tmp_path / name,
            [trace],
            temperature=0.7,
            sampling=Sampling(seed=seed),
            logprobs=LogprobSpec(kind="raw"),
            recorded_by=f"engine {seed % 2}",
        )

    manifest = merge_traces([sampled("p", 1), sampled("q", 2)], tmp_path / "m").traces.manifest
    assert manifest.sampling == Sampling(seed=None)
    assert manifest.recorded_by == "engine 1 + engine 0"
    manifest = merge_traces([sampled("r", 1), sampled("s", 3)], tmp_path / "n").traces.manifest
    assert manifest.recorded_by == "engine 1"


def test_folders_that_do_not_fit_together(tmp_path: Path) -> None:
    one = write(tmp_path / "one", plain(2))
    for name, changes in (
        ("target", {"target": dataclasses.replace(TARGET, weights_sha256=None)}),
        ("features", {"features": dataclasses.replace(AUX, aux_layer_ids=(1, 3, 5))}),
    ):
        other = write(tmp_path / name, [make_trace("z", body(44))], **changes)
        with pytest.raises(TraceError, match=f"another {name} than"):
            merge_traces([one, other], tmp_path / "m")
    for folders, what in (([one, one], "the same traces are given twice"), ([one], "at least two")):
        with pytest.raises(TraceError, match=what):
            merge_traces(folders, tmp_path / "m")
    assert not (tmp_path / "m").exists()
