"""MTP layers: forward maths against transformers' own layers, and the way through the commands.

Tolerance of the maths: transformers computes norms and routers in float32 whatever the weights are,
six of them in a row, whose roundings of 6e-8 an expert's weight of 2.5 and three steps of a chain
enlarge by less than a hundred: 1e-5. A wrong order of the concat moves logits by 1.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tied_pair
import torch
from asked_pairs import check_draft
from by_recipe import quantized
from draftquant import api as dq
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.estimate.work import VerifyStep
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource, resolve_draft
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.quantize.verify import verify
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.recipes.errors import CheckpointError, EstimateError, PlanError, TraceError
from draftquant.recipes.schema import Rule
from draftquant.scripts.cli import main
from draftquant.scripts.verbs.plan import print_plan
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from reference_draft import transformers_in_float64
from reference_mtp import ReferenceModules, ReferenceMtp
from safetensors.torch import load_file, save_file
from said_traces import write_said
from tiny import Stored, config_of, read_tensors, write_tensors
from tiny_mtp import (
    tiny_deepseek_mtp,
    tiny_glm4_moe_mtp,
    tiny_mimo_mtp,
    tiny_qwen3_next_mtp,
    tiny_step3p5_mtp,
)
from tiny_target import MTP, tiny_target
from torch import Tensor

BUILDERS: dict[str, Callable[..., Path]] = {
    "mimo-mtp": tiny_mimo_mtp,
    "deepseek-mtp": tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny_glm4_moe_mtp,
    "qwen3-next-mtp": tiny_qwen3_next_mtp,
}
TOLERANCE = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo-mtp", {}),
    "deepseek-dense": ("deepseek-mtp", {"experts": 0}),
    "qwen3.5": ("qwen3-next-mtp", {"experts": 0}),
    "deepseek-many": ("deepseek-mtp", {"experts": 8, "config": {"num_experts_per_tok": 3}}),
    "qwen3-next-many": ("qwen3-next-mtp", {"experts": 8, "config": {"norm_topk_prob": False}}),
    "glm": ("glm4-moe-mtp", {}),
    "deepseek-v3.2": ("deepseek-mtp", {"indexer": "DeepSeek-V3.2"}),
    "glm-5.2": ("deepseek-mtp", {"indexer": "GLM-5.2"}),
}


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("case", CASES)
def test_chain_is_that_of_transformers_layers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    folder = BUILDERS[family](tmp_path / "draft", dtype="F32", **changes)
    draft = load_draft(folder, dtype=torch.float64)
    compare(draft, ReferenceMtp(family, config_of(folder), draft.weights))


def compare(draft: LoadedDraft, reference: ReferenceMtp | ReferenceModules, **asked: int) -> None:
    """Logits of five rows in three steps, along random tokens and states."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, draft.geometry.vocab_size, (12,), generator=generator)
    states = torch.randn(11, draft.geometry.hidden_size, generator=generator, dtype=torch.float64)
    compared = 0
    for one in draft.forward.passes(
        states[None], token_ids[None], rows=range(3, 8), num_draft_tokens=3, **asked
    ):
        for depth, hidden in zip(one.depths, one.hidden.unbind(2), strict=True):
            for row, ours in zip(one.rows, draft.forward.logits(hidden)[0], strict=True):
                theirs = reference.logits(states, token_ids, row, depth)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
                compared += 1
    assert compared == 5 * 3


@pytest.mark.parametrize("build", [tiny_qwen3_next_mtp, tiny_step3p5_mtp])
def test_a_norm_around_zero_rounds_once(build: Callable[..., Path], tmp_path: Path) -> None:
    """Of weights that 1 + weight in BF16 would lose, held against float64."""
    draft: Any = load_draft(build(tmp_path / "draft", dtype="BF16"), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    name = next(name for name in draft.weights if name.endswith("input_layernorm.weight"))
    weight = draft.weights[name].normal_(0, 0.01, generator=generator).double()
    x = torch.randn(8, len(weight), generator=generator).bfloat16()
    root = (x.double().square().mean(-1, keepdim=True) + draft.geometry.rms_norm_eps).sqrt()
    expected = x.double() / root * (1 + weight)
    forward = getattr(draft.forward, "modules", [draft.forward])[0]
    assert torch.equal(forward.norm(name.removesuffix(".weight"), x), expected.bfloat16())


def made(source: Path, out: Path, recipe: str) -> dict[str, Stored]:
    """Tensors of the quantized folder, which is verified."""
    quantized(source, recipe, out)
    assert verify(out, source).ok
    return read_tensors(out)


@pytest.mark.parametrize(
    ("family", "recipe"), [("glm4-moe-mtp", "mi325x-w4a8"), ("qwen3-next-mtp", "mxfp4-weights")]
)
def test_experts_are_quantized_and_routers_kept(family: str, recipe: str, tmp_path: Path) -> None:
    source, out = BUILDERS[family](tmp_path / "draft"), tmp_path / "out"
    before, after = read_tensors(source), made(source, out, recipe)
    dequantize_draft(DraftSource(folder=out), tmp_path / "plain")
    kept = ("mtp.fc", "eh_proj", "mlp.gate.", "norm", "bias", "embed_tokens", "head")
    for name, tensor in before.items():
        if any(part in name for part in kept):
            assert after[name] == tensor, name
    leaves = {m.rpartition(".")[2] for m in StoredDraft.read(Checkpoint.open(out)).modules}
    assert {"gate_proj", "up_proj", "down_proj", "o_proj"} < leaves


# ---- an indexer


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer without experts that reads at most 44 positions, of sizes that all formats take."""
    config = {"index_topk": 44, "q_lora_rank": 128, "v_head_dim": 32}
    folder = tmp_path_factory.mktemp("indexed") / "draft"
    sizes = {"hidden": 128, "intermediate": 256, "experts": 0}
    return tiny_deepseek_mtp(folder, indexer="GLM-5.2", config=config, **sizes)


@pytest.mark.parametrize("recipe", built_in_recipes())
def test_every_recipe_keeps_an_indexer(recipe: str, indexed: Path) -> None:
    plan = make_plan(load_recipe(recipe), read_draft(Checkpoint.open(indexed)))
    actions = {step.row.leaf: step.action for step in plan.steps if step.row.role == "indexer"}
    assert actions == dict.fromkeys(("wq_b", "wk", "weights_proj"), "keep")


def test_an_indexer_is_rounded_to_nearest_where_a_recipe_says_so(indexed: Path) -> None:
    draft = read_draft(Checkpoint.open(indexed))
    for recipe, fault in (("int4-channel", None), ("int4-channel-gptq", "where an indexer begins")):
        keeps = load_recipe(recipe)
        asked = replace(keeps, rules=(Rule(role=("indexer",), action="quantize"), *keeps.rules))
        if fault is None:
            steps = make_plan(asked, draft).steps
            assert [s.action for s in steps if s.row.leaf == "wk"] == ["quantize"]
            continue
        with pytest.raises(PlanError, match=fault):
            make_plan(asked, draft)


@pytest.mark.parametrize("tokens", [39, 40])
def test_more_positions_than_an_indexer_chooses(tokens: int, indexed: Path, tmp_path: Path) -> None:
    draft = load_draft(indexed)
    traces = write_said(
        tmp_path / "traces", tokens=tokens, prompts=2, hidden=128, layers=[7],
        fusion_sha256=draft.fusion_sha256,
    )  # fmt: skip
    if tokens == 39:
        assert replay_drafts([draft], traces, num_draft_tokens=2)
        return
    with pytest.raises(TraceError, match=r"chooses 44 positions .* the longest prompt has 45"):
        replay_drafts([draft], traces, num_draft_tokens=2)


@pytest.mark.slow
def test_subtree_is_the_layer_alone(tmp_path: Path) -> None:
    target = tiny_deepseek_mtp(tmp_path / "target", inside_target=True)
    alone = tiny_deepseek_mtp(tmp_path / "alone")
    out, subtree = str(tmp_path / "out"), ["--subtree", "model.layers.3"]
    assert main(["quantize", str(target), "--recipe", "fp8-ptpc", "--out", out, *subtree]) == 0
    assert main(["verify", out, "--against", str(target), *subtree]) == 0
    found = read_tensors(tmp_path / "out")
    assert found == made(alone, tmp_path / "same", "fp8-ptpc")
    assert all(name.startswith("model.layers.3.") for name in found)


def test_absent_subtree_names_the_layers_that_are_there(tmp_path: Path) -> None:
    target = tiny_mimo_mtp(tmp_path / "target", inside_target=True)
    with pytest.raises(CheckpointError, match=r"no tensor lies below 'model.layers.61'"):
        Checkpoint.open(target, subtree="model.layers.61")
    tensors = {n: t for n, t in read_tensors(target).items() if "mtp_layers" not in n}
    write_tensors(target, tensors, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no tensor lies below"):
        Checkpoint.open(target, subtree="model.mtp_layers.0")
    with pytest.raises(CheckpointError, match="all its shards would be downloaded"):
        resolve_draft("deepseek-ai/DeepSeek-V3", "model.layers.61")


@pytest.mark.parametrize("kind", MTP)
def test_a_target_is_called_one_whatever_is_left_of_its_layer(kind: str, tmp_path: Path) -> None:
    target, prefix = tiny_target(tmp_path / "target", kind), f"{MTP[kind]}."
    whole = read_tensors(target)
    for shard in target.glob("model*"):
        shard.unlink()
    for kept in ((), ("eh_proj", "input_proj"), ("",)):
        left = {n: t for n, t in whole.items() if not n.startswith(prefix) or n[:-7].endswith(kept)}
        write_tensors(target, left)
        with pytest.raises(CheckpointError, match="is a whole target"):
            dq.inspect(target)


def test_router_and_experts_are_refused_what_they_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an expert of another rule is a row of its own."""
    draft = read_draft(Checkpoint.open(tiny_deepseek_mtp(tmp_path / "draft")))
    with pytest.raises(PlanError, match="gradients and optimizer states of all experts"):
        make_plan(load_recipe("mi355-mxfp4-learned"), draft)
    with pytest.raises(EstimateError, match="drafts with experts"):
        candidates_of(draft, (), VerifyStep(3, 100))
    recipe = load_recipe("fp8-ptpc")
    rules = Rule(tensor=("*.experts.0.*",), action="quantize", why="it"), *recipe.rules
    print_plan(make_plan(replace(recipe, rules=rules), draft))
    said = capsys.readouterr().out
    assert all(f".experts.{name}_proj.weight" in said for name in ("0.up", "0.down", "*.up"))


# ---- Qwen3-Next and Qwen3.5


def stacked_like(folder: Path, tensors: dict[str, Stored]) -> None:
    """The folder with its experts in two tensors, as Qwen3.5's MoE layers are released."""
    own = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefix, count = "mtp.layers.0.mlp.experts.", 4

    def stack(*leaves: str) -> Stored:
        parts = [tensors[f"{prefix}{i}.{leaf}.weight"] for i in range(count) for leaf in leaves]
        rows, columns = parts[0].shape
        shape = (count, len(leaves) * rows, columns)
        return Stored(parts[0].dtype, shape, b"".join(part.data for part in parts))

    own[f"{prefix}gate_up_proj"] = stack("gate_proj", "up_proj")
    own[f"{prefix}down_proj"] = stack("down_proj")
    write_tensors(folder, own, metadata={"format": "pt"})


@pytest.mark.slow
def test_stacked_experts_are_read_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And `verify` reads them: another expert's bytes are another source."""
    apart, stacked = (tiny_qwen3_next_mtp(tmp_path / name) for name in ("apart", "stacked"))
    stacked_like(stacked, read_tensors(apart))
    out = tmp_path / "stacked-out"
    assert made(stacked, out, "fp8-ptpc") == made(apart, tmp_path / "apart-out", "fp8-ptpc")
    ours, theirs = load_draft(stacked).weights, load_draft(apart).weights
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    tensors, name = read_tensors(stacked), "mtp.layers.0.mlp.experts.down_proj"
    data, half = tensors[name].data, len(tensors[name].data) // 2
    tensors[name] = tensors[name]._replace(data=data[:half] + bytes(128) + data[half + 128 :])
    write_tensors(stacked, tensors, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(stacked)]) == 1
    assert "mlp.experts.2.down_proj" in capsys.readouterr().out


@pytest.mark.slow
def test_speculators_layout_of_the_same_layer(tmp_path: Path) -> None:
    """As speculators' converter saves it, experts stacked."""
    plain = tiny_qwen3_next_mtp(tmp_path / "plain")
    same = tiny_qwen3_next_mtp(tmp_path / "same", tables=False)
    stacked_like(same, read_tensors(same))
    spelled = {
        "fc.": "input_proj.", "norm.": "final_layernorm.", "layers.0.": "",
        "pre_fc_norm_hidden.": "hidden_layernorm.", "pre_fc_norm_embedding.": "token_layernorm.",
    }  # fmt: skip
    renamed = {
        name.replace(f"mtp.{old}", f"mtp_layers.0.{new}"): tensor
        for name, tensor in read_tensors(same).items()
        for old, new in spelled.items()
        if name.startswith(f"mtp.{old}")
    }
    write_tensors(same, renamed, metadata={"format": "pt"})
    layers = config_of(same)
    layers = layers.get("text_config", layers)
    own = ("architectures", "torch_dtype")
    keys = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1, "speculators_config": {"algorithm": "mtp"},
        "transformer_layer_config": {k: v for k, v in layers.items() if k not in own},
    }  # fmt: skip
    (same / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    ours, theirs = (read_draft(Checkpoint.open(folder)) for folder in (same, plain))
    shapes = {row.canonical: row.tensor.shape for row in theirs.rows}
    assert {row.canonical: row.tensor.shape for row in ours.rows} == {
        n: s for n, s in shapes.items() if n not in (EMBEDDING, HEAD)
    }
    assert ours.geometry == theirs.geometry
    made(same, tmp_path / "out", "fp8-ptpc")
    assert check_draft(same, engine="vllm").verdict == "UNKNOWN"


# ---- several modules


SEVERAL: dict[str, Callable[..., Path]] = {
    "deepseek-mtp": tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny_glm4_moe_mtp,
    "step3p5-mtp": tiny_step3p5_mtp,
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("family", SEVERAL)
def test_step_i_is_module_i(family: str, tmp_path: Path) -> None:
    folder = SEVERAL[family](tmp_path / "draft", modules=3, dtype="F32")
    draft = load_draft(folder, dtype=torch.float64)
    compare(draft, ReferenceModules(family, config_of(folder), draft.weights), block_rows=3)


# ---- several modules through recording, replay and GPTQ


K = 3


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is nearly a Markov chain, modules that are right now and then, and traces."""
    markov = tmp_path_factory.mktemp("modules")
    tied_pair.save_target(markov / "target")
    tied_modules(markov / "draft", markov / "target")
    prompts = tied_pair.prompts_of(tied_pair.prompt_tokens(6, 5))
    how: Any = {"aux_layer_ids": [tied_pair.NUM_LAYERS - 1], "dtype": "float64"}
    with transformers_in_float64():
        record_traces(markov / "target", prompts, markov / "traces", max_new_tokens=16, **how)
    return markov


def tied_modules(markov: Path, target: Path) -> None:
    """Three modules that say what follows the token they read, and a little of what is before."""
    tiny_step3p5_mtp(markov, number=tied_pair.NUM_LAYERS, window=2, dtype="F32")
    file = markov / "model.safetensors"
    tensors, theirs = load_file(file), load_file(target / "model.safetensors")
    hidden = tied_pair.HIDDEN
    for name, tensor in tensors.items():
        if name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat((torch.eye(hidden), 0.4 * tensor[:, hidden:]), dim=1)
        elif name.endswith("shared_head.output.weight"):
            tensors[name] = theirs["lm_head.weight"].clone()
        elif name.endswith("o_proj.weight"):
            tensors[name] = 5.0 * tensor  # what the window hides is to show
        elif name.endswith("down_proj.weight"):
            tensors[name] = 0.4 * tensor
    tensors["model.embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def served_round(reference: ReferenceModules, states: Tensor, committed: Tensor) -> list[int]:
    """The K tokens drafted behind `committed`, whose last one has no state yet."""
    tokens, hidden, drafted = committed.tolist(), states[: len(committed) - 1], []
    for number in range(K):
        ids = torch.tensor([*tokens, *drafted])
        module = reference.modules[number]
        hidden = module._outputs(hidden, ids[number:])
        head = module._norm("norm", hidden)[-1] @ module.weights["lm_head.weight"].T
        drafted.append(int(head.argmax()))
    return drafted


def served_counts(draft: LoadedDraft, traces: TraceFolder, folder: Path) -> tuple[int, int]:
    """Rounds and accepted tokens of a server that decodes the recorded continuations."""
    reference = ReferenceModules("step3p5-mtp", config_of(folder), draft.weights)
    rounds = accepted = 0
    for trace in traces:
        states, at = first_hidden(draft, traces, trace), trace.prompt_length + 1
        while at + K <= trace.num_tokens:
            drafted = served_round(reference, states, trace.token_ids[:at])
            wanted = trace.token_ids[at : at + K].tolist()
            right = next((i for i in range(K) if drafted[i] != wanted[i]), K)
            rounds, accepted, at = rounds + 1, accepted + right, at + right + 1
    return rounds, accepted


@pytest.mark.usefixtures("float64_on_one_thread")
def test_replay_counts_what_a_server_accepts(markov: Path) -> None:
    draft = load_draft(markov / "draft", dtype=torch.float64)
    traces = TraceFolder.open(markov / "traces")
    (found,) = replay_drafts([draft], traces, num_draft_tokens=K)
    rounds, accepted = served_counts(draft, traces, markov / "draft")
    counts = [prompt.counts for prompt in found.prompts]
    assert sum(c.num_steps for c in counts) == rounds
    assert sum(c.num_accepted_draft_tokens for c in counts) == accepted
    assert 0.2 < accepted / rounds < K - 0.2  # neither all right nor all wrong


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_gptq_of_modules_and_more_draft_tokens_than_modules(markov: Path, tmp_path: Path) -> None:
    out, traces = str(tmp_path / "out"), ["--traces", str(markov / "traces")]
    quantize = ["quantize", str(markov / "draft"), "--out", out, "--recipe", "int4-channel-gptq"]
    assert main([*quantize, *traces, "--num-draft-tokens", str(K)]) == 0
    assert main(["replay", str(markov / "draft"), out, *traces, "-k", "2"]) == 0
    assert main(["replay", str(markov / "draft"), *traces, "-k", "4"]) == 2
