"""Replays that are kept, or made in groups: the same report, and nothing changed is used."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpus
import draftquant.calibration.passes.computing as computed
import draftquant.validate.counting.replay_cache as module
import numpy as np
import pytest
import torch
from draftquant.calibration.passes import draft_inputs as passes
from draftquant.calibration.passes.draft_inputs import batches_of
from draftquant.calibration.passes.memory import DraftMemory, MemoryEstimate
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.files.result_cache import ResultCache
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.scripts.cli import main
from draftquant.validate.counting import replaying
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.counting.replay_cache import ReplayCache, ReplayQuestion
from draftquant.validate.counting.trace_replay import replay_drafts
from draftquant.validate.runs.judging_asked import CompareRun
from safetensors.torch import load_file, save_file
from tiny import edit_json

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
NUM_PROMPTS = 6

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces and a candidate."""
    folder = tmp_path_factory.mktemp("replay-cache")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
    given = ("--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "24")
    target, draft = str(PAIR / "target"), str(PAIR / "draft")
    sampled = ("--temperature", "0.8", "--logprobs", "--out", str(folder / "traces"))
    assert main(["record", "--target", target, "--draft", draft, *given, *sampled]) == 0
    (folder / "int4").symlink_to(corpus.quantized("eagle3-llama", "int4-channel", pair=True))
    return folder


@pytest.fixture
def said() -> list[str]:
    """Notes and warnings."""
    return []


@pytest.fixture
def cache(tmp_path: Path, said: list[str]) -> ReplayCache:
    results = ResultCache(folder=tmp_path / "cache", on_warning=said.append)
    return ReplayCache(results=results, on_note=said.append)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which drafts were run, each time along how many prompts."""
    found: list[tuple[str, int]] = []

    def counting(draft, traces, batch, **how):  # type: ignore[no-untyped-def]
        found.append((draft.name, len(batch)))
        return passes.proposals_of_batch(draft, traces, batch, **how)

    monkeypatch.setattr(module, "proposals_of_batch", counting)
    return found


def replayed(work: Path, *names: str, cache: ReplayCache | None) -> Sequence[DraftReplay]:
    drafts = [load_draft(PAIR / "draft", compact=True)]
    drafts += [load_draft(work / name, compact=True, like=drafts[0]) for name in names]
    return replay_drafts(drafts, TraceFolder.open(work / "traces"), num_draft_tokens=3, cache=cache)


def test_drawn_proposals_are_kept_too_and_what_is_quantized_is_always_replayed(
    work: Path, cache: ReplayCache, said: list[str], ran: list[tuple[str, int]]
) -> None:
    traces = TraceFolder.open(work / "traces")
    drafts = [load_draft(folder) for folder in (work / "int4", PAIR / "draft")]
    for _ in range(2):
        replay_drafts(drafts, traces, num_draft_tokens=3, cache=cache)
    assert ran == [("int4", NUM_PROMPTS), ("draft", NUM_PROMPTS)] * 2
    assert not cache.results.folder.exists()
    drafts.reverse()

    def counted(cache: ReplayCache | None) -> Sequence[DraftReplay]:
        return replay_drafts(
            drafts, traces, num_draft_tokens=2, draft_sampling="probabilistic", cache=cache
        )

    assert counted(None) == counted(cache) == counted(cache)
    assert [name for name, _ in ran[-2:]] == ["draft", "int4"]
    assert "gave the same tokens" in said[0]
    replay_drafts(drafts, traces, num_draft_tokens=2, cache=cache)
    assert len(list(cache.results.folder.glob("*.entry"))) == 2  # greedy ones are others


def gate(work: Path, report: Path, *options: str) -> int:
    return main(["gate", str(PAIR / "draft"), str(work / "int4"),
                 "--traces", str(work / "traces"), "--policy", "screening",
                 "--report", str(report), "--overwrite", *options])  # fmt: skip


def test_a_hit_gives_the_report_byte_for_byte_and_an_edited_entry_none(
    work: Path,
    tmp_path: Path,
    ran: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever command asked first, here `compare`."""
    report, found, cache = tmp_path / "r.json", [], tmp_path / "cache"
    monkeypatch.setattr("draftquant.validate.runs.gate_run.today", lambda: "2026-01-01T00:00:00Z")
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(cache))
    drafts = [str(PAIR / "draft"), str(work / "int4")]
    assert main(["compare", *drafts, "--traces", str(work / "traces")]) == 0
    for folder in (cache, ""):
        monkeypatch.setenv("DRAFTQUANT_CACHE", str(folder))
        ran.clear()
        capsys.readouterr()
        gate(work, report)
        printed = capsys.readouterr()
        found.append((report.read_bytes(), printed.out))
        assert ("gave the same tokens (--no-cache replays all)" in printed.err) is bool(folder)
        assert ran[0] == ("draft", 1 if folder else NUM_PROMPTS)
    assert found[0] == found[1]
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(cache))
    (entry,) = cache.glob("*.entry")
    content = bytearray(entry.read_bytes())
    content[-2] ^= 1
    entry.write_bytes(content)
    gate(work, report)
    assert f"{entry}: this entry of the cache is refused" in capsys.readouterr().err
    assert report.read_bytes() == found[0][0]
    content[-2] ^= 1
    assert entry.read_bytes() == content  # written anew
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "other"))
    gate(work, report, "--no-cache")
    assert not (tmp_path / "other").exists()


def question(work: Path, **changes: object) -> ReplayQuestion:
    traces = TraceFolder.open(work / "traces")
    draft = load_draft(PAIR / "draft", compact=True)
    batches = batches_of(traces.manifest.prompts, max_tokens=4096)
    usual: dict[str, Any] = {"draft": draft, "traces": traces, "batches": batches}
    return ReplayQuestion(**{**usual, "num_draft_tokens": 3, "temperature": None, **changes})


def changed_weight(folder: Path) -> Path:
    """The draft with one bit of one weight flipped."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((PAIR / "draft" / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name].view(torch.int16)[3, 5] ^= 1
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_all_of_the_key_counts(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = question(work)
    assert question(work).key == usual.key
    draft, traces = PAIR / "draft", usual.traces
    others = [
        question(work, draft=load_draft(changed_weight(tmp_path / "draft"), compact=True)),
        question(work, draft=load_draft(draft, compact=True, rope_theta=500.0)),
        question(work, draft=load_draft(draft, compact=True, dtype=torch.bfloat16)),
        question(work, draft=load_draft(draft)),  # held wider
        question(work, traces=traces.only(traces.manifest.prompts[1:])),
        question(work, batches=batches_of(traces.manifest.prompts, max_tokens=64)),
        question(work, num_draft_tokens=2),
        question(work, temperature=0.8),
    ]
    for part in (
        {"family": SimpleNamespace(name="another")}, {"activations": {"fc": "token"}},
        {"cache_scales": {0: usual.draft.geometry}}, {"dtype": torch.float64},
    ):  # fmt: skip
        others.append(question(work, draft=dataclasses.replace(usual.draft, **part)))  # type: ignore[arg-type]
    keys = [usual.key, *(other.key for other in others)]
    torch.set_num_threads(2)
    keys.append(question(work).key)
    torch.set_num_threads(1)
    for where, value in (
        (computed, "code_sha256"), (computed, "package_version"),
        (torch.backends.cpu, "get_cpu_capability"), (computed, "_processor"),
        (torch, "get_float32_matmul_precision"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(where, value, lambda *_: "another")
            keys.append(question(work).key)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "another")
        keys.append(question(work).key)
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    renamed = question(work, draft=dataclasses.replace(usual.draft, name="other"))
    assert renamed.key == usual.key  # by content


def test_the_key_has_all_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "quantize" / "x.py", {computed.code_sha256()}
    for house in ("recipes", "quantize", "calibration", "validate/counting"):
        (tmp_path / house).mkdir(parents=True)
    monkeypatch.setattr(computed, "_ROOT", tmp_path)
    for place, text in ((file, "a = 1\n"), (file, "a = 2\n"), (file.with_name("y.py"), "a = 2\n")):
        file.unlink(missing_ok=True)
        place.write_text(text, encoding="utf-8")
        computed.code_sha256.cache_clear()
        seen.add(computed.code_sha256())
    computed.code_sha256.cache_clear()
    assert len(seen) == 4


def other_token(kept: bytes) -> bytes:
    """Every proposal is another token: whichever prompt is replayed again, it is seen."""
    tokens = np.frombuffer(kept, np.int32)  # -1 where nothing was proposed
    return np.where(tokens < 0, tokens, tokens ^ 1).astype(np.int32).tobytes()


FORGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "tokens": (other_token, "replayed again, the draft proposes other tokens for prompt"),
    "fewer": (lambda kept: kept[:-4], "no proposals for the prompts of the traces"),
    "no tokens of the target": (lambda kept: b"\x7f" * len(kept), "no proposals for the prompts"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_the_user_forged_is_found_by_replaying(
    name: str, work: Path, cache: ReplayCache, said: list[str]
) -> None:
    """With the secret, so that code and key are right."""
    asked = question(work)
    (plain,) = replayed(work, cache=cache)
    kept = cache.results.read(asked.key)
    assert kept is not None
    forge, why = FORGED[name]
    cache.results.write(asked.key, forge(kept))
    assert replayed(work, cache=cache) == (plain,)
    (warning,) = said
    assert "this entry of the cache is refused" in warning
    assert why in warning
    assert cache.results.read(asked.key) == kept  # replaced by what was replayed


def test_groups_give_the_report_of_all_together_and_run_the_first_once(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int]]
) -> None:
    fp8 = corpus.quantized("eagle3-llama", "fp8-ptpc", pair=True)
    drafts = [str(PAIR / "draft"), str(work / "int4"), str(fp8)]
    other, found = shutil.copytree(PAIR / "target", tmp_path / "other"), []
    edit_json(other / "config.json", note="another file")
    for most in (8, 1):
        monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / f"{most}"))
        monkeypatch.setattr(replaying, "MOST_TOGETHER", most)
        out = tmp_path / f"{most}.json"
        words = [*drafts, "--traces", str(work / "traces"), "--report", str(out)]
        words += ["--target", str(other)]
        assert main(["compare", *words]) == 0
        told = json.loads(out.read_text(encoding="utf-8"))
        found.append({key: value for key, value in told.items() if key not in ("date", "argv")})
    assert found[0] == found[1]
    assert "--target other has another config.json than the recorded" in str(found[0]["warnings"])
    assert [name for name, _ in ran[3:]].count("draft") == 1


def estimate(*own: int, available: int) -> MemoryEstimate:
    """Of drafts of these bytes, beside tables of 5 and passes of 10."""
    drafts = tuple(DraftMemory(name=f"d{i}", own=one, common=0) for i, one in enumerate(own))
    rest: Any = {"device": torch.device("cpu"), "reading": 0, "max_tokens": 1}
    return MemoryEstimate(drafts=drafts, tables=5, passes=10, available=available, **rest)


def test_groups_fit_beside_the_first_draft() -> None:
    found = estimate(10, 4, 4, 4, 9, 1, 1, available=34)  # 9 bytes beside the first
    assert found.groups(8) == [range(1, 3), range(3, 4), range(4, 5), range(5, 7)]
    assert found.groups(1) == [range(i, i + 1) for i in range(1, 7)]
    assert all(found.beside_first(found.drafts[g.start : g.stop]).fits for g in found.groups(8))
    assert found.in_turn.total == 10 + 9 + 15
    assert found.in_turn.fits
    assert not estimate(10, 10, 1, available=34).in_turn.fits
    assert estimate(10, available=34).groups(8) == []


def test_one_draft_that_rounds_a_whole_call_has_all_run_one_prompt_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = CompareRun(drafts=(), batch_size=4)
    drafts = [PAIR / "draft", PAIR / "draft"]
    assert replaying._alike(drafts, settings) is settings
    monkeypatch.setattr(StoredDraft, "rounds_alone", False)
    assert replaying._alike(drafts, settings).batch_size == 1


@pytest.mark.parametrize(("token", "known"), [(-2, False), (-1, True), (4, True), (5, False)])
def test_kept_proposals_are_tokens_of_the_target(token: int, known: bool) -> None:
    """Or none, where the draft proposes what the target does not have."""
    asked: Any = SimpleNamespace(
        rows=lambda _: 1, num_draft_tokens=2, temperature=None,
        traces=SimpleNamespace(manifest=SimpleNamespace(target=SimpleNamespace(vocab_size=5))),
    )  # fmt: skip
    kept = module.decoded(np.array([0, token], np.int32).tobytes(), asked, [0])
    assert (kept is not None) is known
