"""`record --continue`: the target goes on behind texts of its own, or behind given ones."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import PromptEncoder, read_prompts
from draftquant.calibration.prompts.prompt_forms import ChosenPrompts
from draftquant.calibration.recording.conversations import recorded_texts
from draftquant.calibration.traces.near_duplicates import recorded_prompts, seen_prompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes.errors import LineProblem, PromptError
from draftquant.scripts.cli import main
from said_traces import VOCAB, write_said
from test_conversations import target as chat_target
from test_dumps import PAIR, TARGET
from tiny import edit_json
from transformers import AutoTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
target = chat_target
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
        assert found.prompt_length == begun.num_tokens
        assert found.id == f"{long.id}/more"
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
    with pytest.raises(PromptError, match="each of its 6 texts ends with the target's end"):
        recorded_texts(traces, VOCAB, set(last))
    drawn = recorded_texts(traces, VOCAB, (), ChosenPrompts(num_prompts=2, prompts_seed=3)).prompts
    assert set(drawn) < set(recorded_texts(traces, VOCAB, ()).prompts)
    assert len(drawn) == 2


def test_what_cannot_go_on(tmp_path: Path) -> None:
    traces = write_said(tmp_path / "traces", prompts=2)
    with pytest.raises(PromptError, match=f"its texts are of {VOCAB} tokens, and the target has 7"):
        recorded_texts(traces, 7, ())
    for choice in (ChosenPrompts(prompts_split="test"), ChosenPrompts(prompts_column="text")):
        with pytest.raises(PromptError, match="belongs to data sets and files"):
            recorded_texts(traces, VOCAB, (), choice)
    with pytest.raises(PromptError, match="expected at least 3 prompts, got 2"):
        recorded_texts(traces, VOCAB, (), ChosenPrompts(num_prompts=3))
    entries = [dataclasses.replace(one, id="x" * 196) for one in traces.manifest.prompts[:1]]
    with pytest.raises(PromptError, match="its id has more than 200 characters"):
        list(_renamed(traces, entries[0]))


def _renamed(traces: TraceFolder, entry: Any) -> Any:
    one = traces.only(traces.manifest.prompts[:1])
    ids = next(ids for _, ids in one.token_ids())
    one.token_ids = lambda: iter([(entry, ids)])  # type: ignore[method-assign]
    return recorded_texts(one, VOCAB, ()).prompts


def test_words_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = write_said(tmp_path / "traces", prompts=2).folder
    record(traces, tmp_path / "out", 2, code=2)
    assert "`record --continue` goes on" in capsys.readouterr().err
    record(traces, tmp_path / "out", 2, "--continue", code=2)
    assert "its texts are of 96 tokens" in capsys.readouterr().err
    record(traces, tmp_path / "out", 2, "--continue", "--turns", "all", code=2)
    assert "--turns all begins with the first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_cut_needs_its_beginning_beside_it(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 64 positions: 48 and 4 tokens, and 14 more, are two too many."""
    short = tmp_path / "target"
    shutil.copytree(TARGET, short)
    edit_json(short / "config.json", max_position_embeddings=64)
    cut = ("--continue", "--too-long", "truncate", "--num-prompts", "1")
    record(prompts, tmp_path / "first", 4, target=short)
    more = record(tmp_path / "first", tmp_path / "more", 14, *cut, target=short)
    said = " ".join(capsys.readouterr().err.split())
    assert "a text that is cut no longer begins as its conversation did" in said
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
