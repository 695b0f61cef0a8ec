"""What trainers and engines read differently: rope, names, dtypes, target layers, keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts import Draft
from ..drafts import config_reader as reader
from ..drafts.architectures import (
    KNOWN_TO_BOTH,
    OTHER_NAMES,
    declared_architecture,
)
from ..drafts.config_defaults import as_read
from ..drafts.family import LAYER_CONFIG, Lint, told
from ..drafts.recognition import layers_of_one
from ..drafts.rope import DEFAULT_THETA, SECTIONS, Unreplayed, declared, followed_by_one
from ..drafts.shared.eagle3 import eagle3
from ..files.checkpoint import CONFIG_FILE

_INJECTED = (32, 2048)
"""Factor and original positions that ModelOpt's export writes for a draft trained without yarn."""


def by_settings(draft: Draft) -> Iterator[tuple[str, dict[str, object]]]:
    """Lints of which lints.toml says all, where they apply, and what they quote."""
    of_eagle3, geometry, config = eagle3(draft), draft.geometry, draft.checkpoint.config
    as_wide = geometry.hidden_size == geometry.target_hidden_size
    embedding = draft.row("embed_tokens.weight")
    if embedding is not None and "embedding" in draft.family.shared_tables and as_wide:
        yield "embed-tokens", {"nbytes": embedding.tensor.nbytes}
    if of_eagle3 is None:
        return
    unsaid = draft.in_speculators_layout and config.get("norm_before_residual") is None
    tied = config.get("tie_word_embeddings") is True
    of_others = draft.is_mla or draft.is_torchspec or draft.in_speculators_layout
    applies = {
        "last-hidden-state": not of_eagle3.fuses,
        "head-tied": tied and draft.row("lm_head.weight") is not None,
        "norm-before-residual-missing": unsaid,
        "norm-before-residual": of_eagle3.norm_before_residual and not unsaid,
        "norm-output": of_eagle3.norm_output and not of_others,
        "eagle3-sliding": any(of_eagle3.windows),
        "modelopt-double-norm": draft.is_modelopt,
    }
    for name in (name for name, holds in applies.items() if holds):
        yield name, {"window": next(filter(None, of_eagle3.windows), None)}


def rope_trained(draft: Draft) -> Iterator[Lint]:
    """TorchSpec may have trained at base 10000 regardless of `rope_theta`; yarn that was not used.

    Source: TorchSpec @6f21829 `deepseek_eagle.py` (yarn without `base`), `llama3_eagle.py`
    (`getattr(config, "rope_theta", 10000)`, which transformers 5 moved into `rope_parameters`);
    ModelOpt 0.47 `hf_spec_export.py`; without mscale keys engines multiply cos and sin by
    0.1 ln 32 + 1.
    """
    geometry = eagle3(draft)
    if geometry is None:
        return
    yarn, theta, who = geometry.rope.yarn, geometry.rope.theta, ""
    if draft.is_mla and yarn is not None and not draft.is_modelopt:
        who = "TorchSpec trains MLA with yarn"
    elif draft.is_torchspec and not draft.is_mla:
        who = "TorchSpec under transformers 5 trains Llama drafts"
    if who and theta != DEFAULT_THETA:
        yield told("rope-base", who=who, theta=theta)
    if yarn is None or draft.is_mla:
        return
    plain = yarn.mscale is None and yarn.mscale_all_dim is None and yarn.attention_factor is None
    if plain and (yarn.factor, yarn.original_max_positions) == _INJECTED:
        yield told("rope-injected")


def rope_default(draft: Draft) -> Iterator[Lint]:
    """Source: `DEFAULT_THETA`; SpecForge's and AngelSlim's draft models train with it."""
    keys, rope = declared(draft.layer_config).keys, draft.geometry.rope
    if rope is None or keys.get("rope_theta") is not None:
        return
    filled = f", which model_type {draft.layer_config.get('model_type')} fills in"
    use = f"use base {rope.theta:g}{filled if rope.theta != DEFAULT_THETA else ''}"
    yield told("rope-theta-missing", do="refuse the null" if "rope_theta" in keys else use)


def rope_by_layer(draft: Draft) -> Iterator[Lint]:
    """Source: executed `get_rope` of vLLM 0.33 and SGLang 0.5.23."""
    rope = declared(draft.layer_config)
    if not rope.by_layer or draft.family.inside_target:
        return
    place = f"{LAYER_CONFIG}." if draft.in_speculators_layout else ""
    given = filter(draft.layer_config.get, SECTIONS)
    flat = dict.fromkeys(given) | {SECTIONS[1]: dict(rope.keys)}
    fix = {f"{place}{key}": value for key, value in flat.items()} if rope.is_clear else {}
    yield told("rope-by-layer", fix, place=rope.place)


def rope_read(draft: Draft) -> Iterator[Lint]:
    """Source: `followed_by_one`; one engine alone reads speculators' layout."""
    rope, traits = draft.geometry.rope, draft.family.engine_traits
    if rope is None:
        return
    of_both = not (draft.family.inside_target or draft.in_speculators_layout)
    unlike = list(followed_by_one(as_read(draft.layer_config), traits)) if of_both else []
    unknown = rope.scaling if isinstance(rope.scaling, Unreplayed) else None
    for key, who in unlike:
        yield told("rope-unlike", key=key, who=who, replay="neither" if unknown else "vLLM's")
    if unknown and not unlike:
        yield told("rope-unreplayed", what=unknown.what, fix=unknown.fix)


_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def architecture(draft: Draft) -> Iterator[Lint]:
    """Source: `architectures.py`; `check` says what each engine makes of a name."""
    name = declared_architecture(draft.checkpoint.config)
    wanted = None if draft.family.inside_target else OTHER_NAMES.get(name)
    if wanted in KNOWN_TO_BOTH and wanted in draft.family.architectures:
        yield told("architecture-name", {"architectures": [wanted]}, name=name, wanted=wanted)


def dtype(draft: Draft) -> Iterator[Lint]:
    """Declared and stored dtype, and more than one of either.

    Source: SGLang 0.5.23 `_get_and_verify_dtype` (none declared: float16); vLLM 0.33
    `speculative.py` (the draft is cast to the target's dtype).
    """
    stored = sorted({row.tensor.dtype for row in draft.linears()})
    if len(stored) > 1:
        yield told("dtype-mixed", stored=" and ".join(stored))
        return
    wanted, config = _TORCH_NAMES[stored[0]], draft.layer_config
    declared = {key: config[key] for key in _DTYPE_KEYS if config.get(key) is not None}
    if draft.in_speculators_layout:  # only vLLM's, which casts to the target's
        return
    if not declared:
        yield told("dtype-missing", {"torch_dtype": wanted}, wanted=wanted)
    elif any(value != wanted for value in declared.values()):
        shown = ", ".join(f"{key} {value!r}" for key, value in declared.items())
        yield told("dtype-mismatch", dict.fromkeys(declared, wanted), said=shown, wanted=wanted)


def model_type(draft: Draft) -> Iterator[Lint]:
    """A model_type by which engines choose another class than the family's layers have.

    Of one that is no more than unusual `check` says what is known.
    """
    read = draft.checkpoint.config.get("model_type")
    if isinstance(read, str) and read in draft.family.misnamed:
        row, meant = draft.family.misnamed[read]
        yield told(row, {"model_type": meant})


def misspelt_keys(draft: Draft) -> Iterator[Lint]:
    """Source: no engine refuses an unknown key (`PretrainedConfig` keeps all)."""
    config = draft.checkpoint.config
    near_keys = {key: near for key in config if (near := reader.near_key(key, config))}
    if near_keys:
        renamed = ", ".join(f"{key!r} to {near!r}" for key, near in near_keys.items())
        yield told("misspelt-key", keys=", ".join(map(repr, near_keys)), renamed=renamed)


_NESTED = f"{reader.SECTION}.{reader.KEY}"


def aux_layer_ids(draft: Draft) -> Iterator[Lint]:
    """Ids that an engine misses or misreads; defaults need none.

    Source of empty lists: SGLang 0.5.23 `llama.py:929-941` uses its default only for null; vLLM for
    both.
    """
    geometry, config = eagle3(draft), draft.checkpoint.config
    if geometry is None:
        return
    section = config.get(reader.SECTION) or {}
    if not draft.in_speculators_layout:  # in which engines read the layers from elsewhere
        where = draft.checkpoint.folder / CONFIG_FILE
        yield from _misread_ids(config, section, reader.read_aux_layer_ids(config, where))
    if geometry.fuses and section.get(reader.KEY) == []:
        yield told("aux-layer-ids-empty", {_NESTED: None})


def _misread_ids(
    config: Mapping[str, Any], section: Mapping[str, Any], ids: reader.AuxLayerIds
) -> Iterator[Lint]:
    if ids.after is None:
        return
    inputs, nested = reader.layers_in_both_places(ids.after, config)
    if ids.spelling == ("equal" if nested == inputs else "portable"):
        return
    wanted = {reader.KEY: (config, inputs), _NESTED: (section, nested)}
    fix = {k: ids for k, (place, ids) in wanted.items() if ids != place.get(reader.KEY)}
    facts = {"read": ids.spelling, "inputs": inputs, "nested": nested, "after": list(ids.after)}
    yield told("aux-layer-ids", fix, **facts)


def layers_of_target(draft: Draft) -> Iterator[Lint]:
    """Source: `llama_eagle3.py:206` of vLLM 0.33, `:202` of SGLang 0.5.23; executed."""
    count = draft.layer_config.get("num_hidden_layers")
    if not draft.family.one_layer or count == draft.geometry.num_layers:
        return
    fix = {} if draft.in_speculators_layout else layers_of_one(draft.checkpoint.config)
    yield told("layers-of-target", fix, said=count)
