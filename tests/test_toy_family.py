"""A family is a module: a toy one is added from without, and goes all the way.

`tests/toy_families/toy.py` is what would lie in `quantize/drafts/families`; its passes are of no
kind that is there. And no module but a family's own names a family.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.drafts import families
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file
from test_packaging import MODULES, ROOT
from tied_pair import HIDDEN, VOCAB, prompt_tokens, save_target

TOYS = Path(__file__).parent / "toy_families"
INNER, LAYERS = 32, [1, 3, 4]


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    """The registry as it is where the module lies beside those of the other families."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "__path__", [*families.__path__, str(TOYS)])
        before, found = families.FAMILIES, families.discover()
        for module in list(sys.modules.values()):
            if vars(module).get("FAMILIES") is before:
                patch.setattr(module, "FAMILIES", found)
        yield
    for name in [name for name in sys.modules if name.startswith(f"{families.__name__}.toy")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def pair(toy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a toy draft that is right about its tokens now and then, and traces."""
    del toy
    folder = tmp_path_factory.mktemp("toy")
    target = load_file(save_target(folder / "target") / "model.safetensors")
    noise = torch.Generator().manual_seed(3)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise) * 0.3 / shape[-1] ** 0.5

    weights = {
        "model.embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
        "model.fc.weight": small(HIDDEN, len(LAYERS) * HIDDEN),
        "model.decay": torch.full((HIDDEN,), 0.1),
        "model.norm.weight": target["model.norm.weight"],
        "model.layers.0.mlp.gate_proj.weight": small(INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": small(INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": small(HIDDEN, INNER),
    }
    draft = folder / "draft"
    draft.mkdir()
    stored = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(stored, draft / "model.safetensors")
    config = {
        "architectures": ["ToyForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "aux_layer_ids": LAYERS, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [
        json.dumps({"id": f"p{i}", "category": "a", "token_ids": list(tokens)}) + "\n"
        for i, tokens in enumerate(prompt_tokens(3, 9))
    ]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    argv = ["record", "--target", folder / "target", "--prompts", folder / "prompts.jsonl"]
    argv += ["--draft", draft, "--out", folder / "traces", "--max-new-tokens", "20"]
    assert main([str(word) for word in argv]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_goes_all_the_way(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own passes, quantized too; some tokens of it are right."""
    for family in (*families.FAMILIES, *families.discover()):
        assert vars(sys.modules[type(family).__module__])["FAMILY"] is family
    draft, out = pair / "draft", pair / "out"
    assert said(capsys, "inspect", draft)["family"] == "toy"
    plan = said(capsys, "plan", draft, "--recipe", "fp8-ptpc")
    assert [step["action"] for step in plan["tensors"]].count("quantize") == 3
    quantized(draft, "fp8-ptpc", out)
    found = said(capsys, "verify", out, "--against", draft)
    assert (found["ok"], found["quantized"]) == (True, 3)
    for folder in (draft, out):
        (found,) = said(capsys, "replay", folder, "--traces", pair / "traces")
        assert 1.5 < found["mean_acceptance_length"] < 4
    for engine in ("vllm", "sglang"):
        assert main(["check", str(out), "--engine", engine]) != 0
        assert "['ToyForCausalLM']" in capsys.readouterr().out


def test_nothing_but_its_module_names_a_family() -> None:
    """As a text of its own."""
    names = {family.name for family in families.FAMILIES}
    found = []
    for module in MODULES:
        place = module.as_posix()
        own = place.startswith(("quantize/drafts/families/", "scripts/dev/"))
        text = "" if own else (ROOT / module).read_text(encoding="utf-8")
        if any(f'"{name}"' in text for name in names):
            found.append(place)
    assert found == []
