"""Commands in the order in which a user gives them; what each says is kept (told.py).

They are those whose lines no other everyday test runs: rare options, and what is said of them.
"""

import json
import shutil
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import draftquant.api as dq
import pyarrow.parquet
import pytest
from draftquant.scripts.cli import main
from handmade_reports import comparison, text_of
from said_traces import write_said
from tiny import edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from tiny_dspark import tiny_dspark, tiny_dspark_mla
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import tiny_deepseek_mtp, tiny_mimo_mtp, tiny_qwen3_next_mtp, tiny_step3p5_mtp
from verify_cases import Tensors, edit

Make = Callable[[Path], Path]
PAIR = corpus.PAIRS / "eagle3-llama"
QUERY = "midlayer.self_attn.q_proj.weight"
LAYERS, TARGET = "--aux-layers 0,1,2", f"record --target {PAIR}/target"
RECORD = f"{TARGET} --prompts {PAIR}/prompts.jsonl --num-prompts 3 --max-new-tokens 6"
PLAIN = f"{RECORD} {LAYERS}"
WORDS = {"pair": PAIR, "layers": LAYERS, "target": TARGET, "record": RECORD, "plain": PLAIN}


def static(_: Path) -> Path:
    return corpus.quantized("eagle3-llama", "blackwell-fp8", pair=True, measured=True)


def damaged(work: Path) -> Path:
    folder = shutil.copytree(static(work), work / "damaged")
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b"down_proj.input_scale", b"down_proj.input_scalf"))
    return folder


def said(work: Path) -> Path:
    tiny_eagle3_llama(work / "draft")
    for number, name in enumerate(("said", "again", "other")):
        write_said(work / name, prompts=24, seed=number // 2, categories=("chat", "code"))
    return work / "said"


def others(work: Path) -> Path:
    """Quantized drafts without a record, of another config or shape."""
    tiny_eagle3_llama(work / "bf16-eps", config={"rms_norm_eps": 1, "max_position_embeddings": 16})
    tiny_eagle3_llama(work / "bf16-wide", intermediate=128)
    for name in ("eps", "wide"):
        dq.quantize(work / f"bf16-{name}", "fp8-ptpc", work / name)
        (work / name / "draftquant.json").unlink()
    return said(work)


def thirteen(work: Path) -> Path:
    for number in range(13):
        tiny_eagle3_llama(work / f"d{number:02}", seed=number)
    write_said(work / "said", prompts=24, categories=("chat", "code"))
    return work


def halves(work: Path) -> Path:
    """The embedding's half of what the attention reads is far smaller than the other."""
    draft = tiny_eagle3_llama(work / "draft")

    def smaller(tensors: Tensors) -> None:
        values = values_of(tensors[QUERY]).copy()
        values[:, : values.shape[1] // 2] *= 0.01
        tensors[QUERY] = store(values, "BF16")

    edit(draft, smaller)
    return draft


def judged(work: Path) -> Path:
    (work / "g.json").write_text(text_of(comparison("FAIL", categories="ab")), encoding="utf-8")
    return work / "g.json"


def prompts(work: Path) -> Path:
    """Files of prompts in other forms, each of which is refused for another reason."""
    row = {"question_id": "q", "category": "math", "turns": ["x = 1"]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), work / "p.parquet")
    (work / "p.csv").write_text("a,b\n")
    long = {"id": "a", "category": "c", "token_ids": [1] * 600}
    (work / "long.jsonl").write_text(json.dumps(long))
    return corpus.traces("eagle3-llama")


def renamed(work: Path) -> Path:
    packed(work)
    edit_json(shutil.copytree(PAIR / "target", work / "other") / "config.json", bos_token_id=1)
    return work / "other"


def packed(work: Path) -> Path:
    (work / "traces").symlink_to(corpus.traces("eagle3-llama"))
    return corpus.quantized("eagle3-llama", "int4-channel", pair=True)


def edited(build: Make, *, without: str = "", **config: Any) -> Make:
    """A draft whose config.json says otherwise, or whose tensors' names lack a part."""

    def made(work: Path) -> Path:
        folder = build(work / "draft")
        edit_json(folder / "config.json", **config)
        own = read_tensors(folder)
        write_tensors(folder, {name.replace(without, ""): own[name] for name in own})
        return folder

    return made


MADE: dict[str, Make] = {make.__name__: make for make in (
    static, damaged, said, others, thirteen, halves, judged, prompts, renamed, packed,
)} | {
    "DSpark with ModelOpt's names": edited(tiny_dspark, without="markov_head."),
    "MLA by another type": edited(tiny_dspark_mla, model_type="kimi_k2"),
    "a layer of another number": edited(tiny_deepseek_mtp, num_hidden_layers=7),
    "a correction that is not declared": edited(tiny_deepseek_mtp, topk_method=None),
    "modules without the embedding": edited(partial(tiny_step3p5_mtp, tables=False)),
    "heads of a width of their own": edited(
        partial(tiny_mimo_mtp, head_dim=32), model_type="qwen2"),
    "no experts": edited(partial(tiny_qwen3_next_mtp, experts=0),
                         architectures=["Qwen3NextForCausalLM"]),
    "all that fits": edited(tiny_eagle3_mla),
    "what a block drafts": edited(tiny_dspark),
    "what GPUs cannot share": edited(partial(tiny_eagle3_llama, hidden=96, heads=6, kv_heads=3)),
    "codes that are declared alone": edited(
        tiny_eagle3_llama,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
}  # fmt: skip
"""What writes the folder `{0}` of a scene, by the name that it has there, or by the scene's."""
SCENES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("scenes.toml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SCENES)
def test_a_scene(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = MADE.get(SCENES[name].get("make", name), Path)(tmp_path)
    for line in SCENES[name]["commands"].split("\n"):
        if line:
            main(line.format(made, **WORDS).split())
