"""What a draft is comes before what its tensors lack, and every remedy is followed and works."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.quantize.engines import check_draft
from draftquant.quantize.engines.contract import ENGINE_NAMES, EngineName
from draftquant.quantize.errors import DraftQuantError
from tiny import Stored, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_target import tiny_target

Build = Callable[[Path], Path]
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
HEAD_NORMS = tuple(f"midlayer.self_attn.{leaf}.weight" for leaf in ("q_norm", "k_norm"))


def changed(build: Build, *tensors: str, rows: int = 4, **keys: object) -> Build:
    """A draft with more tensors, and other keys of config.json."""

    def built(folder: Path) -> Path:
        build(folder)
        added = {name: Stored("BF16", (rows,), bytes(2 * rows)) for name in tensors}
        write_tensors(folder, read_tensors(folder) | added)
        edit_json(folder / "config.json", **keys)
        return folder

    return built


def by_mlx(build: Build, **keys: object) -> Build:
    """Every matrix as MLX packs it: words of 32 bits, scales and biases."""

    def built(folder: Path) -> Path:
        tensors = read_tensors(build(folder))
        for name, (dtype, shape, _) in list(tensors.items()):
            if len(shape) == 2:
                words = (shape[0], shape[1] // 8)
                tensors[name] = Stored("U32", words, bytes(4 * words[0] * words[1]))
                for part in ("scales", "biases"):
                    part_name = name.replace(".weight", f".{part}")
                    tensors[part_name] = Stored(dtype, (shape[0], 1), bytes(2 * shape[0]))
        write_tensors(folder, tensors)
        edit_json(folder / "config.json", **keys)
        return folder

    return built


def nested(*absent: str, **outer: object) -> Build:
    """As vLLM's EAGLEConfig writes a draft."""

    def built(folder: Path) -> Path:
        config = json.loads((tiny_eagle3_llama(folder) / "config.json").read_text("utf-8"))
        inner = {key: value for key, value in config.items() if key not in absent}
        written = json.dumps({"model_type": "eagle", "model": inner, **outer})
        (folder / "config.json").write_text(written, encoding="utf-8")
        return folder

    return built


def named(name: str, build: Build = tiny_eagle3_llama, *tensors: str, **keys: object) -> Build:
    return changed(build, *tensors, rows=16, architectures=[name], **keys)


EXPERT = "mlp.experts.0.up_proj.weight"
KINDS: Mapping[str, tuple[Build, str]] = {
    "Laguna's gates": (
        changed(tiny_dflash, "layers.0.self_attn.g_proj.weight"), "gates on its attention",
    ),
    "DFlash with experts": (changed(tiny_dflash, f"layers.0.{EXPERT}"), "a mixture of experts"),
    "DSpark with experts": (changed(tiny_dspark, f"layers.0.{EXPERT}"), "dspark with a mixture"),
    "EAGLE-3 with experts": (
        changed(tiny_eagle3_llama, f"midlayer.{EXPERT}"), "eagle3-llama with a mixture",
    ),
    "DFlash with MLA by name": (
        named("DeepseekDFlashDraftModel", tiny_dflash, "layers.0.self_attn.kv_a_proj.weight"),
        "DFlash with latent attention (MLA)",
    ),
    "DFlash with MLA by a mode": (
        changed(tiny_dflash, "layers.0.self_attn.kv_a_proj.weight", kv_lora_rank=64),
        "dflash with latent attention (MLA)",
    ),
    "DFlare": (named("DFlareDraftModel", tiny_dflash), "DFlare"),
    "Mistral's EAGLE": (named("EagleMistralLarge3ForCausalLM"), "Mistral's EAGLE"),
    "Nemotron-H's MTP": (
        named("NemotronHMTPModel", model_type="nemotron_h"), "an MTP layer of Nemotron-H",
    ),
    "an MTP layer": (named("Qwen3MoeForCausalLMMTP", model_type="qwen3_moe"), "an MTP layer"),
    "MLX": (by_mlx(tiny_dflash, quantization=MLX, quantization_config=MLX), "MLX"),
    "MLX of old": (by_mlx(tiny_eagle3_llama, quantization=MLX), "MLX"),
    "MLX undeclared": (by_mlx(tiny_eagle3_llama), "MLX"),
}  # fmt: skip
REFUSED = {"an MTP layer": "vllm", "DFlash with MLA by name": "vllm", "DFlare": "sglang"}
"""Executed: names that an engine has not, whatever model_type says."""
TENSOR_REMEDIES = re.compile(
    "remove|declare|set architectures|add |correct|export|incomplete|--fix"
)


@pytest.mark.parametrize("case", KINDS)
def test_what_a_draft_is_replaces_every_remedy(case: str, tmp_path: Path) -> None:
    build, kind = KINDS[case]
    draft, target = build(tmp_path / "draft"), tiny_target(tmp_path / "target", "glm")
    quantized = tmp_path / "quantized"
    dq.quantize(tiny_dflash(tmp_path / "other"), recipe="fp8-ptpc", out=quantized)
    verbs: Mapping[str, Callable[[], Any]] = {
        "inspect": lambda: dq.inspect(draft),
        "plan": lambda: dq.plan(draft, recipe="fp8-ptpc"),
        "quantize": lambda: dq.quantize(draft, recipe="fp8-ptpc", out=tmp_path / "out"),
        "verify": lambda: dq.verify(quantized, against=draft),
        "graft": lambda: dq.graft(target, draft, out=tmp_path / "grafted"),
    }
    for verb, call in verbs.items():
        with pytest.raises(DraftQuantError) as caught:
            call()
        assert kind in caught.value.what, verb
        assert not TENSOR_REMEDIES.search(caught.value.fix), verb
    for engine in ENGINE_NAMES:
        answer = check_draft(draft, engine=engine)
        (finding,) = answer.findings
        assert finding.text.startswith("The draft is ")
        assert kind in finding.text
        assert not TENSOR_REMEDIES.search(finding.remedy)
        assert answer.verdict != "LOADS"
        assert answer.launch is None
    if case in REFUSED:
        assert check_draft(draft, engine=REFUSED[case]).verdict == "REFUSED"  # type: ignore[arg-type]


def renamed(folder: Path, rename: Callable[[str], str | None]) -> None:
    tensors = {rename(name): tensor for name, tensor in read_tensors(folder).items()}
    write_tensors(folder, {name: tensor for name, tensor in tensors.items() if name})


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def rewritten(folder: Path, config: Mapping[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def unnested(folder: Path) -> None:
    outer = config_of(folder)
    inner = outer.pop("model")
    rewritten(folder, {**outer, **inner})


def without(folder: Path, key: str) -> None:
    rewritten(folder, {k: value for k, value in config_of(folder).items() if k != key})


FOLLOWED: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"set architectures to (\w+)", lambda at, name: edit_json(at / "config.json", architectures=[name])),
    (r"add its architecture to config.json \((\w+)", lambda at, name: edit_json(at / "config.json", architectures=[name])),
    (r"set model_type to .*?(\w+)$", lambda at, name: edit_json(at / "config.json", model_type=name)),
    (r"move the keys of 'model' to the top level", unnested),
    (r"remove (quantization_config|rope_theta)", without),
    (r"strip '(.+?)' from the names", lambda at, root: renamed(at, lambda n: n.removeprefix(root))),
    (r"set tie_word_embeddings to (false)", lambda at, _: edit_json(at / "config.json", tie_word_embeddings=False)),
    (r"write draft_vocab_size: null", lambda at: edit_json(at / "config.json", draft_vocab_size=None)),
    (r"remove (d2t) and t2d", lambda at, _: renamed(at, lambda n: None if n in ("d2t", "t2d") else n)),
)  # fmt: skip
"""A remedy, and what whoever follows it does."""

MISTAKES: Mapping[str, Build] = {
    "P-EAGLE's name": named("PeagleLlamaForCausalLM"),
    "P-EAGLE's other name": named("PEagleDraftModel"),
    "P-EAGLE": named("PeagleLlamaForCausalLM", lambda at: with_mask_hidden(tiny_eagle3_llama(at)), mask_token_id=5),
    "P-EAGLE's name of Qwen3": named("PeagleQwen3ForCausalLM"),
    "EAGLE-1's name": named("LlamaForCausalLMEagle"),
    "Qwen3's name": named("Eagle3Qwen3ForCausalLM"),
    "Qwen3's model's name": named("Qwen3ForCausalLM"),
    "Qwen3's layers, named so": named("Qwen3ForCausalLM", tiny_eagle3_llama, *HEAD_NORMS),
    "Qwen3's layers, named Llama": changed(tiny_eagle3_llama, *HEAD_NORMS, rows=16),
    "MLA, named Llama": named("LlamaForCausalLMEagle3", tiny_eagle3_mla),
    "MLA, named as a model": named("DeepseekV3ForCausalLM", tiny_eagle3_mla, model_type="kimi_k2"),
    "AngelSlim's name": named("QwenDFlashDraftModel", tiny_dflash),
    "TensorRT-LLM's name": named("EAGLE3LlamaForCausalLM"),
    "DSpark, named DFlash": named("DFlashDraftModel", lambda at: tiny_dspark(at, layout="flat")),
    "TorchSpec's model_type": changed(tiny_dflash, model_type="dflash"),
    "no name": changed(tiny_eagle3_llama, architectures=None),
    "no name of DFlash": changed(tiny_dflash, architectures=None),
    "nested": nested(),
    "nested, named outside": nested("architectures", architectures=["LlamaForCausalLMEagle3"]),
    "nested without a name": nested("architectures"),
    "eagle": changed(tiny_eagle3_llama, model_type="eagle"),
    "MLX's declaration, and nothing packed": changed(tiny_dflash, quantization_config=MLX),
    "MLX's declaration of nothing": changed(
        tiny_dflash, quantization_config={"group_size": 64, "bits": None}
    ),
    "a root": lambda at: tiny_eagle3_llama(at, prefix="model.layers.0."),
    "another root": lambda at: tiny_dflash(at, spelling="specforge"),
    "a stranger": changed(tiny_eagle3_llama, "midlayer.self_attn.q_proj.bias"),
    "no base": changed(tiny_eagle3_llama, rope_theta=None),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINE_NAMES[:2])
@pytest.mark.parametrize("case", MISTAKES)
def test_a_remedy_that_is_followed_helps(case: str, engine: EngineName, tmp_path: Path) -> None:
    draft = MISTAKES[case](tmp_path / "draft")
    seen: list[tuple[str, str]] = []
    while True:
        try:
            answer = check_draft(draft, engine=engine)
            verdict, error, remedy = answer.verdict, answer.error or "", answer.remedy or ""
        except DraftQuantError as exc:
            verdict, error, remedy = "REFUSED", exc.what, exc.fix
        print(case, engine, verdict, error, "|", remedy)
        if verdict == "LOADS":
            return
        assert (engine, error) not in seen, "the remedy did not help"
        seen.append((engine, error))
        if remedy.startswith("serve it with vLLM"):
            engine = "vllm"
            continue
        steps = [(f, found) for words, f in FOLLOWED if (found := re.search(words, remedy))]
        if not steps:
            assert re.match("The draft is |.* drops .*q_proj.bias", error), remedy
            return
        for follow, found in steps:
            follow(draft, *found.groups())
