"""Mistakes of people who are new here: each exits with 2, is named, and has a way out."""

import errno
import gzip
import json
import os
import shlex
import shutil
import struct
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file

PAIRS = Path(__file__).parent / "pairs"
DISK_USAGE = "draftquant.quantize.files.staging.shutil.disk_usage"


class Mistake(NamedTuple):
    """A command line, what is said of it, the way out, and the exit code."""

    line: str
    says: str
    fix: str
    code: int = 2


MISTAKES = {
    "commands and flags": (
        Mistake("serve draft", "no command 'serve'", "see 'draftquant help'"),
        Mistake("--verison", "no option --verison", "did you mean --version?"),
        Mistake("traces", "missing: VERB", "draftquant traces info ./gate-traces"),
        Mistake("plan draft", "missing: --recipe", "draftquant plan ./draft --recipe fp8-ptpc"),
        Mistake("quantize draft --recipe h200", "missing: --out", "--out ./draft-fp8"),
        Mistake("verify quant draft", "and --against is missing", "verify quant --against draft"),
        Mistake("check draft", "--engine: is missing", "--engine vllm (or sglang"),
        Mistake("check quant --engine vllm --tp two", "a whole number, got 'two'", "--tp 4"),
        Mistake("quantize draft --gpu h200", "no option --gpu", "did you mean --recipe?"),
        Mistake("gate a b --threshold 1", "no option", "did you mean --max-relative-drop?"),
        Mistake("estimate draft --tp 0", "8 attention heads evenly, got 0", "a divisor of 8"),
        Mistake("estimate draft --gpu h1000", "h1000", "did you mean h100"),
        Mistake("estimate draft --efficiency 2", "a share in (0, 1], got 2.0", ""),
        Mistake("vocab d --traces t --curve --concurrency 1:2", "with commas between", "--help"),
        Mistake("clean . --older-than tomorrow", "expected hours, such as 24", "clean --help"),
    ),
    "recipes": (
        Mistake("quantize draft --recipe w4a8 --out o", "no built-in", "whose inputs are FP8"),
        Mistake("quantize draft --recipe INT8 --out o", "no built-in", "has no INT8"),
        Mistake("quantize draft --recipe NVFP4 --out o", "a static scale", "pass --traces"),
        Mistake("quantize draft --recipe B300 --out o", "no built-in", "fp8-mla', as on b200"),
        Mistake("quantize draft --recipe bare.yaml --out o", "bare.yaml:1: name: it is missing",
                "add 'name: bare'"),
        Mistake("quantize draft --recipe on.yaml --out o", "on.yaml:2: name: expected text, got on",
                "quote it ('on'): YAML reads on as true"),
        Mistake("quantize draft --recipe draft --out o", "is a folder, not a recipe", "use one of"),
        Mistake("quantize draft --recipe nope.yaml --out o", "no such recipe file", "the path"),
        Mistake("quantize draft --recipe int8.yaml --out o",
                "expected one of 'int4', 'fp8_e4m3', 'nvfp4', 'mxfp4', got 'int8'",
                "write fp8_e4m3, which has the same size: draftquant has no INT8"),
        Mistake("quantize draft --recipe h200 --algorithm gtpq --out o", "'gtpq'", "'gptq'?"),
        Mistake(
            "quantize draft --recipe blackwell-nvfp4 --backend torch --out o",
            "so each linear needs a static scale of its input. Missing: midlayer.mlp.down_proj,"
            " midlayer.mlp.gate_proj, midlayer.mlp.up_proj and 4 more\n",
            "fp8-ptpc",
        ),
        Mistake("plan draft --recipe NVFP4 --input-correction on", "of auto, off, got 'on'", "--h"),
        Mistake("plan draft --recipe NVFP4 --input-correction auto", "nothing of the inputs",
                "leave it out, or use --algorithm gptq"),
    ),
    "drafts": (
        Mistake("inspect drfat", "drfat: no such folder", "did you mean draft?"),
        Mistake("inspect models--me--draft", "is a folder of the Hub's cache",
                "give me/draft, or models--me--draft/snapshots/123abc"),
        Mistake("inspect https://huggingface.co/me/draft", "is a web address", "id: me/draft"),
        Mistake("inspect me/draft:main", "and no Hub id", "behind @: me/draft@main"),
        Mistake("inspect ''", "DRAFT: expected a path or a name, got an empty text",
                "a variable of the shell that is not set"),
        Mistake("inspect nofc", "1 tensor(s) of eagle3-llama are missing: fc.weight",
                "export the draft again, with all of its tensors\n"),
        Mistake("inspect parent", "1 folder(s) in it have", "did you mean parent/draft?"),
        Mistake("inspect draft/model.safetensors", "is a file, not a draft", "folder: draft"),
        Mistake("inspect gguf", "holds GGUF of llama.cpp", "folder of safetensors"),
        Mistake("inspect lora", "is an adapter (LoRA), not a draft", "merge it"),
        Mistake("inspect empty", "config.json: no such file", "draft's config.json into empty"),
        Mistake("inspect noweights", "no safetensors file", "download the weights too"),
        Mistake("inspect misspelt", "hidden_size: missing key", "rename 'hiden_size'"),
        Mistake("inspect traces", "is a trace folder, not a draft", "behind --traces"),
        Mistake("quantize quant --recipe h200 --out o", "got F8_E4M3", "the floating-point draft"),
        Mistake("verify draft --against quant", "but this one is quantized",
                "in the wrong order? Then run draftquant verify quant --against draft"),
        Mistake("inspect noarch", "expected a list of one name, got no such key",
                "set architectures to LlamaForCausalLMEagle3, whose tensors these are\n"),
        Mistake("inspect own", "no supported draft family has 'MyOwnDraft': it is an EAGLE draft",
                "; or set architectures to LlamaForCausalLMEagle3, whose tensors these are, if"),
        Mistake("inspect zerobytes", "the file is empty (0 bytes)", "download or export the file"),
        Mistake("inspect comma", "a comma before the closing }, which JSON does not allow (line 3,",
                "correct it"),
    ),
    "outputs": (
        Mistake("quantize draft --recipe h200 --out none/o", "does not exist", "mkdir -p"),
        Mistake("quantize draft --recipe h200 --out prompts.jsonl/o", "is a file", "in a folder"),
        Mistake("quantize draft --recipe h200 --out /proc/o", "is not on a disk", "another pl"),
        Mistake("clean nowhere", "no such folder", "the parent of outputs"),
    ),
    "prompts and traces": (
        Mistake("record --target target --prompts prompts.jsonl", "--out: exp", "--out FOLDER"),
        Mistake("record --target meta-llama/Nope --prompts prompts.jsonl --out o", "no such",
                "hf download meta-llama/Nope --local-dir T, then --target T"),
        Mistake("record --target target --draft draft --prompts prompts.jsonl --out o"
                " --max-new-tokens 500", "prompts.jsonl: 4 of 4 do not fit", "--too-long skip"),
        Mistake("record --target draft --draft draft --prompts prompts.jsonl --out o",
                "it reads layer 1, the target has layers 0 to 0", "or leave --draft out"),
        Mistake("record --target target --prompts prompts.jsonl --out o", "default aux layers",
                "record --draft"),
        Mistake("record --target target --draft draft --prompts empty.jsonl --out o",
                "holds no prompt", 'one prompt per line: {"id"'),
        Mistake("record --target target --draft draft --prompts list.json --out o",
                "list.json: it is one JSON list, not JSON lines\n",
                "jq -c '.[]' list.json > NEW.jsonl"),
        Mistake("record --target target --draft draft --prompts utf16.jsonl --out o",
                "it is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8 utf16.jsonl > NEW.jsonl"),
        Mistake("record --target target --draft draft --prompts prompts.jsonl.gz --out o",
                "it is compressed by gzip", "unpack it: gunzip -k prompts.jsonl.gz"),
        Mistake("record --target target --draft draft --prompts query.jsonl --out o",
                "unknown key 'query'", "the prompt: --prompts-column query"),
        Mistake("record --target target --draft draft --prompts prompt.jsonl --out o",
                "cannot be read: No such file", "did you mean prompts.jsonl?"),
        Mistake("record --target target --draft draft --prompts prompts.jsonl --out o"
                " --aux-layers 1,99,3", "ascending ids in [0, 4)", "0-based layers"),
        Mistake("record --target target --draft draft --prompts prompts.jsonl --out o"
                " --temperature hot", "expected a number, got 'hot'", "--temperature 0.5"),
        Mistake("record --target target --draft draft --prompts prompts.jsonl --out o"
                " --server http://localhost:1", "belongs to vLLM", "add --engine vllm"),
        Mistake("replay draft", "missing: --traces", "--traces ./gate-traces -k 3"),
        Mistake("replay draft --traces none", "none: no such folder", "draftquant record"),
        Mistake("quantize draft --recipe int4-channel-gptq --traces traces --device gpu --out o",
                "got 'gpu'", "give one of these"),
        Mistake("traces split traces --out a b --fraction 2", "in (0, 1), got 2.0", "the share"),
    ),
    "gate and servers": (
        Mistake("gate draft quant", "got no --traces", "add --traces T (draftquant record"),
        Mistake("gate draft quant --traces traces --policy relase", "'relase'", "mean release?"),
        Mistake("gate draft quant --traces traces --look 3", "expected i/n", "as 2/3"),
        Mistake("measure", "--server: is needed", "--show MEASUREMENT"),
        Mistake("measure --server localhost:80 --engine vllm --prompts prompts.jsonl --out m",
                "expected an address", "http://HOST:PORT"),
        Mistake("parity tasks a b", "a: no such file or folder", "lm_eval"),
    ),
}  # fmt: skip


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
    text = config.read_text(encoding="utf-8")
    declared = json.loads(text)
    own = declared | {"architectures": ["MyOwnDraft"]}
    for name, content in (
        ("own", json.dumps(own)),
        ("noarch", json.dumps({k: v for k, v in declared.items() if k != "architectures"})),
        ("comma", '{\n"architectures": [],\n}'),
    ):
        folder(here / name, config__json=content, model__safetensors=weights)
    folder(here / "zerobytes", config__json=config, model__safetensors=b"")
    for name, content in (
        ("prompts.jsonl", "".join(lines[:4])),
        ("empty.jsonl", ""),
        ("list.json", json.dumps([{"text": "hello"}], indent=2)),
        ("query.jsonl", '{"query": "hello"}\n'),
        ("bare.yaml", "extends: fp8-ptpc\n"),
        ("on.yaml", "extends: fp8-ptpc\nname: on\n"),
        ("int8.yaml", "extends: int4-channel\nname: int8\nweights: {dtype: int8}\n"),
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


def told(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
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
def test_each_mistake_is_named_and_has_a_way_out(
    about: str, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.relative_to(scene) for path in scene.rglob("*"))
    for mistake in MISTAKES[about]:
        code, said = told(mistake.line, capsys)
        assert code == mistake.code, mistake
        problem, _, fix = said.partition("\n  fix: ")
        assert mistake.says in f"{problem}\n", mistake
        assert mistake.fix in fix, mistake
        assert "[Errno" not in said, mistake
        assert "Traceback" not in said, mistake
        assert sorted(path.relative_to(scene) for path in scene.rglob("*")) == before, mistake


@pytest.mark.usefixtures("scene")
def test_a_full_disk_is_found_before_the_work_and_a_locked_folder_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write everywhere, so the kernel's answer is given here."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(DISK_USAGE, lambda _: usage(10**9, 10**9 - 1000, 1000))
    code, said = told("quantize draft --recipe h200 --out o", capsys)
    assert code == 2
    assert "has 1,000 free\n  fix: free some space, or write to another disk" in said
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    code, said = told("quantize draft --recipe h200 --out o", capsys)
    assert code == 2
    assert "is not writable\n  fix: choose another place" in said
    assert "free" not in said


@pytest.mark.usefixtures("scene")
def test_what_the_system_refuses_has_a_place_and_a_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, fix in (
        (errno.EACCES, "change its permissions"), (errno.ENOSPC, "free some space"),
        (errno.EROFS, "this one is read-only"), (errno.EIO, "see what the system says"),
    ):  # fmt: skip
        refusal = OSError(number, os.strerror(number), "config.json")
        monkeypatch.setattr(
            "draftquant.quantize.inspection.resolve_draft", Mock(side_effect=refusal)
        )
        code, said = told("inspect draft", capsys)
        assert code == 2
        assert said.startswith(f"error: config.json: {os.strerror(number)}\n  fix: ")
        assert fix in said


@pytest.mark.usefixtures("scene")
def test_an_interrupted_run_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("draftquant.quantize.making.execute.execute", interrupt)
    before = sorted(Path.cwd().iterdir())
    code, said = told("quantize draft --recipe fp8-ptpc --out o", capsys)
    assert code == 130
    assert said == "interrupted: nothing unfinished was published\n"
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.usefixtures("scene")
def test_a_gpu_that_was_never_executed_has_no_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quant", "--engine", "tensorrt-llm", "--gpu", "mi355x"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "was never executed on MI355X (gfx950)" in said
    assert "or take vLLM 0.33.0 or SGLang 0.5.23, whose loading was executed for MI355X" in said
    assert "how this is known" not in said


@pytest.mark.usefixtures("one_thread")
def test_a_byte_order_mark_is_no_mistake(
    scene: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
