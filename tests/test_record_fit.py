"""What is refused before a target is loaded: another draft's target, and prompts that do not fit.

The targets here have no weights: whatever is refused late would be refused for that.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.target_shape import TargetShape, fitted_prompts
from draftquant.calibration.traces.manifest import TooLongPrompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from tied_pair import VOCAB, save_draft, save_target
from tiny import edit_json

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 512 positions, width 64 and 8 layers, and its draft."""
    folder = tmp_path_factory.mktemp("fit")
    save_draft(folder / "draft", save_target(folder / "target"))
    return folder


def bare(pair: Path, folder: Path, **changes: Any) -> Path:
    """The target's config.json, changed, and nothing else."""
    folder.mkdir()
    config = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def prompt_file(folder: Path, *lengths: int, token: int = 1) -> Path:
    path = folder / "prompts.jsonl"
    lines = (
        {"id": f"p{i}", "category": "a", "token_ids": [(token + i + j) % VOCAB for j in range(n)]}
        for i, n in enumerate(lengths)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_target_that_cannot_feed_the_draft(pair: Path, tmp_path: Path) -> None:
    prompts, draft = prompt_file(tmp_path, 4), pair / "draft"
    cases: list[tuple[Any, str, int, str]] = [
        ("vllm", "hidden_size", 80, "it reads 3 x 64 = 192 values, the target gives 3 x 80 = 240"),
        ("transformers", "vocab_size", 128, f"its vocabulary has {VOCAB} tokens, the target's 128"),
        ("vllm", "num_hidden_layers", 4, "it reads layer 4, the target has layers 0 to 3"),
    ]
    for engine, key, value, words in cases:
        target = bare(pair, tmp_path / key, **{key: value})
        with pytest.raises(TraceError) as caught:
            dq.record(target, prompts, tmp_path / "out", draft=draft, engine=engine)
        assert words in caught.value.what
        assert "the target that this draft was trained for" in caught.value.fix
        assert not (tmp_path / "out").exists()


def test_layers_that_are_asked_for_are_counted(pair: Path, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, 4)
    given: dict[str, Any] = {"draft": pair / "draft", "max_new_tokens": 2}
    with pytest.raises(TraceError, match=r"the target gives 2 x 64 = 128"):
        dq.record(pair / "target", prompts, tmp_path / "out", aux_layer_ids=(1, 2), **given)
    traces = dq.record(pair / "target", prompts, tmp_path / "out", aux_layer_ids=(1, 2, 3), **given)
    assert traces.manifest.features.aux_layer_ids == (1, 2, 3)


def test_a_head_of_fewer_tokens_is_no_other_vocabulary(pair: Path, tmp_path: Path) -> None:
    draft = save_draft(tmp_path / "draft", pair / "target")
    edit_json(draft / "config.json", draft_vocab_size=VOCAB // 2)
    target = bare(pair, tmp_path / "bare")
    with pytest.raises(TraceError, match="cannot load this target"):  # the weights: all else fits
        dq.record(target, prompt_file(tmp_path, 4), tmp_path / "out", draft=draft)


def test_all_prompts_that_do_not_fit_are_named_at_once(pair: Path, tmp_path: Path) -> None:
    target = bare(pair, tmp_path / "bare")
    prompts = prompt_file(tmp_path, 600, 4, 511, 512)
    with pytest.raises(TraceError) as caught:
        dq.record(target, prompts, tmp_path / "out", max_new_tokens=2, aux_layer_ids=(1,))
    said = str(caught.value)
    assert "3 of 4 do not fit the target" in said
    for line in ("p0: 602 tokens", "p2: 513 tokens", "p3: 514 tokens"):
        assert line in said
    assert 'too_long="skip"' in said


SHAPE = TargetShape(num_layers=2, vocab_size=10, hidden_size=4, max_positions=8)


def prompt(name: str, *token_ids: int) -> Prompt:
    return Prompt(id=name, category="a", token_ids=token_ids)


def test_prompts_of_another_vocabulary_are_refused_whatever_is_asked() -> None:
    given = [prompt("far", 10), prompt("good", 1), prompt("empty"), prompt("long", *range(9))]
    with pytest.raises(TraceError) as caught:
        fitted_prompts(given, SHAPE, 2, "skip")
    assert "2 of 4 do not fit" in caught.value.what
    assert [line.split(":")[0].strip() for line in caught.value.details] == [
        "prompt far", "prompt empty",
    ]  # fmt: skip
    assert "this target's tokenizer" in caught.value.fix


def test_how_many_fit() -> None:
    with pytest.raises(TraceError) as caught:
        fitted_prompts([prompt(f"p{i}", *range(9)) for i in range(30)], SHAPE, 2)
    assert len(caught.value.details) == 21
    assert caught.value.details[-1].strip() == "and 10 more"
    with pytest.raises(TraceError, match="--max-new-tokens: 8 new tokens leave no room"):
        fitted_prompts([prompt("p", 1)], SHAPE, 8, "skip")
    with pytest.raises(TraceError, match="all 1 are longer than 6 tokens"):
        fitted_prompts([prompt("p", *range(7))], SHAPE, 2, "skip")
    endless = TargetShape(num_layers=2, vocab_size=10, hidden_size=4, max_positions=None)
    assert fitted_prompts([prompt("p", *[1] * 99)], endless, 99)[1] is None


@pytest.mark.parametrize("how", ["skip", "truncate"])
def test_too_long_prompts_are_left_out_or_cut_said_and_recorded(
    how: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = prompt_file(tmp_path, 5, 511, 6, 520), tmp_path / "out"
    arguments = ("--target", str(pair / "target"), "--prompts", str(prompts), "--out", str(out))
    given = ("--max-new-tokens", "2", "--too-long", how)
    assert main(["record", *arguments, *given]) == 0
    done = {"skip": "left out", "truncate": "cut to their last tokens"}[how]
    said = " ".join(capsys.readouterr().err.split())
    assert f"2 of 4 prompts are {done}: with 2 new tokens they exceed the target's 512" in said
    traces = TraceFolder.open(out)
    long = ("p1", "p3")
    if how == "skip":
        assert [trace.id for trace in traces] == ["p0", "p2"]
        assert traces.manifest.too_long == TooLongPrompts(skipped=long)
    else:
        assert [trace.prompt_length for trace in traces] == [5, 510, 6, 510]
        assert traces.manifest.too_long == TooLongPrompts(truncated=long)
        (cut,) = (trace for trace in traces if trace.id == "p1")
        whole = json.loads(prompts.read_text(encoding="utf-8").splitlines()[1])["token_ids"]
        assert cut.token_ids[:510].tolist() == whole[-510:]
    assert main(["traces", "info", str(out)]) == 0
    counts = "2 prompts left out, 0 cut" if how == "skip" else "0 prompts left out, 2 cut"
    assert counts in capsys.readouterr().out
