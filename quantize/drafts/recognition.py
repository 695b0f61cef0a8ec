"""Which family a draft belongs to, and the draft's table checked tensor by tensor.

In the speculators layout the draft's own keys stand at the top of config.json, those of its decoder
layers in `transformer_layer_config`; what is written keeps the layout. Where a key is missing, the
draft is what vLLM would serve. SGLang 0.5.23 does not read this layout.

Sources: `config.py` of `eagle3`, `peagle`, `dflash`, `dspark` and `mtp` in speculators 0.9.0, which
has no dflash2 yet; `transformers_utils/configs/speculators/algos.py` of vLLM 0.33, which has no
mtp: the layer is served inside its target, where the package's `scripts/stitch_mtp.py` puts it.
"""

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...recipes.errors import CheckpointError, short
from ..files.checkpoint import CONFIG_FILE, Checkpoint, mtp_layers
from ..files.safetensors_header import TensorInfo
from . import architectures as kinds
from .config_defaults import as_read, in_place_of
from .config_reader import ConfigReader
from .families import FAMILIES
from .family import LAYER_CONFIG, SPECULATORS_MARKS, Draft, Family, Row, SpeculatorsForm, TensorSpec
from .geometry import Geometry
from .unknown_family import UnknownFamily, read_unknown

FORMS: Mapping[str, SpeculatorsForm] = dict(
    sorted(form for family in FAMILIES for form in family.speculators.items())
)
"""speculators_model_type -> how it is spelled, of all families."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """True if a config.json is spelled in the speculators layout."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    ours = [form.architectures[0] for form in FORMS.values()]
    return any(config.get(key) is not None for key in SPECULATORS_MARKS) or name in ours


def plain_config(config: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """The config of a draft as its family reads it; returned unchanged if it is plain already."""
    if not is_speculators(config):
        return config
    keys = ConfigReader(config, where)
    form = FORMS[_kind(keys)]
    given = config.get(LAYER_CONFIG) is not None
    if not given:
        raise CheckpointError(
            keys.where,
            f"{LAYER_CONFIG}: missing key, which holds the sizes of the draft's layers",
            fix="save the draft again with the speculators package",
        )
    layers = keys.section(LAYER_CONFIG)
    return {
        **layers.config,
        **keys.positives("draft_vocab_size", "target_hidden_size"),
        **form.spelled(keys, layers),
    }


def _kind(keys: ConfigReader) -> str:
    kind, names = keys.config.get("speculators_model_type"), keys.config.get("architectures")
    known = ", ".join(FORMS)
    if kind is None:
        raise CheckpointError(
            keys.where,
            "speculators_model_type: missing key",
            fix=f"supported: {known}",
        )
    is_known = kind in tuple(FORMS)  # of any JSON type
    if not is_known:
        raise CheckpointError(
            keys.where,
            f"speculators_model_type: {short(kind)} is not supported",
            fix=f"supported: {known}",
        )
    first, *behind = names if isinstance(names, list) and names else [None]
    wanted = FORMS[str(kind)].architectures
    fits = first in wanted and not behind
    if not fits:
        raise CheckpointError(
            keys.where,
            f"architectures: expected [{wanted[0]!r}], got {names!r} beside speculators_model_type"
            f" {kind!r}",
            fix="correct the one that the draft was not trained as",
        )
    return str(kind)


def read_draft(checkpoint: Checkpoint) -> Draft:
    """Recognise the family of a draft and give every tensor its role.

    Where no family is that of its kind, rules give roles by names (`unknown_family`).

    CheckpointError: config and tensors name different families, or a tensor is absent, extra,
    doubled, or of another shape or dtype than the config implies.
    """
    if (kind := unknown_kind(checkpoint)) is not None:
        return read_unknown(checkpoint, kind)
    family, geometry = read_config(checkpoint)
    if checkpoint.roles:
        raise CheckpointError(
            "--role",
            f"--role is for drafts that no family reads; this one is of {family.name}, which has a"
            " role for every tensor",
            fix="leave --role out, or name tensors in a rule of the recipe",
        )
    if family.inside_target and checkpoint.subtree is None:
        _refuse_target(checkpoint)
    _check_marks(checkpoint, family)
    specs = family.tensor_specs(geometry)
    rows: dict[str, Row] = {}
    for name, tensor in checkpoint.tensors.items():
        canonical = family.canonical_name(name)
        if canonical not in specs:
            raise _unknown(checkpoint, family, name, canonical, list(specs))
        if canonical in rows:
            raise CheckpointError(
                checkpoint.folder,
                f"{name} and {rows[canonical].tensor.name} are the same tensor of {family.name}",
                fix="remove one of the two spellings",
            )
        _check(checkpoint, tensor, specs[canonical])
        rows[canonical] = Row(tensor=tensor, canonical=canonical, role=specs[canonical].role)
    missing = [c for c, spec in specs.items() if not spec.optional and c not in rows]
    if missing:
        first = ", ".join([*missing[:3], "..."] if missing[3:] else missing)
        again = "export the draft again, with all of its tensors"
        if _are_whole_layers(missing, rows):
            again = f"export the draft again, or correct {family.layer_keys} in config.json"
        raise CheckpointError(
            checkpoint.folder,
            f"{len(missing)} tensor(s) of {family.name} are missing: {first}",
            fix=_renaming(checkpoint) or again,
        )
    ordered = tuple(sorted(rows.values(), key=lambda row: row.tensor.name))
    return Draft(checkpoint=checkpoint, family=family, geometry=geometry, rows=ordered)


def _are_whole_layers(missing: Iterable[str], present: Iterable[str]) -> bool:
    numbers = [_NUMBERED.match(name) for name in missing]
    layers = tuple({number[0] for number in numbers if number})
    return all(numbers) and not any(name.startswith(layers) for name in present)


def read_config(checkpoint: Checkpoint, *, as_declared: bool = False) -> tuple[Family, Geometry]:
    """The family and geometry that config.json declares; of the tensors, only the number counts.

    Trainers copy the target's number of layers into a draft of one, which is read as that, but for
    `as_declared`: with as many layers as config.json says, as engines build it.
    """
    if not as_declared:
        if (kind := unknown_kind(checkpoint)) is not None:
            family = UnknownFamily(kind, checkpoint)
            where = checkpoint.folder / CONFIG_FILE
            return family, family.read_geometry(checkpoint.config, where)
        refuse_other_kinds(checkpoint)
    try:
        return _read_config(checkpoint, as_declared=as_declared)
    except CheckpointError as exc:
        fix = _renaming(checkpoint)
        if fix is None:
            raise
        raise CheckpointError(exc.where, exc.what, fix=fix) from exc


def _read_config(checkpoint: Checkpoint, *, as_declared: bool) -> tuple[Family, Geometry]:
    where = checkpoint.folder / CONFIG_FILE
    if kinds.nested_eagle_keys(checkpoint.config) is not None:
        raise CheckpointError(
            where,
            "the keys of the draft stand below 'model', where vLLM's EAGLEConfig puts them",
            fix=missing_name(checkpoint),
        )
    spelled = plain_config(checkpoint.config, where)
    config = kinds.with_family_name(spelled, checkpoint.tensors, _PROJECTORS)
    declared = config.get("architectures")
    if not isinstance(declared, list) or len(declared) != 1:
        got = "null" if declared is None else short(declared)
        got = got if "architectures" in config else "no such key"
        raise CheckpointError(
            where,
            f"architectures: expected a list of one name, got {got}",
            fix=missing_name(checkpoint),
        )
    by_config = next((each for each in FAMILIES if declared[0] in each.architectures), None)
    if by_config is None:
        got = short(declared[0])
        raise CheckpointError(
            where,
            f"architectures: no supported draft family has {got}",
            fix=kinds.SUPPORTED,
        )
    sizes = where if spelled is checkpoint.config else f"{where}: {LAYER_CONFIG}"
    if spelled is checkpoint.config:  # of speculators, whose config has no class
        config = as_read(config)
    if not as_declared:
        config = _with_stored_layer(config, checkpoint, by_config)
    try:
        geometry = by_config.read_geometry(config, sizes)
    except CheckpointError as exc:
        key = exc.what.partition(":")[0]
        if not (filled := in_place_of(spelled, key)):
            raise
        raise CheckpointError(exc.where, f"{exc.what} ({filled})", fix=_as_trained(key)) from exc
    most = max(len(checkpoint.tensors), _MOST_LAYERS if as_declared else 0)
    if geometry.num_layers > most:  # before a table of that many layers is made
        count = len(checkpoint.tensors)
        raise CheckpointError(
            where,
            f"{by_config.layer_keys}: {geometry.num_layers} layers, but {count} tensors in all",
            fix=f"correct {by_config.layer_keys!r}: the tensors are those of"
            f" {stored_layers(checkpoint, by_config)} layer(s)",
        )
    return by_config.of_folder(geometry, checkpoint.tensors), geometry


def _as_trained(keys: str) -> str:
    return f"add {keys} as the draft was trained with, or correct model_type"


@functools.lru_cache(maxsize=4)  # asked once for each GPU of each engine
def other_kind(checkpoint: Checkpoint) -> kinds.Kind | None:
    """What a draft is that no family reads, whatever keys it has; None where that is not known."""
    packed = kinds.packed_by_mlx(checkpoint.tensors)
    if packed is not None:
        return packed
    by_config = kinds.kind_by_config(checkpoint.config, checkpoint.tensors)
    if by_config is not None:
        return by_config
    try:
        config = plain_config(checkpoint.config, checkpoint.folder)
    except CheckpointError:
        return None  # what speculators' form lacks is said where it is read
    name = kinds.declared_architecture(
        kinds.with_family_name(config, checkpoint.tensors, _PROJECTORS)
    )
    if not name:
        return None
    for family in FAMILIES:
        if name in family.architectures:
            kind = kinds.kind_by_marks(family.name, family.foreign_marks(), checkpoint.tensors)
            return kind if kind is None or fitting_name(checkpoint) is None else None
    kind = kinds.kind_by_name(name, checkpoint.tensors)
    if kind is None or kind.fix:
        return kind
    renaming = _renaming(checkpoint)
    meant = f"; or {renaming}, if it was trained as that" if renaming else ""
    return kind._replace(fix=kinds.SUPPORTED + meant)


@functools.lru_cache(maxsize=4)
def unknown_kind(checkpoint: Checkpoint) -> str | None:
    """What a draft is that no family reads, and whose tensors rules give roles by their names.

    None where a family reads it, and of what no draft alone is: a whole language model, a target
    around its MTP layer, what MLX packed, and tensors that a family reads under another name.
    """
    kind = other_kind(checkpoint)
    if kind is None:
        name = kinds.declared_architecture(plain_name(checkpoint))
        if not name or any(name in family.architectures for family in FAMILIES):
            return None
        kind = kinds.Kind(f"of architecture {name!r}", "", "", in_config=True)
    around = bool(mtp_layers(checkpoint.tensors)) and _has_other_layers(checkpoint.tensors)
    whole = kind.name == kinds.WHOLE_MODEL or around
    packed = kinds.packed_by_mlx(checkpoint.tensors) is not None
    return None if whole or packed or fitting_name(checkpoint) is not None else kind.name


def plain_name(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json as families read it, or as it is."""
    with suppress(CheckpointError):
        config = plain_config(checkpoint.config, checkpoint.folder)
        return kinds.with_family_name(config, checkpoint.tensors, _PROJECTORS)
    return {}


def _has_other_layers(names: Collection[str]) -> bool:
    """True of a target, with its MTP layer inside or without."""
    inside = tuple(f"{layer}." for layer in mtp_layers(names))
    return any(_OF_TARGET.match(name) and not name.startswith(inside) for name in names)


def kind_of_draft(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """What draft a folder holds, by its config.json and its tensors' names.

    None of a language model, a target around its MTP layer or without it, and what nobody knows.
    """
    if (kind := kinds.kind_by_config(config, names)) is not None:
        return kind.name
    if is_speculators(config):
        return "a draft in the speculators layout"
    if mtp_layers(names) and not _has_other_layers(names):
        return "an MTP layer"
    name = kinds.declared_architecture(kinds.with_family_name(config, names, _PROJECTORS))
    drafts = (each for each in FAMILIES if not (each.inside_target or each.is_whole_model))
    return next((each.name for each in drafts if name in each.architectures), None)


def refuse_other_kinds(checkpoint: Checkpoint) -> None:
    """Say what a draft is before anything is said of its tensors and keys."""
    kind = other_kind(checkpoint)
    if kind is not None and unknown_kind(checkpoint) is None:
        where = checkpoint.folder / CONFIG_FILE if kind.in_config else checkpoint.folder
        raise CheckpointError(where, kind.what, fix=kind.fix)


def fitting_name(
    checkpoint: Checkpoint, known: Collection[str] | None = None, *, misnamed: bool = True
) -> str | None:
    """The architecture whose tensors a draft has, where its config.json has another one.

    None where none is known, and of a layer or the whole of a model, which has the model's name;
    with `misnamed` also where the tensors fit the name that it has. `known` are the names that may
    be the answer; None = all that families read.
    """
    declared = kinds.declared_architecture(checkpoint.config)
    if is_speculators(checkpoint.config) or (misnamed and _fits(checkpoint, declared)):
        return None
    drafts = (each for each in FAMILIES if not (each.inside_target or each.is_whole_model))
    names = [name for family in drafts for name in family.architectures]
    names.sort(
        key=lambda name: (name != kinds.OTHER_NAMES.get(declared), name not in kinds.KNOWN_TO_BOTH)
    )
    fits = (name for name in names if known is None or name in known)
    return next((name for name in fits if _fits(checkpoint, name)), None)


def _fits(checkpoint: Checkpoint, name: str) -> bool:
    renamed = replace(checkpoint, config={**checkpoint.config, "architectures": [name]})
    try:
        family, geometry = _read_config(renamed, as_declared=True)
    except CheckpointError:
        return False
    specs = family.tensor_specs(geometry)
    stored = {family.canonical_name(t.name): t for t in checkpoint.tensors.values()}
    modules = {_module(canonical) for canonical in stored}
    needed = {_module(canonical) for canonical, spec in specs.items() if not spec.optional}
    return needed <= modules <= {_module(canonical) for canonical in specs} and all(
        tensor.dtype not in spec.dtypes or tensor.shape == tuple(dim.size for dim in spec.shape)
        for canonical, tensor in stored.items()
        if (spec := specs.get(canonical)) is not None
    )


def _module(canonical: str) -> str:
    return canonical.rpartition(".")[0] or canonical


def missing_name(checkpoint: Checkpoint) -> str:
    """What to do about a config.json without the name of an architecture."""
    nested = kinds.nested_eagle_keys(checkpoint.config)
    if nested is not None:
        outer = {key: value for key, value in checkpoint.config.items() if key != "model"}
        flat = replace(checkpoint, config={**outer, **nested})
        named = "architectures" in flat.config
        move = "move the keys of 'model' to the top level of config.json"
        return move if named else f"{move}; {_renaming(flat) or missing_name(flat)}"
    marked = _marked(checkpoint)
    if len(marked) != 1:
        return "add the architecture that the draft was trained as"
    names = ", ".join(marked[0].architectures[:3])
    return f"by its tensors it is {marked[0].name}: add its architecture to config.json ({names})"


def _marked(checkpoint: Checkpoint) -> list[Family]:
    names = checkpoint.tensors
    return [each for each in FAMILIES if each.recognises(set(map(each.canonical_name, names)))]


def _with_stored_layer(
    config: Mapping[str, Any], checkpoint: Checkpoint, family: Family
) -> Mapping[str, Any]:
    """config.json as that of one layer where no other has tensors."""
    num_layers = config.get("num_hidden_layers")
    if not family.one_layer or type(num_layers) is not int or not 1 < num_layers <= _MOST_LAYERS:
        return config
    if _layers(checkpoint, family) != {"layers.0."}:
        return config
    return {**config, **layers_of_one(config)}


def layers_of_one(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say how many layers there are, as those of a single layer."""
    types = config.get("layer_types")
    first_type = {"layer_types": types[:1]} if isinstance(types, list) and types else {}
    return {"num_hidden_layers": 1, **first_type}


def stored_layers(checkpoint: Checkpoint, family: Family) -> int:
    """How many decoder layers have tensors."""
    return len(_layers(checkpoint, family))


def _layers(checkpoint: Checkpoint, family: Family) -> set[str]:
    names = map(family.canonical_name, checkpoint.tensors)
    return {match[0] for name in names if (match := _LAYER.match(name))}


_PROJECTORS = {kind: name for each in FAMILIES for kind, name in each.projectors.items()}
_OTHER_CONFIG = "use the config.json that belongs to these tensors"
_MOST_LAYERS = 256
"""That engines are asked about."""
_OF_TARGET = re.compile(r"(model|language_model\.model|model\.language_model)\.layers\.\d+\.")
_NUMBERED = re.compile(r"(layers|modules)\.\d+\.")
_LAYER = re.compile(r"(blocks\.\d+\.)?layers\.\d+\.")


def _check_marks(checkpoint: Checkpoint, declared: Family) -> None:
    marked = _marked(checkpoint)
    if marked and [family.name for family in marked] != [declared.name]:
        others = "keep the tensors of one draft in this folder, and move the others out"
        fix = _renaming(checkpoint) or (_OTHER_CONFIG if len(marked) == 1 else others)
        names = " and ".join(family.name for family in marked)
        where = checkpoint.folder / CONFIG_FILE
        raise CheckpointError(
            where,
            f"config.json declares {declared.name}, but the tensors are those of {names}",
            fix=fix,
        )


def _check(checkpoint: Checkpoint, tensor: TensorInfo, spec: TensorSpec) -> None:
    where, expected = checkpoint.folder / tensor.file, [dim.size for dim in spec.shape]
    if list(tensor.shape) != expected:
        pairs = zip(spec.shape, tensor.shape, strict=False)
        wrong = [dim for dim, size in pairs if dim.size != size]
        keys = (*wrong, spec.shape[0])[0].follows_from
        filled = in_place_of(checkpoint.config, keys)
        why = filled or f"disagrees with {keys} of config.json"
        fix = _as_trained(keys) if filled else _OTHER_CONFIG
        got = list(tensor.shape)
        raise CheckpointError(
            where,
            f"{tensor.name}: expected shape {expected}, got {got} ({why})",
            fix=fix,
        )
    if tensor.dtype not in spec.dtypes:
        dtypes = " or ".join(spec.dtypes)
        raise CheckpointError(
            where,
            f"{tensor.name}: expected {dtypes}, got {tensor.dtype}",
            fix="give the floating-point draft: a quantized one cannot be quantized again",
        )


def _refuse_target(checkpoint: Checkpoint) -> None:
    """Say where a target's MTP layer is, or that it stores none, before anything of its tensors."""
    if not _has_other_layers(checkpoint.tensors):
        return
    layers = mtp_layers(checkpoint.tensors)
    what = "is a whole target, and a draft is expected"
    fix = f"read its MTP layer alone: --subtree {','.join(layers)}"
    if not layers:
        what += "; config.json promises an MTP layer, and no tensor of one is stored"
        fix = "give a folder that has the layer, with --subtree, or its draft's own folder"
    raise CheckpointError(checkpoint.folder, what, fix=fix)


def _unknown(
    checkpoint: Checkpoint, family: Family, name: str, canonical: str, known: list[str]
) -> CheckpointError:
    near = ", ".join(difflib.get_close_matches(canonical, known, n=3)) or "none"
    fix = _renaming(checkpoint) or (
        f"correct {family.layer_keys} or architectures in config.json; remove the tensor only if"
        " the draft was trained without it"
    )
    return CheckpointError(
        checkpoint.folder,
        f"{name}: no tensor of {family.name} has this name; nearest: {near}",
        fix=fix,
    )


def _renaming(checkpoint: Checkpoint) -> str | None:
    name = fitting_name(checkpoint)
    return f"set architectures to {name}, whose tensors these are" if name else None
