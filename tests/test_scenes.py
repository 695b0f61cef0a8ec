"""Commands in the order in which a user gives them; what each says is kept (told.py).

They are those whose lines no other everyday test runs: rare options, and what is said of them.
"""

import json
import shutil
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
TARGET, LAYERS = f"record --target {PAIR}/target", "--aux-layers 0,1,2"
RECORD = f"{TARGET} --prompts {PAIR}/prompts.jsonl --num-prompts 3 --max-new-tokens 6"
PLAIN, OTHERS = f"{RECORD} {LAYERS}", f"{TARGET} {LAYERS}"
CONTINUED = f"{LAYERS} --continue --num-prompts 1 --max-new-tokens 2"


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
    tiny_eagle3_llama(work / "bf16-eps", config={"rms_norm_eps": 0.001})
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


IN_VLLM, IN_SGLANG = "check {0} --engine vllm", "check {0} --engine sglang"
SCENES: dict[str, tuple[Make, str]] = {
    "a draft with static scales": (static, "inspect {0}"),
    "a tensor of a name that nobody reads": (damaged, "inspect {0}"),
    "a curve by category": (said, "vocab draft --traces {0} --judge other --curve --sizes 12,24"
                                  " -k 2 --plot curve.svg"),
    "a curve that its own prompts judge": (said, "vocab draft --traces {0} --judge again --curve"
                                                 " --sizes 12 -k 2"),
    "a curve of a quantized draft": (said, "quantize draft --recipe int4-channel --out q\n"
                                           "vocab q --traces {0} --curve --sizes 12 -k 2"),
    "calibrated on what judges": (said, "quantize draft --recipe int4-channel-gptq --traces {0}"
                                        " --out q\ngate draft q --traces again -k 2"),
    "more rows than asked": (said, "vocab draft --traces {0} --coverage 0.999 --out cut"),
    "golden": (said, "replay draft --traces {0} -k 2 --golden g.json\ngolden g.json\n"
                     "golden g.json --for sglang --category code"),
    "candidates of another config": (others, "gate draft eps --traces {0} -k 2\n"
                                             "gate draft wide --traces {0} -k 2"),
    "many": (thirteen, "compare" + "".join(f" d{number:02}" for number in range(13))
                       + " --traces said -k 2 --html c.html --plot c.svg"),
    "halves": (halves, "inspect {0}\nestimate {0} --recipe fp8-ptpc --recipe blackwell-fp8-mla"),
    "a report in words": (judged, "report {0}"),
    "a card elsewhere": (static, "card {0} --base-model a/b --license mit --out . --overwrite"),
    "sampled": (Path, f"{PLAIN} --temperature 0.7 --top-logprobs 3 --out s\ntraces info s\n"
                      f"{PLAIN} --out t\ntraces merge t s --out both"),
    "sampled from some": (Path, f"{RECORD} --draft {PAIR}/draft --temperature 0.7 --top-p 0.9"
                                f" --top-k 40 --out s\nreplay {PAIR}/draft --traces s"),
    "together": (Path, f"{PLAIN} --tables --out a\n{PLAIN.replace('6', '5', 1)} --out b\n"
                       "traces merge a b --out both\ntraces info both\ntraces info a"),
    "nothing is listed": (Path, "recipes list --engine tensorrt-llm --gpu mi325x\n"
                                "recipes list --engine tensorrt-llm --family mimo-mtp"),
    "what is no prompt": (prompts, "\n".join(f"{OTHERS} --out o --prompts {asked}" for asked in (
        "p.parquet", "p.parquet --prompts-column a", "p.csv", "{0}", "long.jsonl --too-long skip",
        "long.jsonl --max-new-tokens 512"))),
    "made of what was made": (packed, (
        f"dequantize {{0}} --out plain --dtype bfloat16\nverify plain --against {PAIR}/draft\n"
        "vocab plain --traces traces --size 64 --out o\nquantize plain --recipe fp8-ptpc --out o\n"
        f"verify {{0}} --against {PAIR}/draft --layer plain\n"
        "transcode {0} --layout compressed-tensors --carrier fp8_e4m3 --out carried")),
    "DSpark with ModelOpt's names": (
        edited(tiny_dspark, without="markov_head."), f"{IN_VLLM}\n{IN_SGLANG}"),
    "MLA by another type": (edited(tiny_dspark_mla, model_type="kimi_k2"), IN_VLLM),
    "a layer of another number": (edited(tiny_deepseek_mtp, num_hidden_layers=7), IN_VLLM),
    "a correction that is not declared": (edited(tiny_deepseek_mtp, topk_method=None), IN_VLLM),
    "modules without the embedding": (edited(partial(tiny_step3p5_mtp, tables=False)), IN_VLLM),
    "heads of a width of their own": (
        edited(partial(tiny_mimo_mtp, head_dim=32), model_type="qwen2"), IN_VLLM),
    "no experts": (edited(partial(tiny_qwen3_next_mtp, experts=0),
                          architectures=["Qwen3NextForCausalLM"]), IN_SGLANG),
    "all that fits": (edited(tiny_eagle3_mla), "estimate {0} --gpu h200 -k 2"),
    "what a block drafts": (edited(tiny_dspark), "estimate {0} --gpu h200"),
    "what GPUs cannot share": (edited(partial(tiny_eagle3_llama, hidden=96, heads=6, kv_heads=3)),
                               f"{IN_VLLM} --tp 2\n{IN_VLLM} --tp 3"),
    "codes that are declared alone": (
        edited(tiny_eagle3_llama,
               quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
        "dequantize {0} --out o\ntranscode {0} --layout quark --out o"),
    "another target": (renamed, f"record --target {{0}} {CONTINUED} --prompts traces --out b"),
    "options of replays": (said, (
        "quantize draft --recipe fp8-ptpc --out q\nreplay draft --traces {0} -k 2 --no-cache"
        " --batch-size 3 --golden g.json\n"
        "replay q --traces {0} -k 2 --draft-sampling greedy --golden g.json --overwrite\n"
        "compare draft q --traces {0} -k 2 --confidence 0.8 --batch-size 3 --no-cache"
        " --draft-sampling greedy --report c.json\ncompare draft q --traces {0} -k 2"
        " --report c.json --overwrite\nreport c.json")),
    "options of a gate": (said, (
        "quantize draft --recipe int4-channel --out q\ngate draft q --traces {0} -k 2 --min-prompts"
        " 9 --confidence 0.7 --max-relative-drop 0.5 --draft-sampling greedy"
        " --batch-size 5 --report g.json --junit g.xml --junit-inconclusive skipped\n"
        "gate draft q --traces {0} -k 2 --every-category-passes --expect-baseline 1.5 --report"
        " g.json --markdown g.md --overwrite\n"
        "gate draft q --traces {0} -k 2 --report h.json --no-cache\nreport h.json --markdown"
        " h.md --junit h.xml --junit-inconclusive skipped\n"
        "card q --gate h.json --name a/b --overwrite")),
    "options of a head's rows": (said, (
        "vocab draft --traces {0} --judge other --curve --sizes 12,24 -k 2 --batch-size 5"
        " --concurrency 1,3 --gpu h200 --target-step-ms 9 --draft-sampling greedy\n"
        "quantize draft --recipe fp8-ptpc --vocab-size 24 --traces {0} --out cut\ninspect cut")),
    "options of traces": (Path, (
        f"{OTHERS} --prompts {PAIR}/prompts.jsonl --num-prompts 3 --prompts-seed 7 --max-new-tokens"
        " 6 --batch-size 2 --fixed-batches --device cpu --ignore-eos --feature-storage zstd"
        " --tables --table-ids 1,2,3 --top-logprobs 2 --out a\ntraces info a\n"
        f"{RECORD} {LAYERS} --feature-storage fp8-per-token --temperature 0.7 --top-k 5 --seed 3"
        " --logprobs --out b\ntraces info b")),
    "options about layers": (said, (
        "estimate draft --recipe fp8-ptpc --gpu h200 --concurrency 3 --context 77 -k 5 --tp 2"
        " --efficiency 0.5 --target-step-ms 9 --target-layers 9\nplan draft --recipe mi325x-w4a8"
        " --target-layers 9\nquantize draft --recipe mi325x-w4a8 --target-layers 9 --kv-cache"
        " unit --out w\ncheck w --engine vllm --gpu mi325x --target-layers 9 --tp 2\n"
        "transcode w --layout compressed-tensors --target-layers 9 --out x\n"
        "dequantize w --dtype float32 --out y\ninspect y\nverify w --against draft --target"
        " draft")),
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
