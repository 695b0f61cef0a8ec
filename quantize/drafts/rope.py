"""Rotary position embedding: reading its keys, which nothing else does, and its frequencies.

Sources: transformers `modeling_rope_utils`; vLLM 0.33 `rotary_embedding/__init__.py`; SGLang 0.5.23
`rotary_embedding/factory.py` and `rope_variant.py`.

Only replay computes with it. So a scaling unknown here, or served unalike, is no error before.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...recipes.errors import CheckpointError, short
from .config_reader import ConfigReader, object_at
from .engine_traits import EngineTraits

if TYPE_CHECKING:
    import torch

DEFAULT_THETA = 10000.0
"""Value where config.json has none: `default_theta` of transformers' configs, for both engines
(vLLM `rotary_embedding/__init__.py:63`, SGLang `llama.py:324`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Yarn scaling: position range stretched by `factor` beyond `original_max_positions`."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None
    truncate: bool
    """Round the ends of the ramp to whole pairs; configs in gpt-oss style say false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Pairs are slowed down by `factor`, unless they turn often within the original context.

    They are slowed fully up to `low_freq_factor` turns, not at all from `high_freq_factor` on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NtkAlpha:
    """Type "dynamic" with alpha, of Hunyuan: the base times alpha^(dim / (dim - 2))."""

    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreplayed:
    """A scaling that is not computed here, and the error for a caller that needs it."""

    where: str
    what: str
    fix: str


Scaling = Linear | Llama3 | NtkAlpha | Unreplayed


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base of the frequencies and, for long contexts, their scaling: yarn or another, or none.

    `part`: of each head, its first elements, that is rotated.
    """

    theta: float
    yarn: Yarn | None
    scaling: Scaling | None
    part: float


SECTIONS = ("rope_scaling", "rope_parameters")
"""Where transformers 4 and 5 put the rope; the first counts, unless it is empty."""
_ORIGINAL = "original_max_position_embeddings"
_KEEP_LENGTH = ("llama3", "yarn", "longrope")
"""Types that get the positions before scaling where the section has none."""


class Declared(NamedTuple):
    """The rope keys of a config.json in one place.

    Attributes:
        place: the section that they stand in, or would.
        keys: that section, completed by keys of the top level; without rope_theta where there is
            no base.
        by_layer: there is a section for each type of layer; `keys` are those of the draft's.
        is_clear: its layers all have the same section.
    """

    place: str
    keys: Mapping[str, Any]
    by_layer: bool = False
    is_clear: bool = True


def declared(config: Mapping[str, Any]) -> Declared:
    """Read them as transformers does, through which both engines read config.json.

    Source: `standardize_rope_params` of transformers 5.20; executed
    (`experiments/engines/rope_readings.json`).
    """
    place = next((name for name in SECTIONS if config.get(name)), SECTIONS[-1])
    section = object_at(config, place)
    by_layer, sections = any(isinstance(each, Mapping) for each in section.values()), [section]
    if by_layer:
        types = config.get("layer_types")
        types = types if isinstance(types, list) and types else ["full_attention"]
        sections = [object_at(section, str(each)) for each in types]
    keys = dict(sections[0])
    if "rope_theta" in config:
        keys.setdefault("rope_theta", config["rope_theta"])
    if config.get("partial_rotary_factor") is not None:
        keys.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    keys.setdefault("rope_type", keys.get("type", "default"))
    if keys["rope_type"] in _KEEP_LENGTH:
        keys.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
        keys[_ORIGINAL] = config.get(_ORIGINAL) or keys[_ORIGINAL]
    is_clear = not by_layer or (bool(sections[0]) and all(each == sections[0] for each in sections))
    return Declared(place, keys, by_layer, is_clear)


def read_rope(config: Mapping[str, Any], where: object, part: float | None = None) -> RopeConfig:
    """Read the rope of a draft.

    Args:
        part: of a head, rotated where config.json names none; None = only whole heads are computed.
    """
    for name in SECTIONS:
        ConfigReader(config, where).section(name)
    rope = declared(config)
    keys = ConfigReader(rope.keys, f"{where}: {rope.place}")
    rotated = keys.number("partial_rotary_factor", part or 1.0)
    if rotated > 1:
        raise CheckpointError(
            keys.where,
            f"partial_rotary_factor: expected at most 1, got {rotated:g}",
            fix="correct 'partial_rotary_factor'",
        )
    scaling: Yarn | Scaling | None
    if not rope.is_clear:
        what = "the types of the draft's layers have different sections, and replay knows one rope"
        scaling = Unreplayed(
            where=str(keys.where), what=what, fix="write the one that all layers have"
        )
    elif part is None and (rotated != 1 or keys.positives("rope_dim")):
        scaling = Unreplayed(
            where=str(keys.where),
            what="a part of each head is rotated, which is not replayed",
            fix="measure this draft on a server; if it was trained with another scaling, replay a"
            " copy that declares it",
        )
    else:
        scaling = _scaling(keys)
    yarn = scaling if isinstance(scaling, Yarn) else None
    return RopeConfig(
        theta=ConfigReader(rope.keys, where).number("rope_theta", DEFAULT_THETA),
        yarn=yarn,
        scaling=None if isinstance(scaling, Yarn) else scaling,
        part=rotated,
    )


def followed_by_one(config: Mapping[str, Any], traits: EngineTraits) -> Iterator[tuple[str, str]]:
    """Keys that only one engine follows in a draft that both load, and its name; executed."""
    rope, in_blocks = declared(config), traits.drafts_blocks
    keys, kind, has_width = rope.keys, rope.keys["rope_type"], "rope_dim" in rope.keys
    inner = object_at(config, rope.place).get(_ORIGINAL)
    vllm, sglang = "vLLM 0.33", "SGLang 0.5.23"
    if keys.get("partial_rotary_factor", 1) != 1 and not has_width:
        yield "partial_rotary_factor", vllm
    if has_width and not in_blocks:
        yield "rope_dim", vllm
    if kind == "yarn" and keys.get("attention_factor") and not traits.latent:
        yield "attention_factor", vllm
    if kind == "yarn" and keys.get("attn_factor") not in (None, 1):
        yield "attn_factor", sglang
    if kind == "dynamic" and "alpha" not in keys:
        yield "factor", sglang
    if "mrope_section" in keys and kind not in _PLAIN:
        if not (in_blocks or traits.whole_model):  # SGLang's class of EAGLE-3 overwrites the type
            yield "rope_type", vllm
        elif kind == "yarn":
            yield "mrope_section", sglang
    if in_blocks and kind in _KEEP_LENGTH and config.get(_ORIGINAL) not in (None, inner):
        yield _ORIGINAL, vllm


def check_replayed(rope: RopeConfig) -> RopeConfig:
    """The same rope, if its frequencies are known here; else its error is raised."""
    if isinstance(rope.scaling, Unreplayed):
        unknown = rope.scaling
        raise CheckpointError(unknown.where, unknown.what, fix=unknown.fix)
    return rope


def _scaling(keys: ConfigReader) -> Yarn | Scaling | None:
    kind = keys.config["rope_type"]
    if kind in _PLAIN:
        return None
    if "mrope_section" in keys.config:
        return Unreplayed(
            where=str(keys.where),
            what=f"replay does not compute rope type {short(kind)} with mrope_section, of which"
            " draftquant knows no formula that engines share",
            fix="measure this draft on a server; if it was trained with another scaling, replay a"
            " copy that declares it",
        )
    if kind == "linear":
        return Linear(factor=keys.number("factor"))
    if kind == "dynamic" and keys.config.get("alpha") is not None:
        return NtkAlpha(alpha=keys.number("alpha"))
    if kind == "llama3":
        return Llama3(
            factor=keys.number("factor"),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
            original_max_positions=keys.positive("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(keys)
    return Unreplayed(
        where=str(keys.where),
        what=f"replay does not compute rope type {short(kind)}, of which draftquant knows no"
        " formula that engines share",
        fix="measure this draft on a server; if it was trained with another scaling, replay a copy"
        " that declares it",
    )


_PLAIN = (None, "default", "mrope")
"""With mrope the three positions of a token of text are equal, so it turns by one angle as with
plain rope; traces hold text only (vLLM `mrope.py`, SGLang `llama_eagle3.py:121-125`)."""


def _yarn(keys: ConfigReader) -> Yarn:
    all_dim = "mscale_all_dim"
    return Yarn(
        factor=keys.number("factor"),
        original_max_positions=keys.positive("original_max_position_embeddings"),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        mscale=_optional(keys, "mscale"),
        # DeepSeek writes 0 for none.
        mscale_all_dim=None if keys.config.get(all_dim) == 0 else _optional(keys, all_dim),
        attention_factor=_optional(keys, "attention_factor"),
        truncate=keys.flag("truncate", True),
    )


def of_latent_attention(rope: RopeConfig, where: object) -> RopeConfig:
    """A rope that engines serve alike: plain, or DeepSeek's yarn, which any other type becomes.

    Source: `deepseek_v2.py` of vLLM 0.33 (1115) and SGLang 0.5.23 (2066).
    """
    if rope.yarn is not None and rope.yarn.attention_factor is not None:
        unreplayed = Unreplayed(
            where=str(where),
            what="attention_factor: expected none, as engines disagree about it in an MLA draft"
            " (SGLang 0.5.23 ignores it, vLLM 0.33 leaves the softmax unscaled where it is 1)",
            fix="give mscale and mscale_all_dim, from which the factor follows",
        )
    elif rope.scaling is not None and not isinstance(rope.scaling, Unreplayed):
        unreplayed = Unreplayed(
            where=str(where),
            what="rope type: expected 'default' or 'yarn': engines take any other one for yarn",
            fix="replay it under the scaling that it was trained with, if that is one of the two",
        )
    else:
        return rope
    return dataclasses.replace(rope, yarn=None, scaling=unreplayed)


def yarn_mscale(factor: float, mscale: float) -> float:
    """mscale(f, m) = 0.1 m ln f + 1 for f > 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(
    rope: RopeConfig, dim: int, device: "torch.device | None" = None
) -> "tuple[torch.Tensor, float]":
    """Angular frequencies of the rotated pairs, [dim / 2] float64, and the factor on cos and sin.

    default: f_i = theta^(-2i/dim). yarn blends f_i (fast pairs) and f_i / factor (slow pairs)
    linearly between the pairs that turn beta_fast and beta_slow times within the original context;
    llama3 does so between those that turn high_freq_factor and low_freq_factor times, linear in the
    number of turns.
    """
    import torch

    pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
    theta, scaling = rope.theta, check_replayed(rope).scaling
    if isinstance(scaling, NtkAlpha):
        theta *= scaling.alpha ** (dim / (dim - 2))
    frequencies = theta ** (-2 * pairs / dim)
    if isinstance(scaling, Linear):
        frequencies = frequencies / scaling.factor
    if isinstance(scaling, Llama3):
        frequencies = _llama3(frequencies, scaling)
    yarn = rope.yarn
    if yarn is None:
        return frequencies, 1.0

    def pair_turning(turns: float) -> float:
        wavelength = yarn.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, dim - 1)
    # An empty ramp becomes a step, as in transformers; a reversed one keeps every pair fast.
    ramp = (pairs - low) / ((high - low) or 0.001)
    slow = ramp.clamp(0, 1)
    blended = frequencies * (1 - slow) + frequencies / yarn.factor * slow
    return blended, _attention_factor(yarn)


def _llama3(frequencies: "torch.Tensor", scaling: Llama3) -> "torch.Tensor":
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Equal factors make a step, as in vLLM; transformers would divide by zero.
    fast = (turns - low) / (high - low) if high != low else (turns >= high).to(turns.dtype)
    fast = fast.clamp(0, 1)
    return frequencies * fast + frequencies / scaling.factor * (1 - fast)


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def _optional(keys: ConfigReader, key: str) -> float | None:
    return keys.number(key) if keys.config.get(key) is not None else None
