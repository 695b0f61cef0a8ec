"""Which target layers a draft reads, out of the two places and two conventions of config.json.

`eagle_config.eagle_aux_hidden_state_layer_ids` counts "after layer k" (SpecForge, TorchSpec,
ModelOpt, SGLang); the same key at the top level counts "input of layer k" (speculators, vLLM),
which is one more. The defaults [1, L/2 - 1, L - 4] and [2, L/2, L - 3] are the same tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import CheckpointError
from ..config_reader import ConfigReader

KEY = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"
DEEPSEEK_TYPES = ("deepseek_v3", "kimi_k2")
"""`model_type` of drafts whose target counts in SGLang's DeepSeek way."""

Spelling = Literal["default", "portable", "nested", "top", "equal", "nested-inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxLayerIds:
    """The layers, and how config.json spells them.

    Attributes:
        after: ids "after layer k", 0-based, ascending; None = the engines' default.
        spelling: where they stand. "portable": both places, each in its own convention; "equal":
            both places, the same numbers; "nested-inputs": nested, but in the top level's
            convention (TorchSpec's `--vllm` export).
    """

    after: tuple[int, ...] | None
    spelling: Spelling


def read_aux_layer_ids(config: Mapping[str, Any], where: object) -> AuxLayerIds:
    """Decide which layers a draft reads.

    Ids at the top level alone are inputs of layers; nested ids alone come after layers, except
    those of TorchSpec's `--vllm` export for DeepSeek and Kimi, which begin with 2 and which vLLM
    and SGLang both take as inputs. Of two equal lists the top level's meaning holds.

    Raises:
        CheckpointError: ids are no ascending list of layers, or the two places disagree.

    Source: vLLM 0.33 `gpu_model_runner.py` `_get_eagle3_aux_layers_from_config`; SGLang 0.5.23
    `deepseek_v2.py` and `llama.py` `set_eagle3_layers_to_capture`; TorchSpec `convert_to_hf.py`.
    """
    keys = ConfigReader(config, where)
    top, nested = _ids(keys), _ids(keys.section(SECTION))
    if top is None and nested is None:
        return AuxLayerIds(after=None, spelling="default")
    if top is None:
        assert nested is not None
        if config.get("model_type") in DEEPSEEK_TYPES and nested[0] == 2:
            return AuxLayerIds(after=_after(nested, where), spelling="nested-inputs")
        return AuxLayerIds(after=nested, spelling="nested")
    after = _after(top, where)
    if nested is None:
        return AuxLayerIds(after=after, spelling="top")
    if nested == after:
        return AuxLayerIds(after=after, spelling="portable")
    if nested == top:
        return AuxLayerIds(after=after, spelling="equal")
    raise CheckpointError(
        where,
        f"{KEY}: {list(top)} at the top level and {list(nested)} in {SECTION} are not the same"
        " layers: expected the top level to be one more, or equal",
        fix=f"write the layers that the draft was trained on: 'after layer k' in {SECTION},"
        " k + 1 at the top level",
    )


def layers_in_both_places(
    after: tuple[int, ...], config: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """What stands at the top level, and what in `eagle_config`, where every engine reads `after`.

    Source: SGLang 0.5.23 `deepseek_v2.py` adds one to nested ids only where they begin with 1, so
    other lists for such targets must stand there as inputs of layers.
    """
    inputs = [i + 1 for i in after]
    as_inputs = config.get("model_type") in DEEPSEEK_TYPES and after[0] > 1
    return inputs, inputs if as_inputs else list(after)


def reads_aux_layers(config: Mapping[str, Any], where: object) -> bool:
    """False if the draft reads the target's last hidden state, behind the final norm, and no fc.

    `use_aux_hidden_state: false` is ModelOpt's default; both engines then hand over that state.
    Source: vLLM 0.33 `llama_eagle3.py:180-183,401`, `gpu_model_runner.py:653`; SGLang 0.5.23
    `spec_aux_hidden_state.py:189`, `llama_eagle3.py` (no fc where the widths are equal).
    """
    return ConfigReader(config, where).section(SECTION).flag("use_aux_hidden_state", True)


def _ids(keys: ConfigReader) -> tuple[int, ...] | None:
    """An empty list is none: ModelOpt's defaults have one, for the default layers."""
    if keys.config.get(KEY) == []:
        return None
    try:
        return keys.layer_ids(KEY)
    except CheckpointError as exc:
        raise CheckpointError(
            exc.where,
            exc.what,
            fix=f"correct {KEY!r}: features are concatenated in the order in which layers run, also"
            " where ModelOpt 0.44 wrote the ids in another one",
        ) from exc


def _after(inputs: tuple[int, ...], where: object) -> tuple[int, ...]:
    if inputs[0] == 0:
        raise CheckpointError(
            where,
            f"{KEY}: the input of layer 0 is the embedding, not the output of a layer",
            fix=f"count layers from 1 at the top level: {list(inputs)} may be meant for {SECTION}",
        )
    return tuple(i - 1 for i in inputs)
