"""What the frozen run rests on: every verb is in it, and differences are named."""

from pathlib import Path

from draftquant.scripts.command_table import COMMANDS
from frozen.outcomes import Outcome, differences, read_outcomes, repeatable
from frozen.scenes import read_scenes, with_needed

FROZEN = Path(__file__).with_name("frozen")
SCENES = read_scenes(FROZEN / "commands.toml")


def test_every_verb_is_run_and_every_command_has_an_expectation() -> None:
    lines = [line for scene in SCENES.values() for line in scene.commands.values()]
    assert {line.split()[0] for line in lines} >= set(COMMANDS)
    commands = {f"{name}/{key}" for name, scene in SCENES.items() for key in scene.commands}
    assert set(read_outcomes(FROZEN / "expected.json")) == commands | {"arithmetic"}
    assert "check-gpu-fp8-ptpc-sglang-mi325x" in SCENES["llama-plain"].commands


def test_a_scene_brings_those_whose_folders_it_reads() -> None:
    found = [scene.name for scene in with_needed(SCENES, ["sglang-int4", "families-replayed"])]
    assert found == ["families", "families-replayed", "sglang", "sglang-int4"]


def test_what_differs_from_run_to_run_is_taken_out() -> None:
    said = (
        "replay: 88% after 13 s, about 1.8 s left\nmeasure 2.513: 8 in 18 s, 2.2 s each\n"
        "OUT: verified (write 0.4 s)\n/tmp/x/OUT at http://127.0.0.1:4711\n"
        '"step_seconds": 5.39420444e-07, "latency": 0.003, 2.749699999999999\n'
    )
    assert repeatable(said, Path("/tmp/x")) == (
        "OUT: verified (write TIME)\n./OUT at http://SERVER\n"
        '"step_seconds": 5.39420444e-07, "latency": TIME, 2.7497\n'
    )


def test_differences_are_named() -> None:
    before = Outcome(0, {"text": "a"}, {"config.json": "b", "model.safetensors": "c"})
    now = Outcome(1, {"text": "a"}, {"config.json": "d"})
    assert differences(before, now) == {
        "exit code": ("0", "1"),
        "config.json": ("b", "d"),
        "model.safetensors": ("c", "nothing"),
    }
    assert differences(now, now) == {}
    assert differences(None, now)["exit code"] == ("nothing", "1")
