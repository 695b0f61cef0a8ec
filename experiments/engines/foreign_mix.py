"""Folders as people have them, drawn by a seed, and what `draftquant check` and both engines say.

Draws 300 folders (`mix_formats.py`), asks each engine's own loader of each on one
or two GPUs in 1 to 8 shards, and prints every answer that `check` does not give.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(HERE / "foreign")]

import foreign_sample  # noqa: E402
import kind_formats  # noqa: E402
import kinds  # noqa: E402
import mix_formats  # noqa: E402
import numpy as np  # noqa: E402
from draftquant.quantize.engines.engine_check import check_draft  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402
from drafts import TARGET_FOLDER, write_target  # noqa: E402
from foreign_results import write_page  # noqa: E402
from foreign_sample import NUM_TARGET_LAYERS  # noqa: E402
from mix_formats import Format  # noqa: E402
from tiny import Stored, edit_json, read_tensors, tiny_eagle3_llama, write_tensors  # noqa: E402
from tiny_dflash import tiny_dflash  # noqa: E402
from tiny_dspark import tiny_dspark  # noqa: E402
from tiny_llama import tiny_language_model  # noqa: E402
from tiny_mla import tiny_eagle3_mla  # noqa: E402
from tiny_mtp import (  # noqa: E402
    tiny_deepseek_mtp,
    tiny_glm4_moe_mtp,
    tiny_mimo_mtp,
    tiny_qwen3_next_mtp,
)

ARCHS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("sm80", "sm90", "sm100", "gfx942", "gfx950"),
    "sglang": ("sm80", "sm90", "sm100", "gfx942", "gfx950"),
}
SHARDS = (1, 1, 1, 2, 4, 8)
NUM_FOLDERS = 300
Tensors = dict[str, Stored]
_NEVER = (
    "embed_tokens",
    "lm_head",
    "markov",
    "confidence",
    "joint_proj",
    "gate_proj_0",
    "shared_head",
)
_ANY_WIDTH = ("fp8", "fp8-blocks", "kv-cache", "unquantized", "others")
_CEILED = ("gptq", "auto-round")
_PLAIN_IN_MTP = ("eh_proj", "input_proj", "mlp.gate.", "shared_expert_gate", "mtp.fc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft before it is quantized.

    Attributes:
        name: of its family.
        build: writes the folder. width, vocab: of its target.
        own_target: an MTP layer's target has its config.json.
    """

    name: str
    build: Callable[[Path], Path]
    width: int
    vocab: int
    own_target: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of the structure, before the draft is quantized.

    Attributes:
        config: changes of config.json; None removes a key.
        tensors: of all tensors.
        declared_in: key of config.json in which the declaration stands.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors
    declared_in: str = "quantization_config"
    sharded: bool = False


def draw_draft(rng: Random, *, tool: str) -> Draft:
    """A family, and its dimensions; tools that pack groups want whole ones."""
    uneven = (688,) if tool in _ANY_WIDTH else (704,) if tool in _CEILED else (896,)
    families: tuple[tuple[str, int], ...] = (
        ("llama", 34), ("qwen2", 24), ("qwen3", 30), ("e1", 22), ("e3", 60), ("mla", 36),
        ("dflash", 42), ("dspark", 20), ("mimo-mtp", 10), ("deepseek-mtp", 8), ("glm-mtp", 7),
        ("qwen3-next-mtp", 7),
    )  # fmt: skip
    name = rng.choices([n for n, _ in families], [w for _, w in families])[0]
    hidden, vocab = rng.choice((256, 256, 384, 512)), rng.choice((320, 512))
    heads, kv_heads = rng.choice(((4, 2), (8, 4), (8, 8), (6, 2), (8, 1)))
    head_dim = rng.choice((64, 64, 32, 128)) if name not in ("llama", "qwen2") else hidden // heads
    if hidden % heads:
        hidden = 384
    head_dim = hidden // heads if name in ("llama", "qwen2", "e1", "mimo-mtp") else head_dim
    shape: dict[str, Any] = {
        "hidden": hidden,
        "intermediate": rng.choice(uneven if rng.random() < 0.2 else (512, 640, 768, 1024)),
        "vocab": vocab,
        "heads": heads,
    }
    full = {**shape, "kv_heads": kv_heads, "head_dim": head_dim}
    pruned = {"pruned_vocabulary": rng.random() < 0.7}
    layers = {"num_layers": rng.choice((1, 2))}
    latent = {
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    tables = {"tables": rng.random() < 0.7}
    moe = {"experts": 4, "moe_intermediate": 128}
    dense = {"experts": rng.choice((0, 4)), "moe_intermediate": 128}
    builders: dict[str, Callable[[Path], Path]] = {
        "llama": partial(tiny_language_model, **full, num_layers=2, tied=rng.random() < 0.3),
        "qwen2": partial(tiny_language_model, **full, num_layers=2, kind="Qwen2",
                         tied=rng.random() < 0.3),
        "qwen3": partial(tiny_language_model, **full, num_layers=2, kind="Qwen3",
                         tied=rng.random() < 0.3),
        "e3": partial(tiny_eagle3_llama, **full, **pruned,
                      prefix=rng.choice(("midlayer.", "layers.0."))),
        "mla": partial(tiny_eagle3_mla, **shape, **latent, **pruned),
        "dflash": partial(tiny_dflash, **full, **layers),
        "dspark": partial(tiny_dspark, **full, **layers, rank=128),
        "mimo-mtp": partial(tiny_mimo_mtp, **full, **tables, config={"model_type": "qwen2"}),
        "deepseek-mtp": partial(tiny_deepseek_mtp, **shape, **tables, **moe),
        "glm-mtp": partial(tiny_glm4_moe_mtp, **full, **tables, **moe),
        "qwen3-next-mtp": partial(tiny_qwen3_next_mtp, **full, **dense, tables=False),
    }  # fmt: skip
    return Draft(
        name=name, build=builders[name], width=hidden, vocab=vocab, own_target=name.endswith("mtp")
    )


def draw_edit(rng: Random, draft: Draft, *, often: bool) -> Edit:
    """Something that is otherwise in the folder than in a plain one; in most of them nothing."""
    if rng.random() > (0.85 if often else 0.25):
        return Edit(name="plain")
    whole = draft.name in ("llama", "qwen2", "qwen3")
    d2t = draft.name in ("e3", "mla", "dflash")
    edits = [
        Edit(name="tied", config={"tie_word_embeddings": True}),
        Edit(name="sharded", sharded=True),
        Edit(name="compression_config", declared_in="compression_config"),
        Edit(name="in-text-config", declared_in="text_config"),
        Edit(name="half", config={"torch_dtype": "float16"}),
        Edit(name="no-dtype", config={"torch_dtype": None}),
        Edit(name="dtype-key", config={"torch_dtype": None, "dtype": "bfloat16"}),
        Edit(name="layers", config={"num_hidden_layers": rng.choice((24, 36, 61))}),
        Edit(name="extra", tensors=_with_extra(rng)),
        Edit(name="inv-freq", tensors=_with_inv_freq),
    ]
    if not draft.own_target and draft.name != "mla":
        leaves = ("q_proj", "k_proj", "v_proj", "o_proj")
        edits += [
            Edit(name="attention-bias", config={"attention_bias": True}, tensors=_biases(*leaves)),
            Edit(name="no-attention-bias", config={"attention_bias": True}),
            Edit(name="mlp-bias", config={"mlp_bias": True},
                 tensors=_biases("gate_proj", "up_proj", "down_proj")),
            Edit(name="untold-bias", tensors=_biases(*leaves[:3])),
        ]  # fmt: skip
    if whole:
        edits += [
            Edit(name="rooted", tensors=_renamed("model.", "")),
            Edit(name="no-head", tensors=_without("lm_head")),
        ]
    if d2t:
        edits += [
            Edit(name="no-d2t", tensors=_without("d2t")),
            Edit(name="no-embedding", tensors=_without("embed_tokens")),
            Edit(name="rooted", tensors=_under("model.")),
        ]
    if draft.name == "e3":
        edits += [Edit(name="qwen3-name", config={"architectures": ["Eagle3Qwen3ForCausalLM"]})]
    return rng.choice(edits)


def _with_extra(rng: Random) -> Callable[[Tensors], Tensors]:
    name = rng.choice(("some.other.weight", "target_hidden_norm.weight", "model.rotary.scale"))
    return lambda tensors: {**tensors, name: kinds._tensor(16)}


def _with_inv_freq(tensors: Tensors) -> Tensors:
    root = next(
        (n.partition("q_")[0] for n in sorted(tensors) if "self_attn.q_" in n), "self_attn."
    )
    return {**tensors, f"{root}rotary_emb.inv_freq": kinds._tensor(32, dtype="F32")}


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new, 1): t for name, t in tensors.items()}


def _under(root: str) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        top = ("lm_head", "d2t", "t2d")
        return {n if n.startswith(top) else root + n: tensor for n, tensor in tensors.items()}

    return edit


def _without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)
    }


def _biases(*leaves: str) -> Callable[[Tensors], Tensors]:
    return kinds._biases(*leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """One folder, and where it is asked for."""

    name: str
    draft: Draft
    form: Format
    edit: Edit
    asked: tuple[tuple[str, str, int], ...]


def draw(seed: int, count: int = NUM_FOLDERS) -> list[Mixed]:
    """The folders of one seed: every kind as often as it is weighted, in any order."""
    names = [name for name, (_, weight) in mix_formats.DRAWS.items() for _ in range(weight)]
    Random(f"order {seed}").shuffle(names)
    found = []
    for number, kind in enumerate(names[:count]):
        rng = Random(f"{seed} {number} {kind}")
        form = mix_formats.DRAWS[kind][0](rng)
        draft = draw_draft(rng, tool=form.tool)
        edit = draw_edit(rng, draft, often=kind == "unquantized")
        asked = []
        for engine, archs in ARCHS.items():
            first, second = rng.sample(archs, 2)
            asked += [(engine, first, 1), (engine, second, rng.choice(SHARDS))]
        name = f"{number:03d}-{form.tool}-{form.name}-{draft.name}-{edit.name}"
        found.append(Mixed(name=name, draft=draft, form=form, edit=edit, asked=tuple(asked)))
    return found


def write(mixed: Mixed, folder: Path, seed: int = 3) -> None:
    """Build the draft, change its structure, quantize it, declare it."""
    mixed.draft.build(folder)
    shutil_config = (folder / "config.json").read_text(encoding="utf-8")
    form, edit, rng = mixed.form, mixed.edit, np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, tensor in edit.tensors(read_tensors(folder)).items():
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        never = len(tensor.shape) != 2 or any(part in module for part in _NEVER)
        never = never or any(part in f"{module}." for part in _PLAIN_IN_MTP)
        how = form.others.get(leaf, form.stored)
        kept = leaf in form.kept or "kernel_projection" in module or module == name
        if never or kept or how is None or "." not in f"{module}.":
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        for suffix, (dtype, shape) in how(rows, columns).items():
            tensors[f"{module}.{suffix}"] = _random(rng, suffix, dtype, shape)
    tensors |= {
        f"{root}{end}": tensor
        for root in {n.partition("self_attn.")[0] for n in tensors if "self_attn." in n}
        for end, tensor in ((f"self_attn.{e}", t) for e, t in form.cache.items())
    }
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_tensors(folder, tensors, sharded=edit.sharded, metadata={"format": "pt"})
    changes = {**form.config, **edit.config}
    if form.declared is not None:
        declared: Any = form.declared
        if edit.declared_in == "text_config":
            text = json.loads(shutil_config).get("text_config", {})
            declared = {**text, "quantization_config": declared}
        changes[edit.declared_in] = declared
    edit_json(folder / "config.json", **changes)
    target = folder.parent / TARGET_FOLDER
    if mixed.draft.own_target:
        target.mkdir()
        (target / "config.json").write_text(shutil_config, encoding="utf-8")
    else:
        write_target(target, mixed.draft.width, mixed.draft.vocab)


def _random(rng: np.random.Generator, suffix: str, dtype: str, shape: tuple[int, ...]) -> Stored:
    if dtype == "F8_E8M0":
        codes = rng.integers(110, 130, shape, dtype=np.uint8)
        return Stored(dtype, shape, codes.tobytes())
    return kind_formats.random_tensor(rng, suffix, dtype, shape)


def ask(python: Path, work: Path, folders: Sequence[Path], engine: str, arch: str, tp: int) -> None:
    """What a loader says of each folder, as if there was such a GPU; what is known stays."""
    out = work / f"{engine}-{arch}-tp{tp}.jsonl"
    known = {json.loads(line)["draft"] for line in out.open()} if out.exists() else set()
    todo = [each for each in folders if f"{each.parent.name}/{each.name}" not in known]
    if not todo:
        return
    script = HERE / f"{engine}_loader.py"
    command = [str(python), str(script), "--arch", arch, "--tp", str(tp), *map(str, todo)]
    with out.open("a", encoding="utf-8") as answers, (work / "loaders.log").open("a") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answers.writelines(f"{line}\n" for line in lines)
    print(f"{engine} {arch} tp{tp}: {len(lines)} of {len(todo)}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One answer of an engine beside that of `check`."""

    outcome: Mapping[str, Any]
    verdict: str
    error: str | None

    @property
    def kind(self) -> str:
        """How good the answer is."""
        told = self.outcome["verdict"]
        if told == "UNKNOWN":
            return "not told"
        if self.verdict == told:
            return "right"
        return self.verdict if self.verdict in ("UNKNOWN", "exit 2") else f"wrong {self.verdict}"


def compared(work: Path) -> Iterator[Compared]:
    """Every answer that lies in `work`."""
    for path in sorted(work.glob("*-tp*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            outcome = json.loads(line)
            try:
                said = check_draft(
                    work / "drafts" / outcome["draft"],
                    engine=outcome["engine"],
                    version=outcome["version"],
                    arch=outcome["arch"],
                    tp=outcome["tp"],
                    target_layers=None if "mtp" in outcome["draft"] else NUM_TARGET_LAYERS,
                )
                yield Compared(outcome=outcome, verdict=said.verdict, error=said.error)
            except DraftQuantError as exc:
                yield Compared(outcome=outcome, verdict="exit 2", error=exc.what)
            except Exception as exc:  # noqa: BLE001  a mistake of ours
                yield Compared(outcome=outcome, verdict="crash", error=f"{type(exc)} {exc}")


def write_results(
    work: Path, answers: Sequence[Compared], name: str | None, *, sample: bool
) -> None:
    """`foreign_mix.json`: counts by set and engine, and headers of some folders; and FOREIGN.md."""
    file = HERE / "foreign_mix.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    counts = [row for row in known.get("counts", []) if row["set"] != name]
    for engine in ARCHS if name else ():
        kinds_of = Counter(each.kind for each in answers if each.outcome["engine"] == engine)
        counts.append({"set": name, "engine": engine, "kinds": dict(sorted(kinds_of.items()))})
    rows = sampled(work, answers) if sample else known.get("rows", [])
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    said = ",\n".join(json.dumps(row) for row in counts)
    text = f'{{"counts": [\n{said}\n], "rows": [\n{lines}\n]}}\n'
    file.write_text(text, encoding="utf-8")
    write_page(HERE, (HERE / "FOREIGN.md").read_text(encoding="utf-8"))


def sampled(work: Path, answers: Sequence[Compared]) -> list[foreign_sample.Row]:
    """Of each format the folder with most kinds of answers; of as many the smallest.

    MTP layers are left out: they have another target than the rest.
    """
    told: dict[str, list[Compared]] = {}
    for each in answers:
        if "mtp" not in each.outcome["draft"]:
            told.setdefault(each.outcome["draft"], []).append(each)
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for draft, found in told.items():
        if {each.kind for each in found} != {"right"}:
            continue
        folder = work / "drafts" / draft
        size = (folder / "config.json").stat().st_size
        worth = (len({each.verdict for each in found}), -size)
        kind = "-".join(draft.split("-")[1:4])
        best[kind] = max(best.get(kind, (worth, draft)), (worth, draft))
    rows = []
    for _, draft in sorted(best.values(), key=lambda found: found[1]):
        row = dict(
            foreign_sample.sample_row(
                work / "drafts" / draft, [each.outcome for each in told[draft]]
            )
        )
        rows.append({**row, "draft": draft.removesuffix("/draft")})
    return rows


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=Path, help="python of .venv-engines; None = ask nobody")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of folders and answers")
    parser.add_argument("--count", type=int, default=NUM_FOLDERS)
    parser.add_argument("--results", help="name of the set: write foreign_mix.json and FOREIGN.md")
    parser.add_argument("--sample", action="store_true", help="keep some folders for the tests")
    parser.add_argument("--only", default="", help="part of a platform, such as vllm-sm90")
    arguments = parser.parse_args()
    work, found = arguments.work, draw(arguments.seed, arguments.count)
    for mixed in found:
        folder = work / "drafts" / mixed.name / "draft"
        if not folder.exists():
            folder.parent.mkdir(parents=True)
            write(mixed, folder)
    questions: dict[tuple[str, str, int], list[Path]] = {}
    for mixed in found:
        for asked in dict.fromkeys(mixed.asked):
            questions.setdefault(asked, []).append(work / "drafts" / mixed.name / "draft")
    if arguments.engines:
        for (engine, arch, tp), folders in sorted(questions.items()):
            if arguments.only in f"{engine}-{arch}-tp{tp}":
                ask(arguments.engines, work, folders, engine, arch, tp)
    answers = list(compared(work))
    for each in answers:
        if each.kind not in ("right", "not told"):
            o = each.outcome
            print(
                f"{each.kind} | {o['engine']} {o['arch']} {o['tp']} | {o['draft'][:-6]} |"
                f" {each.error} | {o['verdict']}: {o['stage']}: {o['error']}"
                f" {o['unread'][:2]} {o['unloaded'][:2]} {o['cast'][:1]}"
            )
    if arguments.results or arguments.sample:
        write_results(work, answers, arguments.results, sample=arguments.sample)
    counts = Counter((each.outcome["engine"], each.kind) for each in answers)
    for (engine, kind), number in sorted(counts.items()):
        print(f"{engine}: {number} {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
