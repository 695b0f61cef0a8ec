"""DSpark as the speculators package saves it."""

from typing import Any

from ...config_reader import ConfigReader
from ...family import SpeculatorsForm, positive_keys
from ..dflash.speculators_form import block_keys


def _dspark(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dspark`; the package itself trains and saves `sample_from_anchor` true."""
    names = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {
        "architectures": ["Qwen3DSparkModel"],
        **block_keys(keys),
        **positive_keys(keys, "markov_rank"),
        **{name: keys.config[name] for name in names if keys.config.get(name) is not None},
        "sample_from_anchor": keys.flag("sample_from_anchor", False),
    }


FORMS = {"dspark": SpeculatorsForm(("DSparkSpeculator", "DSparkDraftModel"), _dspark)}
