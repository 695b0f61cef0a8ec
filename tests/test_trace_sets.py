"""Splits and merges: nothing lost, nothing doubled, nothing on both sides that belongs together."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.manifest import LogprobSpec, Sampling, TraceManifest
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
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=7)  # 4.7 and 2.3
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


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    traces = write(tmp_path / "t", plain(20))
    one, two, other = (
        split_traces(traces, tmp_path / f"x{i}", tmp_path / f"y{i}", count=10, seed=seed)
        for i, seed in enumerate((3, 3, 4))
    )
    assert one.first.sha256 == two.first.sha256
    assert one.second.sha256 == two.second.sha256
    assert ids(one.first) != ids(other.first)


@pytest.mark.parametrize("seed", range(2))
def test_a_declared_cluster_stays_together(seed: int, tmp_path: Path) -> None:
    """And is kept by the folders, and by a merge of them."""
    own = [
        dataclasses.replace(trace, cluster="manual" if i % 3 else None)
        for i, trace in enumerate(plain(12))
    ]
    traces = write(tmp_path / "t", own)
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=9, seed=seed)
    manual = {trace.id for trace in own if trace.cluster}
    assert len(manual & set(ids(report.first))) in (0, len(manual))
    merged = merge_traces([report.first, report.second], tmp_path / "merged").traces
    assert {t.id for t in merged if t.cluster == "manual"} == manual
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


def test_tables_go_to_both_sides(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    prompts = [Prompt(id=str(i), category="a", token_ids=t) for i, t in
               enumerate(prompt_tokens(6, 9))]  # fmt: skip
    traces = record_traces(target, prompts, tmp_path / "t", max_new_tokens=4, table_ids=(7,))
    report = split_traces(traces, tmp_path / "x", tmp_path / "y", count=3)
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


def test_a_merge_has_every_trace_in_order(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", plain(3)), write(tmp_path / "two", plain(2, "b"))
    report = merge_traces([one, two], tmp_path / "m")
    assert ids(report.traces) == ["a0", "a1", "a2", "b0", "b1"]
    assert all(same(a, b) for a, b in zip(report.traces, [*one, *two], strict=True))
    assert (dict(report.renamed), report.without_tables) == ({}, ())


def test_an_id_that_is_taken_gets_the_name_of_its_folder(tmp_path: Path) -> None:
    one = write(tmp_path / "one", plain(2))
    two = write(tmp_path / "two", [make_trace("a0", body(30)), make_trace("x", body(40))])
    report = merge_traces([one, two], tmp_path / "m")
    assert ids(report.traces) == ["a0", "a1", "two/a0", "x"]
    assert dict(report.renamed) == {"a0": "two/a0"}
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


def test_tables_that_only_some_carry_are_dropped(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")

    def record(name: str, seed: int, table_ids: tuple[int, ...] | None) -> TraceFolder:
        prompts = [Prompt(id=name, category="a", token_ids=prompt_tokens(1, 9, seed=seed)[0])]
        return record_traces(
            target, prompts, tmp_path / name, max_new_tokens=2, table_ids=table_ids
        )

    report = merge_traces([record("p", 0, ()), record("q", 1, None)], tmp_path / "m")
    assert report.traces.manifest.tables is None
    assert report.without_tables == (tmp_path / "q",)


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


def test_tables_of_another_target(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        target = save_target(tmp_path / f"target{seed}", seed=seed)
        (tokens,) = prompt_tokens(1, 9, seed=seed)
        prompts = [Prompt(id=f"p{seed}", category="a", token_ids=tokens)]
        folder = record_traces(
            target, prompts, tmp_path / f"t{seed}", max_new_tokens=2, table_ids=()
        )
        folders.append(folder)
    unknown = dataclasses.replace(folders[0].manifest.target, weights_sha256=None, name="x")
    for folder in folders:  # as dumps of a target whose weights nobody read
        folder.manifest = dataclasses.replace(folder.manifest, target=unknown)
    with pytest.raises(TraceError, match=r"its embedding and head differ from those of .*: it was"):
        merge_traces(folders, tmp_path / "m")


# ---- info


def test_info_counts(tmp_path: Path) -> None:
    first = make_trace("t1", body(3, 12))
    second = make_trace("t2", body(8, 30), "b", conversation_sha256=first.prompt_sha256)
    info = trace_info(write(tmp_path / "t", [first, second, make_trace("c", body(3, 12))]))
    assert (info.num_copies, info.num_later_turns, info.num_independent) == (1, 1, 1)
    assert [
        (c.category, c.num_prompts, c.prompt_tokens, c.new_tokens) for c in info.categories
    ] == [("a", 2, 24, 12), ("b", 1, 30, 6)]
    assert info.known_top1 == 0
    assert info.head_agreement is None
    assert info.nbytes == sum(p.stat().st_size for p in (tmp_path / "t").glob("*.safetensors"))
