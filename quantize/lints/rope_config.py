"""Rotary embeddings: trained with one base or scaling, served with another."""

from collections.abc import Iterator

from ..drafts import Draft
from ..drafts.exporters import is_mla, is_modelopt, is_torchspec, layer_config
from ..drafts.lint import Lint
from ..drafts.rope import DEFAULT_THETA, Unreplayed
from ..drafts.shared.eagle3.lints import eagle3

_INJECTED = (32, 2048)
"""Factor and original positions that ModelOpt's export writes into a draft trained without yarn."""


def rope_base(draft: Draft) -> Iterator[Lint]:
    """TorchSpec may have trained at base 10000 whatever `rope_theta` says.

    Source: TorchSpec @6f21829 `deepseek_eagle.py` (yarn without `base`), `llama3_eagle.py`
    (`getattr(config, "rope_theta", 10000)`, which transformers 5 moved into `rope_parameters`).
    """
    geometry = eagle3(draft)
    if geometry is None or geometry.rope.theta == DEFAULT_THETA:
        return
    if is_mla(draft) and geometry.rope.yarn is not None and not is_modelopt(draft):
        who = "TorchSpec trains MLA with yarn"
    elif is_torchspec(draft) and not is_mla(draft):
        who = "TorchSpec under transformers 5 trains Llama drafts"
    else:
        return
    yield Lint(
        name="rope-base",
        level="warning",
        cause=f"{who} at rope base 10000, but engines serve rope_theta {geometry.rope.theta:g}",
        remedy="replay with both bases (draftquant replay, with and without --rope-theta"
        " 10000); if 10000 accepts more, correct rope_theta in the source",
    )


def rope_default(draft: Draft) -> Iterator[Lint]:
    """Source: `DEFAULT_THETA`; SpecForge's and AngelSlim's draft models train at it as well."""
    if draft.geometry.rope is None:
        return
    config = layer_config(draft)
    nested = config.get("rope_parameters") or {}
    if config.get("rope_theta") is None and nested.get("rope_theta") is None:
        null, rope = "rope_theta" in config, draft.geometry.rope
        by_class = f", which model_type {config.get('model_type')} fills in"
        whose = by_class if rope.theta != DEFAULT_THETA else ""
        yield Lint(
            name="rope-theta-missing",
            level="warning" if null else "note",
            cause="rope_theta is null, which both engines refuse"
            if null
            else f"config.json has no rope_theta: both engines then use base {rope.theta:g}{whose}",
            remedy="if the draft was trained at another base, such as its target's, add"
            " rope_theta; replay shows which base is right (draftquant replay, with and"
            " without --rope-theta)",
        )


def rope_unreplayed(draft: Draft) -> Iterator[Lint]:
    """What only replay minds."""
    scaling = draft.geometry.rope and draft.geometry.rope.scaling
    if isinstance(scaling, Unreplayed):
        yield Lint(name="rope-unreplayed", level="note", cause=scaling.what, remedy=scaling.fix)


def rope_injected(draft: Draft) -> Iterator[Lint]:
    """Yarn that training did not have.

    Source: ModelOpt 0.47 `hf_spec_export.py`; without mscale keys engines multiply cos and sin by
    0.1 ln 32 + 1.
    """
    geometry = eagle3(draft)
    yarn = geometry.rope.yarn if geometry is not None else None
    if yarn is None or is_mla(draft):
        return
    plain = yarn.mscale is None and yarn.mscale_all_dim is None and yarn.attention_factor is None
    if plain and (yarn.factor, yarn.original_max_positions) == _INJECTED:
        yield Lint(
            name="rope-injected",
            level="warning",
            cause="config.json has yarn with factor 32 over 2048 positions and no mscale,"
            " which ModelOpt's export writes into Llama drafts that were trained without"
            " it; engines then also scale cos and sin by 1.3466",
            remedy="replay with and without rope_scaling; if the draft accepts more without,"
            " remove the key from the source",
        )
