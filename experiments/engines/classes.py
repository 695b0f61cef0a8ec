"""Drafts of classes that no family reads, as folders of the engine's own names and shapes.

`class_configs.json` has a config.json for each. vLLM's class is built by it, and its parameters are
taken apart as its loader puts them together: what `load_weights` does with the folder is the proof.
A class of SGLang alone has its tensors there too.
Each is quantized by `RECIPES` too. `experiments/run classes` writes the answers to `classes.json`;
`check` leaves such a draft to the engine.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIGS: Mapping[str, Any] = json.loads((HERE / "class_configs.json").read_text("utf-8"))
RECIPES = ("fp8-ptpc", "int4-group128")
ARCHS = ("sm90", "sm100")
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_USUAL = (
    (r"\.mtp_block\.", "."),
    (r"\.routed_experts\.", "."),
    (r"(\.gate)?\.e_score_correction_bias$", ".gate.e_score_correction_bias"),
)
"""How names of parameters differ from those on disk in most classes."""


def engine_of(name: str) -> str:
    """The engine that is asked about a row: the other one has another class for its names."""
    return str(CONFIGS[name].get("engine", "vllm"))


def built(name: str) -> Any:
    """vLLM's class for a row, without weights."""
    import vllm_loader
    import vllm_platform
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as work:
        draft, target = Path(work) / "draft", Path(work) / "target"
        write_configs(name, draft, target)
        method = CONFIGS[name].get("method", "mtp")
        config = vllm_loader.speculating(
            draft if method == "mtp" and "target" not in CONFIGS[name] else target,
            "cpu",
            model=str(draft),
            method=method,
            num_speculative_tokens=1 if method == "mtp" else 3,
        )
        vllm_platform.become_rank(1, 0)
        served = config.speculative_config.draft_model_config
        with set_current_vllm_config(config), set_default_torch_dtype(served.dtype):
            return initialize_model(vllm_config=config, model_config=served)


def write_configs(name: str, draft: Path, target: Path) -> None:
    """config.json of a draft, if there is none yet, and of the target that it is served beside."""
    import asking

    row = CONFIGS[name]
    if not draft.exists():
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
    if row.get("method", "mtp") != "mtp" and "target" not in row:
        sizes = row["config"]["hidden_size"], row["config"]["vocab_size"]
        asking.write_target(target, *sizes)
        return
    target.mkdir()
    said = row.get("target", row["config"])
    (target / "config.json").write_text(json.dumps(said), encoding="utf-8")


def on_disk(name: str, model: Any) -> dict[str, list[Any]]:
    """The tensors that a class loads: fused ones apart, experts one by one."""
    row, found = CONFIGS[name], dict[str, list[Any]]()
    modules = dict(model.named_modules())
    scalars = (own for own in model.named_buffers() if own[0].endswith("layer_scalar"))
    for parameter, values in (*model.named_parameters(), *scalars):
        experts = row.get("experts", ["gate_proj", "up_proj", "down_proj"])
        stored = [(parameter, tuple(values.shape))]
        if not row.get("fused"):
            stored = _apart(parameter, tuple(values.shape), modules, experts)
        for disk, shape in stored:
            for pattern, to in (*_USUAL, *row.get("renames", ())):
                disk = re.sub(pattern, to, disk)
            if disk:
                found[disk] = ["F32" if "correction" in disk else "BF16", *shape]
    return found


def _apart(
    name: str, shape: tuple[int, ...], modules: Mapping[str, Any], experts: list[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    module, _, suffix = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    sizes = getattr(modules.get(module), "output_sizes", None)
    if suffix in ("w13_weight", "w2_weight"):
        parts = experts[2:] if suffix == "w2_weight" else [part for part in experts[:2] if part]
        for i in range(shape[0]):
            for part in parts:
                yield f"{module}.{i}.{part}.weight", (shape[1] // len(parts), shape[2])
    elif leaf in _PARTS and sizes and len(sizes) == len(_PARTS[leaf]):
        for part, size in zip(_PARTS[leaf], sizes, strict=True):
            yield f"{parent}.{part}.{suffix}", (size, *shape[1:])
    else:
        yield name, shape


def main() -> int:
    """See the module; with names it is the process that builds those classes."""
    import asking

    if sys.argv[1:]:
        asking.install("vllm")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        for name in sys.argv[1:]:
            print(json.dumps([name, on_disk(name, built(name))]))
        return 0
    import draftquant.api as dq
    import folder_rows
    from draftquant.recipes import DraftQuantError

    given = {name: row["tensors"] for name, row in CONFIGS.items() if "tensors" in row}
    command = [asking.python(), str(Path(__file__)), *(n for n in CONFIGS if n not in given)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = dict(json.loads(line) for line in said.splitlines() if line[:1] == "[")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        folders = []
        for name, tensors in {**found, **given}.items():
            plain = {"draft": name, "config": CONFIGS[name]["config"], "tensors": tensors}
            source = folder_rows.write_folder(
                {**plain, "values": {}, "side_file": False}, Path(work) / name / "plain" / "draft"
            )
            folders.append((name, "", source))
            for recipe in RECIPES:
                out = source.parents[1] / recipe / "draft"
                out.parent.mkdir()
                try:
                    dq.quantize(source, recipe, out=out)
                except DraftQuantError as exc:
                    print(f"{name} {recipe}: {exc}", file=sys.stderr)
                    continue
                folders.append((f"{name} {recipe}", name, out))
        for name, of, folder in folders:
            write_configs(of or name, folder, folder.parent / asking.TARGET_FOLDER)
        told: dict[str, list[Any]] = {str(folder): [] for *_, folder in folders}
        layer = {name: Path("/layer") for name, row in CONFIGS.items() if row.get("layer")}
        asked = {(engine_of(name), layer.get(name)) for name in CONFIGS}
        for arch, (engine, target) in itertools.product(ARCHS, asked):
            one = engine, target
            own = [f for n, of, f in folders if (engine_of(of or n), layer.get(of or n)) == one]
            outcomes = asking.loaded(engine, own, arch=arch, target=target)
            for folder, outcome in zip(own, outcomes, strict=True):
                told[str(folder)].append(outcome)
        for name, of, folder in folders:
            outcomes = told[str(folder)]
            row = {**folder_rows.row_of(folder, outcomes), "draft": name}
            if "num_target_layers" in row["config"]:
                row["target_layers"] = row["config"]["num_target_layers"]
            error = next((o["error"] for o in outcomes if o["error"]), None)
            lost = [k for o in outcomes for k in (*o["unloaded"], *o["unread"], *o["cast"])]
            wrong = f"not as stored: {', '.join(lost[:2])}" if lost else ""
            row["errors"] = {engine_of(of or name): error or wrong} if error or wrong else {}
            rows.append({**row, **({"of": of} if of else {})})
    folder_rows.write_rows(HERE / "classes.json", rows)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(ROOT / "tests")]
    sys.exit(main())
