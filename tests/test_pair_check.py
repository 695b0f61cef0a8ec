"""A draft beside its target, asked of configs and headers alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_pairs import check_pair
from draftquant import api as dq
from draftquant.quantize.pairing.pair import PairCheck
from draftquant.quantize.pairing.target import check_operands
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import config_of, edit_json, read_tensors, store, tiny_eagle3_llama, write_tensors
from tiny_dflash import MASK_TOKEN_ID, tiny_dflash
from tiny_llama import tiny_language_model
from tiny_speculators import tiny_speculators_eagle3
from tiny_target import tiny_target

PAIRS = Path(__file__).parent / "pairs"
LLAMA, DFLASH = PAIRS / "eagle3-llama", PAIRS / "dflash"


def other_target(folder: Path, source: Path = LLAMA, **changes: Any) -> Path:
    """The config.json of a shipped target, changed, and none of its weights."""
    folder.mkdir(parents=True)
    config = json.loads((source / "target" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def said(pair: PairCheck, subject: str, engine: str | None = None) -> list[tuple[str, str]]:
    """Level and text of what was found of a subject, of one engine or of all."""
    return [(f.level, f.text) for f in pair.findings if (f.subject, f.engine) == (subject, engine)]


@pytest.mark.parametrize(
    ("changes", "subject", "level", "words"),
    [
        ({"hidden_size": 800}, "hidden-size", "refused", "gives 3 x 800 = 2400"),
        ({"num_hidden_layers": 2}, "layers", "refused", "the target has layers 0 to 1"),
        ({"vocab_size": 4096}, "vocabulary", "wrong", "tokens, the target's 4,096"),
    ],
)
def test_another_target_is_refused_or_wrong_in_every_engine(
    changes: dict[str, Any], subject: str, level: str, words: str, tmp_path: Path
) -> None:
    pair = check_pair(LLAMA / "draft", other_target(tmp_path / "target", **changes))
    assert any(found == level and words in text for found, text in said(pair, subject))
    assert pair.exit_code == 1
    assert all(each.verdict in ("REFUSED", "LOADS BUT WRONG") for each in pair.engines)


@pytest.mark.parametrize(
    ("source", "name", "found"),
    [
        (LLAMA, "Gemma3ForCausalLM", ["vllm"]),
        (LLAMA, "NemotronHForCausalLM", ["sglang"]),
        (DFLASH, "Gemma3ForCausalLM", ["vllm", "sglang"]),
        (DFLASH, "NemotronHForCausalLM", []),
        (LLAMA, "OfNobody", ["vllm", "sglang"]),
    ],
)
def test_a_target_hands_out_its_layers_or_not(
    source: Path, name: str, found: list[str], tmp_path: Path
) -> None:
    pair = check_pair(source / "draft", other_target(tmp_path / "t", source, architectures=[name]))
    of_target = [f for f in pair.findings if f.subject == "target"]
    assert [f.engine for f in of_target] == found
    for each in of_target:
        assert each.engine is not None
        assert pair.of(each.engine).verdict == "UNKNOWN"
        assert "--ask" in each.remedy


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
    pair = check_pair(DFLASH / "draft", other_target(tmp_path / "t", DFLASH, num_hidden_layers=40))
    assert "names a target of 4 decoder layers, and this one has 40" in said(pair, "layers")[0][1]


def test_the_command_says_and_prints_the_pair(capsys: pytest.CaptureFixture[str]) -> None:
    draft, target = str(LLAMA / "draft"), str(LLAMA / "target")
    args = "--quantization awq --max-model-len 400 --kv-cache-dtype fp8 --dtype half"
    assert main(["check", draft, "--target", target, "--target-args", args]) == 0
    printed = capsys.readouterr().out
    findings = check_pair(Path(draft), Path(target), target_args=args).findings
    remedies = [finding.remedy for finding in findings if finding.remedy]
    assert remedies
    assert all(f"what to do: {remedy}" in printed for remedy in remedies)
    args += """ --speculative-config '{"kv_cache_dtype": "bfloat16"}'"""
    assert main(["check", draft, "--target", target, "--target-args", args]) == 0
    capsys.readouterr()
    assert main(["check", draft, "--target", target, "--engine", "vllm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["engine"] for each in document["engines"]] == ["vllm"]
    assert document["tensor_parallel"] == [1, 2, 4, 8]


WORDS = {
    "--tp two": "expected a whole number above 0 of at most 12 digits, got 'two'",
    f"--tp {'9' * 5000}": "--tensor-parallel-size: expected a whole number above 0",
    "--max-model-len 0k": "--max-model-len: expected a whole number above 0",
    "--dtype bogus": "--dtype: expected one that engines take (auto, half, float16",
    "--dtype": "--dtype has no value",
    "--speculative-config {": "not readable as JSON",
    "--speculative-config 3": "expected a JSON object, got 3",
    "'": "are no words of a shell",
}


def test_words_that_are_not_understood() -> None:
    for words, what in WORDS.items():
        with pytest.raises(CheckpointError) as caught:
            check_pair(LLAMA / "draft", LLAMA / "target", target_args=words)
        assert what in str(caught.value)
    for tp, what in ((2, "--tp is 2, and --target-args says 4"), (0, "at least 1")):
        with pytest.raises(CheckpointError, match=what):
            check_pair(LLAMA / "draft", LLAMA / "target", tp=tp, target_args="-tp 4")


NO_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": "4"}, "num_attention_heads: expected a whole number of at"),
    ({"num_key_value_heads": True}, "num_key_value_heads: expected a whole number"),
    ({"intermediate_size": -64}, "intermediate_size: expected a whole number of at least 0"),
    ({"quantization_config": "x"}, "quantization_config: expected an object, got 'x'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "rope scaling factor"),
    ({"max_position_embeddings": 10**39}, "max_position_embeddings: expected a number up to"),
]


def test_a_target_of_no_model_is_bad_input(tmp_path: Path) -> None:
    for number, (changes, what) in enumerate(NO_MODELS):
        with pytest.raises(CheckpointError, match=r"config\.json") as caught:
            check_pair(LLAMA / "draft", other_target(tmp_path / f"{number}", **changes))
        assert what in str(caught.value)


SWAPPED = (
    "check {t} --target {d}",
    "quantize {t} --recipe fp8-ptpc --target {d} --out {out}",
    "record --target {d} --draft {t} --prompts {t} --out {out}",
    "gate {t} {t} --traces {t} --target {d}",
    "graft {d} {t} --out {out}",
)


@pytest.mark.parametrize("words", SWAPPED)
def test_a_draft_is_no_target(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, target, out = LLAMA / "draft", LLAMA / "target", tmp_path / "out"
    assert main(words.format(d=draft, t=target, out=out).split()) == 2
    said = capsys.readouterr().err
    assert "is a draft itself: eagle3-llama; the draft and its target are swapped" in said
    assert f"give {draft} as the draft, and {target} as the target" in said
    assert not out.exists()


def test_every_kind_of_draft_is_known_from_its_target(tmp_path: Path) -> None:
    glm, mimo = tiny_target(tmp_path / "glm", "glm"), tiny_target(tmp_path / "mimo", "mimo")
    small = tiny_language_model(tmp_path / "small")
    large = other_target(tmp_path / "large", LLAMA, hidden_size=4096)
    kinds = {
        tiny_dflash(tmp_path / "dflash"): "itself: dflash",
        tiny_speculators_eagle3(tmp_path / "speculators"): "itself: a draft in the speculators",
        tmp_path / "glm-layer": "itself: an MTP layer",
        tmp_path / "mimo-layer": "itself: an MTP layer",
        small: "has fewer and narrower layers than",
    }
    for folder, kind in kinds.items():
        with pytest.raises(CheckpointError, match=kind) as caught:
            check_operands(folder, large)
        assert "are swapped" in caught.value.what
    for target in (glm, mimo, large):
        check_operands(target, small)
        check_operands(target, target)
    check_operands("nobody/on-the-hub", glm)


def test_what_belongs_together_is_asked_for() -> None:
    draft = LLAMA / "draft"
    for given, what in (
        ({"version": "1.0"}, "is of one engine, and all are asked"),
        ({"engine": "vllm", "target_args": "--dtype half"}, "without --target, no pair"),
        ({"target": "no/such/folder"}, "no such folder, and no Hub id"),
        ({"target": draft, "version": "1.0"}, "is of one engine, and all are asked"),
    ):
        with pytest.raises(dq.DraftQuantError, match=what):
            dq.check(draft, **given)  # type: ignore[arg-type]


def test_an_index_that_lies_is_bad_input(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    pair = check_pair(LLAMA / "draft", target)
    assert "by the names of its index alone" in pair.not_compared[1]
    (target / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        check_pair(LLAMA / "draft", target)
    edit_json(target / "config.json", hidden_size="wide")
    with pytest.raises(CheckpointError, match="hidden_size: expected a whole number above 0"):
        check_pair(LLAMA / "draft", target)


def ship(folder: Path, tokens: list[str], merges: list[str]) -> None:
    """A tokenizer of these tokens beside the model."""
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges}
    added = [{"id": len(tokens), "content": "<end>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


@pytest.mark.parametrize(
    ("tokens", "merges", "level", "words"),
    [
        (["a", "b", "ab"], ["a b"], None, ""),
        (["a", "c", "ab"], ["a b"], "wrong", "at 1 id; the first is 1, 'c' here and 'b'"),
        (["a", "b"], ["a b"], "wrong", "at 2 ids; the first is 2, '<end>' here and 'ab'"),
        (["a", "b", "ab"], [], "wrong", "equal tokens, but other merges"),
    ],
)
def test_tokenizers_are_compared_by_what_they_do(
    tokens: list[str], merges: list[str], level: str | None, words: str, tmp_path: Path
) -> None:
    target = other_target(tmp_path / "target")
    draft = tmp_path / "draft"
    shutil.copytree(LLAMA / "draft", draft)
    ship(target, ["a", "b", "ab"], ["a b"])
    ship(draft, tokens, merges)
    pair = check_pair(draft, target)
    found = said(pair, "tokenizer")
    assert [each for each, _ in found] == ([level] if level else [])
    assert all(words in text for _, text in found)
    assert not [text for text in pair.not_compared if text.startswith("tokenizers")]


def test_rows_that_no_token_has_are_padding(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target", vocab_size=1088)
    assert said(check_pair(LLAMA / "draft", target), "vocabulary")[0][0] == "wrong"
    ship(target, ["a", "b"], [])
    level, text = said(check_pair(LLAMA / "draft", target), "vocabulary")[0]
    assert (level, "the rest is padding" in text) == ("warning", True)


def test_tokens_of_d2t_and_of_the_mask_that_the_target_has_not(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    sizes = {"hidden_size": 64, "vocab_size": 60, "num_hidden_layers": 8}
    found = check_pair(draft, other_target(tmp_path / "target", **sizes))
    assert "d2t of the draft names token" in said(found, "d2t")[0][1]
    offsets = np.frombuffer(read_tensors(draft)["d2t"].data, "<i8").tolist()
    last = max(row + offset for row, offset in enumerate(offsets))
    for rows in (last, last + 1):
        target = other_target(tmp_path / f"of-{rows}", **{**sizes, "vocab_size": rows})
        assert bool(said(check_pair(draft, target), "d2t")) is (rows == last)
    block = tiny_dflash(tmp_path / "block")
    for rows, is_found in ((60, True), (MASK_TOKEN_ID, True), (MASK_TOKEN_ID + 1, False)):
        target = other_target(tmp_path / f"{rows}", **{**sizes, "vocab_size": rows})
        texts = [text for _, text in said(check_pair(block, target), "vocabulary")]
        assert any("mask_token_id is" in text for text in texts) is is_found


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_weights_that_float16_cannot_hold(dtype: str, tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", dtype=dtype)
    target = other_target(tmp_path / "target", hidden_size=64, vocab_size=96, num_hidden_layers=8)
    narrow = {"engine": "vllm", "target_args": "--dtype float16"}
    assert not said(check_pair(draft, target, **narrow), "float16", "vllm")
    tensors = read_tensors(draft)
    wide = np.full((64, 64), 65536.0, np.float32)
    write_tensors(draft, {**tensors, "midlayer.self_attn.o_proj.weight": store(wide, dtype)})
    level, text = said(check_pair(draft, target, **narrow), "float16", "vllm")[0]
    assert (level, "o_proj.weight up to 65,536" in text) == ("wrong", True)
    assert not said(check_pair(draft, target, target_args="--dtype bfloat16"), "float16", "vllm")


def test_sizes_of_tensor_parallelism_are_those_of_both(tmp_path: Path) -> None:
    target = other_target(tmp_path / "target", num_attention_heads=6, num_key_value_heads=6)
    pair = check_pair(LLAMA / "draft", target, tp=4, engine="vllm")
    assert pair.tensor_parallel == (1, 2)
    assert "the target's 6 attention heads cannot be split over 4 GPUs" in str(pair.findings)
    assert pair.of("vllm").verdict == "REFUSED"
    padded = other_target(tmp_path / "padded", vocab_size=1021)  # engines fill up to 1,024 rows
    assert check_pair(LLAMA / "draft", padded, engine="vllm").tensor_parallel == (1, 2, 4, 8)
    longer = check_pair(LLAMA / "draft", target, target_args="--max-model-len 4096 -tp 2")
    assert said(longer, "context", "vllm")[0][0] == "refused"
    config = config_of(target)
    own = config["max_position_embeddings"]
    for length, levels in ((own, []), (own + 1, ["refused"])):
        served = check_pair(LLAMA / "draft", target, target_args=f"--max-model-len {length}")
        assert [one for one, text in said(served, "context", "vllm") if "itself" in text] == levels
    assert '"draft_tensor_parallel_size": 2' in (longer.of("vllm").launch or "")


def test_hidden_states_that_float16_cannot_hold(tmp_path: Path) -> None:
    draft, target = LLAMA / "draft", LLAMA / "target"
    narrow = {"target_args": "--dtype float16", "engine": "vllm"}
    beyond = check_pair(draft, target, largest_feature=70144.0, **narrow)
    assert "hidden states of the target up to 70,144" in said(beyond, "float16", "vllm")[0][1]
    assert beyond.of("vllm").verdict == "LOADS BUT WRONG"
    assert check_pair(draft, target, largest_feature=70144.0).of("vllm").verdict == "LOADS"
    traces = write_said(tmp_path / "traces", prompts=2, tokens=4, hidden=4).folder
    assert dq.check(draft, target=target, traces=traces, **narrow).verdict == "LOADS"  # type: ignore[arg-type]


def test_what_few_pairs_are_told(tmp_path: Path) -> None:
    draft = LLAMA / "draft"
    model = tiny_language_model(tmp_path / "model")
    sizes = {"vocab_size": 999, "num_hidden_layers": 8}
    found = check_pair(model, other_target(tmp_path / "other", **sizes))
    assert "hands token ids from one to the other" in said(found, "vocabulary", "sglang")[0][1]
    scaled = Path(shutil.copytree(draft, tmp_path / "scaled"))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(scaled / "config.json", rope_scaling=yarn, max_position_embeddings=128)
    short = check_pair(scaled, LLAMA / "target")
    for engine, level in (("vllm", "warning"), ("sglang", "refused")):
        assert said(short, "context", engine)[0][0] == level
