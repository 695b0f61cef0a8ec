"""What `verify` and `inspect` say of folders in which many things are wrong at once: every word."""

import json
from pathlib import Path

import pytest
import scenes

pytestmark = pytest.mark.usefixtures("one_thread")
KEPT = json.loads(scenes.FILE.read_text(encoding="utf-8"))


def test_every_scene_is_kept() -> None:
    assert list(KEPT) == list(scenes.SCENES)


@pytest.mark.parametrize("name", scenes.SCENES)
def test_what_is_said_of_a_scene(name: str, tmp_path: Path) -> None:
    """`python tests/scenes.py` writes it anew."""
    found = scenes.answer(name, tmp_path.resolve())
    for part, said in KEPT[name].items():
        assert found.pop(part) == said, part
    assert not found
