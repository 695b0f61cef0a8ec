"""A draft beside its target, asked of configs and headers alone."""

import itertools
import json
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asked_pairs
import numpy as np
import pytest
import torch
from draftquant import api as dq
from draftquant.quantize.pairing.pair import PairCheck, TargetArgs
from draftquant.quantize.pairing.target import check_operands
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import config_of, edit_json, read_tensors, store, tiny_eagle3_llama, write_tensors
from tiny_dflash import MASK_TOKEN_ID, tiny_dflash
from tiny_llama import tiny_language_model
from tiny_speculators import tiny_speculators_eagle3
from tiny_target import tiny_target
from told import DECIMALS, KEPT

TOLD = ("findings",)
PAIRS = Path(__file__).parent / "pairs"
LLAMA, DFLASH = PAIRS / "eagle3-llama", PAIRS / "dflash"


def other_target(folder: Path, source: Path = LLAMA, **changes: Any) -> Path:
    """The config.json of a shipped target, changed, and none of its weights."""
    folder.mkdir(parents=True)
    config = json.loads((source / "target" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def findings(pair: PairCheck) -> str:
    """What was found, which is kept in told."""
    return "\n".join(
        f"{f.engine} {f.level} {f.subject}: {f.text}; {f.remedy}" for f in pair.findings
    )


def check_pair(*pair: Path, **asked: Any) -> PairCheck:
    """What is found of every pair is kept."""
    found = asked_pairs.check_pair(*pair, **asked)
    findings(found)
    return found


def test_another_target_is_refused_or_wrong_in_every_engine(tmp_path: Path) -> None:
    for key, value in (("hidden_size", 800), ("num_hidden_layers", 2), ("vocab_size", 4096)):
        pair = check_pair(LLAMA / "draft", other_target(tmp_path / key, **{key: value}))
        assert pair.exit_code == 1
        assert all(each.verdict in ("REFUSED", "LOADS BUT WRONG") for each in pair.engines)


def test_a_target_hands_out_its_layers_or_not(tmp_path: Path) -> None:
    names = "Gemma3ForCausalLM", "NemotronHForCausalLM", "OfNobody"
    for source, name in itertools.product((LLAMA, DFLASH), names):
        target = other_target(tmp_path / source.name / name, source, architectures=[name])
        pair = check_pair(source / "draft", target)
        for each in pair.findings:
            if each.subject == "target":
                assert each.engine is not None
                assert pair.of(each.engine).verdict == "UNKNOWN"


def test_quantize_judges_the_pair_where_a_target_is_given(tmp_path: Path) -> None:
    draft = LLAMA / "draft"
    target = other_target(tmp_path / "t", architectures=["Gemma3ForCausalLM"])
    alone = dq.quantize(draft, "fp8-ptpc", tmp_path / "alone")
    with pytest.warns(dq.DraftQuantWarning, match="(?s)UNKNOWN in vLLM .*--ask"):
        beside = dq.quantize(draft, "fp8-ptpc", tmp_path / "beside", target=target)
    assert {one.verdict for one in alone.loads if one.engine == "vllm"} == {"LOADS"}
    assert {one.verdict for one in beside.loads if one.engine == "vllm"} == {"UNKNOWN"}
    for engine in ("sglang", "tensorrt-llm"):
        said = [[o.verdict for o in r.loads if o.engine == engine] for r in (alone, beside)]
        assert said[0] == said[1]
    edit_json(target / "config.json", hidden_size="wide")
    with pytest.warns(dq.DraftQuantWarning, match="the draft alone: .*hidden_size: expected"):
        unread = dq.quantize(draft, "fp8-ptpc", tmp_path / "unread", target=target)
    assert unread.loads == alone.loads


def test_a_draft_of_a_target_of_other_depth(tmp_path: Path) -> None:
    check_pair(DFLASH / "draft", other_target(tmp_path / "t", DFLASH, num_hidden_layers=40))


def test_the_command_says_and_prints_the_pair() -> None:
    draft, target = str(LLAMA / "draft"), str(LLAMA / "target")
    args = "--quantization awq --max-model-len 400 --kv-cache-dtype fp8 --dtype half"
    assert main(["check", draft, "--target", target, "--target-args", args]) == 0
    args += """ --speculative-config '{"kv_cache_dtype": "bfloat16"}'"""
    args += " --speculative-draft-model-quantization fp8"
    assert main(["check", draft, "--target", target, "--target-args", args]) == 0
    assert main(["check", draft, "--target", target, "--engine", "vllm", "--json"]) == 0


def test_every_word_that_is_understood() -> None:
    for spelling in ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--tp_size"):
        assert TargetArgs.parse(f"{spelling} 4 --port 1") == TargetArgs(tp=4, words=("--port", "1"))
    for spelling in ("--max-model-len", "--context-length", "--max_seq_len"):
        lengths = {"400": 400, "4k": 4_000, "4K": 4_096, "4m": 4_000_000, "4M": 4_194_304,
                   "9" * 12: 10**12 - 1, "auto": None, "-1": None}  # fmt: skip
        for text, length in lengths.items():
            assert TargetArgs.parse(f"{spelling}={text}") == TargetArgs(context=length)
    for text, dtype in {"auto": None, "half": "float16", "float16": "float16", "float": "float32",
                        "float32": "float32", "bfloat16": "bfloat16"}.items():  # fmt: skip
        assert TargetArgs.parse(f"--dtype {text}") == TargetArgs(dtype=dtype)
    assert TargetArgs.parse("--kv-cache-dtype auto") == TargetArgs()
    drafts = "--speculative-draft-kv-cache-dtype", "--speculative-draft-model-quantization"
    assert TargetArgs.parse(f"{drafts[0]} fp8") == TargetArgs(draft_cache_dtype="fp8")
    assert TargetArgs.parse(f"{drafts[1]} fp8 -q awq --attention-backend x") == TargetArgs(
        quantization="awq", words=("--attention-backend", "x")
    )


def test_words_that_are_not_understood() -> None:
    for words in (
        "--tp two", f"--tp {'9' * 5000}", f"--tp {'9' * 13}", "--max-model-len 0k", "--dtype bogus",
        "--dtype", "--speculative-config {", "--speculative-config 3", "'",
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            check_pair(LLAMA / "draft", LLAMA / "target", target_args=words)
    for tp in (2, 0):
        with pytest.raises(CheckpointError):
            check_pair(LLAMA / "draft", LLAMA / "target", tp=tp, target_args="-tp 4")


def test_a_target_of_no_model_is_bad_input(tmp_path: Path) -> None:
    for number, changes in enumerate((
        {"num_attention_heads": "4"}, {"num_key_value_heads": True}, {"intermediate_size": -64},
        {"quantization_config": "x"}, {"max_position_embeddings": 10**39},
        {"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}},
    )):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"config\.json"):
            check_pair(LLAMA / "draft", other_target(tmp_path / f"{number}", **changes))


def test_a_draft_is_no_target(tmp_path: Path) -> None:
    draft, target, out = LLAMA / "draft", LLAMA / "target", tmp_path / "out"
    for words in (
        "check {t} --target {d}",
        "quantize {t} --recipe fp8-ptpc --target {d} --out {out}",
        "record --target {d} --draft {t} --prompts {t} --out {out}",
        "gate {t} {t} --traces {t} --target {d}",
        "graft {d} {t} --out {out}",
    ):
        assert main(words.format(d=draft, t=target, out=out).split()) == 2
        assert not out.exists()


def test_every_kind_of_draft_is_known_from_its_target(tmp_path: Path) -> None:
    glm, mimo = tiny_target(tmp_path / "glm", "glm"), tiny_target(tmp_path / "mimo", "mimo")
    small = tiny_language_model(tmp_path / "small")
    large = other_target(tmp_path / "large", LLAMA, hidden_size=4096)
    block, speculators = tiny_dflash(tmp_path / "dflash"), tmp_path / "speculators"
    tiny_speculators_eagle3(speculators)
    layers = tmp_path / "glm-layer", tmp_path / "mimo-layer"
    for folder in (block, speculators, *layers, small):
        with pytest.raises(CheckpointError, match="are swapped"):
            check_operands(folder, large)
    for target in (glm, mimo, large):
        check_operands(target, small)
        check_operands(target, target)
    check_operands("nobody/on-the-hub", glm)


def test_what_belongs_together_is_asked_for() -> None:
    draft = LLAMA / "draft"
    for given in (
        {"version": "1.0"}, {"engine": "vllm", "target_args": "--dtype half"},
        {"target": "no/such/folder"}, {"target": draft, "version": "1.0"},
    ):  # fmt: skip
        with pytest.raises(dq.DraftQuantError):
            dq.check(draft, **given)  # type: ignore[arg-type]


def test_an_index_that_lies_is_bad_input(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "by the names of its index alone" in check_pair(LLAMA / "draft", target).not_compared[1]
    (target / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        check_pair(LLAMA / "draft", target)
    edit_json(target / "config.json", hidden_size="wide")
    with pytest.raises(CheckpointError):
        check_pair(LLAMA / "draft", target)


def ship(folder: Path, tokens: list[str], merges: list[str]) -> None:
    """A tokenizer of these tokens beside the model."""
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges}
    added = [{"id": len(tokens), "content": "<end>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


def test_tokenizers_are_compared_by_what_they_do(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target")
    ship(target, ["a", "b", "ab"], ["a b"])
    draft = tmp_path / "draft"
    shutil.copytree(LLAMA / "draft", draft)
    for tokens, merges, is_same in (
        (["a", "b", "ab"], ["a b"], True),
        (["a", "c", "ab"], ["a b"], False),
        (["a", "b"], ["a b"], False),
        (["a", "b", "ab"], [], False),
    ):
        ship(draft, tokens, merges)
        pair = check_pair(draft, target)
        assert [f.subject == "tokenizer" for f in pair.findings].count(True) == (not is_same)
        assert not [text for text in pair.not_compared if text.startswith("tokenizers")]


def test_rows_that_no_token_has_are_padding(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target", vocab_size=1088)
    check_pair(LLAMA / "draft", target)
    ship(target, ["a", "b"], [])
    check_pair(LLAMA / "draft", target)


def test_tokens_of_d2t_and_of_the_mask_that_the_target_has_not(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    sizes = {"hidden_size": 64, "vocab_size": 60, "num_hidden_layers": 8}
    check_pair(draft, other_target(tmp_path / "target", **sizes))
    offsets = np.frombuffer(read_tensors(draft)["d2t"].data, "<i8").tolist()
    last = max(row + offset for row, offset in enumerate(offsets))
    block = tiny_dflash(tmp_path / "block")
    for own, rows in ((draft, last), (draft, last + 1), (block, 60), (block, MASK_TOKEN_ID),
                      (block, MASK_TOKEN_ID + 1)):  # fmt: skip
        target = tmp_path / f"{own.name}-{rows}"
        check_pair(own, other_target(target, **{**sizes, "vocab_size": rows}))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_weights_that_float16_cannot_hold(dtype: str, tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", dtype=dtype)
    target = other_target(tmp_path / "target", hidden_size=64, vocab_size=96, num_hidden_layers=8)
    narrow = {"engine": "vllm", "target_args": "--dtype float16"}
    check_pair(draft, target, **narrow)
    tensors = read_tensors(draft)
    wide = np.full((64, 64), 65536.0, np.float32)
    write_tensors(draft, {**tensors, "midlayer.self_attn.o_proj.weight": store(wide, dtype)})
    check_pair(draft, target, **narrow)
    check_pair(draft, target, target_args="--dtype bfloat16")


def test_sizes_of_tensor_parallelism_are_those_of_both(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target", num_attention_heads=6, num_key_value_heads=6)
    pair = check_pair(LLAMA / "draft", target, tp=4, engine="vllm")
    assert pair.tensor_parallel == (1, 2)
    assert pair.of("vllm").verdict == "REFUSED"
    padded = other_target(tmp_path / "padded", vocab_size=1021)  # engines fill up to 1,024 rows
    assert check_pair(LLAMA / "draft", padded, engine="vllm").tensor_parallel == (1, 2, 4, 8)
    longer = check_pair(LLAMA / "draft", target, target_args="--max-model-len 4096 -tp 2")
    own = config_of(target)["max_position_embeddings"]
    for length in (own, own + 1):
        check_pair(LLAMA / "draft", target, target_args=f"--max-model-len {length}")
    assert '"draft_tensor_parallel_size": 2' in (longer.of("vllm").launch or "")


def test_hidden_states_that_float16_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = LLAMA / "draft", LLAMA / "target"
    narrow = {"target_args": "--dtype float16", "engine": "vllm"}
    beyond = check_pair(draft, target, largest_feature=70144.0, **narrow)
    assert beyond.of("vllm").verdict == "LOADS BUT WRONG"
    assert check_pair(draft, target, largest_feature=70144.0).of("vllm").verdict == "LOADS"
    traces = write_said(tmp_path / "traces", prompts=2, tokens=4, hidden=4).folder
    asked: Any = {"target": target, "traces": traces, **narrow}
    assert dq.check(draft, **asked).verdict == "LOADS"
    below = SimpleNamespace(features=torch.tensor([-70144.0]))
    monkeypatch.setattr(dq.TraceFolder, "__iter__", lambda _: iter([below]))
    assert dq.check(draft, **asked).verdict == "LOADS BUT WRONG"


def test_what_few_pairs_are_told(tmp_path: Path) -> None:
    model = tiny_language_model(tmp_path / "model")
    sizes = {"vocab_size": 999, "num_hidden_layers": 8}
    check_pair(model, other_target(tmp_path / "other", **sizes))
    scaled = Path(shutil.copytree(LLAMA / "draft", tmp_path / "scaled"))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(scaled / "config.json", rope_scaling=yarn, max_position_embeddings=128)
    check_pair(scaled, LLAMA / "target")


def test_every_row_is_told_with_its_remedy() -> None:
    files = (KEPT / f"{name}.txt" for name in ("pair_check", "pair_threads"))
    told = DECIMALS.sub("0.0", "\n".join(file.read_text(encoding="utf-8") for file in files))
    rows = Path(dq.__file__).with_name("quantize") / "pairing" / "findings.toml"
    for name, row in tomllib.loads(rows.read_text(encoding="utf-8")).items():
        remedy = row.get("remedy", "give the target that this draft was trained for")
        text = DECIMALS.sub("0.0", f"{row['text']}; {remedy}".strip())
        said = re.sub(r"\\\{.+?\\\}", ".*", re.escape(text))
        subject, engine = row.get("subject", name), row.get("engine")
        engine = r"[\w-]+" if engine == "each" else engine
        line = rf"(?m)^(- )?{engine} {row['level']} {subject}: {said}$"
        assert re.search(line, told), name
