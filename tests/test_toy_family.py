"""A family is a module: a toy one is added from without, and goes all the way.

`tests/toy_families/toy.py` is what would lie in `quantize/drafts/families`; its passes are of no
kind that is there. And no module but a family's own names a family.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import families, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file
from test_packaging import MODULES, parsed
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
        "architectures": ["ToyForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "aux_layer_ids": LAYERS,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
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


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def out(pair: Path) -> Path:
    """The toy draft in FP8."""
    folder = pair / "out"
    argv = ["quantize", str(pair / "draft"), "--recipe", "fp8-ptpc", "--out", str(folder)]
    assert main(argv) == 0
    return folder


def test_a_family_is_one_module() -> None:
    for family in (*families.FAMILIES, *families.discover()):
        assert vars(sys.modules[type(family).__module__])["FAMILY"] is family


def test_it_is_read_and_planned(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = read_draft(Checkpoint.open(pair / "draft"))
    assert draft.family.name == "toy"
    assert said(capsys, "inspect", pair / "draft")["family"] == "toy"
    plan = said(capsys, "plan", pair / "draft", "--recipe", "fp8-ptpc")
    assert [step["action"] for step in plan["tensors"]].count("quantize") == 3


def test_it_is_quantized_and_verified(
    pair: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "verify", out, "--against", pair / "draft")
    assert found["ok"] is True
    assert found["quantized"] == 3


def test_it_is_replayed(pair: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own passes, the quantized one too; some tokens of it are right."""
    for folder in (pair / "draft", out):
        (found,) = said(capsys, "replay", folder, "--traces", pair / "traces")
        assert 1.5 < found["mean_acceptance_length"] < 4


def test_engines_say_that_they_do_not_know_it(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in ("vllm", "sglang"):
        assert main(["check", str(out), "--engine", engine]) != 0
        assert "['ToyForCausalLM']" in capsys.readouterr().out


# ---- nobody else knows a family by its name


def literals() -> dict[str, list[str]]:
    """Module -> the names of families that stand in it as texts of their own."""
    names = {family.name for family in families.FAMILIES}
    found: dict[str, list[str]] = {}
    for module in MODULES:
        if module.as_posix().startswith(("quantize/drafts/families/", "scripts/dev/")):
            continue
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Constant) and node.value in tuple(names):
                found.setdefault(module.as_posix(), []).append(f"{node.lineno}: {node.value}")
    return found


def test_nothing_but_its_module_names_a_family() -> None:
    assert literals() == {}
