"""Commands in the order in which a user gives them; what each says is kept (told.py).

They are those whose lines no other everyday test runs: rare options, and what is said of them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import corpus
import pyarrow as pa
import pyarrow.parquet
import pytest
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import tiny_eagle3_llama

PAIR = corpus.PAIRS / "eagle3-llama"
PROMPTS = PAIR / "prompts.jsonl"
RECORD = f"record --target {PAIR}/target --prompts {PROMPTS} --num-prompts 3 --max-new-tokens 6"
PLAIN = f"{RECORD} --aux-layers 0,1,2"
OTHERS = f"record --target {PAIR}/target --aux-layers 0,1,2"


def static(_: Path) -> Path:
    return corpus.quantized("eagle3-llama", "blackwell-fp8", pair=True, measured=True)


def damaged(work: Path) -> Path:
    folder = shutil.copytree(static(work), work / "damaged")
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b"down_proj.input_scale", b"down_proj.input_scalf"))
    return folder


def said(work: Path) -> Path:
    tiny_eagle3_llama(work / "draft")
    write_said(work / "said", prompts=24, categories=("chat", "code"))
    return work / "said"


def prompts(work: Path) -> Path:
    """Files of prompts in other forms, each of which is refused for another reason."""
    table = pa.Table.from_pylist([{"question_id": "q", "category": "math", "turns": ["x = 1"]}])
    pa.parquet.write_table(table, work / "p.parquet")
    (work / "p.csv").write_text("a,b\n")
    long = {"id": "a", "category": "c", "token_ids": [1] * 600}
    (work / "long.jsonl").write_text(json.dumps(long))
    return corpus.traces("eagle3-llama")


def packed(work: Path) -> Path:
    (work / "traces").symlink_to(corpus.traces("eagle3-llama"))
    return corpus.quantized("eagle3-llama", "int4-channel", pair=True)


SCENES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a draft with static scales": (static, "inspect {0}"),
    "a tensor of a name that nobody reads": (damaged, "inspect {0}"),
    "a curve by category": (said, "vocab {0}/../draft --traces {0} --curve --sizes 12,24 -k 2"),
    "sampled": (Path, f"{PLAIN} --temperature 0.7 --top-logprobs 3 --out s\ntraces info s\n"
                      f"{PLAIN} --out t\ntraces merge t s --out both"),
    "together": (Path, f"{PLAIN} --tables --out a\n{PLAIN.replace('6', '5', 1)} --out b\n"
                       "traces merge a b --out both\ntraces info both\ntraces info a"),
    "nothing is listed": (Path, "recipes list --engine tensorrt-llm --gpu mi325x\n"
                                "recipes list --engine tensorrt-llm --family mimo-mtp"),
    "what is no prompt": (prompts, "\n".join(f"{OTHERS} --out o --prompts {asked}" for asked in (
        "p.parquet", "p.parquet --prompts-column a", "p.csv", "{0}", "long.jsonl --too-long skip",
        "long.jsonl --max-new-tokens 512"))),
    "made of what was made": (packed, (
        f"dequantize {{0}} --out plain\nverify plain --against {PAIR}/draft\n"
        "vocab plain --traces traces --size 64 --out o\nquantize plain --recipe fp8-ptpc --out o\n"
        f"verify {{0}} --against {PAIR}/draft --layer plain\n"
        "transcode {0} --layout compressed-tensors --carrier fp8_e4m3 --out carried")),
    "beside a draft": (Path, f"{RECORD} --draft {PAIR}/draft --fused --out a\n"
                             f"replay {PAIR}/draft --traces a"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_a_scene(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, commands = SCENES[name]
    made = make(tmp_path)
    for line in commands.splitlines():
        main(line.format(made).split())
