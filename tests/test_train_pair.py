"""The trainer of the shipped pairs: splits, reproducibility, and the pairs themselves."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import corpus
import pytest
import torch
from by_recipe import draft_of
from draftquant import api as dq
from draftquant.scripts.dev.training.__main__ import FAMILIES
from draftquant.scripts.dev.training.corpus import SourceFile, standard_library
from draftquant.scripts.dev.training.draft import fresh_draft, shipped_draft
from draftquant.scripts.dev.training.optimisation import Schedule, minimise
from draftquant.scripts.dev.training.pair import PairPlan, train_pair
from draftquant.scripts.dev.training.target import TargetSize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

PAIRS = Path(__file__).parent / "pairs"
NAMES = ("dflash", "eagle3-llama", "eagle3-mla")
NUM_REPLAYED = 16
TINY_SIZE = TargetSize(
    vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=5,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
TINY_SCHEDULE = Schedule(num_steps=2, batch_size=2, max_learning_rate=1e-3)
TINY_PLAN = PairPlan(
    target=TINY_SIZE, target_schedule=TINY_SCHEDULE, draft_schedule=TINY_SCHEDULE,
    sequence_length=32, prompt_length=8, num_new_tokens=12, num_training_prompts=4,
    num_gate_prompts=6, num_calibration_prompts=5, num_candidates_per_prompt=1,
    max_repeated_8gram_share=1.0, num_threads=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    """The trainer fixes torch's threads and algorithms; other test modules keep theirs."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(TINY_PLAN.num_threads)
    yield
    torch.set_num_threads(threads)
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


def test_a_draft_that_reads_the_last_layer_is_not_trained(tmp_path: Path) -> None:
    plan = replace(TINY_PLAN, target=replace(TINY_SIZE, num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"eagle3-mla: .* before 3, .*\n  fix: .* 5 layers"):
        train_pair(FAMILIES["eagle3-mla"], plan, (), tmp_path / "pair", seed=0)


def test_a_trained_pair_is_one_of_its_family_with_prompts_of_no_training_text(
    name: str, pair: Path, files: tuple[SourceFile, ...]
) -> None:
    draft = draft_of(pair / "draft")
    assert draft.family.name == name
    assert {row.tensor.dtype for row in draft.rows} == {"BF16"}
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    splits = {file.name: file.split for file in files}
    training = "\n".join(file.text for file in files if file.split == "training")
    texts = []
    for split, count in (("prompts", 6), ("calibration", 5)):
        lines = (pair / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts: list[dict[str, object]] = list(map(json.loads, lines))
        assert len(prompts) == count
        for prompt in prompts:
            texts.append(str(prompt["text"]))
            assert tokenizer.encode(texts[-1]) == prompt["token_ids"]
            assert splits[str(prompt["id"]).rpartition(":")[0]] == split.replace("prompts", "gate")
            assert texts[-1] not in training
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["dflash"], scope="module")
def test_same_seed_gives_same_bytes_and_a_target_can_be_that_of_another_pair(
    pair: Path, files: tuple[SourceFile, ...], tmp_path: Path
) -> None:
    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    for out, seed in (("again", 0), ("other", 1)):
        train_pair(FAMILIES["dflash"], TINY_PLAN, files, tmp_path / out, seed=seed)
    assert weights(pair / "draft") == weights(tmp_path / "again/draft")
    assert weights(pair / "draft") != weights(tmp_path / "other/draft")
    out = tmp_path / "dspark"
    train_pair(FAMILIES["dspark"], TINY_PLAN, files, out, seed=0, shipped_target=pair / "target")
    assert weights(out / "target") == weights(pair / "target")
    own = load_file(out / "draft" / "model.safetensors")
    assert not any(name.startswith(("confidence_head.", "embed_tokens.")) for name in own)
    assert own["markov_head.markov_w1.weight"].shape == (TINY_SIZE.vocab_size, 32)


def test_a_shipped_pair_is_what_the_trainer_writes_and_as_good_as_it_says(name: str) -> None:
    family, folder = FAMILIES[name], PAIRS / name
    plan = family.plan
    said = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    written = (folder / "draft" / "config.json").read_text(encoding="utf-8")
    assert written == json.dumps(family.draft_kind.config(plan.target), indent=2) + "\n"
    assert said["plan"]["target"] == asdict(plan.target)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    draft = shipped_draft(fresh_draft(family.draft_kind, target, plan.target), folder / "draft")
    stored = load_file(folder / "draft" / "model.safetensors")
    shapes = {tensor: weight.shape for tensor, weight in draft.published().items()}
    assert shapes == {tensor: weight.shape for tensor, weight in stored.items()}

    figures, k = said["figures"], plan.num_draft_tokens
    traces = corpus.traces(name, prompts=NUM_REPLAYED, max_new_tokens=plan.num_new_tokens)
    (found,) = dq.replay(
        folder / "draft", traces, num_draft_tokens=k, target=folder / "target", dtype="float32"
    )
    # A prompt's own mean length has a standard deviation below 0.1 K over the 96 prompts, so the
    # mean over 16 of them lies within 4 * 0.1 K / sqrt(16) of the figure, which pools all.
    assert found.counts.mean_acceptance_length == pytest.approx(
        figures["bf16"]["mean_acceptance_length"], abs=0.1 * k
    )
    for path in filter(Path.is_file, folder.rglob("*")):
        assert str(Path.home()).encode() not in path.read_bytes(), path
    assert figures["num_prompts"] >= 64
    assert figures["bf16"]["mean_acceptance_length"] > 2.5


def test_training_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def trained(kept: Path | None, *, killed_at: int | None = None) -> list[float]:
        torch.manual_seed(0)
        weight, calls = torch.zeros(3, requires_grad=True), 0

        def loss() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise KeyboardInterrupt
            return (weight - torch.randn(3)).square().sum()

        schedule = Schedule(num_steps=120, batch_size=1, max_learning_rate=0.1)
        minimise(loss, [weight], schedule, label="weight", kept=kept)
        found: list[float] = weight.tolist()
        return found

    kept = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        trained(kept, killed_at=75)
    assert kept.exists()
    assert trained(kept) == trained(None)
