"""What verification finds in headers, declarations and files, without comparing tensor data."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...recipes.errors import CheckpointError
from ...recipes.regular_file import SIGNATURE_FILE, entries, looks_like_weights, open_stream
from ...recipes.schema import QUANTIZABLE
from ..drafts import Draft, Row
from ..drafts.engine_traits import fused_group, fused_names
from ..files.card_text import CARD_FILE
from ..files.checkpoint import (
    CONFIG_FILE,
    HIDDEN,
    INDEX_FILE,
    PROFILE_FILE,
    PROVENANCE_FILE,
    Checkpoint,
    mistaken_folder,
    without_safetensors,
)
from ..files.provenance import QuantizedProvenance
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import stored_scalar
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.layouts.scheme import DeclaredScheme, Part
from ..stored.stored_declaration import INPUT_SCALES, beside_codes, quantized_looking, stored_parts
from .comparison import Fault, differing, form
from .demands import own_parts
from .scales import Demand

_PYTORCH = repr("pt")  # the value of "format" that transformers demands, and most exporters write
_ONE_FOR_FUSED = (*INPUT_SCALES, "weight_scale_2", "weight_global_scale")
ONLY_OURS = frozenset({PROVENANCE_FILE, PROFILE_FILE})
"""Side files of a source that say nothing true about what is made of it."""
QUANTIZED_ONLY = ONLY_OURS | {HF_QUANT_CONFIG}
"""So does an empty declaration of a BF16 draft, about the quantized one."""
_SAVED_ANEW = ("added_tokens.json", "generation_config.json", "special_tokens_map.json",
               "tokenizer_config.json", "chat_template.jinja")  # fmt: skip
"""What transformers writes beside the weights of a model whenever it saves one."""
_RECORDS = ("quant_config.json", "quant_log.csv", "quantization_config.json",
            "quantize_config.json", "recipe.yaml")  # fmt: skip
"""Files of AutoAWQ, GPTQModel, AutoRound, llm-compressor; engines prefer config.json."""
_PUBLISHED = (CARD_FILE, ".gitattributes", SIGNATURE_FILE, PROFILE_FILE)  # who publishes adds them
_DOWNLOADED = ".cache/huggingface/"  # what a download from the Hub keeps beside the files
_NUMBER = re.compile(r"layers\.(\d+)\.")
_ANY_LAYER = 61  # vLLM numbers a draft's layers after the target's: Kimi-K2 and DeepSeek-V3 have 61


def check_is_checkpoint(output: Path, config_file: str) -> None:
    """CheckpointError where config.json or weights are absent."""
    has_weights = (output / INDEX_FILE).exists() or any(output.glob("*.safetensors"))
    has_config = (output / config_file).is_file()
    if not has_config or not has_weights:
        mistake = without_safetensors(output) if has_config else mistaken_folder(output)
        nothing = f"it holds no {CONFIG_FILE}, or no safetensors files"
        what, fix = mistake or (nothing, "give the output folder of `draftquant quantize`")
        raise CheckpointError(output, what, fix=fix)


@dataclass(slots=True)
class Sorting:
    """Which tensors are to be compared, and how; wrong headers are faults instead.

    Attributes:
        linears: quantized linears whose codes can be decoded, with their stored tensors by suffix.
        complete: on-disk names of those linears that have every declared tensor.
        quantized: on-disk names of all modules that look quantized, complete or not.
    """

    kept: list[Row] = field(default_factory=list)
    linears: list[tuple[Row, Mapping[str, TensorInfo]]] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)


def sort_tensors(
    draft: Draft, output: Checkpoint, demands: Mapping[str, Demand], beside: Collection[str]
) -> Sorting:
    """Compare every tensor of the source with the header of the output, and the other way round.

    `beside` are tensors of the output that belong to no tensor of the source.
    """
    modules = quantized_looking(output.tensors.values())
    sorting, claimed = Sorting(), set(beside)
    for row in draft.rows:
        module = row.module
        if module not in modules:
            claimed.add(row.tensor.name)
            stored = output.tensors.get(row.tensor.name)
            if form(stored) == form(row.tensor):
                sorting.kept.append(row)
            else:
                kept = f"{form(row.tensor)}{' (kept)' if stored else ''}"
                sorting.faults.append(Fault(row.tensor.name, kept, form(stored)))
            continue
        sorting.quantized.add(module)
        demand = demands.get(module)
        scheme = demand.scheme if demand else None
        if demand is None or scheme is None or row.role not in QUANTIZABLE:
            claimed |= {n for n in output.tensors if n.rpartition(".")[0] == module}
            sorting.faults.append(not_quantizable(module, row))
            continue
        recipe = demand.recipe
        rows, columns = row.tensor.shape
        wide = scheme.layout.foreign_scale_dtypes if recipe is None else ()
        parts = stored_parts(scheme, rows, columns, source_dtypes=(row.tensor.dtype, *wide))
        if recipe is not None:
            parts = own_parts(parts, recipe.weights.stored, scheme, demand.scale_dtype)
        claimed |= {f"{module}.{suffix}" for suffix in parts}
        right, wrong = sort_parts(output, module, parts, scheme)
        sorting.faults += wrong
        if not wrong:
            sorting.complete.add(module)
        if {fault.where.rpartition(".")[2] for fault in wrong} <= beside_codes(scheme):
            sorting.linears.append((row, right))
    for name in sorted(output.tensors.keys() - claimed):
        sorting.faults.append(Fault(name, "no such tensor", form(output.tensors[name])))
    return sorting


def not_quantizable(module: str, row: Row) -> Fault:
    """The fault of a row that is stored as codes but must not be."""
    reason = f"{CONFIG_FILE} declares no quantization"
    if row.role not in QUANTIZABLE:
        reason = f"{row.role} is never quantized"
    return Fault(module, f"{form(row.tensor)}: {reason}", "a quantized weight")


def sort_parts(
    output: Checkpoint, module: str, parts: Mapping[str, Part], scheme: DeclaredScheme
) -> tuple[dict[str, TensorInfo], list[Fault]]:
    """The parts of a quantized linear by suffix; faults where parts are missing or misshapen."""
    right, faults = {}, []
    for suffix, part in parts.items():
        tensor = output.tensors.get(f"{module}.{suffix}")
        if not part.fits(tensor):
            expected = f"{' or '.join(part.dtypes)} {list(part.shape)} ({scheme})"
            faults.append(Fault(f"{module}.{suffix}", expected, form(tensor)))
        elif tensor is not None:
            right[suffix] = tensor
    return right, faults


def fused_faults(
    draft: Draft,
    output: Checkpoint,
    scheme: DeclaredScheme | None,
    quantized: Collection[str],
    complete: Collection[str],
) -> Iterator[Fault]:
    """Linears that engines fuse are quantized together, and share what engines keep only once."""
    for group in draft.scale_groups():
        members = [module for module in group if module in quantized]
        if members and len(members) < len(group):
            left = ", ".join(module for module in group if module not in quantized)
            yield Fault(", ".join(group), "all or none of them quantized", f"kept: {left}")
        formats = [str(scheme.of(module)) for module in members] if scheme else []
        if len(set(formats)) > 1:
            yield Fault(", ".join(members), "one format for fused linears", "; ".join(formats))
        for suffix in _ONE_FOR_FUSED:
            names = [f"{module}.{suffix}" for module in group if module in complete]
            stored = [output.tensors[name] for name in names if name in output.tensors]
            scales = {t.name: stored_scalar(output, t) for t in stored if t.numel == 1}
            if len(set(scales.values())) > 1:
                got = str(list(scales.values()))
                yield Fault(", ".join(scales), f"one {suffix} for fused linears", got)


def exclude_faults(
    draft: Draft, scheme: DeclaredScheme, quantized: Collection[str], *, all_listed: bool
) -> Iterator[Fault]:
    """Kept matrices are excluded, quantized ones are not, under each name that an engine may use.

    Engines use run-time names: vLLM 0.33 and SGLang 0.5.23 fuse linears, and vLLM numbers layers
    anew. They look up neither embeddings nor, in most layouts, heads; other tools leave
    these out, so not all need to be listed.
    """
    got = f"patterns {list(scheme.excludes)}"
    matrices = [row for row in draft.rows if len(row.tensor.shape) == 2]
    kept = [row for row in matrices if row.module not in quantized]
    root = draft.family.served_root
    first = 0 if root else _first_layer([row for row in kept if _in_layer(row)], scheme)
    for row in matrices:
        module = row.module
        if module in quantized:
            excluded = filter(scheme.is_excluded, _runtime_names(row, scheme))
            for name in itertools.islice(excluded, 1):
                yield Fault(f"{CONFIG_FILE}: {name}", "not excluded: it is quantized", got)
        elif all_listed or _is_asked_for(row, scheme):
            base = module.removeprefix("model.")
            # At run time the head is outside `model`.
            names = {module, base} if row.role == "head" else {module, base, f"model.{base}"}
            names |= {f"{root}{_numbered(row, first)}"} if _in_layer(row) else set()
            for name in itertools.filterfalse(scheme.is_excluded, sorted(names)):
                yield Fault(f"{CONFIG_FILE}: {name}", "excluded: it is kept", got)


def _is_asked_for(row: Row, scheme: DeclaredScheme) -> bool:
    """An embedding is never looked up: vLLM 0.33 and SGLang 0.5.23 build it unquantized."""
    if row.role == "head":
        return scheme.asks_for_head(row.module)
    if scheme.layout.lists_layers_only and not _in_layer(row):
        return False
    return row.role != "embedding"


def _runtime_names(row: Row, scheme: DeclaredScheme) -> list[str]:
    """Names under which an engine may look up whether a quantized linear is excluded."""
    canonical = row.canonical.removesuffix(".weight")
    parent, _, leaf = canonical.rpartition(".")
    block = parent.rpartition(".")[2]  # self_attn or mlp
    leaves = [leaf, *fused_names(leaf)]
    names = [row.module, canonical]
    # vLLM numbers the draft's layer after the target's; SGLang drops layer and block.
    numbers = [str(_ANY_LAYER), *_NUMBER.findall(" ".join(scheme.excludes))]
    for part in leaves:
        names += [part, f"{block}.{part}", f"{parent}.{part}"]
        names += [f"layers.{number}.{block}.{part}" for number in numbers]
    return names + [f"model.{name.removeprefix('model.')}" for name in names]


def _numbered(row: Row, first: int) -> str:
    """The name in vLLM of a linear of a decoder layer, where the first layer has number `first`."""
    parent, leaf = fused_group(row.canonical.removesuffix(".weight"))
    _, layer, *block = parent.split(".")
    return ".".join(("model.layers", str(first + int(layer)), *block, leaf))


def _first_layer(rows: Sequence[Row], scheme: DeclaredScheme) -> int:
    """The number of the draft's first layer in excludes: the one under which most are excluded.

    Small numbers are those of the names on disk, so they are tried last.
    """
    numbers = {int(number) for number in _NUMBER.findall(" ".join(scheme.excludes))}
    layers = {int(row.canonical.split(".")[1]) for row in rows}
    firsts = {number - layer for number in numbers for layer in layers if number > layer}
    count = {n: sum(scheme.is_excluded(_numbered(row, n)) for row in rows) for n in firsts}
    return max(firsts, key=lambda first: (count[first], first), default=_ANY_LAYER)


def _in_layer(row: Row) -> bool:
    return row.canonical.startswith("layers.")


def file_faults(
    source: Checkpoint,
    output: Checkpoint,
    scheme: DeclaredScheme | None,
    *,
    without: Collection[str] = QUANTIZED_ONLY,
    foreign: bool = False,
    recorded: QuantizedProvenance | None = None,
) -> list[Fault]:
    """Index, metadata and files: those of the source, and what the layout and this package add.

    Another tool's output (`foreign`) may spell the tokenizer's files differently, and
    leave records of how it quantized. `recorded` says whether there is a card.
    """
    side = scheme.layout.side_file if scheme else None
    owned = {output.config_file, INDEX_FILE, PROVENANCE_FILE, *output.headers, *_PUBLISHED}
    owned.update({side.name} if side else (), (*_SAVED_ANEW, *_RECORDS) if foreign else ())
    travelling = [f for f in source.side_files() if f not in without and not looks_like_weights(f)]
    has_card = recorded is None or not recorded.card or (output.folder / CARD_FILE).is_file()
    changeable = (CARD_FILE, *(_SAVED_ANEW if foreign else ()))  # `draftquant card` rewrites it
    return [
        *index_faults(output),
        *_metadata_faults(source, output, foreign=foreign),
        *travelled_faults(source, output, travelling, changeable, whose="source"),
        *([] if has_card else [Fault(CARD_FILE, "the model card that was written", "none")]),
        *_unowned_faults(output, owned.union(travelling)),
    ]


def index_faults(output: Checkpoint) -> list[Fault]:
    """metadata.total_size of the index; weight_map is checked on opening."""
    if output.index is None:
        return []
    metadata = output.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return differing(f"{INDEX_FILE}: ", {"metadata.total_size": (f"{output.nbytes}", repr(total))})


def _metadata_faults(source: Checkpoint, output: Checkpoint, *, foreign: bool) -> list[Fault]:
    """`__metadata__` equals the source's; other tools may add whose tensors these are."""
    stored, wanted = _metadata(output), _metadata(source)
    if foreign and stored.get("format", _PYTORCH) == _PYTORCH:
        stored.pop("format", None)
        wanted.pop("format", None)
    keys, none = sorted(wanted.keys() | stored.keys()), "no such key"
    pairs = {key: (wanted.get(key, none), stored.get(key, none)) for key in keys}
    return differing("__metadata__: ", pairs)


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    by_key: dict[str, set[str]] = {}
    for header in checkpoint.headers.values():
        for key, value in header.metadata.items():
            by_key.setdefault(key, set()).add(value)
    return {key: " and ".join(map(repr, sorted(values))) for key, values in by_key.items()}


def travelled_faults(
    source: Checkpoint,
    output: Checkpoint,
    files: Collection[str],
    changeable: Collection[str] = (),
    *,
    whose: str,
    other: str = "other bytes",
) -> Iterator[Fault]:
    """Each of these side files exists, and equals the source's unless it may change."""
    for file in files:
        path = output.folder / file
        if file == CARD_FILE and file in changeable:
            continue
        if not path.is_file():
            yield Fault(file, f"the {whose}'s file", "none")
        elif file not in changeable and not _same_bytes(source.folder / file, path):
            yield Fault(file, f"the {whose}'s bytes", other)


def _unowned_faults(output: Checkpoint, owned: Collection[str]) -> list[Fault]:
    """No file comes from neither source nor layout: engines read files by name."""
    faults: dict[str, Fault] = {}
    for file, problem in entries(output.folder):
        top = Path(file).parts[0]
        if problem is not None:
            expected = "a file of the folder" if file in owned else "no such file"
            faults[file] = Fault(file, expected, problem)
        elif top in HIDDEN and not file.startswith(_DOWNLOADED):
            faults[top] = Fault(f"{top}/", "no such folder", f"{file} in it")
        elif file not in owned and top not in HIDDEN:
            other = "a file of neither the source nor the layout"
            faults[file] = Fault(file, "no such file", other)
    return [faults[file] for file in sorted(faults)]


def _same_bytes(a: Path, b: Path) -> bool:
    with open_stream(a) as first, open_stream(b) as second:
        blocks = (iter(partial(each.read, 2**20), b"") for each in (first, second))
        return all(one == other for one, other in itertools.zip_longest(*blocks))
