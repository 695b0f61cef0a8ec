"""What config.json of an output may say: what the source's does, and what its run says of changes.

They are put in by a few lines that nothing else uses, and none may change what the draft computes:
a fix is for what engines read.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from ..drafts import Draft, read_config
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from .verify_report import Fault

_DECLARATION = "quantization_config"
Config = Mapping[str, object]


def config_faults(draft: Draft, output: Checkpoint, changes: Config | None) -> list[Fault]:
    """Every key but the declaration has the value that it should have.

    Args:
        changes: dotted key -> value, as the run says; None where nothing says, since another tool
            made the folder: what changes nothing that the draft computes may be written there.
    """
    source = draft.checkpoint.config
    if changes is not None:
        return _different(_changed(source, changes), output.config) + _altered(draft, changes)
    keys = source.keys() | output.config.keys()
    other = [key for key in keys if _said(source, key) != _said(output.config, key)]
    altering = {fault.where for fault in _altered(draft, {k: output.config.get(k) for k in other})}
    found = _different(source, output.config)
    return [fault for fault in found if fault.where in altering]


def _changed(config: Config, changes: Config) -> dict[str, object]:
    """The config with each dotted key at its value; what is in the way of a section gives way."""
    changed = dict(config)
    for path, value in changes.items():
        section, _, rest = path.partition(".")
        inner = changed.get(section)
        changed[section] = (
            _changed(inner if isinstance(inner, Mapping) else {}, {rest: value}) if rest else value
        )
    return changed


def _different(wanted: Config, found: Config) -> list[Fault]:
    return [
        Fault(where=_place(key), expected=_said(wanted, key), got=_said(found, key))
        for key in sorted((wanted.keys() | found.keys()) - {_DECLARATION})
        if _said(wanted, key) != _said(found, key)
    ]


def _altered(draft: Draft, changes: Config) -> list[Fault]:
    """The changes that make another draft of the source, if all of them together do."""
    before = _computed(draft, {})
    if _computed(draft, changes) == before:
        return []
    alone = {
        key: value for key, value in changes.items() if _computed(draft, {key: value}) != before
    }
    return [
        Fault(
            where=_place(key),
            expected="no change of what the draft computes",
            got=json.dumps(value, sort_keys=True),
        )
        for key, value in (alone or changes).items()
    ]


def _computed(draft: Draft, changes: Config) -> tuple[str, object] | None:
    """Which family and numbers config.json stands for; None where it stands for none."""
    config = {
        k: v for k, v in _changed(draft.checkpoint.config, changes).items() if k != _DECLARATION
    }
    try:
        family, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError:
        return None
    return family.name, geometry


def _place(key: str) -> str:
    return f"{CONFIG_FILE}: {key}"


def _said(config: Config, key: str) -> str:
    """A value as text that tells 1 from true and 1.0; "no such key" is not valid JSON."""
    return json.dumps(config[key], sort_keys=True) if key in config else "no such key"
