"""Replay against an engine-style loop that really decodes: every step and every token is the same.

The loop (`engine_loop.py`) runs a transformers target and the independent draft of
`reference_draft.py` with KV caches; replay runs our forward maths on the recorded trace. Both in
float64 throughout, so that the two disagree about a logit by 1e-10 at most and a near-tie does not
decide.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration.passes.draft_inputs import check_trace_fits
from draftquant.calibration.passes.proposals import Proposals
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.backends import get_backend
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import WeightFormat
from draftquant.recipes.errors import ForwardError, ReplayError, TraceError
from draftquant.validate.counting.trace_replay import (
    accepted_by_row,
    counted_prompt,
    decoding_steps,
    replay_drafts,
)
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import POLICIES
from recorded import record_traces
from reference_draft import transformers_in_float64
from replay_proof import (
    RoundInput,
    assert_replay_is_the_engine,
    fp8_per_token,
    quantized_folder,
    unrounded,
)
from safetensors.torch import load_file, save_file
from tied_pair import VOCAB, save_draft, tied
from torch import Tensor
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
FORMATS: dict[str, WeightFormat | None] = {
    "bf16": None,
    "fp8": WeightFormat(dtype="fp8_e4m3", granularity="channel", symmetric=True),
    "int4": WeightFormat(dtype="int4", granularity="channel", symmetric=True),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied(float64=True)


def rounded_weights(draft: LoadedDraft, weight_format: WeightFormat) -> dict[str, Tensor]:
    """The draft's weights with every attention and MLP linear quantized and dequantized."""
    weights = dict(draft.weights)
    for module in draft.linears:
        name = f"{module}.weight"
        codes = get_backend("torch").quantize(weights[name].bfloat16(), weight_format)
        weights[name] = codes.dequantized().to(weights[name].dtype)
    return weights


def with_weights(
    draft: LoadedDraft, weights: dict[str, Tensor], round_input: RoundInput
) -> LoadedDraft:
    forward = draft.family.forward(draft.geometry, weights, round_input)
    return dataclasses.replace(draft, weights=weights, forward=forward)


def kinds(draft: LoadedDraft) -> dict[str, tuple[LoadedDraft, RoundInput]]:
    """BF16, FP8 and INT4 weights, and INT4 weights with FP8 activations."""
    made: dict[str, tuple[LoadedDraft, RoundInput]] = {}
    for name, weight_format in FORMATS.items():
        weights = rounded_weights(draft, weight_format) if weight_format else dict(draft.weights)
        made[name] = (with_weights(draft, weights, unrounded), unrounded)
    weights = dict(made["int4"][0].weights)
    made["int4-a8"] = (with_weights(draft, weights, fp8_per_token), fp8_per_token)
    return made


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "k"), [("int4-a8", 3), ("bf16", 3), ("fp8", 1), ("int4", 5)])
def test_replay_equals_the_engine_on_a_tied_pair(folder: Path, kind: str, k: int) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    draft, round_input = kinds(load_draft(folder / "draft", dtype=torch.float64))[kind]
    counts = assert_replay_is_the_engine(draft, round_input, model, traces, num_draft_tokens=k)
    assert min(counts.histogram) > 0, "every number of accepted tokens has to occur"
    (replay,) = replay_drafts([draft], traces, num_draft_tokens=k)
    assert replay.counts == counts


def test_replay_equals_the_engine_with_a_pruned_vocabulary(folder: Path, tmp_path: Path) -> None:
    draft_folder = save_draft(tmp_path / "draft", folder / "target", draft_vocab_size=80)
    tensors = load_file(draft_folder / "model.safetensors")
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:80].sort().values
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].contiguous()
    tensors["d2t"] = kept - torch.arange(80)
    save_file(tensors, draft_folder / "model.safetensors")
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    draft = load_draft(draft_folder, dtype=torch.float64)
    counts = assert_replay_is_the_engine(
        draft, unrounded, model, traces, num_draft_tokens=3, num_prompts=2
    )
    assert counts.num_steps > 20


@pytest.fixture(scope="module")
def pair_traces(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("pair") / "traces"
    prompts = read_prompts(PAIR / "prompts.jsonl")
    with transformers_in_float64():
        return record_traces(
            PAIR / "target",
            prompts[:4],
            out,
            max_new_tokens=48,
            aux_layer_ids=(0, 1, 2),
            dtype="float64",
        )


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["blackwell-fp8", "mi325x-w4a8", "int4-channel"])
def test_a_quantized_folder_of_a_trained_pair_replays_as_the_engine_decodes(
    recipe: str, pair_traces: TraceFolder, tmp_path: Path
) -> None:
    round_input = quantized_folder(PAIR / "draft", tmp_path / "out", recipe, pair_traces, 3)
    draft = load_draft(tmp_path / "out", dtype=torch.float64)
    assert len(draft.quantized) == 7
    model = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float64)
    counts = assert_replay_is_the_engine(
        draft, round_input, model, pair_traces, num_draft_tokens=3, num_prompts=2
    )
    assert counts.num_steps > 20


@pytest.mark.slow
def test_replay_reproduces_the_figures_of_the_trainer(tmp_path: Path) -> None:
    """training.json holds figures of the trainer's own scoring, written without this package.

    Float32 on another machine may flip a near-tie of the target, which moves that prompt to another
    trajectory. A prompt is 1 % of the figures; one in a hundred may move by half.
    """
    figures = json.loads((PAIR / "training.json").read_text(encoding="utf-8"))["figures"]
    traces = record_traces(
        PAIR / "target",
        read_prompts(PAIR / "prompts.jsonl"),
        tmp_path / "traces",
        max_new_tokens=figures["num_new_tokens"],
        aux_layer_ids=(0, 1, 2),
    )
    made = kinds(load_draft(PAIR / "draft"))
    # The trainer rounds INT4 by a rule of its own; FP8 per channel has one rule only.
    names = {"bf16": "bf16", "fp8": "fp8_per_channel"}
    replays = replay_drafts(
        [made[kind][0] for kind in names], traces, num_draft_tokens=figures["num_draft_tokens"]
    )
    for replay, name in zip(replays, names.values(), strict=True):
        expected = figures[name]
        assert len(replay.prompts) == figures["num_prompts"]
        assert abs(replay.counts.num_steps / expected["num_steps"] - 1) < 0.005
        survival = expected["acceptance_rate_by_position"]
        assert replay.counts.survival == pytest.approx(survival, abs=0.005)
    assert abs(replays[0].traces.repeated_8gram_share - figures["repeated_8gram_share"]) < 0.01
    assert judge(*replays, POLICIES["release"]).verdict == "PASS"


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
    made = kinds(load_draft(PAIR / "draft"))
    replays = replay_drafts([made["bf16"][0], made["int4"][0]], traces, num_draft_tokens=3)
    report = judge(*replays, POLICIES["release"])
    assert (report.num_prompts, report.num_copies, report.traces.num_near_duplicates) == (7, 3, 2)
    assert report.num_clusters == 4
    clusters = [prompt.cluster for prompt in report.prompts]
    assert clusters[:4] == ["", "", "", ""]
    assert len(set(clusters[4:7])) == len(set(clusters[7:9])) == 1
    assert clusters[9] == "" not in clusters[4:9]
    assert [one.alike for one in report.prompts] == [*[None] * 7, "p7", "p8", None]
    assert report.verdict == "INCONCLUSIVE"


def test_counts_by_hand() -> None:
    """Rows 0..6 accept 1 0 2 1 0 3 0: rounds at rows 0, 2, 5 accept 1, 2, 3."""
    assert decoding_steps([1, 0, 2, 1, 0, 3, 0]) == [1, 2, 3]
    assert decoding_steps([0, 0, 0]) == [0, 0, 0]
    assert decoding_steps([]) == []


def hand_trace(tokens: list[int], prompt_length: int) -> PromptTrace:
    token_ids = torch.tensor(tokens)
    return PromptTrace(
        id="hand",
        category="all",
        prompt_length=prompt_length,
        token_ids=token_ids,
        features=torch.zeros(len(tokens) - 1, 1),
        target_top1=token_ids[1:],
    )


def test_accepted_prefixes_by_hand() -> None:
    """Prompt 9 9, continuation 1 .. 6: row P - 1 predicts 2 3 4 (token 1 came from prefill)."""
    trace = hand_trace([9, 9, 1, 2, 3, 4, 5, 6], 2)
    predicted = torch.tensor([[2, 3, 4], [3, 4, 0], [0, 5, 6]])
    assert accepted_by_row(trace, predicted) == [3, 2, 0]
    assert accepted_by_row(trace, predicted[:, :1]) == [1, 1, 0]
    assert accepted_by_row(trace, predicted[:0]) == []


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
    traces = pair_traces
    made = kinds(load_draft(PAIR / "draft", dtype=torch.float64))
    calls: list[tuple[int, int]] = []
    first, second = replay_drafts(
        [made["bf16"][0], made["int4"][0]],
        traces,
        num_draft_tokens=3,
        on_progress=lambda *call: calls.append(call),
    )
    done, total = calls[0]
    assert calls == [(done, total), (2 * done, total)]  # one batch of two drafts: equal steps
    assert total == 2 * done
    calls.clear()
    replay_drafts(
        [made["bf16"][0]],
        traces,
        num_draft_tokens=3,
        batch_size=3,
        on_progress=lambda *call: calls.append(call),
    )
    assert calls == [(done * 3 // 4, done), (done, done)]
    assert first.traces.sha256 == second.traces.sha256 == traces.sha256
    assert first.first_step.share == 1
    assert first.first_step.num_only_this_hits == first.first_step.num_only_reference_hits == 0
    agreement = second.first_step
    assert agreement.num_rows == second.every_position.num_steps == 4 * (48 - 3)
    assert agreement.num_rows > agreement.num_equal > 0.5 * agreement.num_rows
    # McNemar's off-diagonal is the difference of the first-position hits.
    hits = [r.every_position.num_steps - r.every_position.histogram[0] for r in (first, second)]
    assert agreement.num_only_reference_hits - agreement.num_only_this_hits == hits[0] - hits[1]
    assert [p.id for p in first.prompts] == [entry.id for entry in traces.manifest.prompts]


def test_only_one_of_two_drafts_hits(pair_traces: TraceFolder) -> None:
    """A draft whose head is negated proposes the least likely token, which is never right."""
    draft = load_draft(PAIR / "draft", dtype=torch.float64)
    weights = dict(draft.weights) | {"lm_head.weight": -draft.weights["lm_head.weight"]}
    lost = with_weights(draft, weights, unrounded)
    right, wrong = replay_drafts([draft, lost], pair_traces, num_draft_tokens=1)
    hits = right.every_position.histogram[1]
    assert hits > 0
    assert wrong.every_position.histogram[1] == 0
    for drafts, only in (((draft, lost), (hits, 0)), ((lost, draft), (0, hits))):
        step = replay_drafts(drafts, pair_traces, num_draft_tokens=1)[1].first_step
        assert (step.num_only_reference_hits, step.num_only_this_hits) == only
        assert step.num_equal == 0


def test_fused_traces_replay_like_aux_traces(folder: Path, tmp_path: Path) -> None:
    draft = load_draft(folder / "draft", dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    prompts = [
        Prompt(
            id=t.id, category=t.category, token_ids=tuple(t.token_ids[: t.prompt_length].tolist())
        )
        for t in traces
    ]
    fused = record_traces(
        folder / "target", prompts, tmp_path / "fused", max_new_tokens=48, fuse_with=draft,
        dtype="float64",
    )  # fmt: skip
    (from_aux,) = replay_drafts([draft], traces, num_draft_tokens=3)
    (from_fused,) = replay_drafts([draft], fused, num_draft_tokens=3)
    assert from_aux.prompts == from_fused.prompts


def test_what_cannot_be_replayed(folder: Path, tmp_path: Path) -> None:
    traces = TraceFolder.open(folder / "traces")
    draft = load_draft(folder / "draft")
    with pytest.raises(ReplayError, match="drafts: expected at least one"):
        replay_drafts([], traces, num_draft_tokens=3)
    with pytest.raises(ReplayError, match="num_draft_tokens: expected at least 1, got 0"):
        replay_drafts([draft], traces, num_draft_tokens=0)
    with pytest.raises(ReplayError, match="no continuation is longer than num_draft_tokens = 48"):
        replay_drafts([draft], traces, num_draft_tokens=48)
    other = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    shifted = load_draft(save_draft(tmp_path / "shifted", folder / "target", eagle_config=other))
    with pytest.raises(TraceError, match="the draft shifted cannot use them"):
        replay_drafts([draft, shifted], traces, num_draft_tokens=3)
    weights = dict(draft.weights)
    weights["layers.0.mlp.down_proj.weight"] = weights["layers.0.mlp.down_proj.weight"] * torch.inf
    with pytest.raises(ForwardError, match="draft step 1: hidden states are NaN"):
        replay_drafts([with_weights(draft, weights, unrounded)], traces, num_draft_tokens=3)


def test_traces_of_another_target_are_called_so(folder: Path, tmp_path: Path) -> None:
    """A draft that reads the default layers, and a target that is too shallow to have them."""
    manifest = TraceFolder.open(folder / "traces").manifest
    shallow = dataclasses.replace(manifest.target, num_layers=4)
    traces = TraceFolder(folder / "traces", dataclasses.replace(manifest, target=shallow))
    default = {"eagle_aux_hidden_state_layer_ids": None}
    draft = load_draft(save_draft(tmp_path / "deep", folder / "target", eagle_config=default))
    with pytest.raises(TraceError, match="but the recorded target has 4 layers") as caught:
        check_trace_fits(draft, traces)
    assert "traces of the target that this draft was trained for" in caught.value.fix
