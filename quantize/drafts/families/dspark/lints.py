"""DSpark: where config.json says what its heads are."""

from collections.abc import Iterator

from ...family import Draft, Lint
from ..dflash import lints as dflash

_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def nested_keys(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM 0.33 `qwen3_dspark.py:212`, SGLang 0.5.23 `dspark.py:384`, both executed.

    SpecForge trains from such a file, and its export moves the keys
    (`scripts/gates/normalize_dflash_export.py`).
    """
    config = draft.checkpoint.config
    nested = config.get("dflash_config") or {}
    moved = {key: nested[key] for key in _KEYS if key in nested and config.get(key) is None}
    if moved:
        yield Lint(
            name="dspark-keys-nested",
            level="warning",
            cause=f"only dflash_config has {', '.join(moved)}: vLLM 0.33 and SGLang 0.5.23"
            " read the keys of the heads at the top level, and refuse the draft",
            remedy="write them at the top level as well",
            fix=moved,
        )


LINTS = (*dflash.LINTS, nested_keys)
