"""Mistakes of people who are new here: each exits with 2, is named, and has a way out."""

import errno
import gzip
import json
import os
import shlex
import shutil
import struct
import tomllib
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
PAIRS = Path(__file__).parent / "pairs"
DISK_USAGE = "draftquant.quantize.files.staging.shutil.disk_usage"

RULES = """extends: fp8-ptpc
name: own
rules:
- {{role: {}}}
- {{role: [fusion, embedding, norm, vocabulary_map, attention, mlp], action: keep, why: small}}
"""
MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))


def folder(path: Path, **files: str | bytes | Path) -> None:
    """A folder with files, their names with a `.` for each `__`; a path is what is copied."""
    path.mkdir(parents=True)
    for name, content in files.items():
        file = path / name.replace("__", ".")
        if isinstance(content, Path):
            shutil.copy(content, file)
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a user has lying about: a draft and its target, one in FP8, and much that is neither."""
    here, pair = tmp_path_factory.mktemp("mistakes"), PAIRS / "eagle3-llama"
    config, weights = pair / "draft" / "config.json", pair / "draft" / "model.safetensors"
    for name in ("draft", "target"):
        shutil.copytree(pair / name, here / name)
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    folder(here / "empty")
    folder(here / "parent" / "draft", config__json=config, model__safetensors=weights)
    folder(here / "gguf", model__gguf=b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
    folder(here / "lora", adapter_config__json="{}", adapter_model__safetensors=weights)
    folder(here / "models--me--draft" / "snapshots" / "123abc", config__json=config)
    folder(here / "models--me--draft" / "refs", main="123abc")
    without = load_file(weights)
    del without["fc.weight"]
    folder(here / "nofc", config__json=config)
    save_file(without, here / "nofc" / "model.safetensors")
    folder(here / "noweights", config__json=config)
    misspelt = json.loads(config.read_text(encoding="utf-8"))
    misspelt["hiden_size"] = misspelt.pop("hidden_size")
    folder(here / "misspelt", config__json=json.dumps(misspelt), model__safetensors=weights)
    declared = json.loads(config.read_text(encoding="utf-8"))
    for name, content in (
        ("own", json.dumps(declared | {"architectures": ["MyOwnDraft"]})),
        ("noarch", json.dumps({k: v for k, v in declared.items() if k != "architectures"})),
        ("comma", '{\n"architectures": [],\n}'),
    ):
        folder(here / name, config__json=content, model__safetensors=weights)
    for name, change in (
        ("listed", {"eagle_config": []}),
        ("declared", {"quantization_config": {"quant_method": "fp8"}}),
        ("tied", {"tie_word_embeddings": True}),
    ):
        folder(here / name, config__json=json.dumps(declared | change), model__safetensors=weights)
    folder(here / "resumed", config__json=config, model__safetensors=weights, optimizer__pt=b"x")
    folder(here / "mistral", params__json="{}", consolidated__safetensors=weights)
    for name, header in (
        ("aslist", "[]"),
        ("longname", json.dumps({"x" * 5000: {}})),
        ("oddshape", json.dumps({"x": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}})),
    ):
        content = struct.pack("<Q", len(header)) + header.encode()
        folder(here / name, config__json=config, model__safetensors=content)
    (here / "dangling").symlink_to("nowhere")
    folder(here / "zerobytes", config__json=config, model__safetensors=b"")
    for name, content in (
        ("prompts.jsonl", "".join(lines[:4])),
        ("empty.jsonl", ""),
        ("list.json", json.dumps([{"text": "hello"}], indent=2)),
        ("query.jsonl", '{"query": "hello"}\n'),
        ("bare.yaml", "extends: fp8-ptpc\n"),
        ("on.yaml", "extends: fp8-ptpc\nname: on\n"),
        ("again.yaml", RULES.format("[attention], action: quantize")),
        ("norms.yaml", RULES.format("[norm], action: drop, why: x")),
        ("headless.yaml", RULES.format("[head], action: drop, why: x")),
        ("int2.yaml", "extends: int4-channel\nname: int2\nweights: {dtype: int2}\n"),
    ):
        (here / name).write_text(content, encoding="utf-8")
    (here / "utf16.jsonl").write_text("".join(lines[:4]), encoding="utf-16")
    (here / "prompts.jsonl.gz").write_bytes(gzip.compress("".join(lines[:4]).encode()))
    before = Path.cwd()
    os.chdir(here)
    try:
        record = "record --target target --draft draft --prompts prompts.jsonl --out traces"
        assert main([*record.split(), "--max-new-tokens", "32"]) == 0
        assert main(["quantize", "draft", "--recipe", "h200", "--out", "quant"]) == 0
        yield here
    finally:
        os.chdir(before)


def told(line: str, capsys: Capsys) -> tuple[int, str]:
    """The exit code of a command line, and its stderr; nothing may be on stdout."""
    try:
        code = main(shlex.split(line))
    except SystemExit as exc:
        code = int(exc.code or 0)
    output = capsys.readouterr()
    assert output.out == ""
    return code, output.err


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("about", MISTAKES)
def test_each_mistake_is_named_and_has_a_way_out(about: str, scene: Path, capsys: Capsys) -> None:
    before = sorted(path.relative_to(scene) for path in scene.rglob("*"))
    for line, problem, fix in MISTAKES[about]:
        code, said = told(line, capsys)
        assert code == 2, line
        found, _, way_out = said.partition("\n  fix: ")
        assert problem in f"{found}\n", line
        assert fix in way_out, line
        assert "[Errno" not in said, line
        assert "Traceback" not in said, line
        assert sorted(path.relative_to(scene) for path in scene.rglob("*")) == before, line


@pytest.mark.usefixtures("scene")
def test_a_full_disk_is_found_before_the_work_and_a_locked_folder_is_none(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    """Root may write everywhere, so the kernel's answer is given here."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(DISK_USAGE, lambda _: usage(10**9, 10**9 - 1000, 1000))
    assert told("quantize draft --recipe h200 --out o", capsys)[0] == 2
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    assert told("quantize draft --recipe h200 --out o", capsys)[0] == 2


@pytest.mark.usefixtures("scene")
def test_what_the_system_refuses_has_a_place_and_a_fix(monkeypatch: Patch, capsys: Capsys) -> None:
    for number in (errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO):
        error = OSError(number, os.strerror(number), "config.json")
        monkeypatch.setattr("draftquant.quantize.inspection.resolve_draft", Mock(side_effect=error))
        assert told("inspect draft", capsys)[0] == 2


@pytest.mark.usefixtures("scene")
def test_an_interrupted_run_leaves_nothing(monkeypatch: Patch, capsys: Capsys) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("draftquant.quantize.making.execute.execute", interrupt)
    before = sorted(Path.cwd().iterdir())
    code, said = told("quantize draft --recipe fp8-ptpc --out o", capsys)
    assert code == 130
    assert said == "interrupted: nothing unfinished was published\n"
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.usefixtures("scene")
def test_a_gpu_that_was_never_executed_has_no_evidence() -> None:
    assert main(["check", "quant", "--engine", "tensorrt-llm", "--gpu", "mi355x"]) == 3


@pytest.mark.usefixtures("one_thread")
def test_a_byte_order_mark_is_no_mistake(scene: Path, capsys: Capsys, tmp_path: Path) -> None:
    """Editors of Windows write one in front of UTF-8."""
    mark = b"\xef\xbb\xbf"
    weights = scene / "draft" / "model.safetensors"
    folder(tmp_path / "bom", config__json=mark + (scene / "draft" / "config.json").read_bytes(),
           model__safetensors=weights)  # fmt: skip
    prompts = tmp_path / "bom.jsonl"
    prompts.write_bytes(mark + (scene / "prompts.jsonl").read_bytes())
    recipe = tmp_path / "bom.yaml"
    recipe.write_bytes(mark + b"extends: fp8-ptpc\nname: bom\n")
    assert main(["inspect", str(tmp_path / "bom")]) == 0
    assert main(["plan", str(tmp_path / "bom"), "--recipe", str(recipe)]) == 0
    record = ["record", "--target", "target", "--draft", str(tmp_path / "bom"), "--prompts"]
    out = str(tmp_path / "traces")
    assert main([*record, str(prompts), "--out", out, "--max-new-tokens", "4", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
