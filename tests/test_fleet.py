"""More drafts than fit in memory together: in groups beside the first, with equal results."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from draftquant.calibration.passes import draft_inputs as passes
from draftquant.calibration.passes.memory import DraftMemory, MemoryEstimate
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.scripts.cli import main
from draftquant.validate.counting import replaying
from draftquant.validate.runs.judging_asked import CompareRun
from safetensors.torch import load_file, save_file

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
NUM_PROMPTS = 8


def estimate(*own: int, available: int) -> MemoryEstimate:
    """Of drafts of these bytes, beside tables of 5 and passes of 10."""
    return MemoryEstimate(
        device=torch.device("cpu"),
        drafts=tuple(DraftMemory(name=f"d{i}", own=one, common=0) for i, one in enumerate(own)),
        tables=5,
        reading=0,
        passes=10,
        max_tokens=1,
        available=available,
    )


def test_groups_fit_beside_the_first_draft() -> None:
    found = estimate(10, 4, 4, 4, 9, 1, 1, available=34)  # 9 bytes beside the first
    assert found.groups(8) == [range(1, 3), range(3, 4), range(4, 5), range(5, 7)]
    assert found.groups(1) == [range(i, i + 1) for i in range(1, 7)]
    assert all(found.beside_first(found.drafts[g.start : g.stop]).fits for g in found.groups(8))
    assert found.in_turn.total == 10 + 9 + 15
    assert found.in_turn.fits
    assert not estimate(10, 10, 1, available=34).in_turn.fits
    assert estimate(10, available=34).groups(8) == []


def make(draft: Path, out: Path, seed: int) -> None:
    """A draft like another, with noise of its own: all its tensors are others."""
    shutil.copytree(draft, out)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(out / "model.safetensors")
    for name, one in tensors.items():
        if one.ndim == 2:
            noise = 0.01 * one.float().std() * torch.randn(one.shape, generator=generator)
            tensors[name] = (one.float() + noise).to(one.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces, and four drafts."""
    folder = tmp_path_factory.mktemp("fleet")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
    given = ("--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "16")
    names = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"))
    assert main(["record", *names, *given, "--out", str(folder / "traces")]) == 0
    for number in (1, 2, 3, 4):
        make(PAIR / "draft", folder / f"draft-{number:03}", number)
    return folder


def compare(work: Path, out: Path) -> dict[str, object]:
    """The report, without when and how it was made."""
    drafts = [str(work / f"draft-{number:03}") for number in (1, 2, 3, 4)]
    words = [str(PAIR / "draft"), *drafts, "--traces", str(work / "traces")]
    assert main(["compare", *words, "--report", str(out)]) == 0
    found: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in ("date", "argv")}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which drafts were run, once for each batch."""
    found: list[str] = []

    def counting(draft, traces, batch, **how):  # type: ignore[no-untyped-def]
        found.append(draft.name)
        return passes.proposals_of_batch(draft, traces, batch, **how)

    monkeypatch.setattr("draftquant.validate.counting.replay_cache.proposals_of_batch", counting)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_groups_give_the_report_of_all_together_and_run_the_first_once(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "one"))
    together = compare(work, tmp_path / "together.json")
    batches = ran.count("draft")
    assert batches == ran.count("draft-004")
    ran.clear()
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(replaying, "MOST_TOGETHER", 1)
    assert compare(work, tmp_path / "apart.json") == together
    assert {name: ran.count(name) for name in ran} == dict.fromkeys(
        ["draft", *(f"draft-{number:03}" for number in (1, 2, 3, 4))], batches
    )


def test_one_draft_that_rounds_a_whole_call_has_all_run_one_prompt_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = CompareRun(drafts=(), batch_size=4)
    drafts = [PAIR / "draft", PAIR / "draft"]
    assert replaying._alike(drafts, settings) is settings
    monkeypatch.setattr(StoredDraft, "rounds_alone", False)
    assert replaying._alike(drafts, settings).batch_size == 1
