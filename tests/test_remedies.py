"""What a draft is comes before what its tensors lack, and a remedy that is followed helps."""

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_draft
from draftquant import api as dq
from draftquant.quantize.engines.contract import ENGINE_NAMES, EngineCheck
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import DraftQuantError
from folder_rows import FILES, read_rows, write_folder
from tiny import Stored, config_of, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import tiny_language_model, with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import tiny_glm4_moe_mtp
from tiny_speculators import tiny_speculators_dflash, tiny_speculators_eagle3
from tiny_target import tiny_target

Build = Callable[[Path], Path]
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
HEAD_NORMS = [f"midlayer.self_attn.{leaf}.weight" for leaf in ("q_norm", "k_norm")]


def made(build: Build, *tensors: str, name: str | None = "", **keys: object) -> Build:
    """A draft with these tensors too, under another architecture, with other keys."""

    def built(folder: Path) -> Path:
        build(folder)
        added = {tensor: Stored("BF16", (16,), bytes(32)) for tensor in tensors}
        write_tensors(folder, read_tensors(folder) | added)
        named = {} if name == "" else {"architectures": name and [name]}
        edit_json(folder / "config.json", **named, **keys)
        return folder

    return built


def by_mlx(build: Build, **keys: object) -> Build:
    """Every matrix as MLX packs it: words of 32 bits beside scales and biases."""

    def built(folder: Path) -> Path:
        tensors = read_tensors(build(folder))
        for name, (dtype, shape, _) in list(tensors.items()):
            if len(shape) == 2:
                tensors[name] = Stored("U32", (shape[0], 1), bytes(4 * shape[0]))
                one = Stored(dtype, (shape[0], 1), bytes(2 * shape[0]))
                tensors |= {name.replace(".weight", end): one for end in (".scales", ".biases")}
        write_tensors(folder, tensors)
        edit_json(folder / "config.json", **keys)
        return folder

    return built


def nested(*absent: str, **outer: object) -> Build:
    """As vLLM's EAGLEConfig writes a draft."""

    def built(folder: Path) -> Path:
        config = json.loads((tiny_eagle3_llama(folder) / "config.json").read_text("utf-8"))
        model = {key: value for key, value in config.items() if key not in absent}
        return written(folder, {"model_type": "eagle", "model": model, **outer})

    return built


def written(folder: Path, config: Mapping[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


KINDS: Mapping[str, tuple[Build, str]] = {
    "MLX": (by_mlx(tiny_dflash, quantization=MLX, quantization_config=MLX), "MLX"),
    "MTP": (made(tiny_eagle3_llama, name="Qwen3MoeForCausalLMMTP"), "an MTP layer"),
    "Nemotron": (
        made(tiny_eagle3_llama, name="NemotronHMTPModel", model_type="nemotron_h"), "Nemotron-H",
    ),
    "MLX undeclared": (by_mlx(tiny_eagle3_llama), "MLX"),
}  # fmt: skip
"""Executed: names that an engine has not, whatever model_type says."""
OF_TENSORS = re.compile("remove|declare |set architectures|add |correct|export|incomplete|--fix")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is quantized."""
    at = tmp_path_factory.mktemp("others")
    draft = tiny_dflash(at / "draft", num_layers=1, config={"dtype": "bfloat16"})
    dq.quantize(draft, recipe="fp8-ptpc", out=at / "quantized")
    return tiny_target(at / "target", "glm"), at / "quantized"


@pytest.mark.some(4)
@pytest.mark.parametrize("case", KINDS)
def test_a_kind_replaces_every_remedy(case: str, others: tuple[Path, Path], tmp_path: Path) -> None:
    (build, kind), (target, quantized), out = KINDS[case], others, tmp_path / "out"
    draft = build(tmp_path / "draft")
    verbs: Mapping[str, Callable[[], Any]] = {
        "inspect": lambda: dq.inspect(draft),
        "plan": lambda: dq.plan(draft, recipe="fp8-ptpc"),
        "quantize": lambda: dq.quantize(draft, recipe="fp8-ptpc", out=out),
        "verify": lambda: dq.verify(quantized, against=draft),
        "graft": lambda: dq.graft(target, draft, out=out),
    }
    for verb, call in verbs.items():
        with pytest.raises(DraftQuantError) as caught:
            call()
        assert kind in caught.value.what, verb
        assert not OF_TENSORS.search(caught.value.fix), verb
    for engine in ENGINE_NAMES:
        answer = check_draft(draft, engine=engine)
        ((_, text, remedy),) = answer.findings
        assert text.startswith("The draft is ")
        assert kind.removeprefix("it is ") in text
        assert not OF_TENSORS.search(remedy)
        assert (answer.verdict, answer.launch) != ("LOADS", None)


# ---- A remedy that is followed: until the draft loads, or what is told ends in the folder


def unnested(folder: Path) -> None:
    outer = config_of(folder)
    inner = outer.pop("model")
    written(folder, {**outer, **inner})


def stripped(folder: Path, root: str) -> None:
    tensors = read_tensors(folder)
    write_tensors(folder, {name.removeprefix(root): tensors[name] for name in tensors})


def without(folder: Path, name: str) -> None:
    write_tensors(folder, {n: t for n, t in read_tensors(folder).items() if n != name})


def put(folder: Path, key: str, value: object) -> None:
    """Where the key stands, or at the top; None takes it away."""
    config = config_of(folder)
    layers_of = config.get("transformer_layer_config", {})
    for section in [layers_of] if key in layers_of and key != "model_type" else [config]:
        section[key] = value
        if value is None:
            del section[key]
    written(folder, config)


def declared(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the declaration, the flat one or its nested section."""
    config = config_of(folder)
    outer = config.get("quantization_config") or {}
    change(outer.get("quantization", outer))
    written(folder, {**config, "quantization_config": outer})


EXCLUDES = {"compressed-tensors": "ignore", "quark": "exclude", "modelopt": "ignore"}


def exclude(folder: Path, names: str) -> None:
    def change(said: dict[str, Any]) -> None:
        named = re.findall("'(.*?)'", names)
        key = EXCLUDES.get(said.get("quant_method", "modelopt"), "modules_to_not_convert")
        key = "exclude_modules" if "exclude_modules" in said else key
        said[key] = [*(said.get(key) or []), *named]

    declared(folder, change)


def include(folder: Path, named: str) -> None:
    def change(said: dict[str, Any]) -> None:
        for key, names in said.items():
            if isinstance(names, list) and all(isinstance(one, str) for one in names):
                found = re.findall("'(.*?)'", named)
                said[key] = [one for one in names if not any(matches(one, n) for n in found)]

    declared(folder, change)


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatch(name, pattern) or pattern in name


def layers(folder: Path, top: str, nested: str) -> None:
    config = config_of(folder)
    section = {**(config.get("eagle_config") or {}), LAYERS: json.loads(nested)}
    written(folder, config | {LAYERS: json.loads(top), "eagle_config": section})


LAYERS = "eagle_aux_hidden_state_layer_ids"
FOLLOWED: Mapping[str, Callable[..., None]] = {
    r"move the keys of 'model' to the top level": unnested,
    r"(?:set architectures to|add its architecture to config.json) \(?(\w+)": lambda at, name: put(
        at, "architectures", [name]
    ),
    r"set model_type to .*?(\w+)(?:$|[,:;])": lambda at, name: put(at, "model_type", name),
    r"^set (\w+) in config.json to \d+, or remove it": lambda at, key: put(at, key, None),
    r"^remove (\w+)(?:$|:| from config.json)": lambda at, key: put(at, key, None),
    r"^remove ([\w.]+\.\w+)(?: only if| if|:)": without,
    r"strip '(.+?)' from the names": stripped,
    r"correct num_hidden_layers: the tensors are those of (\d+)": lambda at, n: put(
        at, "num_hidden_layers", int(n)
    ),
    r"set tie_word_embeddings to false": lambda at: put(at, "tie_word_embeddings", False),
    r"^exclude \w+ so that \w+ matches it as ('.*')$": exclude,
    r"as quantized: an exclude matches ('.*')": include,
    rf"set {LAYERS} in config.json to (\[.*\]) at the top level, and to (\[.*\]) in": layers,
    r"name the 5 layers": lambda at: layers(at, "[2, 4, 5, 6, 7]", "[1, 3, 4, 5, 6]"),
}
"""A remedy, and what whoever follows it does."""
ELSEWHERE = re.compile(r"serve (?:it|the draft|a draft of speculators)[^;]*? with (vLLM|SGLang)\b")
LLAMA, DFLASH = tiny_eagle3_llama, tiny_dflash
MISTAKES: Mapping[str, Build] = {
    "P-EAGLE's name": made(LLAMA, name="PeagleLlamaForCausalLM"),
    "P-EAGLE": made(lambda at: with_mask_hidden(LLAMA(at)), name="PeagleLlamaForCausalLM",
                    mask_token_id=5),
    "Qwen3's layers, named so": made(LLAMA, *HEAD_NORMS, name="Qwen3ForCausalLM"),
    "MLA, named Llama": made(tiny_eagle3_mla, name="LlamaForCausalLMEagle3"),
    "MLA, named as a model": made(tiny_eagle3_mla, name="DeepseekV3ForCausalLM",
                                  model_type="kimi_k2"),
    "DSpark, named DFlash": made(tiny_dspark, name="DFlashDraftModel"),
    "TorchSpec's model_type": made(DFLASH, model_type="dflash"),
    "no name": made(LLAMA, name=None),
    "nested": nested(),
    "MLX, and nothing packed": made(DFLASH, quantization_config=MLX),
    "the target's layers": made(LLAMA, num_hidden_layers=61),
    "a tied head": made(LLAMA, tie_word_embeddings=True),
    "a root": lambda at: LLAMA(at, prefix="model.layers.0."),
    "a stranger": made(LLAMA, "midlayer.self_attn.q_proj.bias"),
}  # fmt: skip


def end_of(draft: Path, engine: str, **asked: Any) -> tuple[str, str]:
    """The verdict and the remedy that are left when every remedy that is an edit was followed."""
    seen: set[tuple[str, str, str]] = set()
    while True:
        try:
            answer = answered(draft, engine, **asked)
            verdict, error, remedy = answer.verdict, answer.error or "", answer.remedy or ""
        except DraftQuantError as exc:
            verdict, error, remedy = "bad input", exc.what, exc.fix
        if verdict == "LOADS":
            return verdict, ""
        assert remedy, error
        assert (engine, error, remedy) not in seen, "the remedy did not help"
        seen.add((engine, error, remedy))
        steps = ((do, re.search(words, remedy)) for words, do in FOLLOWED.items())
        step = next(((do, found) for do, found in steps if found), None)
        if step is not None:
            step[0](draft, *step[1].groups())
        elif (other := ELSEWHERE.search(remedy)) is not None:
            engine = other[1].lower()
        else:
            return verdict, remedy


def answered(
    draft: Path, engine: str, subtree: str | None = None, target_layers: int | None = None
) -> EngineCheck:
    return check_checkpoint(
        Checkpoint.open(draft, subtree=subtree, is_target=subtree is not None),
        engine=engine,  # type: ignore[arg-type]
        arch="sm90",
        target_layers=target_layers,
        has_side_file=(draft / "hf_quant_config.json").is_file(),
    )


@pytest.mark.some(6)
@pytest.mark.parametrize("engine", ENGINE_NAMES[:2])
@pytest.mark.parametrize("case", MISTAKES)
def test_a_remedy_that_is_followed_helps(case: str, engine: str, tmp_path: Path) -> None:
    verdict, remedy = end_of(MISTAKES[case](tmp_path / "draft"), engine)
    ends = remedy.endswith("as the draft was trained"), remedy.startswith("ask vLLM or SGLang")
    assert verdict == "LOADS" or any(ends)


def unlike_layers(folder: Path) -> Path:
    """One layer's o_proj in BF16, which SGLang's excludes cannot tell from the other's."""
    source = tiny_dflash(folder.with_name("source"), num_layers=2, config={"dtype": "bfloat16"})
    dq.quantize(source, recipe="fp8-ptpc", out=folder)
    tensors, before = read_tensors(folder), read_tensors(source)
    name = "layers.1.self_attn.o_proj.weight"
    del tensors[f"{name}_scale"]
    write_tensors(folder, {**tensors, name: before[name]})
    declared(folder, lambda said: said["ignore"].append(name.removesuffix(".weight")))
    return folder


ENDS: Mapping[str, tuple[Build, str, str]] = {
    "layers alike": (unlike_layers, "sglang", "store it in layout compressed-tensors"),
    "another activation": (made(LLAMA, hidden_act="gelu", model_type="qwen3"), "vllm", "ask vLLM"),
    "called eagle": (made(tiny_dspark, hidden_act="gelu", model_type="eagle"), "vllm", "ask vLLM"),
    "called eagle, named": (made(tiny_dspark, model_type="eagle"), "vllm", ""),
}


@pytest.mark.parametrize("case", ENDS)
def test_no_remedy_leads_to_itself(case: str, tmp_path: Path) -> None:
    build, engine, end = ENDS[case]
    verdict, remedy = end_of(build(tmp_path / "draft"), engine)
    assert (verdict == "LOADS") == (not end)
    assert remedy.startswith(end)


CORPUS = [row for file in FILES.values() for row in read_rows(file)]
DRAWN: Mapping[str, Sequence[object]] = {
    "num_aux_hidden_states": (1, 2, 5), "num_hidden_layers": (1, 2, 61), LAYERS: ([1, 2], None),
    "tie_word_embeddings": (True,), "draft_vocab_size": (None, 48), "vocab_size": (50, 200),
    "eagle_config": (None, {LAYERS: [1, 3, 4]}, {LAYERS: []}), "head_dim": (8, None),
    "target_hidden_size": (32, 128, None), "num_key_value_heads": (1, 4), "hidden_act": ("gelu",),
    "attention_bias": (True, None), "model_type": ("llama", "qwen3", "kimi_k2", "eagle", None),
    "architectures": (None, ["LlamaForCausalLM"], ["Qwen3ForCausalLM"], ["DFlashDraftModel"],
                      ["PEagleDraftModel"], ["Nobody"]),
    "quantization_config": ({}, {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4},
                            {"quant_method": "nope"}, {"group_size": 64, "bits": 4}),
    "layer_types": (["full_attention"], ["sliding_attention"] * 2), "mask_token_id": (5, None),
    "num_target_layers": (2, None), "max_position_embeddings": (None,),
}  # fmt: skip
BUILDS: Sequence[Build] = (
    LLAMA, tiny_eagle3_mla, DFLASH, tiny_dspark, tiny_language_model, tiny_glm4_moe_mtp,
    tiny_speculators_eagle3, tiny_speculators_dflash,
)  # fmt: skip


def drawn(folder: Path, seed: int) -> Path:
    """A draft of some family with up to three keys of others, and a tensor less or more."""
    rng = random.Random(seed)
    rng.choice(BUILDS)(folder)
    for key in rng.sample(sorted(DRAWN), rng.randint(1, 3)):
        put(folder, key, rng.choice(DRAWN[key]))
    tensors, change = read_tensors(folder), rng.random()
    if change < 0.3:
        del tensors[rng.choice(sorted(tensors))]
    elif change < 0.5:
        module = rng.choice(sorted(tensors)).rpartition(".")[0]
        tensors[f"{module}.bias"] = Stored("BF16", (16,), bytes(32))
    write_tensors(folder, tensors)
    return folder


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
def test_every_remedy_of_the_corpus_ends(step: int, tmp_path: Path) -> None:
    loaded = 0
    for number, row in enumerate(CORPUS[::step]):
        for engine in ENGINE_NAMES[:2]:
            folder = write_folder(row, tmp_path / f"{number}-{engine}")
            asked = {"subtree": row.get("subtree"), "target_layers": row.get("target_layers", 8)}
            loaded += end_of(folder, engine, **asked)[0] == "LOADS"
            shutil.rmtree(folder)
    assert loaded > len(CORPUS[::step]) / 2


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_every_remedy_of_a_drawn_draft_ends(count: int, tmp_path: Path) -> None:
    for seed in range(count):
        for engine in ENGINE_NAMES[:2]:
            folder = drawn(tmp_path / f"{seed}-{engine}", seed)
            end_of(folder, engine)
            shutil.rmtree(folder)


def test_a_folder_of_mlx_in_which_nothing_is_packed_is_a_bf16_draft(tmp_path: Path) -> None:
    assert dq.inspect(MISTAKES["MLX, and nothing packed"](tmp_path / "draft")).audit is None
