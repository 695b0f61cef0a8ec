"""`draftquant tune`: a mixture is found, written as a recipe that makes it, or refused with why."""

import json
from pathlib import Path

import pytest
from draftquant.quantize.files.provenance import QuantizedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.recipes import load_recipe
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from draftquant.validate.errors import GateError
from draftquant.validate.judging.held_out import check_held_out
from rounding_pairs import RoundingPair, make_pair

pytestmark = pytest.mark.usefixtures("one_thread")

SERVED = ("--engine", "vllm", "--arch", "b200", "--fix-config")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    made = make_pair(tmp_path_factory.mktemp("tune") / "llama", "llama", num_prompts=16)
    config = json.loads((made.draft_folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "llama"}  # without it vLLM refuses every mixture alike
    (made.draft_folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def tune(pair: RoundingPair, out: Path, *arguments: str) -> int:
    traces = str(pair.folder / "traces")
    given = ("--traces", traces, "--out", str(out))
    return main(["tune", str(pair.draft_folder), *given, *arguments])


def test_the_recipe_makes_the_draft_that_was_measured(
    pair: RoundingPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bytes and acceptance length of the chosen mixture, by the recipe file alone.

    Of all that was replayed, the unquantized draft's replay is kept.
    """
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path / "cache"))
    out, plot = tmp_path / "tuned.yaml", tmp_path / "path.svg"
    mixed = ("--recipe", "int4-channel", "fp8-ptpc")
    whole = sum(row.tensor.nbytes for row in pair.plan(load_recipe("fp8-ptpc")).draft.rows)
    budget = ("--budget", str(whole * 0.97), "--plot", str(plot), "--json")
    assert tune(pair, out, *SERVED, *mixed, *budget) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(list((tmp_path / "cache").glob("*.entry"))) == 1
    assert [one["bytes"] for one in found["points"]] == sorted(o["bytes"] for o in found["points"])
    assert len(found["points"]) > 3
    for unit, each in found["costs"].items():  # 1 - overlap: finer formats differ less
        divergences = [each[name]["divergence"] for name in ("int4-channel", "fp8-ptpc", "kept")]
        assert 0.5 > divergences[0] > divergences[1] > divergences[2] == 0, unit
    everywhere = [set(one["formats"].values()) for one in found["points"]]
    assert {"int4-channel"} in everywhere
    assert {"fp8-ptpc"} in everywhere
    (chosen,) = (one for one in found["points"] if one["chosen"])
    assert chosen["bytes"] <= whole * 0.97
    better = [o for o in found["points"] if o["overlap"] > chosen["overlap"]]
    assert all(one["bytes"] > whole * 0.97 for one in better)
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    assert "Found by 'draftquant tune'" in out.read_text(encoding="utf-8")
    recipe = load_recipe(str(out))
    assert [place.engine for place in recipe.loads_on] == ["vllm", "sglang"]
    made = tmp_path / "made"
    assert main(["quantize", str(pair.draft_folder), "--recipe", str(out), "--out", str(made)]) == 0
    assert pair.plan(recipe).bytes_after == chosen["bytes"]
    record = read_provenance(made)
    assert isinstance(record, QuantizedProvenance)
    with pytest.raises(
        GateError, match=r"16 of its 16 prompts were used to choose the candidate's recipe"
    ):
        check_held_out(record, pair.traces)
    (replay,) = replay_drafts([pair.loaded(made)], pair.traces, num_draft_tokens=3)
    assert replay.counts.mean_acceptance_length == pytest.approx(chosen["acceptance_length"])


def test_codes_by_gptq_are_found_by_prompts_that_do_not_judge(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", "int4-channel", "--algorithm", "gptq", "--max-drop", "0.9", "--json")
    assert tune(pair, tmp_path / "r.yaml", *SERVED, *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_prompts"], found["num_calibration_prompts"]) == (8, 8)
    assert load_recipe(str(tmp_path / "r.yaml")).algorithm.rounding == "gptq"
    everywhere = {one["formats"]["o_proj"] for one in found["points"]}
    assert everywhere == {"int4-channel", "kept"}


@pytest.mark.slow
def test_gptq_is_taken_where_a_recipe_names_it_and_said_where_none_does(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--recipe", "int4-channel-gptq", "fp8-ptpc", "--max-drop", "0.9")
    assert tune(pair, tmp_path / "gptq.yaml", *SERVED, *named) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "judged on 8 prompts, calibrated on 8 others" in said
    assert "gptq was not tried" not in said
    assert load_recipe(str(tmp_path / "gptq.yaml")).algorithm.rounding == "gptq"
    plain = ("--recipe", "int4-channel", "--max-drop", "0.9")
    assert tune(pair, tmp_path / "plain.yaml", *SERVED, *plain) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the algorithm was absmax; --algorithm gptq was not tried" in said
    assert tune(pair, tmp_path / "fp8.yaml", *SERVED, "--recipe", "fp8-ptpc", *plain[2:]) == 0
    assert "was not tried" not in capsys.readouterr().out  # eight bits: nothing to win


def test_nothing_as_wanted_writes_no_recipe_and_says_what_comes_closest(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.yaml"
    assert tune(pair, out, *SERVED, "--recipe", "fp8-ptpc", "--budget", "1000") == 1
    said = capsys.readouterr().out
    assert "no mixture is small enough" in said
    assert "the closest is all fp8-ptpc" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SERVED, "--max-drop", "0"), "--max-drop: expected a share above 0"),
        ((*SERVED, "--budget", "-5"), "--budget: expected bytes, got -5"),
        ((*SERVED, "--recipe", "mi355-mxfp4"), "layout compressed-tensors"),
        ((*SERVED, "--recipe", "int4-chanel"), "did you mean"),
        (("--engine", "vllm", "--arch", "b2000"), "does not know the GPU"),
        (("--engine", "tensorrt-llm", "--arch", "b200", "--recipe", "int4-channel"), "no mixture"),
        ((*SERVED, "--plot", "path.jpg"), "expected a name ending in .svg"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    arguments: tuple[str, ...],
    words: str,
    pair: RoundingPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune(pair, tmp_path / "r.yaml", *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_what_engines_refuse_of_the_draft_itself_is_said_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = make_pair(tmp_path_factory.mktemp("nameless") / "llama", "llama", num_prompts=8)
    assert tune(nameless, tmp_path / "r.yaml", *SERVED, "--recipe", "int4-channel") == 2
    said = capsys.readouterr().err
    assert said.count("Should have a `model_type` key in its config.json") == 1
    assert "set eagle_aux_hidden_state_layer_ids in config.json to" in said


def test_an_existing_file_or_another_name_is_refused(
    pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine", encoding="utf-8")
    assert tune(pair, there, *SERVED) == 2
    assert there.read_text(encoding="utf-8") == "mine"
    assert tune(pair, tmp_path / "recipe.txt", *SERVED) == 2
    assert "is no name of a recipe" in capsys.readouterr().err


def test_too_few_prompts_and_another_targets_traces_are_refused(
    pair: RoundingPair,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = make_pair(tmp_path_factory.mktemp("few") / "llama", "llama", num_prompts=5)
    assert tune(few, tmp_path / "r.yaml", *SERVED, "--recipe", "int4-channel") == 2
    assert "expected at least 8 prompts to judge mixtures by, got 5" in capsys.readouterr().err
    block = make_pair(tmp_path_factory.mktemp("other") / "dflash", "dflash", num_prompts=8)
    traces = ("--traces", str(block.folder / "traces"), "--out", str(tmp_path / "r.yaml"))
    assert main(["tune", str(pair.draft_folder), *traces, *SERVED]) == 2
    assert "its vocabulary has 96 tokens, the target's 24" in capsys.readouterr().err
