"""Typed reading of a draft's config.json: each key checked once, errors that name file and key."""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...recipes.errors import CheckpointError, short
from ...recipes.packages import table_beside

KNOWN = frozenset(table_beside(__file__)["keys"].split())
_NEAR = 0.88

_REQUIRED = object()
Served = Mapping[str, tuple[Any, str]]
"""Config key -> the value that a family's maths is for, and what another value means."""


def object_at(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside another one; {} where the value is something else."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def with_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a multimodal target's text_config besides its own, which take precedence."""
    return {**object_at(config, "text_config"), **config}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads keys of one JSON object: null counts as missing. Errors name `where`."""

    config: Mapping[str, Any]
    where: object

    def positive(self, key: str, default: Any = _REQUIRED) -> int:
        """A whole number of at least 1."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive whole number", value)
        return value

    def even(self, key: str) -> int:
        """An even number of rotated dimensions, which turn in pairs."""
        value = self.positive(key)
        if value % 2 != 0:
            raise CheckpointError(
                self.where,
                f"{key}: expected an even number, got {value}: dimensions are rotated in pairs",
                fix=f"correct {key!r}",
            )
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite positive number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def section(self, key: str) -> "ConfigReader":
        """A nested object, or an empty one."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return ConfigReader(value, f"{self.where}: {key}")

    def items(self, key: str) -> list[Any]:
        """A list, or none."""
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return value

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        """A list of distinct layer numbers in ascending order; None where the key is missing."""
        value = self._get(key, None)
        if value is None:
            return None
        good = isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)
        if not good or sorted(set(value)) != value:
            raise self.wrong(key, "distinct layer numbers in ascending order", value)
        return tuple(value)

    def after_layer(self, key: str) -> list[int] | None:
        """0-based layers, from indices into `hidden_states`, whose 0 is the embedding."""
        ids = self.layer_ids(key)
        if ids is None:
            return None
        if ids[0] == 0:
            raise CheckpointError(
                self.where,
                f"{key}: expected ids from 1 (the output of layer 0), got {list(ids)}",
                fix="a draft that reads the target's embedding is not supported",
            )
        return [i - 1 for i in ids]

    def positives(self, *names: str) -> dict[str, int]:
        """Those of the keys that are given."""
        return {name: self.positive(name) for name in names if self.config.get(name) is not None}

    def refuse_others(self, served: Served) -> None:
        """Refuse keys of other maths than the family's; a missing key means the family's."""
        for key, (expected, meaning) in served.items():
            got = self.config.get(key)
            same = got == expected and isinstance(got, bool) == isinstance(expected, bool)
            if got is not None and not same:
                raise CheckpointError(
                    self.where,
                    f"{key}: expected {expected!r}, got {short(got)}: {meaning}",
                    fix="use another draft: no supported family computes this, so it cannot be"
                    " quantized or replayed",
                )

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            near = misspelling_of(key, self.config)
            add = f"add {key!r} as the draft was trained with it"
            fix = f"rename {near!r} to {key!r}" if near else add
            raise CheckpointError(self.where, f"{key}: missing key", fix=fix)
        return default

    def wrong(self, key: str, expected: str, got: Any) -> CheckpointError:
        """The error for a key whose value is not as expected."""
        what = f"{key}: expected {expected}, got {short(got)}"
        return CheckpointError(self.where, what, fix=f"correct {key!r}")


def near_key(key: str, config: Mapping[str, Any]) -> str | None:
    """The known key that a config's key nearly equals, where the known one is absent; else None."""
    if key in KNOWN:
        return None
    near = difflib.get_close_matches(key, KNOWN - config.keys(), n=1, cutoff=_NEAR)
    return near[0] if near else None


def misspelling_of(key: str, config: Mapping[str, Any]) -> str | None:
    """A key of a config that nearly equals this one and is unknown; None where there is none."""
    unread = [other for other in config if other not in KNOWN]
    near = difflib.get_close_matches(key, unread, n=1, cutoff=_NEAR)
    return near[0] if near else None


KEY = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"
"""Which target layers a draft reads, in two places: in the section counted "after layer k"
(SpecForge, TorchSpec, ModelOpt, SGLang), at the top level "input of layer k" (speculators, vLLM),
which is one more. The defaults [1, L/2 - 1, L - 4] and [2, L/2, L - 3] are the same tensors."""
DEEPSEEK_TYPES = ("deepseek_v3", "kimi_k2")
"""`model_type` of drafts whose target counts in SGLang's DeepSeek way."""

Spelling = Literal["default", "portable", "nested", "top", "equal", "nested-inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxLayerIds:
    """The layers "after layer k", 0-based, ascending, and how config.json spells them.

    None = the engines' default. "portable": both places, each in its own convention; "equal": both
    places, the same numbers; "nested-inputs": nested, but in the top level's convention
    (TorchSpec's `--vllm` export).
    """

    after: tuple[int, ...] | None
    spelling: Spelling


def read_aux_layer_ids(config: Mapping[str, Any], where: object) -> AuxLayerIds:
    """Decide which layers a draft reads.

    Ids only at the top level are inputs of layers; ids only in the section come after layers. Not
    so those of TorchSpec's `--vllm` export for DeepSeek and Kimi, which begin with 2 and which vLLM
    and SGLang both take as inputs. If both lists are equal, the top level's meaning holds.

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
        fix=f"write the layers that the draft was trained on: 'after layer k' in {SECTION}, k + 1"
        " at the top level",
    )


def layers_in_both_places(
    after: tuple[int, ...], config: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """The ids for the top level, and those for `eagle_config`, so that every engine reads `after`.

    Source: SGLang 0.5.23 `deepseek_v2.py` adds one to nested ids only where they begin with 1, so
    other lists for these targets must be inputs of layers there.
    """
    inputs = [i + 1 for i in after]
    as_inputs = config.get("model_type") in DEEPSEEK_TYPES and after[0] > 1
    return inputs, inputs if as_inputs else list(after)


def reads_aux_layers(config: Mapping[str, Any], where: object) -> bool:
    """False if the draft reads the target's last hidden state, after the final norm, without an fc.

    `use_aux_hidden_state: false` is ModelOpt's default; both engines then pass on that state.
    Source: vLLM 0.33 `llama_eagle3.py:180-183,401`, `gpu_model_runner.py:653`; SGLang 0.5.23
    `spec_aux_hidden_state.py:189`, `llama_eagle3.py` (no fc where the widths are equal).
    """
    return ConfigReader(config, where).section(SECTION).flag("use_aux_hidden_state", True)


def _ids(keys: ConfigReader) -> tuple[int, ...] | None:
    """An empty list counts as none: ModelOpt's defaults have one, for the default layers."""
    if keys.config.get(KEY) == []:
        return None
    try:
        return keys.layer_ids(KEY)
    except CheckpointError as exc:
        raise CheckpointError(
            exc.where,
            exc.what,
            fix=f"correct {KEY!r}: features are concatenated in the order in which layers run,"
            " also where ModelOpt 0.44 wrote the ids in another one",
        ) from exc


def _after(inputs: tuple[int, ...], where: object) -> tuple[int, ...]:
    if inputs[0] == 0:
        raise CheckpointError(
            where,
            f"{KEY}: the input of layer 0 is the embedding, not the output of a layer",
            fix=f"count layers from 1 at the top level: {list(inputs)} may be meant for {SECTION}",
        )
    return tuple(i - 1 for i in inputs)
