"""Every lint, in the order of reports."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from ...recipes.errors import DraftQuantError
from ..drafts import Draft
from ..drafts.family import Lint, told
from ..files.checkpoint import Checkpoint
from ..stored.stored_draft import StoredDraft
from . import config_lints as config
from . import value_lints as values

CHECKS: tuple[Callable[[Draft], Iterator[Lint]] | str, ...] = (
    config.rope_trained,
    config.rope_default,
    config.rope_by_layer,
    config.rope_read,
    config.aux_layer_ids,
    "last-hidden-state",
    config.layers_of_target,
    values.draft_vocab_size,
    "head-tied",
    values.vocabulary_map,
    values.pruned_head,
    *("norm-before-residual-missing", "norm-before-residual", "norm-output"),
    *("eagle3-sliding", "modelopt-double-norm"),
    lambda draft: (lint for check in draft.family.lints for lint in check(draft)),
    config.architecture,
    config.model_type,
    config.dtype,
    "embed-tokens",
    config.misspelt_keys,
)
"""Functions, and names of `by_settings`."""


def find_lints(draft: Draft) -> tuple[Lint, ...]:
    """Check a draft's config, headers and vocabulary maps; no other tensor is read."""
    if not draft.family.has_maths:  # what a setting means there is not known
        return ()
    values.check_vocabulary_map(draft)
    quoted = dict(config.by_settings(draft))
    lints = (
        check(draft) if callable(check) else [told(n, **quoted[n]) for n in {check} & quoted.keys()]
        for check in CHECKS
    )
    return tuple(chain.from_iterable(lints))


OF_MATHS = frozenset({
    "rope-base", "rope-injected", "rope-unlike", "model-type",
    "norm-before-residual-missing", "norm-before-residual", "norm-output", "eagle3-sliding",
    "modelopt-double-norm", "dflash-sliding", "dflash-causal", "dflash-use-swa",
    "dflash-speculators-causal",
    "dflash2-embedding-scale", "dflash2-float16", "d2t-absolute", "d2t-duplicates", "pruned-head",
    "misspelt-key",
})  # fmt: skip
"""Lints on what a draft computes in a server: all others are on what `check` itself answers."""


def lints_of_maths(checkpoint: Checkpoint) -> tuple[Lint, ...]:
    """Those of `OF_MATHS` about a folder, quantized or not; none where it cannot be read."""
    try:
        lints = find_lints(StoredDraft.look(checkpoint).draft)
    except DraftQuantError:  # `check` says why
        return ()
    return tuple(each for each in lints if each.name in OF_MATHS)


def output_changes(before: Draft, after: Draft, *, fix_config: bool) -> dict[str, Any]:
    """How config.json must change once tables of a draft are left to the target.

    Dotted key -> value; with `fix_config` all that lints ask for, otherwise only new ones.
    """
    if before.rows == after.rows and not fix_config:
        return {}
    known = set() if fix_config else {lint.name for lint in find_lints(before)}
    return config_changes(lint for lint in find_lints(after) if lint.name not in known)


def config_changes(lints: Iterable[Lint]) -> dict[str, Any]:
    """All fixes together: dotted key -> value. No two lints touch one key."""
    changes: dict[str, Any] = {}
    for lint in lints:
        assert not changes.keys() & lint.fix.keys(), f"{lint.name}: {lint.fix} against {changes}"
        changes |= lint.fix
    return changes


def fixed_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes applied; keys keep their order, `config` is not changed."""
    fixed = dict(config)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = fixed
        for section in sections:
            place[section] = dict(place.get(section) or {})
            place = place[section]
        place[key] = value
    return fixed
