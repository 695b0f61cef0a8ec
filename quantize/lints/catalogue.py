"""Every lint there is, in the order in which they are reported."""

from typing import Any

from ..drafts import Draft
from . import dflash, dspark, layers, medusa, norms, rope, spelling, storage, vocabulary
from .lint import Check, Lint, config_changes

CHECKS: tuple[Check, ...] = (
    rope.rope_base,
    rope.rope_injected,
    rope.rope_default,
    rope.rope_unreplayed,
    layers.aux_layer_ids,
    layers.aux_layer_list,
    layers.without_fc,
    layers.aux_layer_zero,
    layers.layers_of_target,
    layers.later_layer_norm,
    layers.layers_of_mla,
    vocabulary.draft_vocab_size,
    vocabulary.tied_head,
    vocabulary.vocabulary_map,
    vocabulary.full_vocabulary_map,
    vocabulary.pruned_head,
    norms.norm_before_residual,
    norms.norm_before_fc,
    norms.norm_output,
    norms.double_norm,
    dflash.block_size,
    dflash.causality,
    dflash.candidate_pool,
    dflash.float16,
    dflash.embedding_scale,
    dspark.nested_keys,
    medusa.biases,
    medusa.names,
    storage.layout,
    storage.architecture,
    storage.model_type,
    storage.dtype,
    storage.names,
    storage.embedding,
    spelling.misspelt_keys,
)


def find_lints(draft: Draft) -> tuple[Lint, ...]:
    """Look at a draft's config, headers and vocabulary maps; no other tensor is read.

    Raises:
        CheckpointError: d2t leaves the target's vocabulary, or a file shrank.
    """
    vocabulary.check_vocabulary_map(draft)
    return tuple(lint for check in CHECKS for lint in check(draft))


def output_changes(before: Draft, after: Draft, *, fix_config: bool) -> dict[str, Any]:
    """What config.json must say otherwise once tables of a draft are left to the target.

    Args:
        before: the draft.
        after: the draft without them, which may be the very same.
        fix_config: all that lints ask for, not only what is asked for anew.

    Returns:
        Dotted key -> value.
    """
    if before.rows == after.rows and not fix_config:
        return {}
    known = set() if fix_config else {lint.name for lint in find_lints(before)}
    return config_changes(lint for lint in find_lints(after) if lint.name not in known)
