"""Second moments of what linears read, against every input written down, in float64."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_pair
import pytest
import tied_pair
import torch
from draftquant.calibration.linear_inputs import plan_inputs as second_moments
from draftquant.calibration.linear_inputs import static_scales as trace_runs
from draftquant.calibration.linear_inputs.plan_inputs import BLOCK_ROW_STRIDE, MomentsAlongTraces
from draftquant.calibration.linear_inputs.static_scales import run_over_traces
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.passes import BlockForward
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from recorded import record_traces
from reference_draft import transformers_in_float64
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

QKV = [f"layers.0.self_attn.{name}_proj" for name in "qkv"]


K = {"chain": 3, "block": 7}


@pytest.fixture(scope="module", params=K)
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft and the traces of four prompts."""
    folder = tmp_path_factory.mktemp(kind)
    module = tied_pair if kind == "chain" else block_pair
    module.save_target(folder / "target")
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tokens)
        for i, tokens in enumerate([(1, 2, 3, 4, 5), (7, 8, 9), (11, 3, 12, 6), (5, 5)])
    ]
    layers = None if kind == "chain" else block_pair.TARGET_LAYER_IDS
    with transformers_in_float64():
        traces = record_traces(
            folder / "target",
            prompts,
            folder / "traces",
            max_new_tokens=24,
            aux_layer_ids=layers,
            dtype="float64",
        )
    if kind == "chain":
        tied_pair.save_draft(folder / "draft", folder / "target")
    else:
        block_pair.save_draft(folder / "draft", folder / "target", traces)
    return folder


@pytest.fixture
def traces(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def loaded(folder: Path, kind: str) -> LoadedDraft:
    shared = block_pair.shared_tables(folder / "target") if kind == "block" else None
    return load_draft(folder / "draft", shared=shared)


def written_down(
    draft: LoadedDraft, traces: TraceFolder, k: int, rounding: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """All inputs of every linear, rounded and before, one below the other, [n, in] float64."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> Tensor:
        both = torch.stack([rounding(x), x]).reshape(2, -1, x.shape[-1]).double()
        seen.setdefault(name, []).append(both)
        return rounding(x)

    forward = draft.family.forward(draft.geometry, draft.weights, note)
    stride = BLOCK_ROW_STRIDE if isinstance(forward, BlockForward) else 1
    run_over_traces(forward, DraftRun(draft, traces, k), row_stride=stride)
    return {name: (*torch.cat(parts, dim=1),) for name, parts in seen.items()}  # type: ignore[misc]


def coarse(x: Tensor) -> Tensor:
    """A rounding that shows: to multiples of 1/8."""
    return (x * 8).round() / 8


@pytest.mark.parametrize("rounded", [False, True])
def test_moments_are_the_mean_over_all_inputs(
    rounded: bool,
    kind: str,
    folder: Path,
    traces: TraceFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several products of each matrix, each of several strips."""
    monkeypatch.setattr(second_moments, "_ROWS", 16)
    monkeypatch.setattr(second_moments, "_STRIP", 12)
    rounding = coarse if rounded else torch.clone
    draft = loaded(folder, kind)
    statistics = MomentsAlongTraces(
        DraftRun(draft, traces, K[kind]),
        spool=tmp_path,
        rounding=lambda _name, x: rounding(x),
        corrected=draft.linears if rounded else (),
    )
    statistics.measure([*draft.linears, "fc", "lm_head"])
    for name, (x, before) in written_down(draft, traces, K[kind], rounding).items():
        exact = x.T @ x / len(x)
        moments = statistics.second_moments([name])[name]
        found = moments.mean.double()
        assert found.shape == (x.shape[1], x.shape[1])
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max(), name
        assert torch.equal(found, found.T)
        if not rounded or name not in draft.linears:
            assert moments.lost is None
            continue
        exact = (before - x).T @ x / len(x)
        assert moments.lost is not None
        assert (moments.lost.double() - exact).abs().max() <= 1e-5 * exact.abs().max(), name


def test_what_does_not_fit_at_once_begins_a_new_run(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices of a width at a time: five make three runs, not one each after the first two."""
    draft = loaded(folder, kind)
    names = list(dict.fromkeys(second_moments._leaders(draft, list(draft.linears)).values()))[:5]
    monkeypatch.setattr(second_moments, "_columns", lambda *_: 8)
    monkeypatch.setattr(second_moments, "BYTES_AT_ONCE", 2 * 4 * 8**2)
    groups = second_moments._groups(draft, names, ())
    assert [len(group) for group in groups] == [2] * (len(names) // 2) + [1] * (len(names) % 2)


def test_prompts_of_equal_lengths_run_together(
    kind: str, folder: Path, traces: TraceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5, 3, 4 and 2 tokens and as many behind them: none; of the same prompt twice, both."""
    draft, entries = loaded(folder, kind), traces.manifest.prompts
    twice = TraceFolder(traces.folder, replace(traces.manifest, prompts=(*entries, *entries)))
    monkeypatch.setattr(trace_runs, "MAX_TOKENS", 2 * max(entry.num_tokens for entry in entries))
    batches: list[int] = []
    plain = trace_runs.first_hidden_of_batch

    def counted(draft: LoadedDraft, traces: TraceFolder, prompts: Any, forward: Any) -> Tensor:
        batches.append(len(prompts))
        return plain(draft, traces, prompts, forward)

    monkeypatch.setattr(trace_runs, "first_hidden_of_batch", counted)
    forward = draft.family.forward(draft.geometry, draft.weights, lambda _name, x: x)
    run_over_traces(forward, DraftRun(draft, twice, K[kind]))
    assert set(batches) == {2}
    inputs = written_down(draft, twice, K[kind], torch.clone)
    for name, (x, _) in written_down(draft, traces, K[kind], torch.clone).items():
        twofold, _ = inputs[name]
        assert len(twofold) == 2 * len(x)
        exact = x.T @ x
        assert (twofold.T @ twofold - 2 * exact).abs().max() <= 1e-5 * exact.abs().max()


def test_linears_that_read_the_same_share_a_file(
    kind: str, folder: Path, traces: TraceFolder, tmp_path: Path
) -> None:
    """Queries of a block draft see the block alone, its keys and values the context as well."""
    draft = loaded(folder, kind)
    statistics = MomentsAlongTraces(DraftRun(draft, traces, K[kind]), spool=tmp_path)
    statistics.measure(QKV)
    assert len(list(tmp_path.iterdir())) == (1 if kind == "chain" else 2)
    q, k, v = statistics.second_moments(QKV).values()
    assert k is v
    assert (q is k) is (kind == "chain")
    assert torch.equal(q.mean, k.mean) is (kind == "chain")
