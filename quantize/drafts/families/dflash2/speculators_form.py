"""DFlash2 as vLLM reads it in the speculators layout; the package has no such draft yet."""

from typing import Any

from ...config_reader import ConfigReader
from ...family import SpeculatorsForm, positive_keys
from ..dflash.speculators_form import dflash_keys


def _dflash2(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dflash2`, which hands on these keys and no others."""
    plain = dflash_keys(keys, layers)
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**plain["dflash_config"], **positive_keys(keys, *own)},
    }


FORMS = {"dflash2": SpeculatorsForm(("DFlash2Speculator", "DFlash2DraftModel"), _dflash2)}
