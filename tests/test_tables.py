"""The target's embedding and head: found in a target, carried by traces, used by bare drafts."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.calibration.passes.draft_inputs import check_trace_fits
from draftquant.calibration.passes.on_traces import chosen_num_draft_tokens
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import OutputError, ReplayError, TraceError
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from safetensors.torch import load_file, save_file
from tied_pair import HIDDEN, VOCAB, prompt_tokens, prompts_of, save_draft, save_target
from tiny import Stored, store, write_tensors
from tiny_dflash import tiny_dflash

PROMPTS = prompts_of(prompt_tokens(6, 7))

pytestmark = pytest.mark.usefixtures("one_thread")


def write_target(
    folder: Path, tensors: dict[str, Stored], *, sharded: bool = False, **config: Any
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder, tensors, sharded=sharded)
    return folder


def random_table(seed: int) -> Stored:
    return store(np.random.default_rng(seed).normal(size=(10, 6)), "BF16")


def bits(stored: Stored) -> torch.Tensor:
    return torch.frombuffer(bytearray(stored.data), dtype=torch.bfloat16).view(*stored.shape)


# ---- in the target

EMBED, HEAD_TABLE = random_table(0), random_table(1)


@pytest.mark.parametrize(
    ("body", "top"), [("model.", ""), ("language_model.model.", "language_model.")]
)
def test_tables_are_found_whatever_their_prefix(tmp_path: Path, body: str, top: str) -> None:
    tensors = {body + EMBEDDING: EMBED, top + HEAD: HEAD_TABLE, f"{body}norm.weight": EMBED}
    copies = {f"{body}layers.61.{EMBEDDING}": HEAD_TABLE, f"layers.61.{HEAD}": EMBED}  # of MTP
    folder = write_target(tmp_path / "t", tensors | copies, sharded=bool(top))
    (folder / "config.json").rename(tmp_path / "kept elsewhere")
    (folder / "config.json").symlink_to(tmp_path / "kept elsewhere")  # the user's own
    found = TargetTables.find(folder)
    assert (found.vocab_size, found.width) == (10, 6)
    shared = found.shared()
    assert torch.equal(shared[EMBEDDING], bits(EMBED).float())
    assert torch.equal(shared[HEAD], bits(HEAD_TABLE).float())
    assert shared[HEAD] is shared[HEAD]  # read once for all drafts
    config = {"text_config": {"tie_word_embeddings": True}}
    tied = TargetTables.find(write_target(tmp_path / "e", {f"model.{EMBEDDING}": EMBED}, **config))
    assert torch.equal(tied.shared()[HEAD], bits(EMBED).float())


# ---- in a trace folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("tables") / "target")


@pytest.fixture(scope="module")
def recorded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    """Few tokens of 96: most rows of the embedding are not carried."""
    out = tmp_path_factory.mktemp("recorded") / "traces"
    return record_traces(target, PROMPTS[:2], out, max_new_tokens=12, table_ids=(0, 95))


@pytest.fixture
def folder(recorded: TraceFolder, tmp_path: Path) -> Path:
    shutil.copytree(recorded.folder, tmp_path / "traces")
    return tmp_path / "traces"


def distinct(traces: TraceFolder) -> set[int]:
    return {token for trace in traces for token in trace.token_ids.tolist()}


def test_the_file_holds_the_rows_of_the_tokens_in_the_traces(
    recorded: TraceFolder, target: Path, tmp_path: Path
) -> None:
    path = recorded.folder / "tables.safetensors"
    tensors, source = load_file(path), load_file(target / "model.safetensors")
    expected = sorted(distinct(recorded) | {0, 95})
    assert len(expected) < VOCAB / 2
    assert tensors["token_ids"].tolist() == expected
    assert torch.equal(tensors["embed_tokens"], source[f"model.{EMBEDDING}"][expected])
    assert torch.equal(tensors["lm_head"], source[HEAD])
    assert torch.equal(tensors["norm"], source["model.norm.weight"])
    listed = json.loads((recorded.folder / "trace.json").read_text(encoding="utf-8"))["tables"]
    assert listed["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    plain = record_traces(target, PROMPTS[:2], tmp_path / "plain", max_new_tokens=12)
    assert (len(plain.tables()), plain.sha256) == (0, recorded.sha256)
    tables = recorded.tables(torch.float64)
    assert torch.equal(tables[HEAD], source[HEAD].double())
    assert torch.equal(tables[EMBEDDING][expected], tensors["embed_tokens"].double())
    assert bool(tables[EMBEDDING][sorted(set(range(VOCAB)) - set(expected))].isnan().all())


def test_an_entry_or_a_file_that_lies_is_refused(folder: Path) -> None:
    text = (folder / "trace.json").read_text(encoding="utf-8")
    for change in (
        {"file": "../tables.safetensors"}, {"nbytes": 1}, {"num_token_ids": 97},
        {"num_token_ids": 5}, {"width": 32}, {"lm_head_dtype": "BF16"},
    ):  # fmt: skip
        manifest = json.loads(text)
        manifest["tables"] |= change
        (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(TraceError):
            TraceFolder.open(folder)
    (folder / "trace.json").write_text(text, encoding="utf-8")
    path = folder / "tables.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    tables = TraceFolder.open(folder).tables()
    for name in (EMBEDDING, HEAD):
        with pytest.raises(TraceError, match="sha256 differs"):
            tables[name]
    path.unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        TraceFolder.open(folder)


def reseal(folder: Path) -> None:
    """Give trace.json the size and the hash of an edited table file."""
    path = folder / "tables.safetensors"
    manifest = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["tables"] |= {"nbytes": path.stat().st_size, "sha256": digest}
    (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_contents_that_contradict_beside_a_hash_that_fits(folder: Path) -> None:
    path = folder / "tables.safetensors"
    whole = path.read_bytes()
    wrong = ("token_ids", 0, -1), ("token_ids", 1, 0), ("lm_head", -1, float("nan"))
    for name, index, value in wrong:
        path.write_bytes(whole)
        tensors = load_file(path)
        tensors[name].view(-1)[index] = value
        save_file(tensors, path)
        reseal(folder)
        with pytest.raises(TraceError):
            TraceFolder.open(folder).tables()[HEAD if name == "lm_head" else EMBEDDING]
    save_file(tensors | {"more": tensors[name].clone()}, path)
    reseal(folder)
    with pytest.raises(TraceError, match="more: expected"):
        TraceFolder.open(folder)


def test_contradicting_tables_are_not_merged(target: Path, folder: Path, tmp_path: Path) -> None:
    """One row of the embedding, under all hashes that fit."""
    given: Any = {"max_new_tokens": 12, "table_ids": (0, 95)}
    other = record_traces(target, PROMPTS[2:4], tmp_path / "other", **given).folder
    path = folder / "tables.safetensors"
    tensors = load_file(path)
    tensors["embed_tokens"][-1, -1] += 1  # of token 95, which both hold
    save_file(tensors, path)
    reseal(folder)
    assert main(["traces", "merge", *map(str, (other, folder)), "--out", str(tmp_path / "m")]) == 2


def test_tables_that_cannot_be_carried_leave_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(TraceError, match=r"token id 96: expected ids in \[0, 96\)"):
        record_traces(target, PROMPTS[:1], out, max_new_tokens=3, table_ids=(96,))
    full = SimpleNamespace(free=VOCAB * HIDDEN * 4 - 1)
    monkeypatch.setattr("draftquant.quantize.files.staging.shutil.disk_usage", lambda _: full)
    with pytest.raises(OutputError, match="needs 24,576 bytes"):
        record_traces(target, PROMPTS[:1], out, max_new_tokens=3, table_ids=())
    assert list(tmp_path.iterdir()) == []


# ---- drafts that use them


@pytest.fixture(scope="module")
def bare(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft without embedding and head."""
    draft = save_draft(tmp_path_factory.mktemp("bare") / "draft", target)
    path = draft / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n not in (EMBEDDING, HEAD)}, path)
    return draft


def test_a_token_that_is_not_carried_stops_the_draft(
    bare: Path, target: Path, recorded: TraceFolder, tmp_path: Path
) -> None:
    """Tables of other traces: an argmax over NaN logits would be some token, without a word."""
    draft = load_draft(bare, shared=recorded.tables())
    other = record_traces(target, PROMPTS[2:], tmp_path / "other", max_new_tokens=3)
    absent = distinct(other) - distinct(recorded) - {0, 95}
    with pytest.raises(TraceError, match=r"reads token \d+, but the traces do not hold") as caught:
        replay_drafts([draft], other, num_draft_tokens=2)
    assert any(f"record again with --tables --table-ids {t}" in str(caught.value) for t in absent)
    for token in (95, min(set(range(VOCAB)) - distinct(recorded) - {0, 95})):
        own = {"mask_token_id": token, "target_layer_ids": [1, 3, 4]}
        folder = tiny_dflash(tmp_path / str(token), num_layers=1, own=own)
        if token != 95:
            block = load_draft(folder, shared=recorded.tables())
            with pytest.raises(TraceError, match=f"reads token {token}, but the traces do not"):
                check_trace_fits(block, recorded)
            mask = {"mask_token_id": token, "embedding": torch.ones(HIDDEN)}
            torch.save(mask, folder / "mask_embedding.pt")
        check_trace_fits(load_draft(folder, shared=recorded.tables()), recorded)


def test_a_target_that_is_given_goes_before_the_tables_of_the_traces(
    target: Path, bare: Path, recorded: TraceFolder, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    record_traces(target, PROMPTS[:2], tmp_path / "plain", max_new_tokens=12)
    replay = ["replay", str(bare), "--json", "--traces"]
    assert main([*replay, str(tmp_path / "plain")]) == 2
    capsys.readouterr()
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tensors = load_file(other / "model.safetensors")
    tensors[HEAD] = tensors[HEAD].roll(1, dims=0)  # every proposal becomes its neighbour
    save_file(tensors, other / "model.safetensors")
    found = []
    for extra in ([], ["--target", str(target)], ["--target", str(other)]):
        assert main([*replay, str(recorded.folder), *extra]) == 0
        found.append(json.loads(capsys.readouterr().out)[0])
    assert found[0]["prompts"] == found[1]["prompts"]
    assert found[2]["mean_acceptance_length"] < found[0]["mean_acceptance_length"]


def test_a_draft_proposes_what_it_is_made_for() -> None:
    chain, block, longer = (
        SimpleNamespace(name=name, geometry=SimpleNamespace(most_draft_tokens=most))
        for name, most in (("chain", None), ("block", 7), ("longer", 15))
    )
    chosen: Callable[[int | None, list[Any]], int] = chosen_num_draft_tokens
    assert chosen(None, [chain]) == chosen(None, [chain, chain]) == 3
    assert chosen(None, [block]) == 7
    assert chosen(None, [longer, longer]) == 15
    assert chosen(5, [chain, longer]) == 5
    assert chosen(1, [longer]) == 1
    with pytest.raises(ReplayError, match=r"--num-draft-tokens: .*: block 7, longer 15\n.*-k K"):
        chosen(None, [block, longer])
