"""Fuzzing: whatever a file holds, a command says what it makes of it, soon, and in plain text.

Valid documents are changed in a few places: each command ends with an exit code of its own, and
prints nothing that a terminal would obey. `./scripts/test --fuzz` tries as many as you like.
"""

import contextlib
import copy
import io
import json
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.recipes import built_in_recipes, load_recipe, to_mapping
from draftquant.recipes.errors import CheckpointError, PromptError
from draftquant.scripts.cli import main
from handmade import MADE, quantize_by_hand
from hypothesis import given
from hypothesis import strategies as st
from mixes import DOWN, FP8, INT4_CHANNEL, mixed
from mutations import documents, json_bytes, mutated, scrambled
from said_traces import write_said
from tiny import INDEX_FILE, SINGLE_FILE, config_of, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import tiny_speculators_eagle3

pytestmark = pytest.mark.slow

SECONDS, MEGABYTES = 2.0, 500
CHECKS = tuple(("check", "DRAFT", "--engine", name) for name in ("vllm", "sglang", "tensorrt-llm"))
INT4 = ("--recipe", "int4-channel", "--backend", "torch")
PLAIN = (
    ("inspect", "DRAFT"),
    ("plan", "DRAFT", *INT4),
    ("quantize", "DRAFT", *INT4, "--fix-config", "--out", "OUT"),
    *CHECKS,
)
QUANTIZED = (
    ("inspect", "DRAFT"),
    ("verify", "DRAFT", "--against", "SOURCE"),
    ("dequantize", "DRAFT", "--out", "OUT"),
    ("gate", "SOURCE", "DRAFT", "--traces", "TRACES"),
    *CHECKS,
)


class Folders(NamedTuple):
    """Valid folders, which no test changes, and room to write in."""

    root: Path
    sources: dict[str, Path]
    quantized: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    root = tmp_path_factory.mktemp("fuzz")
    sources = {
        "llama": tiny_eagle3_llama(root / "llama"),
        "sharded": tiny_eagle3_llama(root / "sharded", sharded=True, pruned_vocabulary=True),
        "mla": tiny_eagle3_mla(root / "mla"),
        "dflash": tiny_dflash(root / "dflash", num_layers=1, mask_embedding=True),
        "speculators": tiny_speculators_eagle3(root / "speculators"),
    }
    quantized = {
        name: quantize_by_hand(sources["llama"], root / name, made) for name, made in MADE.items()
    }
    quantized["ours"] = root / "ours"
    assert main(["quantize", str(sources["llama"]), *INT4, "--out", str(root / "ours")]) == 0
    recipe, quantized["mixed"] = root / "mixed.yaml", root / "mixed"
    text = yaml.safe_dump(to_mapping(mixed(INT4_CHANNEL, (FP8, DOWN))))
    recipe.write_text(text, encoding="utf-8")
    asked = ("--recipe", str(recipe), "--out", str(quantized["mixed"]))
    assert main(["quantize", str(sources["llama"]), *asked]) == 0
    write_said(root / "traces", prompts=3, tokens=12)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield Folders(root, sources, quantized)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1000


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """The block takes little time of this process."""
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


def run(command: Sequence[str], folders: Folders, source: str = "llama") -> None:
    """Run a command on the changed folder, and judge what it does."""
    out = folders.root / "out"
    shutil.rmtree(out, ignore_errors=True)
    named = {
        "DRAFT": str(folders.root / "changed"),
        "OUT": str(out),
        "SOURCE": str(folders.sources[source]),
        "TRACES": str(folders.root / "traces"),
    }
    printed, errors = io.StringIO(), io.StringIO()
    with bounded(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main([named.get(argument, argument) for argument in command])
    assert code in (0, 1, 2, 3)
    said = errors.getvalue().split("\n")  # `gate` says before what memory it takes
    assert code != 2 or any(line.startswith("error: ") for line in said)
    assert_plain(printed.getvalue() + errors.getvalue())


def assert_plain(text: str) -> None:
    """Nothing that a terminal would obey."""
    assert all(line.isprintable() for line in text.split("\n"))


def changed(folders: Folders, original: Path, file: str, content: bytes) -> None:
    """The folder "changed" is the original one with another content of a file."""
    folder = folders.root / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / file).unlink(missing_ok=True)
    (folder / file).write_bytes(content)


@given(st.data())
@pytest.mark.parametrize(("group", "file", "commands"), [
    ("sources", "config.json", PLAIN), ("sources", INDEX_FILE, PLAIN),
    ("quantized", "hf_quant_config.json", QUANTIZED), ("quantized", "draftquant.json", QUANTIZED),
])  # fmt: skip
def test_document(folders: Folders, group: str, file: str, commands: Any, data: Any) -> None:
    of: dict[str, Path] = getattr(folders, group)
    name = data.draw(st.sampled_from([name for name, at in of.items() if (at / file).exists()]))
    original = json.loads((of[name] / file).read_text(encoding="utf-8"))
    changed(folders, of[name], file, data.draw(documents(original)))
    run(data.draw(st.sampled_from(commands)), folders, name if group == "sources" else "llama")


@given(st.data())
def test_declaration(folders: Folders, data: st.DataObject) -> None:
    original = folders.quantized[data.draw(st.sampled_from(list(folders.quantized)))]
    config = config_of(original)
    declared = data.draw(mutated(config["quantization_config"]))
    content = json_bytes(config | {"quantization_config": declared})
    changed(folders, original, "config.json", content)
    run(data.draw(st.sampled_from(QUANTIZED)), folders)


def with_header(data: st.DataObject, content: bytes) -> bytes:
    """Safetensors with another header, whose length is now and then wrong."""
    start = 8 + int.from_bytes(content[:8], "little")
    text = data.draw(documents(json.loads(content[8:start])))
    length = data.draw(st.sampled_from([len(text)] * 9 + [0, len(text) + 8, 2**24, 2**63]))
    return length.to_bytes(8, "little") + text + content[start:]


@given(st.data())
def test_header(folders: Folders, data: st.DataObject) -> None:
    plain = data.draw(st.booleans())
    of = folders.sources if plain else folders.quantized
    original = of[data.draw(st.sampled_from([name for name in of if name != "sharded"]))]
    content = with_header(data, (original / SINGLE_FILE).read_bytes())
    changed(folders, original, SINGLE_FILE, content)
    run(data.draw(st.sampled_from(PLAIN if plain else QUANTIZED)), folders)


RECIPES = {name: to_mapping(load_recipe(name)) for name in built_in_recipes()}


@given(st.data())
def test_recipe(folders: Folders, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(RECIPES)))
    recipe = copy.deepcopy(RECIPES[name]) | {"name": "mine"}
    if data.draw(st.booleans()):
        content = json_bytes(data.draw(mutated(recipe)))  # JSON is YAML
    else:
        content = data.draw(scrambled(yaml.safe_dump(recipe, sort_keys=False).encode()))
    path = folders.root / "mine.yaml"
    path.write_bytes(content)
    changed(folders, folders.sources["llama"], "x", b"")
    (folders.root / "changed" / "x").unlink()
    plan = ("plan", "DRAFT", "--recipe", str(path))
    run(data.draw(st.sampled_from([("recipes", "check", str(path)), plan])), folders)


@given(st.data())
def test_traces(folders: Folders, data: st.DataObject) -> None:
    original = folders.root / "traces"
    file = data.draw(st.sampled_from(["trace.json", "traces-00001.safetensors"]))
    content = (original / file).read_bytes()
    if file == "trace.json":
        content = data.draw(documents(json.loads(content)))
    else:
        content = with_header(data, content)
    changed(folders, original, file, content)
    run(("replay", str(folders.sources["llama"]), "--traces", "DRAFT"), folders)


PROMPTS = [
    {"id": "a", "category": "code", "token_ids": [1, 2, 3]},
    {"id": "b", "text": "def f("},
    {"id": "c", "messages": [{"role": "user", "content": "Hi"}]},
]


@given(st.data())
def test_prompts(folders: Folders, data: st.DataObject) -> None:
    path = folders.root / "prompts.jsonl"
    path.write_bytes(b"\n".join([data.draw(documents(prompt)) for prompt in PROMPTS]))
    with bounded():
        try:
            found = read_prompts(path)
        except (PromptError, CheckpointError) as exc:
            assert_plain(str(exc))
            return
    assert found
    assert all(prompt.token_ids and prompt.id.isprintable() for prompt in found)
