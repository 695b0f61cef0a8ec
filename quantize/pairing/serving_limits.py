"""How many positions are served, and what engines do where the draft is made for fewer."""

from typing import Any

from ..engines.contract import EngineName
from ..engines.folder_findings import undivided
from ..engines.versions import ENGINES
from .pair import Pair

LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"


def served_length(pair: Pair, engine: EngineName) -> int | None:
    """Positions that an engine serves; None = neither the line nor the target's config says."""
    if pair.args.context is not None:
        return pair.args.context
    return pair.target.rotation.positions_in(engine)


def is_too_short(pair: Pair, engine: EngineName) -> bool:
    """Whether the draft is made for fewer positions than are served."""
    served, limit = served_length(pair, engine), pair.rotation.positions_in(engine)
    return not pair.is_inside and served is not None and limit is not None and limit < served


def facts_in(pair: Pair, engine: EngineName) -> dict[str, Any]:
    """Facts on positions in one engine.

    More than the target is made for: vLLM 0.33 `config/model.py:2650`; SGLang 0.5.23
    `configs/model_config.py:1295`.
    """
    asked, made = pair.args.context, pair.target.rotation.positions_in(engine)
    return {
        "is_short": is_too_short(pair, engine),
        "served": served_length(pair, engine),
        "own_length": pair.rotation.positions_in(engine),
        "flag": ENGINES[engine].flags["context"][0],
        "asked": asked,
        "made": made,
        "is_beyond_target": bool(asked and made and asked > made),
    }


def facts(pair: Pair) -> dict[str, Any]:
    """Facts on positions and their rotation."""
    of_both = (("target", pair.target.text), ("draft", pair.config))
    shares = ((n, undivided(pair.tp, c)) for n, c in of_both if pair.tp <= MOST)
    return {
        "own_kind": pair.rotation.kind,
        "only_sizes_a_table": pair.rotation.only_sizes_a_table,
        "tp": pair.tp,
        "allowed": ", ".join(map(str, sizes_of_both(pair))),
        "undivided": " and ".join(f"the {whose}'s {rest}" for whose, rest in shares if rest),
    }


# ---- Tensor-parallel sizes that a draft and its target both allow
# The draft is split as the target is: vLLM accepts no other `draft_tensor_parallel_size` than 1 and
# the target's (`config/speculative.py:1849`), the others have no such option.

MOST = 16


def sizes_of_both(pair: Pair) -> tuple[int, ...]:
    """Sizes up to 16 that divide both."""
    configs = [pair.target.text, *([] if pair.is_inside else [pair.config])]
    return tuple(tp for tp in range(1, MOST + 1) if all(undivided(tp, c) is None for c in configs))
