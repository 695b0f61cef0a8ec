"""What an engine made of a draft: the comparison of the loaded model with the folder.

Knows torch and nothing of any engine. A draft that loads without an error may still be wrong:

- a parameter that was never written keeps what was in memory;
- a tensor of the folder that reached no parameter was dropped;
- codes that were written into floats, or floats into codes, lost their meaning;
- parts of a fused linear with scales of their own were merged under one.

The first three are measured, not read off the engine's code: a parameter is unloaded if a byte of
it still depends on what was there before loading, and a tensor reached a parameter if changing the
tensor changes the parameter.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

Steps = Mapping[str, Callable[[], object]]
Verdict = Literal["LOADS", "LOADS BUT WRONG", "REFUSED", "UNKNOWN"]

_CODES = frozenset({torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32})
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


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one engine made of one draft: a line of the loaders' output.

    Attributes:
        stage: the last stage that was entered: config, init, load, after load, loaded.
        error: the engine's own text, shortened; None where nothing was raised.
        schemes: runtime module -> class of the quantization method, and of its scheme.
        unloaded: parameters that nothing was written to. unread: tensors that reached no
            parameter, or not whole. cast: "tensor: dtype -> dtype of its parameter". merged:
            parameters whose different values became one.
        parameters: of the built model, before loading: name -> dtype and shape.
        not_run: modules whose step after loading needs a kernel -> that kernel.
        captures: runner -> layers of the target that it captures; None = its default.
        proposes: target ids that the loaded draft proposes, see `proposals`; or the error of an
            engine that proposes none.
        served: sha256 over the draft's parameters after the step after loading, as they are
            served; "" where that was not reached.
    """

    draft: str
    engine: str
    version: str
    arch: str
    tp: int
    verdict: Verdict = "REFUSED"
    stage: str = "config"
    error: str | None = None
    schemes: dict[str, str] = field(default_factory=dict)
    unloaded: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    captures: dict[str, list[int] | None] = field(default_factory=dict)
    proposes: list[int] | str = field(default_factory=list)
    served: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One shard of a draft in an engine.

    Attributes:
        build: a new model, parameters not loaded.
        load_folder: loads the draft as the engine does, with the engine's checks.
        tensors: of the draft's folder.
        needs_gpu: tells the exception of a stand-in for a kernel from the engine's own.
        context: in which all of this happens.
        captures: see `Outcome`.
        proposes: see `Outcome`; of a loaded model.
        last_steps: what follows the modules' own steps after loading: runtime module -> step.
        unused: of a parameter's name: it is built, and no forward pass reads it.
        ignored: keys of the declaration that the engine does not read, though they change what is
            computed.
        first: the first shard; a later one may hold nothing but the padding of a vocabulary.
    """

    build: Callable[[], nn.Module]
    load_folder: Callable[[nn.Module], object]
    tensors: Mapping[str, Tensor]
    needs_gpu: Callable[[Exception], bool]
    context: AbstractContextManager[object] = field(default_factory=nullcontext)
    captures: Callable[[], dict[str, list[int] | None]] = dict
    proposes: Callable[[nn.Module], list[int]] = lambda _model: []
    last_steps: Callable[[nn.Module], Steps] = lambda _model: {}
    unused: re.Pattern[str] = re.compile(r"(?!)")
    ignored: tuple[str, ...] = ()
    first: bool = True


def examine(subject: Subject, outcome: Outcome) -> None:
    """Build, load, compare, and run the step after loading.

    Raises:
        Exception: of the engine: it refuses the draft at `outcome.stage`.
    """
    outcome.stage = "init"
    model = subject.build()
    outcome.schemes = describe_schemes(model)
    outcome.parameters = describe_parameters(model)
    outcome.stage = "load"
    _fill(model, 0x55)
    subject.load_folder(model)
    unread, outcome.cast = _unread_and_cast(model, subject.tensors, whole=outcome.tp == 1)
    outcome.unread = [n for n in unread if subject.first or not n.endswith(_VOCABULARY)]
    outcome.unread += subject.ignored
    unloaded = _unloaded(model, subject.tensors)
    outcome.unloaded = [name for name in unloaded if not subject.unused.search(name)]
    if outcome.unloaded and not _matters(subject, outcome.unloaded):
        outcome.unloaded = []
    if not (outcome.unloaded or outcome.unread or outcome.cast):
        outcome.stage = "after load"
        model = subject.build()
        subject.load_folder(model)
        outcome.not_run, outcome.merged = _finish(model, subject)
        outcome.served = _sha256(model, _absent(subject.tensors))
        outcome.proposes = _proposed(model, subject)
    outcome.stage = "loaded"
    outcome.captures = subject.captures()
    wrong = outcome.unloaded or outcome.unread or outcome.cast or outcome.merged
    outcome.verdict = "LOADS BUT WRONG" if wrong else "LOADS"


def _proposed(model: nn.Module, subject: Subject) -> list[int] | str:
    """Of a draft that loads: an error comes with the first request, not before."""
    try:
        return subject.proposes(model)
    except Exception as exc:  # noqa: BLE001  whatever an engine raises is its answer
        return [] if subject.needs_gpu(exc) else f"{type(exc).__name__}: {exc}"


def describe_schemes(model: nn.Module) -> dict[str, str]:
    """Runtime module -> who quantizes it, for every module that has a quantization method."""
    found = {}
    for name, module in model.named_modules():
        method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
        if method is not None:
            names = [type(part).__name__ for part in (method, scheme) if part is not None]
            found[name] = " / ".join(names)
    return found


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Name -> dtype and shape of every parameter that loading fills."""
    return {
        name: f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
        for name, parameter in model.named_parameters()
    }


def _sha256(model: nn.Module, absent: tuple[str, ...]) -> str:
    """Over name, dtype, shape and bytes of every parameter that is the draft's own."""
    state = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if any(module in name.split(".") for module in absent):
            continue
        state.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        state.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file of a folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stream:
            tensors |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    return tensors


def _absent(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Ends of the names of parameters that the folder rightly says nothing of."""
    return tuple(n for n in _MAY_BE_ABSENT if not any(n in t.split(".") for t in tensors))


def _unloaded(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Parameters with a byte that is what it was before loading, whatever it was."""
    states = []
    for byte in (0x55, 0xAA):
        _fill(model, byte)
        model.load_weights(_copies(tensors))
        states.append({name: value.detach().clone() for name, value in model.named_parameters()})
    absent = _absent(tensors)
    return [
        name
        for name in states[0]
        if not _same(states[0][name], states[1][name])
        and not _KEEPS_ITS_DEFAULT.search(name)
        and not any(module in name.split(".") for module in absent)
    ]


def _matters(subject: Subject, unloaded: list[str]) -> bool:
    """False if the step after loading drops what these parameters hold."""
    states = []
    for byte in (0x55, 0xAA):
        model = subject.build()
        _fill(model, byte)
        subject.load_folder(model)
        try:
            _finish(model, subject)
        except Exception:  # noqa: BLE001  the step stumbled over it: it matters
            return True
        states.append(dict(_state(model)))
    modules = {name.rpartition(".")[0] for name in unloaded}
    return any(
        not _same(value, states[1].get(name))
        for name, value in states[0].items()
        if name.rpartition(".")[0] in modules
    )


def _unread_and_cast(
    model: nn.Module, tensors: Mapping[str, Tensor], *, whole: bool
) -> tuple[list[str], list[str]]:
    """Change each tensor in turn and see which parameters change, and of which dtype they are.

    `whole`: it is not split, and scales of blocks change as many values as they are.
    """
    model.load_weights(_copies(tensors))
    before = {name: value.detach().clone() for name, value in _state(model)}
    parameters = dict(model.named_parameters())
    unread, read, cast = [], [], set()
    for name, tensor in tensors.items():
        model.load_weights(_copies({**tensors, name: _changed(tensor)}))
        after = dict(_state(model))
        reached = [key for key, value in after.items() if not _same(value, before.get(key))]
        counted = reached if whole and name.endswith(_OF_BLOCKS) else []
        if any(_num_differing(after[key], before.get(key)) < tensor.numel() for key in counted):
            reached = []
        if not reached and not name.endswith(_NOT_READ_BY_DESIGN):
            unread.append(name)
        elif reached and name.endswith(_LAST_ONE_WINS):
            read.append(name)
        for key in reached:
            symmetric = name.endswith(_NOT_READ_BY_DESIGN)
            known = key in parameters and not symmetric
            if known and _loses_meaning(tensor.dtype, parameters[key].dtype):
                cast.add(f"{name}: {_dtype(tensor)} -> {_dtype(parameters[key])}")
    return [name for name in unread if not _overwritten(name, read, tensors)], sorted(cast)


def _overwritten(name: str, read: list[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether an equal tensor of the same block was loaded in its place."""
    block = name.rsplit(".", 2)[0]
    return name.endswith(_LAST_ONE_WINS) and any(
        other.rsplit(".", 2)[0] == block and _same(tensors[name], tensors[other]) for other in read
    )


def _finish(model: nn.Module, subject: Subject) -> tuple[dict[str, str], list[str]]:
    """The engine's steps after loading, module by module: packing, merging of scales.

    Returns:
        Module -> the kernel at which its step ended: what comes after it, only a GPU can tell; and
        the parameters of `_ONE_PER_LINEAR` with different values that raised no error.
    """
    merged = [
        name
        for name, value in model.named_parameters()
        if name.endswith(_ONE_PER_LINEAR) and value.unique().numel() > 1
    ]
    steps = {
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


def _copies(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A loader may keep what it is given, or write into it."""
    return ((name, tensor.clone()) for name, tensor in tensors.items())


def _fill(model: nn.Module, byte: int) -> None:
    for parameter in model.parameters():
        if parameter.numel():
            _bytes(parameter.data).fill_(byte)


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters, buffers and tensors that are plain attributes, such as SGLang's d2t table."""
    plain = (
        (f"{prefix}.{key}".lstrip("."), value)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    )
    return itertools.chain(plain, model.named_buffers(), model.named_parameters())


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _num_differing(a: Tensor, b: Tensor | None) -> int:
    return a.numel() if b is None or a.shape != b.shape else int((a != b).sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _changed(tensor: Tensor) -> Tensor:
    """Another tensor, different in every element, and after rounding to fewer bits too."""
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return tensor * 1.5 + 1
    changed = tensor.clone()
    _bytes(changed).bitwise_xor_(1)
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
