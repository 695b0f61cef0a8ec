"""What `check` says of dtype, quantization and length of a draft, against the engines' own classes.

`experiments/engines/pairs.json` is what they made of the same configs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_config
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.pairing.dtypes import dtype_in
from draftquant.quantize.pairing.inherited import KEEPS, becomes_in_sglang, declared_method
from draftquant.quantize.pairing.pair import Pair, TargetArgs
from draftquant.quantize.pairing.serving_limits import is_too_short, served_length
from draftquant.quantize.pairing.target import Target
from pairs import DRAFT, OUT, TARGET

EXECUTED = json.loads(OUT.read_text(encoding="utf-8"))


def pair_of(case: dict[str, Any], folder: Path) -> Pair:
    """A draft and a target of these configs, without tensors."""
    config = {**DRAFT, **case.get("draft", {})}
    (folder / "config.json").write_text(json.dumps({**TARGET, **case.get("target", {})}))
    checkpoint = Checkpoint(folder=folder, config=config, tensors={}, headers={}, index=None)
    family, geometry = read_config(checkpoint, as_declared=True)
    return Pair(
        draft=checkpoint,
        config=config,
        family=family,
        geometry=geometry,
        target=Target.read(folder),
        args=TargetArgs(**case.get("args", {})),
        tp=1,
    )


def quantization_in(pair: Pair, engine: EngineName) -> str | None:
    """The method by which an engine reads the draft, if nothing stops what is inherited."""
    own, given = declared_method(pair), pair.args.quantization
    if engine != "sglang" or given in (None, "unquant"):
        return own
    return given if own is None or own in KEEPS.get(given, ()) else own


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", EXECUTED)
def test_dtype_quantization_and_length_are_those_of_the_engine(
    name: str, engine: EngineName, tmp_path: Path
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
    assert quantization_in(pair, engine) == answer["quantization"]


def test_only_an_inherited_quantization_is_warned_of(tmp_path: Path) -> None:
    warned = {
        name
        for name, answer in EXECUTED.items()
        if (pair := pair_of(answer["case"], tmp_path))
        and becomes_in_sglang(pair, pair.args.quantization)
    }
    assert warned == {name for name in EXECUTED if "--quantization" in name}
