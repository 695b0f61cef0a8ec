"""What engines answer to `draftquant check --ask`, for every recipe and family.

`experiments/run asked PYTHON...` asks the vLLM of each environment on this machine's CPU, with its
kernels; `--fake ENGINE:ARCH` the engine of $ENGINES_PYTHON on a faked GPU, without kernels. Rows of
the same engine, version and device are replaced in asked.json, and ASKED.md is written anew.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSIDE = HERE.parents[1] / "quantize" / "asking"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
import torch  # noqa: E402
from cases import FAMILIES, Case, Workshop, recipe_cases  # noqa: E402
from draftquant.quantize.asked import Checking  # noqa: E402
from draftquant.quantize.asking.ask import DraftQuestion  # noqa: E402
from draftquant.quantize.asking.asked_check import AskedCheck  # noqa: E402
from draftquant.quantize.asking.child_process import REQUEST, read_answer  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

RESULTS, PAGE = HERE / "asked.json", HERE / "ASKED.md"
Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]

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
if {plugin!r}:
    importlib.import_module("plugins." + {engine!r}).register()
for name in ("inside.loaded_model", "inside.running", "safetensors.torch", *engine.NEEDED):
    importlib.import_module(name)
if {engine!r} == "vllm":  # which looks at each class in a process of its own: a minute
    import vllm.model_executor.models.registry as registry
    registry._run_in_subprocess = lambda function: function()
sys.stdout.flush()
for request in sys.argv[1:]:
    if os.fork() == 0:  # engines cache configs and change classes: each draft starts afresh
        try:
            answer.main(request)
        finally:
            os._exit(0)
    os.wait()
"""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pythons", nargs="*", help="interpreters with a vLLM for CPUs")
    parser.add_argument("--fake", nargs="+", default=[], metavar="ENGINE:ARCH")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    given = parser.parse_args()
    rows: list[Row] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        workshop = Workshop(work)
        cases = [case for case in recipe_cases(workshop) if case.family in given.families]
        questions = [(python, "vllm", "") for python in given.pythons]
        questions += [(asking.python(), *fake.split(":")) for fake in given.fake]
        for python, engine, arch in questions:
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
    folders = [work / case.name for case in cases]
    where: dict[str, str] = {}
    for case, found in zip(cases, ask_all(engine, python, folders, arch=arch), strict=True):
        where = where or {"version": found.version, "device": found.device}
        yield row_of(found, draft=case.name, kind="recipe")
    plain = [work / case.name for case in cases if case.recipe == "mi325x-w4a8"]
    for folder, found in zip(
        plain, ask_all(engine, python, plain, arch=arch, plugin=True), strict=True
    ):
        yield row_of(found, draft=folder.name, kind="plugin")
    if not arch:
        yield from broken_rows(work, python, engine)


def row_of(found: AskedCheck, **more: str) -> Row:
    wrong = [each.sentence for each in found.linears if not each.is_right]
    return {
        "engine": found.engine, "version": found.version, "device": found.device, **more,
        "verdict": found.verdict, "stage": found.stage, "error": found.error,
        "linears": len(found.linears), "not_run": sorted(set((found.not_run or {}).values())),
        "largest": round(max((each.error for each in found.linears), default=0.0), 5),
        "format": sorted({each.format for each in found.linears}),
        "wrong": [*found.unloaded, *found.unread, *found.cast, *found.merged, *wrong],
    }  # fmt: skip


def ask_all(
    engine: str,
    python: str,
    folders: Sequence[Path],
    *,
    arch: str = "",
    plugin: bool = False,
    judged_by: Sequence[Path] | None = None,
) -> Iterator[AskedCheck]:
    """The verdict of an engine on each folder; `judged_by`: what the linears are compared with."""
    paths = [str(INSIDE), str(HERE), str(INSIDE.parent)]
    code = _FORKING.format(paths=paths, engine=engine, arch=arch, plugin=plugin)
    with tempfile.TemporaryDirectory() as temporary:
        works = [Path(temporary) / str(i) for i in range(len(folders))]
        questions = [DraftQuestion.of(Checking(folder, engine)) for folder in folders]
        for question, work in zip(questions, works, strict=True):
            work.mkdir()
            question.write(work)
        command = [python, "-c", code, *(str(work / REQUEST) for work in works)]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        print(f"{python} {engine} {arch}: status {done.returncode}", file=sys.stderr)
        if judged_by is not None:
            questions = [DraftQuestion.of(Checking(folder, engine)) for folder in judged_by]
        for question, work in zip(questions, works, strict=True):
            try:
                yield question.judged(read_answer(work), work, python=python, seconds=0)
            except DraftQuantError:
                print(done.stderr[-4000:], file=sys.stderr)
                raise


# ---- Broken folders: what the engine is given is not what the judge reads


def _changed(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return make


def _config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        change(config["quantization_config"])
        path.write_text(json.dumps(config), encoding="utf-8")

    return make


ATTENTION, MLP = "midlayer.self_attn.", "midlayer.mlp."


def _swap(tensors: Tensors) -> None:
    words = tensors[f"{ATTENTION}k_proj.weight_packed"].view(torch.uint8)
    tensors[f"{ATTENTION}k_proj.weight_packed"] = ((words << 4) | (words >> 4)).view(torch.int32)


def _double(tensors: Tensors) -> None:
    tensors[f"{MLP}up_proj.weight_scale"] *= 2


def _double_row(tensors: Tensors) -> None:
    tensors[f"{MLP}up_proj.weight_scale"][7] *= 2


def _exchange(tensors: Tensors) -> None:
    gate, up = (f"{MLP}{name}_proj.weight_scale" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _exchange_parts(tensors: Tensors) -> None:
    for leaf in ("weight", "weight_scale"):
        k, v = (f"{ATTENTION}{name}_proj.{leaf}" for name in "kv")
        tensors[k], tensors[v] = tensors[v], tensors[k]


def _transpose(tensors: Tensors) -> None:
    name = f"{ATTENTION}o_proj.weight"
    weight = tensors[name]
    square = weight[:, : len(weight)].clone()
    tensors[name] = torch.cat([square.T, weight[:, len(weight) :]], 1).contiguous()


def _flip_sign(tensors: Tensors) -> None:
    tensors[f"{MLP}down_proj.weight"].view(torch.uint8)[0].bitwise_xor_(0x80)


BROKEN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "nibbles of k_proj swapped": ("int4-group128", _changed(_swap)),
    "scales of up_proj times 2": ("fp8-ptpc", _changed(_double)),
    "one scale of up_proj times 2": ("fp8-ptpc", _changed(_double_row)),
    "scales of gate_proj and up_proj exchanged": ("fp8-ptpc", _changed(_exchange)),
    "k_proj and v_proj exchanged": ("fp8-ptpc", _changed(_exchange_parts)),
    "the square part of o_proj transposed": ("fp8-ptpc", _changed(_transpose)),
    "signs of one row of down_proj": ("fp8-ptpc", _changed(_flip_sign)),
    "the scale of v_proj missing": (
        "fp8-ptpc", _changed(lambda tensors: tensors.pop(f"{ATTENTION}v_proj.weight_scale")),
    ),
    "the tensor of down_proj missing": (
        "fp8-ptpc", _changed(lambda tensors: tensors.pop(f"{MLP}down_proj.weight")),
    ),
    "excludes name the MLP too": (
        "fp8-ptpc", _config(lambda said: said["ignore"].append("re:.*mlp.*")),
    ),
    "excludes are empty": ("fp8-ptpc", _config(lambda said: said.update(ignore=[]))),
    "groups of 64 declared": (
        "int4-group128",
        _config(lambda said: said["config_groups"]["group_0"]["weights"].update(group_size=64)),
    ),
}  # fmt: skip


def broken_rows(work: Path, python: str, engine: str) -> Iterator[Row]:
    """Each is given to the engine, and the folder before it was broken to the judge."""
    sound, broken = [], []
    for number, (recipe, make) in enumerate(BROKEN.values()):
        source = work / f"eagle3-llama--{recipe}"
        folder = work / f"broken-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        make(folder)
        sound.append(source)
        broken.append(folder)
    answers = ask_all(engine, python, broken, judged_by=sound)
    for name, found in zip(BROKEN, answers, strict=True):
        yield row_of(found, draft=name, kind="broken")


# ---- The page


def write(rows: Sequence[Row]) -> None:
    """asked.json with a line for each row, and ASKED.md."""
    order = sorted(rows, key=lambda row: (*key_of(row), row["kind"], row["draft"]))
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, order)) + "\n]\n", encoding="utf-8")
    PAGE.write_text("\n".join(page(order)) + "\n", encoding="utf-8")


def page(rows: Sequence[Row]) -> Iterator[str]:
    """All of ASKED.md."""
    asked = sorted({key_of(row) for row in rows}, key=lambda key: (key[0] == "sglang", *key))
    titles = [f"{ {'vllm': 'vLLM', 'sglang': 'SGLang'}[e] } {v}, {d}" for e, v, d in asked]
    yield "# What engines answer to `check --ask`"
    yield ""
    yield (
        "Tiny drafts of up to four families by every recipe (`experiments/run asked`). On a CPU the"
        " own kernels of vLLM run: the figure is the largest relative error of a linear. On a faked"
        " GPU loading runs, and no kernel. A number in brackets counts families. Packages beside"
        " older versions were those of vLLM 0.32, but for torch 2.11 before 0.28."
    )
    yield ""
    yield f"| recipe | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 1) + "|"
    notes: dict[str, int] = {}
    recipes = dict.fromkeys(row["draft"].split("--")[1] for row in rows if row["kind"] == "recipe")
    for recipe in sorted(recipes):
        cells = (cell(rows, key, "recipe", recipe, notes) for key in asked)
        yield f"| {recipe} | {' | '.join(cells)} |"
    cells = (cell(rows, key, "plugin", "mi325x-w4a8", notes) for key in asked)
    yield f"| mi325x-w4a8 with the plugin | {' | '.join(cells)} |"
    yield ""
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
    parts = []
    for said, of in found.items():
        largest = max(row["largest"] for row in of)
        figure = f" {largest:.1%}" if largest else ""
        parts.append(f"{said}{figure} ({len(of)})")
    return ", ".join(parts)


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
