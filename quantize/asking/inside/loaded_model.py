"""What an engine made of a draft: the comparison of the loaded model with the folder.

Knows torch and nothing of any engine. A draft that loads without an error may still be wrong:

- a parameter that was never written keeps what was in memory;
- a tensor of the folder that reached no parameter was dropped, or not all of it arrived;
- codes that were written into floats, or floats into codes, lost their meaning;
- parts of a fused linear with scales of their own were merged under one.

The first three are measured: an element is unloaded if it depends on what was there before, and a
tensor reached it if changing the tensor changes it. Each tensor has a number, and in pass b those
with bit b are changed: the passes in which an element changes spell its tensor.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations, islice
from math import comb
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

Steps = Mapping[str, Callable[[], object]]
_CODES = frozenset({torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WATCHED = 2**20
"""Elements of a parameter that compared, evenly spread: each part of a fused linear has many."""
_NOT_READ_BY_DESIGN = (
    "t2d",  # the inverse of d2t: engines need one of the two
    "weight_shape",  # the parts of a fused linear share one parameter, which no kernel reads
    "weight_zero_point",  # all zero: the codes are symmetric
    "g_idx",  # of GPTQ: the same in all parts of a fused linear; without desc_act ascending
    "rotary_emb.inv_freq",  # computed from config.json
    ".k_zero_point",  # of the KV cache: zero, as its values are symmetric
    ".v_zero_point",
    ".q_zero_point",
    "confidence_head.proj.weight",  # asked by adaptive verification alone
    "confidence_head.proj.bias",
)
_KEEPS_ITS_DEFAULT = re.compile(
    r"[.](prob|[qkv])_(scale|zero_point)$"  # of the KV cache, which drafts do not quantize
    r"|[.]weight_shape$"
)
_MAY_BE_ABSENT = ("embed_tokens", "lm_head", "mask_embedding")
"""Without the first two the whole module is the target's; without the third it embeds the mask."""
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_LAST_ONE_WINS = ".input_scale"
"""Of INT8: the parts of a fused linear read the same inputs, so theirs are equal."""
_OF_BLOCKS = ".weight_scale_inv"
"""Of blocks of rows: where a part of a fused linear ends inside one, the scales of the next part
may be written over its last."""
_ONE_PER_LINEAR = ("weight_scale_2", "weight_global_scale")
"""The global scale of NVFP4. Kernels take one for a whole fused linear: both engines give them the
largest and leave the codes as they are (vLLM 0.33 `modelopt.py:2085`, SGLang 0.5.23
`modelopt_quant.py:1888`)."""


@dataclass
class Outcome:
    """What an engine made of a draft.

    Attributes:
        stage: the last one of engine, target, config, init, load, after load, run, loaded.
        schemes: runtime module -> class of the quantization method, and of its scheme.
        unloaded, unread, cast, merged: see `AskedCheck`.
        not_run: modules whose step after loading needs a kernel that is not there -> that kernel.
        filled: parameter -> the tensors that fill it, in the order in which they lie there.
    """

    stage: str = "engine"
    schemes: dict[str, str] = field(default_factory=dict)
    unloaded: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    filled: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_incomplete(self) -> bool:
        """Whether something of the folder is not where it belongs."""
        return bool(self.unloaded or self.unread or self.cast)


@dataclass(frozen=True)
class Subject:
    """One shard of a draft in an engine.

    Attributes:
        build: a new model, parameters not loaded.
        load_folder: loads the draft as the engine does, with the engine's checks.
        tensors: of the draft's folder.
        needs_gpu: tells the exception of a stand-in for a kernel from the engine's own.
        context: in which all of this happens.
        last_steps: what follows the modules' own steps after loading: runtime module -> step.
        unused: of a parameter's name: it is built, and no forward pass reads it.
        ignored: keys of the declaration that the engine does not read, though they change what is
            computed.
        whole: the draft is not split over several shards.
        first: the first shard; a later one may hold nothing but the padding of a vocabulary.
    """

    build: Callable[[], nn.Module]
    load_folder: Callable[[nn.Module], object]
    tensors: Mapping[str, Tensor]
    needs_gpu: Callable[[Exception], bool] = lambda _exc: False
    context: AbstractContextManager[object] = field(default_factory=nullcontext)
    last_steps: Callable[[nn.Module], Steps] = lambda _model: {}
    unused: "re.Pattern[str]" = re.compile(r"(?!)")
    ignored: tuple[str, ...] = ()
    whole: bool = True
    first: bool = True


class FolderTensors(Mapping[str, Tensor]):
    """Every tensor of every safetensors file of a folder, read when it is asked for."""

    def __init__(self, folder: Path, *, only: Callable[[str], bool] = lambda _name: True) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stream: Any = safe_open(path, "pt")
            self._files.update({name: stream for name in stream.keys() if only(name)})  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def architecture_of_gpu() -> str:
    """Of the first one: gfx942, or sm90."""
    properties = torch.cuda.get_device_properties(0)
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return name or f"sm{properties.major}{properties.minor}"


def examine(subject: Subject, outcome: Outcome) -> "nn.Module | None":
    """Build, load, compare, and run the step after loading.

    Returns:
        The model as it is served; None where something of the folder is missing there.

    Raises:
        Exception: of the engine: it refuses the draft at `outcome.stage`.
    """
    outcome.stage = "init"
    model = subject.build()
    outcome.schemes = describe_schemes(model)
    outcome.stage = "load"
    _fill(model, 0x55)
    subject.load_folder(model)
    _compare(model, subject, outcome)
    if outcome.unloaded and not _matters(subject, outcome.unloaded):
        outcome.unloaded = []
    if outcome.is_incomplete:
        return None
    outcome.stage = "after load"
    del model
    model = subject.build()
    subject.load_folder(model)
    outcome.not_run, outcome.merged = _finish(model, subject)
    return model


def describe_schemes(model: nn.Module) -> dict[str, str]:
    """Runtime module -> who quantizes it, for every module that has a quantization method."""
    found = {}
    for name, module in model.named_modules():
        method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
        if method is not None:
            names = [type(part).__name__ for part in (method, scheme) if part is not None]
            found[name] = " / ".join(names)
    return found


def absent_tables(tensors: "Iterable[str]") -> "tuple[str, ...]":
    """Modules that the folder rightly says nothing of."""
    parts = {part for name in tensors for part in name.split(".")}
    return tuple(name for name in _MAY_BE_ABSENT if name not in parts)


def _compare(model: nn.Module, subject: Subject, outcome: Outcome) -> None:
    """Fill in unloaded, unread, cast and filled."""
    tensors = subject.tensors
    names = list(tensors)
    other = _watched_after(model, tensors, fill=0xAA)
    before = _watched_after(model, tensors, fill=0x55)  # which the passes below leave as it is
    absent = absent_tables(tensors)
    outcome.unloaded = [
        name
        for name, _ in model.named_parameters()
        if _differing(before[name], other.get(name)).any()
        and not _KEEPS_ITS_DEFAULT.search(name)
        and not subject.unused.search(name)
        and not any(module in name.split(".") for module in absent)
    ]
    spelled = {name: torch.zeros(len(value), dtype=torch.int32) for name, value in before.items()}
    numbered = _numbered(names)
    for bit in range(max(numbered, default=0).bit_length()):
        asked = {name for number, name in numbered.items() if number >> bit & 1}
        after = _watched_after(model, tensors, changed=asked)
        for name, value in before.items():
            spelled[name] += _differing(value, after.get(name)).int() << bit
    counts = {name: _counted(numbers, numbered) for name, numbers in spelled.items()}
    for name, _ in model.named_parameters():
        outcome.filled[name] = list(counts.get(name, ()))
    reached = {name: [key for key, found in counts.items() if name in found] for name in names}
    parameters, read, cast = dict(model.named_parameters()), [], []
    for name in names:
        tensor, by_design = tensors[name], name.endswith(_NOT_READ_BY_DESIGN)
        if not reached[name] and not by_design:  # it may share all elements with another one
            after = _watched_after(model, tensors, changed={name})
            reached[name] = [k for k, v in before.items() if _differing(v, after.get(k)).any()]
        where = reached[name]
        if subject.whole and name.endswith(_OF_BLOCKS):
            full = min(tensor.numel(), _WATCHED)
            if any(counts[key].get(name, full) < full for key in where):
                where = []
        if not where and not by_design:
            outcome.unread.append(name)
        elif where and name.endswith(_LAST_ONE_WINS):
            read.append(name)
        for key in where if not by_design else ():
            if key in parameters and _loses_meaning(tensor.dtype, parameters[key].dtype):
                cast.append((name, key))
    outcome.unread = [
        name
        for name in outcome.unread
        if not _overwritten(name, read, tensors)
        and (subject.first or not name.endswith(_VOCABULARY))
    ] + list(subject.ignored)
    outcome.cast = sorted(
        f"{name}: {_dtype(tensors[name])} -> {_dtype(parameters[key])}"
        for name, key in cast
        if not any(key in reached.get(f"{name}{scale}", ()) for scale in ("_scale", "_scale_inv"))
    )  # by its scale, a value is multiplied while it is loaded


def _watched_after(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    fill: "int | None" = None,
    changed: "set[str] | frozenset[str]" = frozenset(),
) -> dict[str, Tensor]:
    """Load all tensors, some of them changed, and look at the watched elements."""
    if fill is not None:
        _fill(model, fill)
    model.load_weights(  # type: ignore[operator]
        # A loader may keep what it is given, or write into it.
        (name, _changed(tensor) if name in changed else tensor.clone())
        for name, tensor in tensors.items()
    )
    return {name: _watched(value) for name, value in _state(model)}


def _watched(value: Tensor) -> Tensor:
    """Elements as integers; the step is odd, so that it meets all columns."""
    flat = value.detach().contiguous().view(-1)
    step = -(-flat.numel() // _WATCHED) | 1
    return flat.view(_INTEGERS[flat.element_size()])[::step].cpu().clone()


def _differing(a: Tensor, b: "Tensor | None") -> Tensor:
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones(len(a), dtype=torch.bool)
    return a.ne(b)


def _numbered(names: "list[str]") -> dict[int, str]:
    """A number for each, all with as many bits: what several spell together is no number."""
    width = 2
    while comb(width, width // 2) < len(names):
        width += 1
    chosen = islice(combinations(range(width), width // 2), len(names))
    return {sum(1 << bit for bit in bits): name for bits, name in zip(chosen, names)}  # noqa: B905


def _counted(numbers: Tensor, names: "Mapping[int, str]") -> dict[str, int]:
    """Tensor -> watched elements that spell its number, in the order of the first of them."""
    found, first = {}, {}
    values, counts = torch.unique(numbers, return_counts=True)
    for number, count in zip(values.tolist(), counts.tolist()):  # noqa: B905  Python 3.9 has no strict
        if (name := names.get(number)) is not None:
            found[name] = count
            first[name] = int((numbers == number).int().argmax())
    return {name: found[name] for name in sorted(found, key=first.__getitem__)}


def out_of_memory(exc: Exception) -> bool:
    """Of a GPU."""
    return "OutOfMemory" in type(exc).__name__


def _matters(subject: Subject, unloaded: "list[str]") -> bool:
    """False if the step after loading drops what these parameters hold."""
    states = []
    for byte in (0x55, 0xAA):
        model = subject.build()
        _fill(model, byte)
        subject.load_folder(model)
        try:
            _finish(model, subject)
        except Exception as exc:
            if out_of_memory(exc):
                raise
            return True
        states.append({name: _watched(value) for name, value in _state(model)})
    modules = {name.rpartition(".")[0] for name in unloaded}
    return any(
        bool(_differing(value, states[1].get(name)).any())
        for name, value in states[0].items()
        if name.rpartition(".")[0] in modules
    )


def _overwritten(name: str, read: "list[str]", tensors: Mapping[str, Tensor]) -> bool:
    """Whether an equal tensor of the same block was loaded in its place."""
    block = name.rsplit(".", 2)[0]
    return name.endswith(_LAST_ONE_WINS) and any(
        other.rsplit(".", 2)[0] == block and torch.equal(tensors[name], tensors[other])
        for other in read
    )


def _finish(model: nn.Module, subject: Subject) -> "tuple[dict[str, str], list[str]]":
    """The engine's steps after loading, module by module: packing, merging of scales.

    Returns:
        Module -> the kernel at which its step ended: what comes after it, only a GPU can tell; and
        the parameters of `_ONE_PER_LINEAR` with different values that raised no error.
    """
    merged = [
        name
        for name, value in model.named_parameters()
        if name.endswith(_ONE_PER_LINEAR) and torch.unique(value).numel() > 1
    ]
    steps: Steps = {
        name: partial(module.quant_method.process_weights_after_loading, module)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
    }
    not_run = {}
    for name, step in (*steps.items(), *subject.last_steps(model).items()):
        try:
            step()
        except Exception as exc:
            if not subject.needs_gpu(exc):
                raise
            not_run[name] = str(exc).partition(" with arguments")[0]
    return not_run, merged


def _fill(model: nn.Module, byte: int) -> None:
    for parameter in model.parameters():
        storage: Any = parameter.data.untyped_storage()
        storage.fill_(byte)


def _state(model: nn.Module) -> "Iterator[tuple[str, Tensor]]":
    """Parameters, buffers and tensors that are plain attributes, such as SGLang's d2t table."""
    plain = (
        (f"{prefix}.{key}".lstrip("."), value)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    )
    return chain(plain, model.named_buffers(), model.named_parameters())


def _changed(tensor: Tensor) -> Tensor:
    """Another tensor, different in every element, and after rounding to fewer bits too."""
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return tensor * 1.5 + 1
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8).bitwise_xor_(1)
    return changed


def _loses_meaning(source: torch.dtype, stored: torch.dtype) -> bool:
    """Codes keep their meaning in the same dtype only; floats in any float that is no code.

    FP8 of the FNUZ kind is copied by value: all of it but odd multiples of 2^-10 are values of FP8.
    """
    if (source, stored) == (torch.float8_e4m3fnuz, torch.float8_e4m3fn):
        return False
    if (source, stored) == (torch.int32, torch.int64):  # offsets of d2t
        return False
    if source in _CODES or stored in _CODES:
        return source != stored
    return False


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
