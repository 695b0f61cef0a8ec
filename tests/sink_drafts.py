"""The drafts with sinks with which engines' own classes were executed."""

from pathlib import Path

from k3_draft import SHAPE
from tiny import edit_json
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_nemotron

CASES = ("nemotron", "both-ways")
_SIZES = {**SHAPE, "head_dim": 64}


def write_draft(folder: Path, case: str) -> Path:
    """The draft of a case, whose embedding is the target's table of both."""
    if case == "nemotron":  # SGLang reads a window of a draft in BF16 with this key alone
        tiny_nemotron(folder, seed=3, **_SIZES)
        edit_json(folder / "config.json", use_sliding_window=True)
        return folder
    own = {"attention_sink_bias": True, "attention_value_scale": 0.6}
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}
    config = {"attention_sink_bias": True, "use_sliding_window": True, **layers}
    return tiny_dflash(folder, seed=4, num_layers=2, embed=True, own=own, config=config, **_SIZES)
