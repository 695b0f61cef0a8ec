"""The speculators layout: an ordinary draft whose config.json is spelled differently.

The draft's own keys stand at the top, those of its decoder layers in `transformer_layer_config`.
`plain_config` spells such a config as the families read it; what is written keeps the layout.

Where a key is missing, the draft is what vLLM would serve. SGLang 0.5.23 does not read this layout.

Sources: `config.py` of `eagle3`, `peagle`, `dflash`, `dspark` and `mtp` in speculators 0.9.0, which
has no dflash2 yet; `transformers_utils/configs/speculators/algos.py` of vLLM 0.33, which has no
mtp: such a layer is served inside its target, where the package's `scripts/stitch_mtp.py` puts it.
"""

from collections.abc import Mapping
from typing import Any

from ...recipes.errors import short
from ..errors import CheckpointError
from .config_reader import ConfigReader
from .families import FAMILIES
from .speculators_form import SpeculatorsForm, positive_keys

LAYER_CONFIG = "transformer_layer_config"

FORMS: Mapping[str, SpeculatorsForm] = dict(
    sorted(form for family in FAMILIES for form in family.speculators.items())
)
"""speculators_model_type -> how it is spelled, of all families."""
_MARKS = ("speculators_model_type", "speculators_config", LAYER_CONFIG)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """True if a config.json is spelled in the speculators layout."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    ours = [form.architectures[0] for form in FORMS.values()]
    return any(config.get(key) is not None for key in _MARKS) or name in ours


def plain_config(config: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """The config of a draft as its family reads it; returned unchanged if it is plain already.

    Raises:
        CheckpointError: no transformer_layer_config, a kind of draft that is not supported, or
            keys that contradict each other.
    """
    if not is_speculators(config):
        return config
    keys = ConfigReader(config, where)
    form = FORMS[_kind(keys)]
    if config.get(LAYER_CONFIG) is None:
        raise CheckpointError(
            where,
            f"{LAYER_CONFIG}: missing key, which holds the sizes of the draft's layers",
            fix="save the draft again with the speculators package",
        )
    layers = keys.section(LAYER_CONFIG)
    return {
        **layers.config,
        **positive_keys(keys, "draft_vocab_size", "target_hidden_size"),
        **form.spelled(keys, layers),
    }


def _kind(keys: ConfigReader) -> str:
    """The supported speculators_model_type, in agreement with architectures."""
    kind, names = keys.config.get("speculators_model_type"), keys.config.get("architectures")
    if kind not in tuple(FORMS):  # of any JSON type
        raise CheckpointError(
            keys.where,
            "speculators_model_type: missing key"
            if kind is None
            else f"speculators_model_type: {short(kind)} is not supported",
            fix=f"supported: {', '.join(FORMS)}",
        )
    first, *behind = names if isinstance(names, list) and names else [None]
    form = FORMS[str(kind)]
    if first not in form.architectures or behind:
        raise CheckpointError(
            keys.where,
            f"architectures: expected [{form.architectures[0]!r}], got {names!r}"
            f" beside speculators_model_type {kind!r}",
            fix="correct the one that the draft was not trained as",
        )
    return str(kind)
