"""Replay against an engine-style loop that really decodes: every step and every token is the same.

The loop (`engine_loop.py`) runs a transformers target and the independent drafts of
`reference_draft.py` with KV caches; replay runs our forward maths on the
recorded trace. Both in float64, so that a near-tie does not decide.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import corpus
import pytest
import torch
from draftquant.calibration.passes.draft_inputs import check_trace_fits
from draftquant.calibration.passes.proposals import Proposals
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import ForwardError, ReplayError, TraceError
from draftquant.scripts.cli import main
from draftquant.validate.counting.acceptance_counts import repeated_ngram_share
from draftquant.validate.counting.trace_replay import (
    accepted_by_row,
    counted_prompt,
    decoding_steps,
    replay_drafts,
)
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import POLICIES
from recorded import record_traces
from reference_draft import ReferenceDraft, ReferenceMlaDraft
from replay_proof import assert_replay_is_the_engine, quantized_folder, unrounded
from safetensors.torch import load_file, save_file
from tied_mla import save_mla_draft
from tied_pair import VOCAB, save_draft, tied
from transformers import LlamaForCausalLM

PAIR = corpus.PAIRS / "eagle3-llama"
pytestmark = pytest.mark.usefixtures("float64_on_one_thread")
OTHER_MLA = {"num_hidden_layers": 2, "rope_interleave": False, "norm_output": True}
SAVED = {"llama": save_draft, "mla": save_mla_draft}


def pruned(folder: Path, target: Path, **_: Any) -> Path:
    """A draft that proposes 80 of the target's 96 tokens."""
    save_draft(folder, target, draft_vocab_size=80)
    tensors = load_file(folder / "model.safetensors")
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:80].sort().values
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].contiguous()
    tensors["d2t"] = kept - torch.arange(80)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied(float64=True)


@pytest.fixture(scope="module")
def pair_traces() -> TraceFolder:
    """Of twelve prompts of the shipped pair."""
    return TraceFolder.open(corpus.traces("eagle3-llama"))


@pytest.mark.parametrize(
    ("family", "config", "recipe", "k"),
    [
        ("llama", {}, "mi325x-w4a8", 3),
        ("mla", {}, "blackwell-fp8", 3),
        pytest.param("llama", {"num_hidden_layers": 2}, None, 5, marks=pytest.mark.slow),
        pytest.param("mla", OTHER_MLA, "int4-channel", 3, marks=pytest.mark.slow),
    ],
)
def test_replay_equals_the_engine(
    family: str, config: dict[str, Any], recipe: str | None, k: int, folder: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    source = SAVED[family](tmp_path / "draft", folder / "target", **config)
    round_input = unrounded
    if recipe is not None:
        round_input = quantized_folder(source, tmp_path / "out", recipe, traces, k)
        source = tmp_path / "out"
    draft = load_draft(source, dtype=torch.float64)
    assert len(draft.quantized) == 7 * config.get("num_hidden_layers", 1) * (recipe is not None)
    reference = ReferenceMlaDraft if family == "mla" else ReferenceDraft
    counts = assert_replay_is_the_engine(
        draft, round_input, model, traces, num_draft_tokens=k, reference=reference
    )
    assert min(counts.histogram) > 0, "every number of accepted tokens has to occur"
    (replay,) = replay_drafts([draft], traces, num_draft_tokens=k)
    assert replay.counts == counts


def test_replay_equals_the_engine_with_a_pruned_vocabulary(folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    draft = load_draft(pruned(tmp_path / "draft", folder / "target"), dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    counts = assert_replay_is_the_engine(
        draft, unrounded, model, traces, num_draft_tokens=3, num_prompts=2
    )
    assert counts.num_steps > 20


def test_copies_and_near_duplicates_reach_the_gate(tmp_path: Path) -> None:
    """One prompt under four ids, three that differ in one token, two in a cluster, one alone."""
    first, second, third = (p.token_ids for p in read_prompts(PAIR / "prompts.jsonl")[:3])
    near = [(*second[:-1], (second[-1] + 1) % 1024), ((second[0] + 1) % 1024, *second[1:])]
    own = third[::-1], tuple(sorted(third)), third
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=ids, cluster="mixed" if ids in own[:2] else None)
        for i, ids in enumerate([*[first] * 4, second, *near, *own])
    ]
    traces = record_traces(
        PAIR / "target", prompts, tmp_path / "traces", max_new_tokens=40, aux_layer_ids=(0, 1, 2)
    )
    draft = load_draft(PAIR / "draft")
    report = judge(*replay_drafts([draft, draft], traces, num_draft_tokens=3), POLICIES["release"])
    assert (report.num_prompts, report.num_copies, report.traces.num_near_duplicates) == (7, 3, 2)
    assert report.num_clusters == 4
    clusters = [prompt.cluster for prompt in report.prompts]
    assert clusters[:4] == ["", "", "", ""]
    assert len(set(clusters[4:7])) == len(set(clusters[7:9])) == 1
    assert clusters[9] == "" not in clusters[4:9]
    assert [one.alike for one in report.prompts] == [*[None] * 7, "p7", "p8", None]
    assert report.verdict == "INCONCLUSIVE"


def hand_trace(tokens: list[int], prompt_length: int) -> PromptTrace:
    token_ids = torch.tensor(tokens)
    features = torch.zeros(len(tokens) - 1, 1)
    kept = {"token_ids": token_ids, "features": features, "target_top1": token_ids[1:]}
    return PromptTrace(id="hand", category="all", prompt_length=prompt_length, **kept)


def test_accepted_prefixes_by_hand() -> None:
    """Prompt 9 9, continuation 1 .. 6: row P - 1 predicts 2 3 4 (token 1 came from prefill)."""
    trace = hand_trace([9, 9, 1, 2, 3, 4, 5, 6], 2)
    predicted = torch.tensor([[2, 3, 4], [3, 4, 0], [0, 5, 6]])
    assert accepted_by_row(trace, predicted) == [3, 2, 0]
    assert accepted_by_row(trace, predicted[:, :1]) == [1, 1, 0]
    assert accepted_by_row(trace, predicted[:0]) == []
    assert decoding_steps([1, 0, 2, 1, 0, 3, 0]) == [1, 2, 3]  # rounds at rows 0, 2, 5
    assert decoding_steps([0, 0, 0]) == [0, 0, 0]


def test_shorter_rounds_begin_elsewhere() -> None:
    """Four rows that would accept 2, 0, 1 and 2 of 2 proposals; at K = 1 rounds are shorter."""
    trace = hand_trace([9, 1, 2, 3, 4, 5, 6], 1)
    proposals = Proposals(token_ids=torch.tensor([[2, 3], [7, 7], [4, 7], [5, 6]]))
    found = counted_prompt(trace, proposals)
    assert found.counts.histogram == (0, 0, 2)  # rows 0 and 3
    (one,) = found.shorter
    assert one.histogram == (0, 2)  # rows 0 and 2: row 0 accepts one of one
    assert one.mean_acceptance_length == 2


def test_several_drafts_are_compared_with_the_first(pair_traces: TraceFolder) -> None:
    draft = load_draft(PAIR / "draft")
    int4 = load_draft(corpus.quantized("eagle3-llama", "int4-channel", pair=True))
    weights = dict(draft.weights) | {"lm_head.weight": -draft.weights["lm_head.weight"]}
    forward = draft.family.forward(draft.geometry, weights, unrounded)
    never_right = dataclasses.replace(draft, weights=weights, forward=forward)
    drafts, calls = [draft, int4, never_right], list[tuple[int, int]]()
    first, second, wrong = replay_drafts(
        drafts, pair_traces, num_draft_tokens=3, on_progress=lambda *call: calls.append(call)
    )
    done, total = calls[0]
    assert calls == [(n * done, total) for n in (1, 2, 3)]  # one batch of all: equal steps
    assert total == 3 * done
    assert first.traces.sha256 == second.traces.sha256 == pair_traces.sha256
    assert [p.id for p in first.prompts] == [entry.id for entry in pair_traces.manifest.prompts]
    alone = [repeated_ngram_share([trace.continuation]) for trace in pair_traces]
    assert [prompt.repeated_8gram_share for prompt in second.prompts] == alone
    assert first.first_step.share == 1
    assert (first.quantized, second.quantized, second.cache_scales) == (False, True, None)
    assert second.family == "eagle3-llama"
    assert second.draft_vocab_size == int4.geometry.draft_vocab_size is not None
    agreement = second.first_step
    assert agreement.num_rows == second.every_position.num_steps == 12 * (48 - 3)
    assert agreement.num_rows > agreement.num_equal > 0.5 * agreement.num_rows
    # McNemar's off-diagonal is the difference of the first-position hits.
    hits = [r.every_position.num_steps - r.every_position.histogram[0] for r in (first, second)]
    assert agreement.num_only_reference_hits - agreement.num_only_this_hits == hits[0] - hits[1]
    assert wrong.every_position.histogram[0] == agreement.num_rows
    step = wrong.first_step
    assert (step.num_only_reference_hits, step.num_only_this_hits) == (hits[0], 0)
    step = replay_drafts([never_right, draft], pair_traces, num_draft_tokens=3)[1].first_step
    assert (step.num_only_reference_hits, step.num_only_this_hits) == (0, hits[0])


def test_fused_traces_replay_like_aux_traces(folder: Path, tmp_path: Path) -> None:
    draft, traces = load_draft(folder / "draft", dtype=torch.float64), folder / "traces"
    prompts = [
        Prompt(id=t.id, category="a", token_ids=tuple(t.token_ids[: t.prompt_length].tolist()))
        for t in TraceFolder.open(traces)
    ]
    fused = record_traces(
        folder / "target", prompts, tmp_path / "fused", max_new_tokens=48, fuse_with=draft,
        dtype="float64",
    )  # fmt: skip
    (from_aux,) = replay_drafts([draft], TraceFolder.open(traces), num_draft_tokens=3)
    (from_fused,) = replay_drafts([draft], fused, num_draft_tokens=3)
    assert from_aux.prompts == from_fused.prompts
    for got, aux in zip(fused, TraceFolder.open(traces), strict=True):
        expected = aux.features @ draft.weights["fc.weight"].T
        torch.testing.assert_close(got.features, expected, rtol=0, atol=1e-4)
    fusion = fused.manifest.features
    assert (fusion.kind, fusion.fusion_sha256) == ("fused", draft.fusion_sha256)
    with pytest.raises(TraceError, match="load the draft in the dtype"):
        record_traces(folder / "target", prompts, tmp_path / "x", max_new_tokens=3, fuse_with=draft)
    for quantized in ((), ("fc",)):
        other = dataclasses.replace(draft, fusion_sha256="0" * 64, quantized=quantized)
        with pytest.raises(TraceError):
            replay_drafts([other], fused, num_draft_tokens=3)


def test_what_cannot_be_replayed(folder: Path, tmp_path: Path) -> None:
    traces, draft = TraceFolder.open(folder / "traces"), load_draft(folder / "draft")
    other = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    shifted = load_draft(save_draft(tmp_path / "shifted", folder / "target", eagle_config=other))
    broken = load_draft(folder / "draft")
    broken.weights["layers.0.mlp.down_proj.weight"].fill_(torch.inf)
    wrong = ([], 3), ([draft], 0), ([draft], 48), ([draft, shifted], 3), ([broken], 3)
    for drafts, k in wrong:
        with pytest.raises((ReplayError, TraceError, ForwardError)):
            replay_drafts(drafts, traces, num_draft_tokens=k)
    # a draft that reads the default layers, and a target that is too shallow to have them
    shallow = dataclasses.replace(traces.manifest.target, num_layers=4)
    low = TraceFolder(traces.folder, dataclasses.replace(traces.manifest, target=shallow))
    default = {"eagle_aux_hidden_state_layer_ids": None}
    deep = load_draft(save_draft(tmp_path / "deep", folder / "target", eagle_config=default))
    with pytest.raises(TraceError, match="but the recorded target has 4 layers"):
        check_trace_fits(deep, low)


def test_the_command_line_replays_with_another_rope_base(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds for every draft named, and the output says so."""
    served = save_mla_draft(tmp_path / "served", folder / "target", rope_theta=50000.0)
    trained = save_mla_draft(tmp_path / "trained", folder / "target", rope_theta=100.0)
    replay = ["replay", str(served), str(trained), "--traces", str(folder / "traces"), "--json"]
    assert main(replay) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*replay, "--rope-theta", "100"]) == 0
    probed = json.loads(capsys.readouterr().out)
    assert [found["rope_theta"] for found in plain + probed] == [None, None, 100.0, 100.0]
    assert plain[0]["prompts"] != plain[1]["prompts"]
    assert probed[0]["prompts"] == probed[1]["prompts"] == plain[1]["prompts"]
    assert main([*replay, "--rope-theta", "-1"]) == 2
    assert "rope_theta: expected a number above 1, got -1.0" in capsys.readouterr().err
