"""Which layers engines capture, against those that config.json means.

What the engines' own code makes of the same configs `experiments/run engines` asks (`captures`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_pairs import check_draft
from draftquant.quantize.engines.config_rules import misread_layers
from draftquant.quantize.engines.versions import ENGINES
from tiny import change, edit_json, store, tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla

KEY = "eagle_aux_hidden_state_layer_ids"
TOLD = ("check_draft",)


def config(
    nested: list[int] | None = None, top: list[int] | None = None, **keys: Any
) -> dict[str, Any]:
    own: dict[str, Any] = {"eagle_config": {KEY: nested}} if nested else {}
    return {**own, **({KEY: top} if top else {}), **keys}


def captures(engine: Any, given: dict[str, Any]) -> Any:
    return ENGINES[engine].captures(given)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("engine", "given", "captured"),
    [
        ("vllm", config(), None),
        ("vllm", config(nested=[0, 1, 2]), None),
        ("vllm", config(top=[1, 2, 3]), (1, 2, 3)),
        ("vllm", config(nested=[0, 1, 2], top=[1, 2, 3]), (1, 2, 3)),
        ("vllm", config(dflash_config={"target_layer_ids": [0, 4]}), (1, 5)),
        ("vllm", config(nested=[7], dflash_config={"target_layer_ids": [0, 4]}), (1, 5)),
        ("vllm", config(target_layer_ids=[0, 4]), (1, 5)),
        ("vllm", config(dflash_config={"layer_ids": [2, 4]}), (2, 4)),
        ("sglang", config(), None),
        ("sglang", config(nested=[0, 1, 2]), (1, 2, 3)),
        ("sglang", config(top=[1, 2, 3]), None),
        ("sglang", config(nested=[1, 2, 3], model_type="kimi_k2"), (2, 3, 4)),
        ("sglang", config(nested=[2, 3, 4], model_type="kimi_k2"), (2, 3, 4)),
        ("sglang", config(nested=[2, 3, 4], model_type="llama"), (3, 4, 5)),
        ("sglang", config(dflash_config={"target_layer_ids": [0, 4]}), (1, 5)),
    ],
)
def test_captured_layers(engine: str, given: dict[str, Any], captured: Any) -> None:
    assert captures(engine, given) == captured


def test_ids_are_a_set_to_engines() -> None:
    """Layers are captured as they are passed, whatever the order of their ids."""
    assert (captured := captures("vllm", config(top=[3, 1, 2]))) == (3, 1, 2)
    assert misread_layers("vLLM", captured, [0, 1, 2], 8) is None
    assert misread_layers("vLLM", captured, [0, 1, 3], 8) is not None


def test_check_says_what_is_read_and_what_to_write(tmp_path: Path) -> None:
    own: dict[str, Any] = {"eagle_config": {KEY: [0, 1, 2]}}
    folder = tiny_eagle3_llama(tmp_path / "a", config=own)
    assert check_draft(folder, engine="vllm", arch="sm90").verdict == "LOADS BUT WRONG"
    edit_json(folder / "config.json", **own, **{KEY: [1, 2, 3]})
    for engine in ("vllm", "sglang"):
        corrected = check_draft(folder, engine=engine, arch="sm90")  # type: ignore[arg-type]
        assert (corrected.verdict, corrected.notes) == ("LOADS", ())
        assert corrected.captures == (1, 2, 3)


def test_an_fc_whose_width_is_null_is_not_known_where_an_engine_reads_it(tmp_path: Path) -> None:
    for build, known in ((tiny_eagle3_llama, []), (tiny_eagle3_mla, ["sglang"])):
        folder = build(tmp_path / build.__name__)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"target_hidden_size": None}))
        answers = {e: check_draft(folder, engine=e) for e in ("vllm", "sglang")}
        assert [e for e, said in answers.items() if "An fc of" not in str(said.error)] == known


@pytest.mark.parametrize("count", ["3", 2, 10**12])
def test_a_number_of_layers_that_is_none_is_refused(count: Any, tmp_path: Path) -> None:
    own = {"num_aux_hidden_states": count, "fc_norm": True}
    folder = tiny_eagle3_llama(tmp_path / "a", config=own)
    for engine in ("vllm", "sglang"):
        assert check_draft(folder, engine=engine, arch="sm90").verdict == "UNKNOWN"  # type: ignore[arg-type]


@pytest.mark.parametrize("normed", [False, True])
def test_keys_that_give_vllm_the_number_of_layers(normed: bool, tmp_path: Path) -> None:
    """Of an fc of two layers. Sources: `llama_eagle3.py:209`; of Qwen3 `qwen3_eagle3.py:202`."""
    own = {"architectures": ["Eagle3Qwen3ForCausalLM" if normed else "LlamaForCausalLMEagle3"]}
    for number, (keys, known) in enumerate((
        (config([1, 3]), True), (config(None, [2, 4]), normed),
        (config([1, 3], num_aux_layers=3), not normed),
        (config([1, 3], num_aux_hidden_states=3), False),
    )):  # fmt: skip
        whole = {"eagle_config": {}, **own, **keys}
        folder = tiny_eagle3_llama(tmp_path / f"{number}", normed=normed, config=whole)
        change(folder, fc__weight=store(np.zeros((64, 128)), "BF16"))
        said = str(check_draft(folder, engine="vllm", arch="sm90").error)
        assert ("An fc of another size" in said) is not known
