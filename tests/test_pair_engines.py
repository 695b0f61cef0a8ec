"""What `check` says of dtype, quantization and length of a draft, against the engines' own classes.

`experiments/engines/pairs.json` is what they made of the same configs.
"""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.quantize.drafts import read_config
from draftquant.quantize.engines import contract
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.pairing.dtypes import dtype_in
from draftquant.quantize.pairing.features import handed_out
from draftquant.quantize.pairing.pair import Pair, TargetArgs
from draftquant.quantize.pairing.serving_limits import is_too_short, served_length
from draftquant.quantize.pairing.target import Target

EXECUTED = json.loads(
    (Path(__file__).parents[1] / "experiments" / "engines" / "pairs.json").read_text("utf-8")
)
SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}  # fmt: skip
TARGET = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8,
          "torch_dtype": "bfloat16"}  # fmt: skip
DRAFT = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
         "draft_vocab_size": 96, "torch_dtype": "bfloat16"}  # fmt: skip


def pair_of(case: dict[str, Any], folder: Path) -> Pair:
    """A draft and a target of these configs, without tensors."""
    config = {**DRAFT, **case.get("draft", {})}
    (folder / "config.json").write_text(json.dumps({**TARGET, **case.get("target", {})}))
    checkpoint = Checkpoint(folder=folder, config=config, tensors={}, headers={}, index=None)
    family, geometry = read_config(checkpoint, as_declared=True)
    draft: Any = {"draft": checkpoint, "config": config, "family": family, "geometry": geometry}
    args = TargetArgs(**case.get("args", {}))
    return Pair(**draft, target=Target.read(folder), args=args, tp=1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", EXECUTED)
def test_dtype_quantization_and_length_are_those_of_the_engine(
    name: str, engine: contract.EngineName, tmp_path: Path
) -> None:
    case, answer = EXECUTED[name]["case"], EXECUTED[name][engine]
    pair = pair_of(case, tmp_path)
    if "error" in answer:
        assert is_too_short(pair, engine)
        assert f"context_length ({served_length(pair, engine)}) is greater" in answer["error"]
        return
    assert dtype_in(pair, engine) == answer["dtype"]
    assert served_length(pair, engine) == answer["served"]
    assert is_too_short(pair, engine) == (answer["length"] < answer["served"])


def test_so_many_models_hand_out_states_to_each_kind_of_draft() -> None:
    rows = contract.data_file("targets")["row"]
    versions = {row["engine"]: row["version"] for row in rows}
    names = {name for row in rows for name in row["classes"].split()}

    def hands_out(engine: str, kind: str, name: str) -> bool:
        served = SimpleNamespace(served_as=kind)
        pair: Any = SimpleNamespace(
            is_inside=False, geometry=SimpleNamespace(reads_layers=True),
            target=SimpleNamespace(config={"architectures": [name]}),
            family=SimpleNamespace(engine_traits=SimpleNamespace(vllm=served, sglang=served)),
        )  # fmt: skip
        answer: Any = SimpleNamespace(engine=engine, version=versions[engine], verdict="LOADS")
        return not [*handed_out(pair, answer)]

    kinds = product(versions, ("eagle3", "dflash", "dspark"))
    found = {(e, kind): sum(hands_out(e, kind, name) for name in names) for e, kind in kinds}
    vllm = dict.fromkeys(product(["vllm"], ("eagle3", "dflash", "dspark")), 129)
    sglang = {("sglang", "eagle3"): 54, ("sglang", "dflash"): 55, ("sglang", "dspark"): 58}
    assert found == vllm | sglang
