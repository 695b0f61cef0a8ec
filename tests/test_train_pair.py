"""The trainer of the shipped pairs: layout, splits, reproducibility, and the loss it lowers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.dev.training.__main__ import FAMILIES
from draftquant.scripts.dev.training.acceptance import (
    accepted_by_row,
    counted,
)
from draftquant.scripts.dev.training.corpus import SourceFile, standard_library
from draftquant.scripts.dev.training.draft import (
    Draft,
    distillation_loss,
    fresh_draft,
    scored_rows,
    train_draft,
)
from draftquant.scripts.dev.training.optimisation import Schedule
from draftquant.scripts.dev.training.pair import PairPlan, train_pair
from draftquant.scripts.dev.training.target import TargetSize, Traces, output_head
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

NAMES = ("dflash", "eagle3-llama", "eagle3-mla")
TINY_SIZE = TargetSize(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TINY_PLAN = PairPlan(
    target=TINY_SIZE,
    target_schedule=Schedule(num_steps=2, batch_size=2, max_learning_rate=1e-3),
    sequence_length=32,
    prompt_length=8,
    num_new_tokens=12,
    num_training_prompts=4,
    draft_schedule=Schedule(num_steps=2, batch_size=2, max_learning_rate=1e-3),
    num_gate_prompts=6,
    num_calibration_prompts=5,
    num_candidates_per_prompt=1,
    max_repeated_8gram_share=1.0,
    num_threads=1,
)


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    """The trainer fixes torch's threads and algorithms; other test modules keep theirs."""
    num_threads, deterministic = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.set_num_threads(TINY_PLAN.num_threads)
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def files() -> tuple[SourceFile, ...]:
    """A corner of the standard library with files of every split."""
    return tuple(file for file in standard_library() if len(file.text) < 10_000)[:80]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a family; what depends on it runs once per family."""
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    name: str, files: tuple[SourceFile, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("trained") / "pair"
    train_pair(FAMILIES[name], TINY_PLAN, files, out, seed=0)
    return out


@pytest.fixture
def traces() -> Traces:
    """Two sequences with random features: a prompt of 4 tokens and 12 more."""
    generator = torch.Generator().manual_seed(1)
    hidden = TINY_SIZE.hidden_size
    return Traces(
        token_ids=torch.randint(TINY_SIZE.vocab_size, (2, 16), generator=generator),
        features=torch.randn(2, 16, 3 * hidden, generator=generator),
        final_hidden=torch.randn(2, 16, hidden, generator=generator),
        prompt_length=4,
    )


@pytest.fixture
def draft(name: str, pair: Path) -> Draft:
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    torch.manual_seed(0)
    return fresh_draft(FAMILIES[name].draft_kind, target, TINY_SIZE)


def read_prompts(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "training.json"
    }


def test_a_trained_draft_is_one_of_its_family_in_bf16(name: str, pair: Path) -> None:
    draft = read_draft(Checkpoint.open(pair / "draft"))
    assert draft.family.name == name
    assert {row.tensor.dtype for row in draft.rows} == {"BF16"}
    plan = make_plan(load_recipe("int4-channel"), draft)
    assert len(plan.quantized) == (21 if name == "dflash" else 7)


def test_target_folder_loads_and_its_tokenizer_reproduces_every_prompt(
    name: str, pair: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    assert target.config.model_type == FAMILIES[name].target_kind.name
    assert target.dtype == torch.bfloat16
    for prompt in read_prompts(pair / "prompts.jsonl") + read_prompts(pair / "calibration.jsonl"):
        assert tokenizer.encode(prompt["text"]) == prompt["token_ids"]
        assert len(tokenizer.encode(prompt["text"])) == TINY_PLAN.prompt_length


def test_prompts_are_disjoint_and_not_in_training_text(
    pair: Path, files: tuple[SourceFile, ...]
) -> None:
    gate = read_prompts(pair / "prompts.jsonl")
    calibration = read_prompts(pair / "calibration.jsonl")
    assert (len(gate), len(calibration)) == (6, 5)
    splits = {file.name: file.split for file in files}
    assert {splits[str(prompt["id"]).rpartition(":")[0]] for prompt in gate} == {"gate"}
    assert {splits[str(prompt["id"]).rpartition(":")[0]] for prompt in calibration} == {
        "calibration"
    }
    texts = [str(prompt["text"]) for prompt in gate + calibration]
    assert len(set(texts)) == len(texts)
    training_text = "\n".join(file.text for file in files if file.split == "training")
    assert not any(text in training_text for text in texts)


def test_same_seed_gives_same_bytes_and_another_seed_does_not(
    name: str, pair: Path, files: tuple[SourceFile, ...], tmp_path: Path
) -> None:
    family = FAMILIES[name]
    train_pair(family, TINY_PLAN, files, tmp_path / "again", seed=0)
    train_pair(family, TINY_PLAN, files, tmp_path / "other", seed=1)
    first, again, other = map(folder_bytes, (pair, tmp_path / "again", tmp_path / "other"))
    assert first == again
    assert first["draft/model.safetensors"] != other["draft/model.safetensors"]


def live_chain(draft: Draft, traces: Traces, row: int, num_draft_tokens: int) -> list[int]:
    """Draft from one row of sequence 0 as an engine does: feed back what was drafted."""
    token_ids, chain = traces.token_ids[:1].clone(), list[int]()
    for depth in range(num_draft_tokens):
        live = replace(traces, token_ids=token_ids, features=traces.features[:1])
        chain.append(int(draft.proposals(live, num_draft_tokens)[0, row, depth]))
        position = scored_rows(traces, num_draft_tokens)[row] + 2 + depth
        token_ids[0, position] = chain[-1]
    return chain


def test_accepted_counts_equal_a_live_chain(draft: Draft, traces: Traces) -> None:
    chain = live_chain(draft, traces, row=2, num_draft_tokens=3)
    start = scored_rows(traces, 3)[2] + 2
    traces.token_ids[0, start : start + 3] = torch.tensor(chain)
    assert accepted_by_row(traces, draft.proposals(traces, 3))[0, 2] == 3
    traces.token_ids[0, start + 1] = (chain[1] + 1) % TINY_SIZE.vocab_size
    assert accepted_by_row(traces, draft.proposals(traces, 3))[0, 2] == 1


def logits_of(draft: Draft, traces: Traces, rows: range) -> Tensor:
    """[N, R, 3, vocabulary] of three draft steps, which fit into one block of rows."""
    passes = [one.hidden for one in draft.passes(traces, rows, 3)]
    return draft.forward.logits(torch.cat(passes, dim=2))


def test_chain_does_not_see_the_future(draft: Draft, traces: Traces) -> None:
    rows, row = scored_rows(traces, 3), 2
    before = logits_of(draft, traces, rows)
    token = rows[row]
    features = traces.features.clone()
    features[:, token + 1 :] += 1
    token_ids = traces.token_ids.clone()
    token_ids[:, token + 4 :] = 0
    after = logits_of(draft, replace(traces, features=features, token_ids=token_ids), rows)
    for depth in range(3):
        assert torch.equal(before[:, row, depth], after[:, row, depth])
        assert not torch.equal(before[:, row + 2, depth], after[:, row + 2, depth])


def test_the_walk_goes_from_step_to_step_and_pools() -> None:
    # Steps start at rows 0, 3, 5, 7, 8 and 9 of 10, in both sequences.
    accepted = torch.tensor([[2, 0, 0, 1, 0, 1, 2, 0, 0, 0]] * 2)
    counts = counted(accepted, num_draft_tokens=2)
    assert counts.num_steps == 2 * 6
    assert counts.num_accepted_by_position == (2 * 3, 2 * 1)
    assert counts.mean_acceptance_length() == pytest.approx(1 + 4 / 6)


def test_training_approaches_the_entropy_of_the_target(
    name: str, pair: Path, traces: Traces
) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    head = output_head(target)
    head.weight.data *= 10  # untrained, it tells no token from another
    torch.manual_seed(0)
    draft = fresh_draft(FAMILIES[name].draft_kind, target, TINY_SIZE)

    def loss() -> float:
        return distillation_loss(
            draft, traces, scored_rows(traces, 3), head, num_draft_tokens=3, decay=0.8
        ).item()

    before = loss()
    train_draft(
        draft,
        traces,
        head,
        Schedule(num_steps=60, batch_size=2, max_learning_rate=1e-2),
        num_draft_tokens=3,
        row_stride=1,
        decay=0.8,
        seed=0,
    )
    log_probabilities = head(traces.final_hidden).log_softmax(dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean().item()
    # Of what separates an untrained draft from the entropy, most must go: rows are memorised.
    assert loss() - entropy < 0.3 * (before - entropy)


@pytest.mark.parametrize("name", ["dflash"], scope="module")
def test_a_draft_over_the_target_of_another_pair(
    pair: Path, files: tuple[SourceFile, ...], tmp_path: Path
) -> None:
    out = tmp_path / "dspark"
    report = train_pair(
        FAMILIES["dspark"], TINY_PLAN, files, out, seed=0, shipped_target=pair / "target"
    )
    for name in ("model.safetensors", "config.json"):
        copied = (out / "target" / name).read_bytes()
        assert copied == (pair / "target" / name).read_bytes()
    own = load_file(out / "draft" / "model.safetensors")
    assert not any(name.startswith(("confidence_head.", "embed_tokens.")) for name in own)
    assert own["markov_head.markov_w1.weight"].shape == (TINY_SIZE.vocab_size, 32)
    assert (
        report["prompts"]
        == json.loads((pair / "training.json").read_text(encoding="utf-8"))["prompts"]
    )
