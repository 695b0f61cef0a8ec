"""DSpark's forward maths against the trainer's own module, and an independent draft.

`dspark_maths.json` holds what SpecForge's own `DSparkDraftModel` computes;
the independent draft chooses token by token. Tolerance: see test_dflash_forward.py; a Markov head
adds some ten products of the same size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.families.dspark import DSpark, DSparkGeometry
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.recipes.errors import CheckpointError
from reference_dflash import ReferenceDSpark, random_weights
from reference_draft import assert_close
from tiny import edit_json, read_tensors
from tiny_dspark import tiny_dspark
from torch import Tensor

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

K = 5
CONTEXT = 11
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "block_size": K, "mask_token_id": 95, "target_layer_ids": [1, 3, 5],
    "markov_rank": 8, "markov_head_type": "vanilla",
}  # fmt: skip
TOKENS = [17, 3, 80, 41, 5, 60]
"""An anchor, and K tokens behind it."""


TABLE = json.loads(
    (Path(__file__).parents[1] / "experiments" / "engines" / "dspark_maths.json").read_text(
        encoding="utf-8"
    )
)


def build(**changes: Any) -> tuple[DSparkGeometry, dict[str, Tensor], BlockForward]:
    geometry = DSpark().read_geometry(CONFIG | changes, "config.json")
    weights = random_weights(geometry, family=DSpark())
    return geometry, weights, DSpark().forward(geometry, weights, lambda _name, x: x)


def features(geometry: DSparkGeometry) -> Tensor:
    """[1, CONTEXT, num_aux * W_target] float64."""
    width = geometry.num_aux_layers * geometry.target_hidden_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn((1, CONTEXT, width), generator=generator, dtype=torch.float64)


def block_logits(forward: BlockForward, context: Tensor, block: list[int]) -> Tensor:
    """[K, draft vocabulary] of one block behind a context [1, T, features]."""
    position = context.shape[1]
    attention = BlockAttention(forward, forward.fuse(context))
    attention.begin(range(position, position + 1))
    hidden = forward.block(torch.tensor([block]), torch.tensor([position]), attention)
    return forward.logits(hidden)[0]


def test_logits_are_those_of_the_trainers_own_module() -> None:
    geometry, _, forward = build()
    got = block_logits(forward, features(geometry), TOKENS)
    expected = torch.tensor(TABLE["vanilla"], dtype=torch.float64)
    assert_close(got[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 24}, {"sample_from_anchor": False}])
def test_logits_are_those_of_a_draft_that_chooses_token_by_token(changes: dict[str, Any]) -> None:
    geometry, weights, forward = build(**changes)
    reference = ReferenceDSpark(geometry, weights)
    reference.extend(features(geometry))
    block = TOKENS
    recorded = iter(block[1:])
    expected = reference.steps(block[0], K, lambda _logits: next(recorded))
    assert_close(block_logits(forward, features(geometry), block), torch.stack(expected))


# ---- the family: what is read, and a draft's way through the commands


SMALL: dict[str, Any] = {"num_layers": 1}


def test_a_mask_embedding_beside_it_is_read_by_no_engine(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", mask_embedding=True, **SMALL)
    geometry = read_draft(Checkpoint.open(folder)).geometry
    with pytest.raises(CheckpointError, match="which no engine reads beside a DSpark draft"):
        DSpark().side_weights(geometry, folder)


def test_it_is_quantized_verified_and_decoded(tmp_path: Path) -> None:
    source = tiny_dspark(tmp_path / "d", num_layers=2)
    quantized(source, "int4-channel", tmp_path / "q", target_layers=8)
    kept, before = read_tensors(tmp_path / "q"), read_tensors(source)
    heads = [name for name in before if "_head." in name]
    assert len(heads) == 4
    assert all(kept[name] == before[name] for name in heads)
    dequantize_draft(DraftSource(folder=tmp_path / "q"), tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == before.keys()
    for engine in ("vllm", "sglang"):
        said = check_draft(tmp_path / "q", engine=engine, arch="sm90", target_layers=8)  # type: ignore[arg-type]
        assert said.verdict == "LOADS", said.error
        launch = said.launch or ""
        assert '"method": "dspark"' in launch or "--speculative-algorithm DSPARK" in launch
        assert '"num_speculative_tokens": 8' in launch or "-num-draft-tokens 9" in launch
    edit_json(source / "config.json", architectures=["DSparkDraftModel"], model_type="llama")
    other = check_draft(source, engine="vllm")
    assert other.verdict == "UNKNOWN"
    assert other.error == "vLLM takes a draft of model_type llama for DeepSeek-V4's own"


def test_speculators_spell_it_with_layers_of_their_own(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", **SMALL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = {key: config[key] for key in ("block_size", "mask_token_id", "markov_rank")}
    ids = [i + 1 for i in config.pop("target_layer_ids")]
    layers = {key: value for key, value in config.items() if key not in own}
    spelled = {
        **own,
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark"},
        "aux_hidden_state_layer_ids": ids,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "transformer_layer_config": {
            **layers,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
        },
    }
    (folder / "config.json").write_text(json.dumps(spelled), encoding="utf-8")
    draft = read_draft(Checkpoint.open(folder))
    assert draft.family.name == "dspark"
    assert draft.geometry.most_draft_tokens == 8
    assert draft.geometry.aux_layer_ids == (1, 3, 5)
    assert check_draft(folder, engine="vllm", arch="sm90").verdict == "LOADS"
    edit_json(folder / "config.json", sample_from_anchor=None)  # vLLM's default, not the package's
    assert read_draft(Checkpoint.open(folder)).geometry.most_draft_tokens == 7
