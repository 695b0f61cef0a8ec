"""Replay of drawn text: against a loop that really draws, and what it refuses.

The loop (sampled_loop.py) shares nothing with replay but the weights: its draft and its sampling
are those of transformers. `python tests/sampled_loop.py` compares on more prompts.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.traces.manifest import LogprobSpec
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import ReplayError
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import (
    acceptance_probabilities,
    block_acceptance,
    replay_drafts,
)
from proposing import draft_proposals
from recorded import record_traces
from sampled_loop import PAIRS, Sampled, compare, difference
from tiny import tiny_eagle3_llama

PAIR = PAIRS / "eagle3-llama"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("pair", "how"),
    [
        ("eagle3-llama", Sampled()),
        pytest.param("eagle3-mla", Sampled(temperature=0.8, top_k=20), marks=pytest.mark.slow),
        pytest.param("dflash", Sampled(temperature=0.6, top_p=0.95), marks=pytest.mark.slow),
    ],
)
def test_expected_rounds_are_those_of_a_loop_that_draws(pair: str, how: Sampled) -> None:
    """Per prompt; the bound is four standard errors, and less than a round of about sixteen."""
    found = compare(pair, how, num_prompts=8, num_new_tokens=36, seed=1)
    for pairs in (found[:, 0], found[:, 1]):
        mean, error = difference(pairs)
        assert abs(mean) < 4 * error
        assert 0 < error < 1.1


def traces_of(out: Path, decoding: Decoding, num_prompts: int = 6) -> TraceFolder:
    prompts = read_prompts(PAIR / "prompts.jsonl")[:num_prompts]
    how = {"max_new_tokens": 40, "aux_layer_ids": (0, 1, 2)}
    return record_traces(PAIR / "target", prompts, out, decoding=decoding, **how)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("sampled") / "traces"
    return traces_of(out, Decoding(temperature=0.8, top_p=0.95))


@pytest.fixture(scope="module")
def draft() -> LoadedDraft:
    return load_draft(PAIR / "draft")


def test_drawn_proposals_are_expected_and_most_likely_ones_counted(
    sampled: TraceFolder, draft: LoadedDraft
) -> None:
    drawn, likely = (
        replay_drafts([draft], sampled, num_draft_tokens=3, draft_sampling=how)[0]
        for how in ("probabilistic", "greedy")
    )
    assert all(isinstance(count, int) for count in likely.counts.histogram)
    assert any(count % 1 for count in drawn.counts.histogram)
    assert drawn.counts.mean_acceptance_length > likely.counts.mean_acceptance_length
    assert drawn.first_step == likely.first_step
    assert drawn.traces.temperature == 0.8
    logprobs = [trace.token_logprob for trace in sampled if trace.token_logprob is not None]
    mean = float(torch.cat(logprobs).double().exp().mean())
    assert drawn.traces.mean_token_probability == pytest.approx(mean, rel=1e-6)
    assert 0.2 < mean < 1
    # Every position weighs alike: another quantity.
    assert drawn.every_position != drawn.counts


def test_a_token_without_a_row_is_never_drawn(tmp_path: Path) -> None:
    forward = load_draft(tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)).forward
    ids, hidden = torch.arange(96), torch.ones(95, 64)
    found = draft_proposals(
        forward, hidden, ids, first_row=0, num_draft_tokens=1, temperature=1.0
    ).recorded_logprobs
    assert found is not None
    offered = torch.isin(ids[2:], forward.to_target(torch.arange(48)))
    assert torch.equal(found[:, 0] > -torch.inf, offered[: len(found)])


def test_nothing_is_made_up(sampled: TraceFolder, draft: LoadedDraft, tmp_path: Path) -> None:
    greedy = traces_of(tmp_path / "greedy", GREEDY, num_prompts=2)
    with pytest.raises(ReplayError, match="the traces are greedy, and with a greedy target"):
        replay_drafts([draft], greedy, num_draft_tokens=3, draft_sampling="probabilistic")
    raw = dataclasses.replace(sampled.manifest, logprobs=LogprobSpec(kind="raw"))
    other = TraceFolder(sampled.folder, raw)
    with pytest.raises(ReplayError, match="holds raw log-probabilities"):
        replay_drafts([draft], other, num_draft_tokens=3, draft_sampling="probabilistic")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = ["record", "--target", str(PAIR / "target"), "--prompts", str(PAIR / "prompts.jsonl")]
    record += ["--draft", str(PAIR / "draft"), "--max-new-tokens", "24", "--num-prompts", "2"]
    out = ["--out", str(tmp_path / "traces")]
    assert main([*record, *out, "--top-p", "0.9"]) == 2
    assert main([*record, *out, "--temperature", "1", "--seed", "5", "--top-logprobs", "2"]) == 0
    replay = ["replay", str(PAIR / "draft"), "--traces", str(tmp_path / "traces")]
    capsys.readouterr()
    assert main([*replay, "--draft-sampling", "probabilistic", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["traces"]["sampling"] == {"top_p": 1.0, "top_k": 0, "seed": 5}
    for rule in ("greedy", "probabilistic", "block"):
        assert main([*replay, "--draft-sampling", rule]) == 0
        assert f"at temperature 1 (proposals: {rule})" in " ".join(capsys.readouterr().out.split())


Table = dict[tuple[int, ...], npt.NDArray[np.float64]]
"""What follows each path of tokens, [4] probabilities."""
DEPTH, TOKENS = 3, 4


def tables(seed: int) -> list[Table]:
    """Of a target, and of a draft that is something like it."""
    random = np.random.default_rng(seed)
    paths = [p for n in range(DEPTH) for p in itertools.product(range(TOKENS), repeat=n)]
    target, noise = ({p: random.dirichlet(np.ones(TOKENS)) for p in paths} for _ in range(2))
    return [target, {path: 0.6 * target[path] + 0.4 * noise[path] for path in paths}]


def drawn_blocks(p: Table, q: Table, num: int) -> float:
    """Mean acceptance length of `num` blocks, verified by algorithm 2 of arXiv 2403.10444."""
    random, each = np.random.default_rng(7), np.arange(num)
    both = [np.zeros((TOKENS,) * n + (2, TOKENS)) for n in range(DEPTH)]
    for place, row in p.items():
        both[len(place)][place] = row, q[place]
    path: list[npt.NDArray[np.int64]] = []
    ratio, accepted = np.ones(num), np.zeros(num)
    for depth in range(DEPTH):
        rows = np.broadcast_to(both[depth][tuple(path)], (num, 2, TOKENS))
        token = (rows[:, 1].cumsum(1) > random.random((num, 1))).argmax(1)
        ratio = np.minimum(ratio * rows[each, 0, token] / rows[each, 1, token], 1)
        path.append(token)
        chance = ratio
        if depth + 1 < DEPTH:
            after = both[depth + 1][tuple(path)]
            left = np.maximum(ratio[:, None] * after[:, 0] - after[:, 1], 0).sum(1)
            chance = left / np.maximum(left + 1 - ratio, 1e-300)
        accepted[random.random(num) < chance] = depth + 1
    return 1 + float(accepted.mean())


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_block_accepts_what_a_sampler_of_blocks_does(seed: int) -> None:
    """Over all texts of the target: more than one by one, and to 0.1 % what is drawn."""
    p, q = tables(seed)
    texts = list(itertools.product(range(TOKENS), repeat=DEPTH))
    drafted, target = (
        np.array([[of[text[:i]][text[i]] for i in range(DEPTH)] for text in texts]) for of in (q, p)
    )
    logprobs = torch.tensor(np.log(drafted)), torch.tensor(np.log(target))
    block, single = (
        1 + target.prod(1) @ rule(*logprobs).cumprod(1).sum(1).numpy()
        for rule in (block_acceptance, acceptance_probabilities)
    )
    assert block > single * 1.005
    assert drawn_blocks(p, q, 1_000_000) == pytest.approx(block, rel=1e-3)


def test_blocks_accept_more_of_drawn_proposals(sampled: TraceFolder, draft: LoadedDraft) -> None:
    one_by_one, blocks = (
        replay_drafts([draft], sampled, num_draft_tokens=3, draft_sampling=how)[0].counts
        for how in ("probabilistic", "block")
    )
    assert 1.001 < blocks.mean_acceptance_length / one_by_one.mean_acceptance_length < 1.06
