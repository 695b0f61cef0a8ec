"""What engines answer to `draftquant check --ask`, for every recipe and family.

`experiments/run asked PYTHON` asks the vLLM of an environment on this machine's CPU, with its
kernels; `PYTHON:ENGINE:ARCH` its engine on a faked GPU, without kernels (the Python sources of a
wheel for CUDA are enough, found before the packages that `setup` installs). Rows of the same
engine, version and device are replaced in asked.json, and ASKED.md is written anew.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
INSIDE = HERE.parents[1] / "quantize" / "asking"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from cases import FAMILIES, Case, Workshop, recipe_cases  # noqa: E402
from data_free import DATA_FREE, data_free  # noqa: E402
from draftquant.quantize.asked import Checking  # noqa: E402
from draftquant.quantize.asking.ask import DraftQuestion  # noqa: E402
from draftquant.quantize.asking.asked_check import AskedCheck  # noqa: E402
from draftquant.quantize.asking.child_process import REQUEST, read_answer  # noqa: E402
from draftquant.recipes import DraftQuantError, load_recipe  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

RESULTS, PAGE = HERE / "asked.json", HERE / "ASKED.md"
Row = dict[str, Any]
LIKE_NO_OTHER = ("mi355-w4a8-gptq", "int4-channel-gptq-head", "int4-group128-gptq-head")
RECIPES = [data_free(load_recipe(name)) for name in (*DATA_FREE, *LIKE_NO_OTHER)]
"""Others store the same tensors in the same formats."""

_FORKING = """
import importlib, os, sys
sys.path[:0] = {paths!r}
from inside import answer
import torch
torch.set_num_threads(1)
engine = importlib.import_module("inside.in_" + {engine!r})
os.environ.update(engine.ENVIRONMENT)
if {arch!r}:
    import fakes
    fakes.install(engine, {arch!r})
for name in ("inside.loaded_model", "inside.running", "safetensors.torch", *engine.NEEDED):
    importlib.import_module(name)
if {engine!r} == "vllm":  # which looks at each class in a process of its own: a minute
    import vllm.model_executor.models.registry as registry
    registry._run_in_subprocess = lambda function: function()
sys.stdout.flush()
for request in sys.argv[1:]:
    if os.fork() == 0:  # engines cache configs and change classes: each draft starts afresh
        try:
            if "plugin" in request:
                importlib.import_module("plugins." + {engine!r}).register()
            answer.main(request)
        finally:
            os._exit(0)
    os.wait()
"""


class Asked(NamedTuple):
    """One question: what the engine is given, and the folder by which its linears are judged."""

    kind: str
    name: str
    given: Path
    judged_by: Path


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("asked", nargs="+", metavar="PYTHON[:ENGINE:ARCH]")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text("utf-8"))
    rows: list[Row] = [{**row, "draft": draft} for row in kept for draft in row.pop("drafts")]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        cases = recipe_cases(Workshop(work), given.families, RECIPES)
        for asked in given.asked:
            python, engine, arch = [*asked.split(":"), "vllm", ""][:3]
            new = list(asked_rows(work, cases, python, engine, arch))
            mine = {key_of(row) for row in new}
            rows = [row for row in rows if key_of(row) not in mine] + new
            write(rows)
    return 0


def key_of(row: Row) -> tuple[str, str, str]:
    return row["engine"], row["version"], row["device"]


def asked_rows(
    work: Path, cases: Sequence[Case], python: str, engine: str, arch: str
) -> Iterator[Row]:
    """A row for each recipe and family, for the plugin, and for each folder that is broken."""
    folders = {case.name: work / case.name for case in cases}
    questions = [Asked("recipe", name, folder, folder) for name, folder in folders.items()]
    plain = [each for each in questions if each.name.endswith("--mi325x-w4a8")]
    questions += [each._replace(kind="plugin") for each in plain]
    questions += [] if arch else [broken(work, name) for name in BROKEN]
    for asked, found in zip(questions, ask_all(engine, python, arch, questions), strict=True):
        wrong = [each.sentence for each in found.linears if not each.is_right]
        yield {
            "engine": found.engine, "version": found.version, "device": found.device,
            "draft": asked.name, "kind": asked.kind,
            "verdict": found.verdict, "stage": found.stage,
            "error": found.error and re.sub(rf"/\S*?/(?={found.engine}/)", "", found.error),
            "linears": len(found.linears), "not_run": sorted(set((found.not_run or {}).values())),
            "largest": round(max((each.error for each in found.linears), default=0.0), 5),
            "format": sorted({each.format for each in found.linears}),
            "wrong": [*found.unloaded, *found.unread, *found.cast, *found.merged, *wrong],
        }  # fmt: skip


def ask_all(
    engine: str, python: str, arch: str, questions: Sequence[Asked]
) -> Iterator[AskedCheck]:
    """The engine's answers, all of one process that imports it once."""
    paths = [str(INSIDE), str(HERE), str(INSIDE.parent)]
    code = _FORKING.format(paths=paths, engine=engine, arch=arch)
    with tempfile.TemporaryDirectory() as temporary:
        works = [Path(temporary) / f"{i}-{each.kind}" for i, each in enumerate(questions)]
        for each, work in zip(questions, works, strict=True):
            work.mkdir()
            DraftQuestion.of(Checking(each.given, engine)).write(work)
        command = [python, "-c", code, *(str(work / REQUEST) for work in works)]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        print(f"{python} {engine} {arch}: status {done.returncode}", file=sys.stderr)
        for each, work in zip(questions, works, strict=True):
            judge = DraftQuestion.of(Checking(each.judged_by, engine))
            try:
                yield judge.judged(read_answer(work), work, python=python, seconds=0)
            except DraftQuantError:
                print(done.stderr[-4000:], file=sys.stderr)
                raise


# ---- Broken folders: what the engine is given is not what the judge reads


def _exchange(tensors: Any, one: str, other: str, *leaves: str) -> None:
    for leaf in leaves:
        tensors[one + leaf], tensors[other + leaf] = tensors[other + leaf], tensors[one + leaf]


def _swap(packed: torch.Tensor) -> None:
    codes = packed.view(torch.uint8)
    codes.copy_((codes << 4) | (codes >> 4))


def _transpose(weight: torch.Tensor) -> None:
    square = weight.view(torch.uint8)[:, : len(weight)]
    square.copy_(square.T.clone())


K, V, O = (f"midlayer.self_attn.{name}_proj.weight" for name in "kvo")  # noqa: E741
GATE, UP, DOWN = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
OF_INT4 = ("nibbles of k_proj swapped", "groups of 64 declared")
BROKEN: dict[str, Callable[[Any, Any], object]] = {
    "nibbles of k_proj swapped": lambda t, _: _swap(t[f"{K}_packed"]),
    "scales of up_proj times 2": lambda t, _: t[f"{UP}_scale"].mul_(2),
    "one scale of up_proj times 2": lambda t, _: t[f"{UP}_scale"][7].mul_(2),
    "scales of gate_proj and up_proj exchanged": lambda t, _: _exchange(t, GATE, UP, "_scale"),
    "k_proj and v_proj exchanged": lambda t, _: _exchange(t, K, V, "", "_scale"),
    "the square part of o_proj transposed": lambda t, _: _transpose(t[O]),
    "signs of one row of down_proj": lambda t, _: t[DOWN].view(torch.uint8)[0].bitwise_xor_(0x80),
    "the scale of v_proj missing": lambda t, _: t.pop(f"{V}_scale"),
    "the tensor of down_proj missing": lambda t, _: t.pop(DOWN),
    "excludes name the MLP too": lambda _, said: said["ignore"].append("re:.*mlp.*"),
    "excludes are empty": lambda _, said: said.update(ignore=[]),
    "groups of 64 declared": (
        lambda _, said: said["config_groups"]["group_0"]["weights"].update(group_size=64)
    ),
}


def broken(work: Path, name: str) -> Asked:
    """The broken folder for the engine, and the folder before it was broken for the judge."""
    recipe = "int4-group128" if name in OF_INT4 else "fp8-ptpc"
    sound, folder = work / f"eagle3-llama--{recipe}", work / name.replace(" ", "-")
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    (path,) = folder.glob("*.safetensors")
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text("utf-8"))
    BROKEN[name](tensors, config["quantization_config"])
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Asked("broken", name, folder, sound)


# ---- The page

KINDS = (
    (
        "vLLM for CPUs, with its kernels",
        "The figure is the largest relative error of a linear. Packages beside other versions were"
        " those of vLLM 0.32 (torch 2.11 before 0.28), beside 0.28 to 0.30 of `requirements.txt`.",
        False,
    ),
    (
        "Wheels for CUDA, on faked GPUs",
        "Loading runs, and no kernel. Packages beside them are those of `requirements.txt`, and"
        " torch 2.13.0; transformers is 5.17.0 for vLLM 0.31.0, 5.19.0 for 0.32.0 and SGLang"
        " 0.5.22, and 5.12.1 for SGLang 0.5.19, beside an empty torchvision.",
        True,
    ),
)
"""Title and text of a table, and whether its engines were on faked GPUs."""


def write(rows: Sequence[Row]) -> None:
    """asked.json with a line for the drafts of each answer, and ASKED.md."""
    order = sorted(rows, key=lambda row: (*key_of(row), row["kind"], row["draft"]))
    alike: dict[str, list[str]] = {}
    for row in order:
        answer = json.dumps({key: value for key, value in row.items() if key != "draft"})
        alike.setdefault(answer, []).append(row["draft"])
    lines = (f'{answer[:-1]}, "drafts": {json.dumps(of)}}}' for answer, of in alike.items())
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    PAGE.write_text("\n".join(page(order)) + "\n", encoding="utf-8")


def page(rows: Sequence[Row]) -> Iterator[str]:
    """All of ASKED.md."""
    asked = sorted({key_of(row) for row in rows}, key=lambda key: (key[0] == "sglang", *key))
    recipes = {row["draft"].split("--")[1] for row in rows if row["kind"] == "recipe"}
    lines = [(recipe, "recipe", recipe) for recipe in sorted(recipes)]
    lines.append(("mi325x-w4a8 with the plugin", "plugin", "mi325x-w4a8"))
    notes: dict[str, int] = {}
    yield "# What engines answer to `check --ask`\n"
    yield (
        "Tiny drafts of up to seven families by every recipe (`experiments/run asked`). In round"
        " brackets are the number of families with the most frequent answer, and the others; in"
        " square brackets is the number of a reason."
    )
    for title, about, on_gpu in KINDS:
        keys = [key for key in asked if key[2].startswith("faked") == on_gpu]
        titles = [f"{ {'vllm': 'vLLM', 'sglang': 'SGLang'}[e] } {v}, {d}" for e, v, d in keys]
        yield f"\n## {title}\n\n{about}\n"
        yield f"| recipe | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|"
        for label, kind, recipe in lines:
            cells = (cell(rows, key, kind, recipe, notes) for key in keys)
            yield f"| {label} | {' | '.join(cells)} |"
    yield "\n## Reasons\n"
    for note, number in notes.items():
        yield f"{number}. {note}"
    yield from _formats(rows)
    yield from _broken(rows)


def cell(
    rows: Sequence[Row], key: tuple[str, str, str], kind: str, recipe: str, notes: dict[str, int]
) -> str:
    """The answers of one version to one recipe, families with the same one counted."""
    own = [row for row in rows if key_of(row) == key and row["kind"] == kind]
    own = [row for row in own if row["draft"].split("--")[1] == recipe]
    found: dict[str, list[Row]] = {}
    for row in own:
        reason = row["error"] or "; ".join(row["wrong"][:2])
        note = f" [{notes.setdefault(reason, len(notes) + 1)}]" if reason else ""
        found.setdefault(f"{row['verdict']}{note}", []).append(row)
    parts: list[str] = []
    for said, of in sorted(found.items(), key=lambda each: -len(each[1])):
        largest = max(row["largest"] for row in of)
        figure = f" {largest:.1%}" if largest else ""
        who = ", ".join(row["draft"].split("--")[0] for row in of) if parts else len(of)
        parts.append(f"{said}{figure} ({who})")
    return ", ".join(parts) or "not asked"


def _formats(rows: Sequence[Row]) -> Iterator[str]:
    """Largest errors with real kernels, by how the linears are stored."""
    yield "\n## Largest errors of real CPU kernels, by format\n"
    yield "| stored as | largest error | linears |"
    yield "|---|---|---|"
    found: dict[str, list[Row]] = {}
    for row in rows:
        if len(row["format"]) == 1 and row["kind"] == "recipe" and row["verdict"] == "LOADS":
            found.setdefault(row["format"][0], []).append(row)
    for form, of in sorted(found.items()):
        largest = max(row["largest"] for row in of)
        yield f"| {form} | {largest:.2%} | {sum(row['linears'] for row in of)} |"


def _broken(rows: Sequence[Row]) -> Iterator[str]:
    """What the newest version said of each broken folder."""
    own = [row for row in rows if row["kind"] == "broken"]
    newest = max((row["version"] for row in own), default="")
    yield f"\n## Broken folders, vLLM {newest} on the CPU\n"
    yield (
        "The engine is given the broken folder, and the judge reads the sound one: so would an"
        " engine be found that reads it so."
    )
    yield ""
    yield "| broken | verdict | by |"
    yield "|---|---|---|"
    for row in own:
        if row["version"] == newest:
            by = row["error"] or "; ".join(row["wrong"][:3])
            yield f"| {row['draft']} | {row['verdict']} | {by} |"


if __name__ == "__main__":
    sys.exit(main())
