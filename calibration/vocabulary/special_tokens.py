"""Tokens that every head keeps: those that begin and end texts and turns.

The target's config.json and generation_config.json name them, and often the draft's own config.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_KEYS = ("eos_token_id", "bos_token_id")
_TEXT = "text_config"  # where the config of a multimodal target has that of its language model


def special_tokens(configs: Iterable[Mapping[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """The ids that configs name, each once, of those that a vocabulary has.

    Args:
        configs: parsed JSON objects, in any order.
        vocab_size: tokens of the target.
    """
    named = (token for config in configs for token in _named(config))
    return tuple(dict.fromkeys(token for token in named if 0 <= token < vocab_size))


def _named(config: Mapping[str, Any]) -> Iterator[int]:
    section = config.get(_TEXT)
    for each in (config, section if isinstance(section, Mapping) else {}):
        for key in _KEYS:
            found = each.get(key)
            for token in found if isinstance(found, list) else [found]:
                if type(token) is int:
                    yield token
