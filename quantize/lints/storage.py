"""How the draft lies on disk: dtypes, names, what need not be there, and keys of config.json."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts import Draft
from ..drafts.architectures import KNOWN_TO_BOTH, OTHER_NAMES, declared_architecture
from ..drafts.config_defaults import REWRITTEN_BY_VLLM, absent_keys, as_read, class_defaults
from ..drafts.config_reader import near_key
from ..drafts.exporters import in_speculators_layout, is_mla, layer_config
from ..drafts.lint import Lint
from ..drafts.shared.aux_layers import DEEPSEEK_TYPES

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DTYPE_KEYS = ("dtype", "torch_dtype")
_NOBODY_READS = (
    "draft_model.", "eagle_module.", "dflash_module.", "context_proj.", "context_norm.",
    "final_norm.",
)  # fmt: skip
_VLLM_REFUSES = ("model.", "aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")


def architecture(draft: Draft) -> Iterator[Lint]:
    """Source: `architectures.py`; what each engine makes of a name, `check` says."""
    name = declared_architecture(draft.checkpoint.config)
    if name in draft.family.misnamed:
        yield draft.family.misnamed[name]
    wanted = None if draft.family.inside_target else OTHER_NAMES.get(name)
    if wanted in KNOWN_TO_BOTH and wanted in draft.family.architectures:
        yield Lint(
            name="architecture-name",
            level="warning",
            cause=f"vLLM 0.33 and SGLang 0.5.23 do not both serve {name} as a draft; the"
            f" tensors are those of {wanted}, which both serve",
            remedy=f"write {wanted}",
            fix={"architectures": [wanted]},
        )


def dtype(draft: Draft) -> Iterator[Lint]:
    """Declared and stored dtype, and more than one of them.

    Source: SGLang 0.5.23 `_get_and_verify_dtype` (none declared: float16); vLLM 0.33
    `speculative.py` (the draft is cast to the target's dtype).
    """
    stored = sorted({row.tensor.dtype for row in draft.linears()})
    if len(stored) > 1:
        yield Lint(
            name="dtype-mixed",
            level="warning",
            cause=f"the linears are stored as {' and '.join(stored)}, and engines cast all of"
            " them to one dtype",
            remedy="export the draft in one dtype, so that what is measured is what is served",
        )
        return
    wanted, config = _TORCH_NAMES[stored[0]], layer_config(draft)
    declared = {key: config[key] for key in _DTYPE_KEYS if config.get(key) is not None}
    if in_speculators_layout(draft):  # vLLM alone, which casts to the target's
        return
    if not declared:
        yield Lint(
            name="dtype-missing",
            level="warning",
            cause="config.json declares no dtype: SGLang 0.5.23 then serves float16, but the"
            f" weights are {wanted}",
            remedy=f"add torch_dtype {wanted}",
            fix={"torch_dtype": wanted},
        )
    elif any(value != wanted for value in declared.values()):
        said = ", ".join(f"{key} {value!r}" for key, value in declared.items())
        yield Lint(
            name="dtype-mismatch",
            level="warning",
            cause=f"config.json declares {said}, but the weights are {wanted}: SGLang 0.5.23"
            " casts them to the declared dtype",
            remedy=f"write {wanted}",
            fix=dict.fromkeys(declared, wanted),
        )


def names(draft: Draft) -> Iterator[Lint]:
    """Names that engines skip or refuse.

    Source: loaded in vLLM 0.33 and SGLang 0.5.23 (Llama); SGLang `kimi_k25_eagle3.py`.
    """
    spelled = [] if draft.family.inside_target else [row.tensor.name for row in draft.rows]
    unread = [name for name in spelled if name.startswith(_NOBODY_READS)]
    refused = [name for name in spelled if name.startswith(_VLLM_REFUSES)]
    if draft.family.is_whole_model:  # which is loaded as any model, by its own names
        return
    if unread:
        yield Lint(
            name="tensor-names",
            level="warning",
            cause=f"{len(unread)} tensors are named like {unread[0]}: vLLM refuses these"
            " names, and SGLang silently leaves its own parameters uninitialized",
            remedy="export the draft in its serving layout (layers.0., fc., norm.)",
        )
    elif refused:
        sglang = "skips them" if is_mla(draft) else "reads them"
        yield Lint(
            name="tensor-names",
            level="warning",
            cause=f"{len(refused)} tensors are named like {refused[0]}: vLLM 0.33 refuses"
            f" these names, and SGLang 0.5.23 {sglang}",
            remedy="rename the tensors of the source: remove 'model.', and write fc_norm.0, .1, .2",
        )


def layout(draft: Draft) -> Iterator[Lint]:
    """Source: no reader of `transformer_layer_config` in SGLang 0.5.23."""
    if in_speculators_layout(draft):
        yield Lint(
            name="speculators-layout",
            level="note",
            cause="the draft is in the speculators layout: vLLM 0.33 translates it, but"
            " SGLang 0.5.23 does not read it",
            remedy="serve this draft with vLLM",
        )


def model_type(draft: Draft) -> Iterator[Lint]:
    """A model_type that an engine rewrites, or whose class fills in what the layers are not.

    Source: `config_defaults.json`; executed for the types of `tests/engines/names.json`.
    """
    config, geometry = draft.checkpoint.config, draft.geometry
    found, usual = config.get("model_type"), draft.family.engine_traits.usual_type
    if isinstance(found, str) and found in draft.family.misnamed:
        yield draft.family.misnamed[found]
        return
    if found in DEEPSEEK_TYPES and (geometry.aux_layer_ids or (0,))[0] > 1:
        usual = "kimi_k2"  # by which engines count the layers
    if not usual or not isinstance(found, str) or found == usual or in_speculators_layout(draft):
        return
    if why := _misread_by(found, config):
        yield Lint(
            name="model-type",
            level="warning",
            cause=f"model_type {found}: {why}",
            remedy=f"write {usual}, whose layers these are, and of the keys that config.json lacks"
            " the values of training",
            fix={"model_type": usual, **_read_by(draft, usual)},
        )


def _misread_by(model_type: str, config: Mapping[str, Any]) -> str:
    """What engines make of a draft under a model_type that is not its own; "" = nothing else."""
    row = class_defaults(model_type)
    if model_type in REWRITTEN_BY_VLLM:
        return f"vLLM 0.33 rewrites the architecture to {REWRITTEN_BY_VLLM[model_type]}"
    if row == "unknown":
        return "neither Transformers nor an engine knows it"
    if row == "refused" or any(value is None for value in row.changes.values()):
        return "its config class has other keys than such a draft"
    usual = absent_keys(config, class_defaults("llama"))
    given = {k: v for k, v in absent_keys(config, row).items() if v not in (None, usual.get(k))}
    if "sliding_attention" not in (given.get("layer_types") or config.get("layer_types") or ()):
        given.pop("sliding_window", None)
    said = [f"{key} {json.dumps(value)}" for key, value in given.items()]
    said += [f"no {key}" for key in sorted((row.lacks | row.unclear) - config.keys())]
    return f"its config class fills in {', '.join(said)}" if said else ""


def _read_by(draft: Draft, usual: str) -> dict[str, Any]:
    """What a forward pass depends on and the class of `usual` would fill in otherwise."""
    config, geometry = draft.checkpoint.config, draft.geometry
    read = as_read({**config, "num_hidden_layers": geometry.num_layers})
    found = {key: read[key] for key in read if key not in config and read[key] is not None}
    if "layer_types" not in found and not config.get("layer_types"):
        found.pop("sliding_window", None)
    other = class_defaults(usual)
    for key in ("num_key_value_heads", "head_dim"):
        if key not in config and not isinstance(other, str) and key in other.values:
            found[key] = getattr(geometry, key)
    return found


def embedding(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `eagle_worker_v2.py`; vLLM 0.33 `llm_base_proposer.py`."""
    row = draft.row("embed_tokens.weight")
    if "embedding" not in draft.family.shared_tables:
        return
    if row is not None and draft.geometry.hidden_size == draft.geometry.target_hidden_size:
        yield Lint(
            name="embed-tokens",
            level="note",
            cause="the draft stores embed_tokens, but SGLang 0.5.23 uses the target's"
            " embedding instead, and so does vLLM 0.33 where the two are equal",
            remedy="drop it if it equals the target's (a rule with 'action: drop'), which"
            f" saves {row.tensor.nbytes:,} bytes",
        )


def misspelt_keys(draft: Draft) -> Iterator[Lint]:
    """A key beside which the right one is absent: its value is not read by anything.

    Source: no engine refuses a key that it does not know (`PretrainedConfig` keeps all of them).
    """
    config = draft.checkpoint.config
    found = {key: near for key in config if (near := near_key(key, config))}
    if found:
        yield Lint(
            name="misspelt-key",
            level="warning",
            cause=f"nothing reads {', '.join(map(repr, found))} of config.json",
            remedy="if that is what is meant, rename "
            + ", ".join(f"{key!r} to {near!r}" for key, near in found.items()),
        )
