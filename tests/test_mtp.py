"""MTP layers: forward maths against transformers' own layers, and the way through the commands.

Tolerance of the maths: transformers computes norms and routers in float32 whatever the weights are,
six of them in a row, whose roundings of 6e-8 an expert's weight of 2.5 and three steps of a chain
enlarge by less than a hundred: 1e-5. A wrong order of the concat moves logits by 1.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.shared.mixture import Mixture, routed
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.estimate.work import VerifyStep
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError, EstimateError, PlanError
from draftquant.scripts.cli import main
from reference_mtp import ReferenceMtp
from tiny import edit_json, read_tensors, write_tensors
from tiny_mtp import tiny_deepseek_mtp, tiny_glm4_moe_mtp, tiny_mimo_mtp, tiny_qwen3_next_mtp

BUILDERS: dict[str, Callable[..., Path]] = {
    "mimo-mtp": tiny_mimo_mtp,
    "deepseek-mtp": tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny_glm4_moe_mtp,
    "qwen3-next-mtp": tiny_qwen3_next_mtp,
}
TOLERANCE = 1e-5
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo-mtp", {}),
    "deepseek-dense": ("deepseek-mtp", {"experts": 0}),
    "qwen3.5": ("qwen3-next-mtp", {"experts": 0}),
}
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek-mtp", {}),
    "deepseek-many": ("deepseek-mtp", {"experts": 8, "config": {"num_experts_per_tok": 3}}),
    "qwen3-next": ("qwen3-next-mtp", {}),
    "qwen3-next-many": ("qwen3-next-mtp", {"experts": 8, "config": {"norm_topk_prob": False}}),
    "glm": ("glm4-moe-mtp", {}),
    "glm-unnormalised": ("glm4-moe-mtp", {"config": {"norm_topk_prob": False}}),
}


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("case", [*DENSE, *MIXED])
def test_chain_is_that_of_transformers_layers(case: str, tmp_path: Path) -> None:
    family, changes = {**DENSE, **MIXED}[case]
    folder = BUILDERS[family](tmp_path / "draft", dtype="F32", **changes)
    draft = load_draft(folder, dtype=torch.float64)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    reference = ReferenceMtp(family, config, draft.weights)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, draft.geometry.vocab_size, (12,), generator=generator)
    states = torch.randn(11, draft.geometry.hidden_size, generator=generator, dtype=torch.float64)
    found = draft.forward.passes(
        states[None], token_ids[None], rows=range(3, 8), num_draft_tokens=3
    )
    compared = 0
    for one in found:
        for depth, hidden in zip(one.depths, one.hidden.unbind(2), strict=True):
            logits = draft.forward.logits(hidden)[0]
            for row, ours in zip(one.rows, logits, strict=True):
                theirs = reference.logits(states, token_ids, row, depth)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
                compared += 1
    assert compared == 5 * 3


@pytest.mark.usefixtures("float64_on_one_thread")
def test_embedding_at_position_0_is_masked(tmp_path: Path) -> None:
    draft = load_draft(tiny_mimo_mtp(tmp_path / "draft"), dtype=torch.float64)
    states = torch.randn(5, draft.geometry.hidden_size, dtype=torch.float64)

    def first_logits(tokens: list[int]) -> torch.Tensor:
        passes = draft.forward.passes(
            states[None], torch.tensor([tokens]), rows=range(2, 3), num_draft_tokens=1
        )
        return draft.forward.logits(next(iter(passes)).hidden)

    same = first_logits([1, 2, 3, 4, 5, 6])
    assert torch.equal(same, first_logits([1, 9, 3, 4, 5, 6]))  # row 0 reads token 1, masked
    assert not torch.equal(same, first_logits([1, 2, 9, 4, 5, 6]))


def test_routing_by_hand() -> None:
    mixture = Mixture(
        num_experts=4,
        per_token=2,
        width=8,
        shared_width=0,
        scoring="sigmoid",
        corrects=True,
        num_groups=2,
        groups_per_token=1,
        normalises=True,
        scale=2.0,
    )
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0]])  # scores .953 .047 | .731 .731
    experts, weights = routed(mixture, logits, torch.eye(4), None)
    assert sorted(experts[0].tolist()) == [2, 3]  # 1.462 against 1.000
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0]]))
    corrected = torch.tensor([0.0, 1.0, 0.0, 0.0])  # chooses, and does not weigh
    experts, weights = routed(mixture, logits, torch.eye(4), corrected)
    chosen = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert chosen == pytest.approx({0: 2 * 0.9526, 1: 2 * 0.0474}, abs=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("recipe", ["int4-channel", "fp8-ptpc", "mi325x-w4a8", "mi355-mxfp4"])
def test_quantize_verify_inspect_dequantize(
    family: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = BUILDERS[family](tmp_path / "draft"), tmp_path / "out"
    assert main(["quantize", str(source), "--recipe", recipe, "--out", str(out)]) == 0
    assert main(["verify", str(out), "--against", str(source)]) == 0
    assert main(["inspect", str(out)]) == 0
    assert main(["dequantize", str(out), "--out", str(tmp_path / "plain")]) == 0
    assert "\nerror:" not in capsys.readouterr().err
    before, after = read_tensors(source), read_tensors(out)
    kept = ("input_proj", "eh_proj", "mlp.gate.", "norm", "bias", "embed_tokens", "head")
    for name, tensor in before.items():
        if any(part in name for part in kept):
            assert after[name] == tensor, name
    stored = StoredDraft.read(Checkpoint.open(out))
    leaves = {module.rpartition(".")[2] for module in stored.modules}
    assert {"gate_proj", "up_proj", "down_proj", "o_proj"} < leaves


def test_subtree_is_the_layer_alone(tmp_path: Path) -> None:
    target = tiny_deepseek_mtp(tmp_path / "target", inside_target=True)
    alone, out = tiny_deepseek_mtp(tmp_path / "alone"), tmp_path / "out"
    subtree = ["--subtree", "model.layers.3"]
    assert main(["inspect", str(target), *subtree]) == 0
    assert main(["plan", str(target), *subtree, "--recipe", "int4-channel"]) == 0
    quantize = ["quantize", str(target), *subtree, "--recipe", "int4-channel"]
    assert main([*quantize, "--out", str(out)]) == 0
    assert main(["verify", str(out), "--against", str(target), *subtree]) == 0
    same = ["quantize", str(alone), "--recipe", "int4-channel", "--out", str(tmp_path / "same")]
    assert main(same) == 0
    assert read_tensors(out) == read_tensors(tmp_path / "same")
    assert all(name.startswith("model.layers.3.") for name in read_tensors(out))


def test_only_shards_of_the_subtree_are_needed(tmp_path: Path) -> None:
    target = tiny_deepseek_mtp(tmp_path / "target", inside_target=True)
    index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))
    own = {f for name, f in index["weight_map"].items() if name.startswith("model.layers.3.")}
    edit_json(
        target / "model.safetensors.index.json",
        weight_map=index["weight_map"]
        | {"model.layers.0.mlp.up_proj.weight": "model-00009-of-00009.safetensors"},
    )
    found = Checkpoint.open(target, subtree="model.layers.3")
    assert set(found.headers) == own
    assert read_draft(found).family.name == "deepseek-mtp"
    with pytest.raises(CheckpointError, match="not in the folder"):
        Checkpoint.open(target)


def test_absent_subtree_names_the_layers_that_are_there(tmp_path: Path) -> None:
    target = tiny_mimo_mtp(tmp_path / "target", inside_target=True)
    with pytest.raises(CheckpointError, match=r"no tensor lies below 'model.layers.61'") as caught:
        Checkpoint.open(target, subtree="model.layers.61")
    assert "give one of the MTP layers of this folder: model.mtp_layers.0" in caught.value.fix
    plain = tiny_mimo_mtp(tmp_path / "plain", inside_target=True)
    tensors = {n: t for n, t in read_tensors(plain).items() if "mtp_layers" not in n}
    write_tensors(plain, tensors, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no tensor lies below") as caught:
        Checkpoint.open(plain, subtree="model.mtp_layers.0")
    assert "this folder has no MTP layer" in caught.value.fix


def test_subtree_of_a_hub_id_is_refused() -> None:
    with pytest.raises(CheckpointError, match="all its shards would be downloaded"):
        resolve_draft("deepseek-ai/DeepSeek-V3", "model.layers.61")


def test_router_and_experts_are_refused_what_they_cannot(tmp_path: Path) -> None:
    draft = read_draft(Checkpoint.open(tiny_deepseek_mtp(tmp_path / "draft")))
    with pytest.raises(PlanError, match="gradients and optimizer states of all experts"):
        make_plan(load_recipe("mi355-mxfp4-learned"), draft)
    with pytest.raises(EstimateError, match="drafts with experts"):
        candidates_of(draft, (), VerifyStep(3, 100))
