"""Tables that are left to the target: shown to be equal, recorded, verified again, read from it."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from asked_pairs import check_draft
from by_recipe import planned, quantized
from draftquant.calibration.runs import quantize_run
from draftquant.quantize.engines.contract import TITLES
from draftquant.quantize.making import quantize_draft
from draftquant.quantize.making.preparing import check_tables
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, RecipeError, Rule, load_recipe
from draftquant.recipes.errors import CheckpointError, PlanError
from draftquant.recipes.schema import Role
from draftquant.scripts.cli import main
from tiny import Stored, config_of, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_llama import tiny_language_model
from tiny_mla import tiny_eagle3_mla
from verify_cases import edit, faults_of, flip_bit, reseal

pytestmark = pytest.mark.usefixtures("one_thread")

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
WHY = "the target has it"
TWO_BYTES = 2 * 64


def dropping(*roles: Role) -> Recipe:
    """FP8, and these tables left to the target."""
    base = load_recipe("fp8-ptpc")
    rules = (rule for rule in base.rules if not set(rule.role) & set(roles))
    drops = (Rule(role=(role,), action="drop", why=WHY) for role in roles)
    return dataclasses.replace(base, rules=(*rules, *drops))


def target_of(draft: Path, folder: Path, *, prefix: str = "model.") -> Path:
    """A target with the tables of a draft."""
    tensors = read_tensors(draft)
    folder.mkdir()
    (folder / "config.json").write_text('{"tie_word_embeddings": false}\n', encoding="utf-8")
    tables = {f"{prefix}{EMBEDDING}": tensors[EMBEDDING], HEAD: tensors[HEAD]}
    write_tensors(folder, tables, metadata={"format": "pt"})
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.fixture
def target(source: Path, tmp_path: Path) -> Path:
    return target_of(source, tmp_path / "target")


def test_a_table_is_left_out_and_the_rest_stays(source: Path, target: Path, tmp_path: Path) -> None:
    report = quantized(source, dropping("embedding"), tmp_path / "out", target=target)
    quantized(source, "fp8-ptpc", tmp_path / "whole")
    assert report.dropped == {EMBEDDING: f"model.{EMBEDDING}"}
    assert report.verification.dropped == (EMBEDDING,)
    whole = read_tensors(tmp_path / "whole")
    del whole[EMBEDDING]
    assert read_tensors(tmp_path / "out") == whole
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    recorded = json.loads((tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert recorded["dropped"] == {EMBEDDING: f"model.{EMBEDDING}"}
    assert EMBEDDING in recorded["source"]["tensor_digests"]
    assert recorded["tensor_bytes"]["before"] - recorded["tensor_bytes"]["after"] > 96 * TWO_BYTES
    assert "dropped" not in (tmp_path / "whole" / "draftquant.json").read_text(encoding="utf-8")


def test_without_its_head_config_json_says_so_to_sglang(tmp_path: Path) -> None:
    """SGLang takes the target's where draft_vocab_size is null, and leaves it unwritten else."""
    config = {"draft_vocab_size": 96}
    source = tiny_eagle3_mla(tmp_path / "draft", config=config, embed=True, head=True)
    target = target_of(source, tmp_path / "target")
    out = tmp_path / "out"
    report = quantized(source, dropping("embedding", "head"), out, target=target)
    assert report.config_changes == {"draft_vocab_size": None}
    assert config_of(out)["draft_vocab_size"] is None
    assert verify(out, source).ok
    for engine in ("vllm", "sglang"):
        answer = check_draft(out, engine=engine, arch="sm90")  # type: ignore[arg-type]
        assert answer.verdict == "LOADS"
        embedding, head = (each for each in answer.notes if "is not stored" in each)
        said = f"is not stored, so {TITLES[engine]} serves the target's"  # type: ignore[index]
        assert embedding.startswith(f"embed_tokens {said}")
        assert head == f"lm_head {said}"
    edit_json(out / "config.json", draft_vocab_size=96)
    assert "draft_vocab_size: expected null, got 96" in faults_of(verify(out, source))
    answer = check_draft(out, engine="sglang", arch="sm90")
    assert answer.verdict == "LOADS BUT WRONG"
    assert str(answer.error).startswith("lm_head stays uninitialised: it is not stored")
    assert not any("lm_head" in note for note in answer.notes)


# Shown, or refused.


def test_one_value_that_differs(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftquant.quantize.stored.stored_tables._BLOCK_BYTES", 10 * TWO_BYTES)
    name, bit = f"model.{EMBEDDING}", 8 * (95 * TWO_BYTES + 13)
    edit(target, lambda tensors: tensors.update({name: flip_bit(tensors[name], bit)}))
    with pytest.raises(CheckpointError):
        quantized(source, dropping("embedding"), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()
    small = Stored("BF16", (80, 64), bytes(80 * TWO_BYTES))
    edit(target, lambda tensors: tensors.update({name: small, HEAD: small}))
    with pytest.raises(CheckpointError):
        quantized(source, dropping("embedding"), tmp_path / "out", target=target)


def test_no_target(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        quantized(source, dropping("embedding"), tmp_path / "out")
    with pytest.raises(CheckpointError):
        quantized(source, dropping("embedding"), tmp_path / "out", target=tmp_path / "nowhere")


def test_a_pruned_head(tmp_path: Path) -> None:
    """Rows of the target's head, which no engine picks for a draft without its own."""
    source = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    whole = tiny_language_model(tmp_path / "whole")  # which has its own
    for draft, role in ((source, "head"), (whole, "embedding")):
        with pytest.raises(PlanError):
            planned(draft, dropping(role))
    assert planned(source, dropping("embedding")).dropped


def test_a_role_that_no_engine_takes_from_the_target(tmp_path: Path) -> None:
    text = recipe_text("{role: norm, action: drop, why: x}")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError):
        load_recipe(str(tmp_path / "mine.yaml"))


def recipe_text(rule: str) -> str:
    from draftquant.recipes import library

    text = (Path(library.__file__).parent / "fp8-ptpc.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "role: embedding" not in line]
    at = next(i for i, line in enumerate(lines) if line.startswith("rules:"))
    lines.insert(at + 1, f"  - {rule}")
    return "\n".join(lines).replace("name: fp8-ptpc", "name: mine") + "\n"


# Verified, read, written anew.


@pytest.fixture
def out(source: Path, target: Path, tmp_path: Path) -> Path:
    quantized(source, dropping("embedding"), tmp_path / "out", target=target)
    return tmp_path / "out"


def test_verify_knows_it_from_the_record(source: Path, target: Path, out: Path) -> None:
    report = verify(out, source)
    assert (report.ok, report.dropped, report.dropped_shown) == (True, (EMBEDDING,), False)
    assert verify(out, source, target=target).dropped_shown
    edit(target, lambda t: t.update({f"model.{EMBEDDING}": flip_bit(t[f"model.{EMBEDDING}"], 9)}))
    assert not verify(out, source, target=target).ok


def test_verify_sees_another_record(source: Path, out: Path) -> None:
    for recorded in ({}, {HEAD: HEAD}):
        edit_json(out / "draftquant.json", dropped=recorded)
        reseal(out)
        assert "draftquant.json" in faults_of(verify(out, source))


def test_the_commands(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = Mock(side_effect=check_tables)
    for module in (quantize_run, quantize_draft):
        monkeypatch.setattr(module, "check_tables", proven)
    text = recipe_text(f"{{role: embedding, action: drop, why: {WHY}}}")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    chosen = ["--recipe", str(tmp_path / "mine.yaml")]
    assert main(["plan", str(source), *chosen]) == 0
    out = str(tmp_path / "made")
    assert main(["quantize", str(source), *chosen, "--out", out]) == 2
    assert main(["quantize", str(source), *chosen, "--out", out, "--target", str(target)]) == 0
    assert [call.args[1] for call in proven.call_args_list] == [None, target]
    assert main(["verify", out, "--against", str(source)]) == 0
    assert main(["verify", out, "--against", str(source), "--target", str(target)]) == 0
