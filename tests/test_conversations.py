"""Conversations turn by turn, whose turns count as one prompt; prompts in parquet files."""

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from draftquant.calibration.prompts.prompt_file import PromptEncoder, read_prompts
from draftquant.calibration.prompts.prompt_forms import ChosenPrompts
from draftquant.calibration.recording.conversations import record_conversations, recorded_texts
from draftquant.calibration.traces.held_out import recorded_prompts, seen_prompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes.errors import LineProblem, PromptError
from draftquant.scripts.cli import main
from recorded import plan_of, record_traces
from said_traces import VOCAB, write_said
from test_dumps import PAIR, TARGET
from tiny import edit_json
from transformers import AutoTokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TURNS = [
    {"question_id": 81, "category": "code", "turns": ["def add(a, b):", "    import os", "x = 1"]},
    {"question_id": 82, "category": "text", "turns": ["class Node:"]},
    {"question_id": 83, "category": "code", "turns": ["import sys", "def main():"]},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped one, with a chat template."""
    folder = shutil.copytree(TARGET, tmp_path_factory.mktemp("chat") / "target")
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, TURNS)), encoding="utf-8")
    return path


def recorder(target: Path, **options: Any) -> Any:
    arguments = {"max_new_tokens": 12, "aux_layer_ids": (0, 1, 2)} | options
    return partial(record_traces, target, **arguments)


@pytest.fixture(scope="module")
def traces(target: Path, file: Path, tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("out") / "traces"
    plan = plan_of(target, read_prompts(file, target=target), max_new_tokens=12)
    report = record_conversations(plan, out, recorder(target))
    assert (report.num_turns, report.num_cut_short) == ((3, 2, 1), 0)
    assert [path.name for path in out.parent.iterdir()] == ["traces"]
    return report.traces


def test_each_turn_is_a_prompt_after_the_targets_answers(traces: TraceFolder, target: Path) -> None:
    assert [(trace.id, trace.category) for trace in traces] == [
        ("81/turn-1", "code"), ("81/turn-2", "code"), ("81/turn-3", "code"), ("82", "text"),
        ("83/turn-1", "code"), ("83/turn-2", "code"),
    ]  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    first, second = list(traces)[:2]
    answer = tokenizer.decode(list(first.continuation), skip_special_tokens=True)
    expected = f"user: def add(a, b):\nassistant: {answer}\nuser:     import os\nassistant: "
    ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert second.token_ids[: second.prompt_length].tolist() == ids
    # The turns of a conversation know their first.
    one, two, three, single, *last = traces
    assert one.conversation_sha256 is single.conversation_sha256 is None
    assert {two.conversation_sha256, three.conversation_sha256} == {one.prompt_sha256}
    assert last[1].cluster_sha256 == last[0].prompt_sha256
    found = [prompt.hashes[1] for prompt in recorded_prompts(traces)]
    assert found == [trace.cluster_sha256 for trace in traces]
    assert len(set(found)) == 3


def test_a_template_that_takes_no_answers(target: Path, file: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(target, tmp_path / "odd")
    refusing = "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}"
    edit_json(odd / "tokenizer_config.json", chat_template=refusing + TEMPLATE)
    plan = plan_of(odd, read_prompts(file, target=odd), max_new_tokens=12)
    with pytest.raises(PromptError):
        record_conversations(plan, tmp_path / "out", recorder(odd))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd"]


def test_record_turns_all(target: Path, file: Path, traces: TraceFolder, tmp_path: Path) -> None:
    arguments = ["record", "--target", str(target), "--prompts", str(file)]
    arguments += ["--max-new-tokens", "12", "--aux-layers", "0,1,2", "--dtype", "float32"]
    assert main([*arguments, "--out", str(tmp_path / "all"), "--turns", "all", "--tables"]) == 0
    found = TraceFolder.open(tmp_path / "all")
    assert found.sha256 == traces.sha256
    assert found.manifest.tables is not None
    assert main([*arguments, "--out", str(tmp_path / "first")]) == 0
    assert len(TraceFolder.open(tmp_path / "first")) == 3


# ---- parquet

SPEED_BENCH = [
    {"question_id": f"q{i}", "category": "math", "sub_category": None, "turns": turns,
     "source": "made", "src_id": str(i), "difficulty": "easy", "multiturn": len(turns) > 1}
    for i, turns in enumerate((["x = 1"], ["def f():", "y = 2"]))
]  # fmt: skip


def test_parquet_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SPEED_BENCH), path)
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"PAR1" + bytes(100) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(PromptError):
            read_prompts(path)
    with pytest.raises(PromptError):
        read_prompts(tmp_path / "none.parquet")
    path.write_bytes(whole)
    monkeypatch.setattr("draftquant.calibration.prompts.prompt_file.MAX_GROUP_BYTES", 10)
    with pytest.raises(PromptError):
        read_prompts(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptError):
        read_prompts(path)


# ---- `record --continue`: behind texts of its own, or behind given ones

LAYERS = ("--draft", str(PAIR / "draft"), "--ignore-eos", "--dtype", "float32")


def record(
    prompts: Path, out: Path, new: int, *words: str, code: int = 0, target: Path = TARGET
) -> TraceFolder:
    given = ("--prompts", str(prompts), "--max-new-tokens", str(new), "--out", str(out))
    assert main(["record", "--target", str(target), *LAYERS, *given, *words]) == code
    return TraceFolder.open(out) if code == 0 else TraceFolder.open(prompts)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    of_files = [json.loads(line) | {"cluster": "file"} for line in lines[:1]]
    path.write_text("\n".join([*map(json.dumps, of_files), *lines[1:]]), encoding="utf-8")
    return path


def test_texts_of_its_own_go_on_as_one_longer_recording(prompts: Path, tmp_path: Path) -> None:
    whole = record(prompts, tmp_path / "whole", 6)
    first = record(prompts, tmp_path / "first", 4)
    more = record(tmp_path / "first", tmp_path / "more", 2, "--continue")
    for long, begun, found in zip(whole, first, more, strict=True):
        assert found.token_ids.tolist() == long.token_ids.tolist()
        assert (found.prompt_length, found.id) == (begun.num_tokens, f"{long.id}/more")
        assert (found.category, found.cluster) == (long.category, long.cluster)
        assert found.cluster_sha256 == begun.prompt_sha256
    third = recorded_texts(more, more.manifest.target.vocab_size, ()).prompts
    assert [one.conversation_sha256 for one in third] == [one.prompt_sha256 for one in first]
    # What was calibrated on the beginning has seen the text that goes on.
    seen = set(seen_prompts(first).sha256)
    assert all(seen & set(one.hashes) for one in recorded_prompts(more))
    assert all(one.conversation_known for one in recorded_prompts(more))


def test_texts_that_have_ended_are_named_and_left_out(tmp_path: Path) -> None:
    traces = write_said(tmp_path / "traces", prompts=6)
    last = [int(ids[-1]) for _, ids in traces.token_ids()]
    names = [entry.id for entry in traces.manifest.prompts]
    ends = {last[0]}
    found = recorded_texts(traces, VOCAB, ends)
    assert found.ended == tuple(n for n, one in zip(names, last, strict=True) if one in ends)
    assert len(found.prompts) + len(found.ended) == 6
    with pytest.raises(PromptError):
        recorded_texts(traces, VOCAB, set(last))
    drawn = recorded_texts(traces, VOCAB, (), ChosenPrompts(num_prompts=2, prompts_seed=3)).prompts
    assert set(drawn) < set(recorded_texts(traces, VOCAB, ()).prompts)
    assert len(drawn) == 2


def test_what_cannot_go_on(tmp_path: Path) -> None:
    traces = write_said(tmp_path / "traces", prompts=2)
    with pytest.raises(PromptError):
        recorded_texts(traces, 7, ())
    for choice in (
        ChosenPrompts(prompts_split="test"), ChosenPrompts(prompts_column="text"),
        ChosenPrompts(num_prompts=3),
    ):  # fmt: skip
        with pytest.raises(PromptError):
            recorded_texts(traces, VOCAB, (), choice)
    entries = [dataclasses.replace(one, id="x" * 196) for one in traces.manifest.prompts[:1]]
    first = traces.only(traces.manifest.prompts[:1])
    ids = next(ids for _, ids in first.token_ids())
    first.token_ids = lambda: iter([(entries[0], ids)])  # type: ignore[method-assign]
    with pytest.raises(PromptError):
        recorded_texts(first, VOCAB, ())


def test_a_text_that_is_cut_needs_its_beginning_beside_it(prompts: Path, tmp_path: Path) -> None:
    """Of 64 positions: 48 and 4 tokens, and 14 more, are two too many."""
    short = shutil.copytree(TARGET, tmp_path / "target")
    edit_json(short / "config.json", max_position_embeddings=64)
    cut = ("--continue", "--too-long", "truncate", "--num-prompts", "1")
    record(prompts, tmp_path / "first", 4, target=short)
    more = record(tmp_path / "first", tmp_path / "more", 14, *cut, target=short)
    (found,) = more.manifest.prompts
    assert found.prompt_length == 50
    assert not any(one.conversation_known for one in recorded_prompts(more))  # gate refuses that


def test_an_answer_that_is_given_goes_on(target: Path, tmp_path: Path) -> None:
    encoder = PromptEncoder(target, continues=True)
    user = {"role": "user", "content": "def f():"}
    begun = [user, {"role": "assistant", "content": "    return 1"}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": begun}), encoding="utf-8")
    (found,) = read_prompts(path, encoder=encoder)
    assert encoder.answer(found.token_ids).endswith("user: def f():\nassistant:     return 1")
    plain = PromptEncoder(target).messages([user])
    assert found.token_ids[: len(plain) - 1] == tuple(plain[:-1])
    command = ["record", "--target", str(target), "--prompts", str(path), "--aux-layers", "0,1,2"]
    command += ["--max-new-tokens", "2", "--continue", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    (trace,) = TraceFolder.open(tmp_path / "out")
    assert tuple(trace.token_ids[: trace.prompt_length].tolist()) == found.token_ids
    for messages in ([user], [user, {"role": "assistant", "content": " "}]):
        with pytest.raises(LineProblem, match="expected the beginning of an assistant's answer"):
            encoder.messages(messages)


def test_a_template_in_which_no_answer_can_go_on(target: Path, tmp_path: Path) -> None:
    """transformers marks the answer's end with a word, which would be left in the second one."""
    of_target = AutoTokenizer.from_pretrained(target)
    user, begun = ({"role": role, "content": "def f():"} for role in ("user", "assistant"))
    for which, written, message in (
        ("messages[:-1]", "{{ m.content }}", "chat template fails: contin"),
        ("messages", "{{ m.content }}|{{ m.content }}", "writes no answer so that it can go on"),
    ):
        of_target.chat_template = f"{{% for m in {which} %}}{written}{{% endfor %}}"
        of_target.save_pretrained(tmp_path)
        with pytest.raises(LineProblem, match=message) as caught:
            PromptEncoder(tmp_path, continues=True).messages([user, begun])
        assert "give the prompts as text" in caught.value.fix
        assert "\n" not in str(caught.value)
