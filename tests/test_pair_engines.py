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
