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
from draftquant.calibration.passes.draft_inputs import check_trace_fits, first_hidden
from draftquant.calibration.passes.on_traces import chosen_num_draft_tokens
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.manifest import TargetIdentity
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.drafts import read_config
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import (
    CheckpointError,
    ForwardError,
    OutputError,
    ReplayError,
    TraceError,
)
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from proposing import draft_proposals
from recorded import record_traces
from safetensors.torch import load_file, save_file
from test_traces import AUX
from tied_pair import HIDDEN, VOCAB, prompt_tokens, save_draft, save_target
from tiny import Stored, store, write_tensors

PROMPTS = [
    Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(prompt_tokens(6, 7))
]

pytestmark = pytest.mark.usefixtures("one_thread")


def write_target(
    folder: Path, tensors: dict[str, Stored], *, sharded: bool = False, **config: Any
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder, tensors, sharded=sharded)
    return folder


def random_table(seed: int, rows: int = 10, width: int = 6, dtype: str = "BF16") -> Stored:
    return store(np.random.default_rng(seed).normal(size=(rows, width)), dtype)


def bits(stored: Stored) -> torch.Tensor:
    return torch.frombuffer(bytearray(stored.data), dtype=torch.bfloat16).view(*stored.shape)


# ---- in the target

EMBED, HEAD_TABLE = random_table(0), random_table(1)


@pytest.mark.parametrize(
    ("body", "top"),
    [
        ("", ""),
        ("model.", ""),
        ("language_model.model.", "language_model."),  # Kimi-K2.5
        ("model.language_model.", ""),
    ],
)
def test_tables_are_found_whatever_their_prefix(tmp_path: Path, body: str, top: str) -> None:
    tensors = {body + EMBEDDING: EMBED, top + HEAD: HEAD_TABLE, f"{body}norm.weight": EMBED}
    copies = {f"{body}layers.61.{EMBEDDING}": HEAD_TABLE, f"layers.61.{HEAD}": EMBED}  # of MTP
    found = TargetTables.find(write_target(tmp_path / "t", tensors | copies, sharded=bool(top)))
    assert (found.vocab_size, found.width) == (10, 6)
    shared = found.shared()
    assert list(shared) == [EMBEDDING, HEAD]
    assert torch.equal(shared[EMBEDDING], bits(EMBED).float())
    assert torch.equal(shared[HEAD], bits(HEAD_TABLE).float())
    assert shared[HEAD] is shared[HEAD]  # read once for all drafts
    assert found.shared(torch.float64)[HEAD].dtype == torch.float64


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = {"text_config": {"tie_word_embeddings": True}}
    found = TargetTables.find(write_target(tmp_path / "t", {f"model.{EMBEDDING}": EMBED}, **config))
    assert found.lm_head == found.embed_tokens
    assert torch.equal(found.shared()[HEAD], bits(EMBED).float())


def test_targets_without_such_tables(tmp_path: Path) -> None:
    two = {f"talker.{EMBEDDING}": EMBED, f"thinker.{EMBEDDING}": EMBED, HEAD: EMBED}
    cases: tuple[tuple[dict[str, Stored], str], ...] = (
        ({HEAD: HEAD_TABLE}, "no tensor is called embed_tokens.weight"),
        ({EMBEDDING: EMBED}, "no tensor is called lm_head.weight, and config.json"),
        (two, r"several .* embed_tokens\.weight: talker\.embed_tokens\.weight, think"),
        ({EMBEDDING: EMBED, HEAD: random_table(1, width=8)},
         r"embed_tokens.weight is \[10, 6\], lm_head.weight \[10, 8\]: expected equal"),
        ({EMBEDDING: EMBED, HEAD: Stored("F8_E4M3", (10, 6), bytes(60))},
         r"lm_head.weight: expected BF16 .* got F8_E4M3 \[10, 6\]"),
        ({EMBEDDING: Stored("BF16", (0, 6), b""), HEAD: EMBED}, r"got BF16 \[0, 6\]"),
    )  # fmt: skip
    for number, (tensors, message) in enumerate(cases):
        target = write_target(tmp_path / str(number), tensors)
        with pytest.raises(CheckpointError, match=message) as caught:
            TargetTables.find(target)
        assert "fix: give" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"no such folder.*\n.*the target's local folder"):
        TargetTables.find(tmp_path / "nothing")


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


def test_the_file_holds_what_the_docstring_says(recorded: TraceFolder, target: Path) -> None:
    path = recorded.folder / "tables.safetensors"
    tensors, source = load_file(path), load_file(target / "model.safetensors")
    expected = sorted(distinct(recorded) | {0, 95})
    assert len(expected) < VOCAB / 2
    assert tensors["token_ids"].dtype == torch.int32
    assert tensors["token_ids"].tolist() == expected
    assert torch.equal(tensors["embed_tokens"], source[f"model.{EMBEDDING}"][expected])
    assert torch.equal(tensors["lm_head"], source[HEAD])
    assert torch.equal(tensors["norm"], source["model.norm.weight"])
    assert len(tensors) == 4
    listed = json.loads((recorded.folder / "trace.json").read_text(encoding="utf-8"))["tables"]
    assert listed["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (listed["num_token_ids"], listed["width"]) == (len(expected), HIDDEN)
    assert {listed[f"{name}_dtype"] for name in ("embed_tokens", "lm_head", "norm")} == {"F32"}


def test_the_same_traces_without_tables_have_the_same_hash(
    recorded: TraceFolder, target: Path, tmp_path: Path
) -> None:
    plain = record_traces(target, PROMPTS[:2], tmp_path / "plain", max_new_tokens=12)
    assert "tables" not in (tmp_path / "plain" / "trace.json").read_text(encoding="utf-8")
    assert (len(plain.tables()), plain.sha256) == (0, recorded.sha256)


def test_rows_that_are_not_carried_are_nan(recorded: TraceFolder, target: Path) -> None:
    tables, carried = recorded.tables(torch.float64), sorted(distinct(recorded) | {0, 95})
    source = TargetTables.find(target).shared(torch.float64)
    assert torch.equal(tables[HEAD], source[HEAD])
    assert torch.equal(tables[EMBEDDING][carried], source[EMBEDDING][carried])
    others = sorted(set(range(VOCAB)) - set(carried))
    assert tables[EMBEDDING].shape == (VOCAB, HIDDEN)
    assert bool(tables[EMBEDDING][others].isnan().all())


Edit = Callable[[dict[str, Any]], object]
BAD_ENTRIES: dict[str, tuple[Edit, str]] = {
    "traversal": (
        lambda t: t.update(file="../tables.safetensors"),
        "expected 'tables.safetensors'",
    ),
    "size": (lambda t: t.update(nbytes=1), "expected 1 bytes"),
    "hash": (lambda t: t.update(sha256="zz"), "tables.sha256: expected 64 hex"),
    "more rows than tokens": (lambda t: t.update(num_token_ids=97), "num_token_ids: expected 1"),
    "other rows": (
        lambda t: t.update(num_token_ids=5),
        r"embed_tokens: expected F32 \[5, 64\], got",
    ),
    "width": (lambda t: t.update(width=32), "32 contradicts features of width 192"),
    "dtype": (lambda t: t.update(lm_head_dtype="BF16"), r"lm_head: expected BF16 \[96, 64\], got"),
}


def test_an_entry_or_a_file_that_lies_is_refused(folder: Path) -> None:
    text = (folder / "trace.json").read_text(encoding="utf-8")
    for edit, message in BAD_ENTRIES.values():
        manifest = json.loads(text)
        edit(manifest["tables"])
        (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(TraceError, match=message) as caught:
            TraceFolder.open(folder)
        assert "fix: " in str(caught.value)
    (folder / "trace.json").write_text(text, encoding="utf-8")
    path = folder / "tables.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(TraceError, match="bytes, got"):
        TraceFolder.open(folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    tables = TraceFolder.open(folder).tables()
    for name in (EMBEDDING, HEAD):
        with pytest.raises(TraceError, match="sha256 differs"):
            tables[name]
    path.unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        TraceFolder.open(folder)


def rewrite(folder: Path, name: str, index: int, value: float) -> TraceFolder:
    """Change one element and make size and hash agree again: only the contents contradict."""
    path = folder / "tables.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[index] = value
    save_file(tensors, path)
    manifest = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["tables"] |= {"nbytes": path.stat().st_size, "sha256": digest}
    (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
    return TraceFolder.open(folder)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("token_ids", 0, -1, r"token_ids: expected ascending ids in \[0, 96\)"),
        ("token_ids", 1, 0, "token_ids: expected ascending ids"),
        ("embed_tokens", 7, float("nan"), "embed_tokens contains NaN or infinity"),
        ("lm_head", -1, float("nan"), "lm_head contains NaN or infinity"),
    ],
)
def test_contents_that_contradict(
    folder: Path, name: str, index: int, value: float, message: str
) -> None:
    tables = rewrite(folder, name, index, value).tables()
    with pytest.raises(TraceError, match=message):
        tables[HEAD if name == "lm_head" else EMBEDDING]


def test_tables_that_cannot_be_carried_leave_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(TraceError, match=r"token id 96: expected ids in \[0, 96\)"):
        record_traces(target, PROMPTS[:1], out, max_new_tokens=3, table_ids=(96,))
    other = TargetIdentity(
        name="o", config_sha256="a" * 64, weights_sha256="b" * 64, num_layers=8, vocab_size=95
    )
    with (
        pytest.raises(TraceError, match="its embedding has 96 rows, the vocabulary 95"),
        trace_output(out, GREEDY.manifest(other, AUX), tables=TargetTables.find(target)),
    ):
        pass
    full = SimpleNamespace(free=VOCAB * HIDDEN * 4 - 1)
    monkeypatch.setattr("draftquant.quantize.files.staging.shutil.disk_usage", lambda _: full)
    with pytest.raises(OutputError, match="needs 24,576 bytes"):
        record_traces(target, PROMPTS[:1], out, max_new_tokens=3, table_ids=())
    assert list(tmp_path.iterdir()) == []


# ---- drafts that use them


def without(folder: Path, *names: str) -> Path:
    """Remove tensors from a draft that is one file."""
    path = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n not in names}, path)
    return folder


@pytest.fixture(scope="module")
def bare(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = save_draft(tmp_path_factory.mktemp("bare") / "draft", target)
    return without(draft, EMBEDDING, HEAD)


def test_carried_tables_replay_like_the_targets(
    bare: Path, target: Path, recorded: TraceFolder
) -> None:
    first, second = (
        load_draft(bare, shared=shared)
        for shared in (TargetTables.find(target).shared(), recorded.tables())
    )
    drafts = [first, second]
    of_target, of_traces = replay_drafts(drafts, recorded, num_draft_tokens=3)
    assert of_traces.prompts == of_target.prompts
    assert of_traces.counts.num_accepted_draft_tokens > 0


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
    assert "--target M" in str(caught.value)
    trace = next(t for t in other if not absent.isdisjoint(t.token_ids[1:-2].tolist()))
    borrowed = load_draft(bare, shared=TargetTables.find(target).shared())
    with pytest.raises(ForwardError, match="NaN or infinite"):  # the chain has its own check
        draft_proposals(
            draft.forward,
            first_hidden(borrowed, other, trace),
            trace.token_ids,
            first_row=0,
            num_draft_tokens=1,
        )


def tiny_dflash(folder: Path, *, mask_token_id: int) -> Path:
    """A DFlash draft of the tied target, with random weights of the shapes that its config asks."""
    config = {
        "architectures": ["DFlashDraftModel"], "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 8,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": [1, 3, 4]},
    }  # fmt: skip
    write_target(folder, {"norm.weight": random_table(0)}, **config)
    family, geometry = read_config(Checkpoint.open(folder))
    rng = np.random.default_rng(0)
    shapes = {
        name: [dim.size for dim in spec.shape]
        for name, spec in family.tensor_specs(geometry).items()
        if not spec.optional
    }
    weights = {n: store(rng.normal(size=shape) / 8, "BF16") for n, shape in shapes.items()}
    write_tensors(folder, weights)
    return folder


def test_the_mask_token_has_to_be_carried(recorded: TraceFolder, tmp_path: Path) -> None:
    carried, absent = 95, min(set(range(VOCAB)) - distinct(recorded) - {0, 95})
    for number, token in enumerate((carried, absent)):
        folder = tiny_dflash(tmp_path / str(number), mask_token_id=token)
        draft = load_draft(folder, shared=recorded.tables())
        if token == carried:
            check_trace_fits(draft, recorded)
            continue
        with pytest.raises(TraceError, match=f"reads token {absent}, but the traces do not hold"):
            check_trace_fits(draft, recorded)
        torch.save(
            {"mask_token_id": token, "embedding": torch.ones(HIDDEN)}, folder / "mask_embedding.pt"
        )
        check_trace_fits(load_draft(folder, shared=recorded.tables()), recorded)


# ---- the command line


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = (json.dumps({"id": p.id, "token_ids": p.token_ids}) for p in PROMPTS)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def record(target: Path, prompts: Path, out: Path, *extra: str, tokens: int = 12) -> int:
    arguments = ["record", "--target", target, "--prompts", prompts, "--out", out, *extra]
    return main([*map(str, arguments), "--max-new-tokens", str(tokens)])


def test_commands_need_no_target_where_the_traces_carry_tables(
    target: Path, bare: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, plain = tmp_path / "traces", tmp_path / "plain"
    assert record(target, prompts, traces, "--tables", "--table-ids", "0,95") == 0
    tables = TraceFolder.open(traces).manifest.tables
    assert tables is not None
    expected = f"tables.safetensors: embedding {tables.num_token_ids} x 64, head 96 x 64, 0.04 MB"
    assert expected in capsys.readouterr().out
    assert record(target, prompts, plain) == 0

    replay = ["replay", str(bare), "--json", "--traces"]
    capsys.readouterr()
    assert main([*replay, str(plain)]) == 2
    error = capsys.readouterr().err
    assert "--target M" in error
    assert "traces recorded with --tables" in error
    assert main([*replay, str(traces)]) == 0
    carried = capsys.readouterr().out
    assert main([*replay, str(plain), "--target", str(target)]) == 0
    assert carried == capsys.readouterr().out

    fp8 = ["--recipe", "blackwell-fp8", "--backend", "torch", "--out", str(tmp_path / "fp8")]
    assert main(["quantize", str(bare), *fp8, "--traces", str(traces)]) == 0
    gate = ["gate", str(bare), str(tmp_path / "fp8"), "--min-prompts", "2", "--traces"]
    for same in (traces, plain):  # calibrated on these, whether they carry tables or not
        assert main([*gate, str(same)]) == 2
        assert "6 of its 6 prompts were used to calibrate the candidate" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[3:]]
    fresh = [line | {"token_ids": line["token_ids"][::-1]} for line in lines]
    other.write_text("".join(json.dumps(line) + "\n" for line in fresh), encoding="utf-8")
    assert record(target, other, tmp_path / "judged", "--tables", tokens=60) == 0
    assert main([*gate, str(tmp_path / "judged"), "--max-relative-drop", "0.9"]) == 0


def test_a_target_that_is_given_goes_before_the_traces(
    target: Path, bare: Path, recorded: TraceFolder, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tensors = load_file(other / "model.safetensors")
    tensors[HEAD] = tensors[HEAD].roll(1, dims=0)  # every proposal becomes its neighbour
    save_file(tensors, other / "model.safetensors")
    replay = ["replay", str(bare), "--traces", str(recorded.folder), "--json"]
    accepted = []
    for extra in ([], ["--target", str(other)]):
        assert main([*replay, *extra]) == 0
        accepted.append(json.loads(capsys.readouterr().out)[0]["mean_acceptance_length"])
    assert accepted[1] < accepted[0]


def test_the_mask_token_comes_from_the_draft_that_is_named(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(prompts.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
    used = distinct(record_traces(target, PROMPTS[:1], tmp_path / "plain", max_new_tokens=12))
    mask = min(set(range(VOCAB)) - used)
    draft = tiny_dflash(tmp_path / "dflash", mask_token_id=mask)
    assert record(target, short, tmp_path / "out", "--draft", str(draft), "--tables") == 0
    traces = TraceFolder.open(tmp_path / "out")
    assert traces.manifest.features.aux_layer_ids == (1, 3, 4)
    embedding = traces.tables()[EMBEDDING]
    assert set((~embedding[:, 0].isnan()).nonzero().flatten().tolist()) == used | {mask}


# ---- draft tokens per step


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
