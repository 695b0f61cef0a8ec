"""Commands in the order in which a user gives them; what each says is kept (told.py).

They are those whose lines no other everyday test runs: rare options, and what is said of them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import corpus
import draftquant.api as dq
import pytest
from draftquant.scripts.cli import main
from handmade_reports import comparison, text_of
from said_traces import write_said
from tiny import store, tiny_eagle3_llama, values_of
from verify_cases import Tensors, edit

PAIR = corpus.PAIRS / "eagle3-llama"
PROMPTS = PAIR / "prompts.jsonl"
QUERY = "midlayer.self_attn.q_proj.weight"
RECORD = f"record --target {PAIR}/target --prompts {PROMPTS} --num-prompts 3 --max-new-tokens 6"
PLAIN = f"{RECORD} --aux-layers 0,1,2"


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


SCENES: dict[str, tuple[Callable[[Path], Path], str]] = {
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
