"""A stored float weight where an engine expects quantized values: an exclude does not match."""

from contextlib import suppress
from dataclasses import replace

from ..drafts.engine_traits import Finding
from ..drafts.fused import MLA_DOWN
from ..files.safetensors_header import TensorInfo
from .contract import Module, Question, UnsureError
from .engine import Engine
from .folder_findings import no_such_name
from .linear_scheme import LinearScheme
from .mtp import GRAFT, GRAFTED, of_other_layer
from .parameters import refused_shape


def floats_into_codes(
    engine: Engine,
    question: Question,
    module: Module,
    scheme: LinearScheme,
    weight: TensorInfo,
    shape: tuple[int, int],
    *,
    mixed: bool,
) -> Finding:
    """What the engine makes of it.

    Args:
        scheme: as which it is taken.
        weight: the float weight of one of its parts.
        shape: rows and columns of that part.
    """
    own, checks_shapes = question.own, engine.tensors.checks_shapes
    remedy = _remedy(engine, question, module, mixed=mixed)
    codes = scheme.parts(*shape).get("weight")
    if scheme.weight_dtype in ("fp8_e4m3", "mxfp8", "int8") and codes is not None:
        if own.floats_into_fp8 == "cast":
            text = (
                f"{engine.title} casts {weight.name} from {weight.dtype} to {codes.dtypes[0]}, and"
                " its scale stays uninitialised"
            )
            return Finding("wrong", text, remedy)
        if mixed and module.leaf in MLA_DOWN.names:
            return Finding(
                "load",
                "RuntimeError: Promotion for Float8 Types is not supported, attempted to"
                " promote BFloat16 and Float8_e4m3fn",
                remedy,
            )
        if own.floats_into_fp8 == "refused":
            text = "ValueError: Downcasting not allowed: target.dtype=torch.float8_e4m3fn,"
            return Finding("load", f"{text} loaded_weight.dtype=torch.bfloat16", remedy)
    elif scheme.suffix != "weight":
        if own.unknown_tensors == "refused":
            return no_such_name(weight.name, remedy)
        if refused := engine.tensors.stranger(question, weight.name):
            return Finding("load", refused, remedy)
        if own.unknown_tensors == "dropped":
            text = f"{engine.title} drops {weight.name}, and its own values stay uninitialised"
            return Finding("wrong", text, remedy)
    elif module.leaf == "lm_head" and own.unknown_tensors == "dropped":  # FP4, in bytes
        packed, columns = weight.shape[1] // 2, weight.shape[1]
        text = f"RuntimeError: The size of tensor a ({packed}) must match the size of tensor b"
        return Finding("load", f"{text} ({columns}) at non-singleton dimension 1", remedy)
    elif scheme.weight_dtype == "int4" and own.unknown_tensors == "refused":
        text = f"AssertionError: Tried to load weights of size torch.Size({list(weight.shape)})"
        return Finding("load", text, remedy)
    elif codes is not None and codes.shape != weight.shape and checks_shapes:
        return refused_shape(weight, codes.shape, remedy)
    text = f"{weight.name} is stored as {weight.dtype}, and {engine.title} expects quantized values"
    return Finding("unknown", text, remedy)


def _remedy(engine: Engine, question: Question, module: Module, *, mixed: bool) -> str:
    unread = question.declaration and question.declaration.exclude_remedy
    if unread:
        return unread
    if mixed:
        return f"quantize all parts of {module.leaf} or none: they are fused"
    return excluding(engine, question, module)


def excluding(engine: Engine, question: Question, module: Module) -> str:
    """What excludes a module: its own name, or those of its parts, if no other layer has them."""

    def excluded(asked: Module, names: tuple[str, ...]) -> bool:
        declared = question.declaration and replace(question.declaration, excludes=names)
        with suppress(UnsureError):
            answer = engine.declaration.is_excluded(replace(question, declaration=declared), asked)
            return answer is True
        return False

    names: tuple[str, ...] = (module.prefix,)
    shared = (twin := of_other_layer(question, module)) == module
    if not excluded(module, ()):  # as by keys of another kind
        names = next((n for n in (names, module.part_prefixes) if excluded(module, n)), names)
        shared = shared or (twin is not None and excluded(twin, names))
    if shared:
        graft = f"{GRAFT}, and " if question.method in GRAFTED else ""
        what = f"{engine.title} knows the layer's linears by names that others of the target have"
        return f"{graft}serve it with another engine: {what}"
    said = ", ".join(map(repr, names))
    return f"exclude {module.leaf} so that {engine.title} matches it as {said}"
