"""An engine's tables applied to a folder: every linear as it is built, and its tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...recipes.formats import NUMBER_FORMATS
from ..drafts.engine_traits import Finding
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import FLOAT_DTYPES, FP8_DTYPE
from ..stored.stored_declaration import COMPANIONS
from . import built_linears as built
from .contract import Linears, Module, Question, Scheme, Stored, UnsureError, taken_by
from .declared_forms import NOT_READ, LinearScheme
from .engine import BuildingEngine
from .excludes import BY_NAME, scheme_of
from .folder_findings import SHARED, folder_findings, strangers

_GLOBAL_SCALES = {name for name, number in NUMBER_FORMATS.items() if number.global_scale}
_FNUZ = "F8_E4M3FNUZ"
"""Another kind of FP8, which engines copy by value into a parameter of the usual one (executed)."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Every linear of a folder in one engine."""

    engine: BuildingEngine
    question: Question

    def linears_and_findings(self) -> tuple[Linears, list[Finding]]:
        """The class that takes each linear, and everything that differs from what is meant."""
        linears, findings = dict[str, str | None](), list[Finding]()
        question, declared = self.question, self.question.declaration
        signatures = [group.signature for group in declared.groups] if declared else []
        rows = {each: taken_by(self.engine.name, each, question.gpu) for each in signatures}
        for untried in (str(each) for each, row in rows.items() if row is None):
            findings += self.engine.rules("untried", name=untried)
        if declared and not any(rows.values()):  # nor is it known which names and shapes it wants
            what = declared.problem or f"quant_method {declared.method}"
            return linears, findings or [*self.engine.rules("untried", name=what)]
        findings += [*folder_findings(self.engine, question), *_experts(self)]
        met: list[Scheme] = []
        for module in self.engine.modules(question):
            if any(f"{part}.weight" not in question.specs for part in module.parts):
                findings += self.engine.rules("untried", name=f"{module.name} of such a draft")
                continue
            parts = {part: question.stored.get(part, {}) for part in module.parts}
            if module.leaf in SHARED and not any(parts.values()):
                absent = self._scheme(module, [], even_plain=module.prefix != module.leaf)
                if absent is not None:
                    facts = {"prefix": module.prefix, **vars(absent.signature)}
                    findings += self.engine.rules("absent_head", **facts)
                continue
            scheme = self._scheme(module, findings)
            if scheme is None:
                findings += self._plain(module, parts)
                linears[module.name] = None
            elif (row := rows[scheme.signature]) is not None:  # else nobody knows how it takes it
                findings += self._quantized(module, parts, scheme)
                linears[module.name] = row.name
                met.append(row)
        for each in dict.fromkeys(filter(None, rows.values())):
            problem = each.problem
            if problem is not None and (each in met or problem.stage == "config"):
                findings.append(problem)
        return linears, findings

    def _scheme(
        self, module: Module, findings: list[Finding], *, even_plain: bool = False
    ) -> LinearScheme | None:
        """The scheme in which the engine builds a module; None = unquantized."""
        question = self.question
        is_plain = module.leaf in self.engine.plain(question) and not even_plain
        if question.declaration is None or is_plain:
            return None
        try:
            excluded = self.engine.is_excluded(question, module)
            scheme = scheme_of(question, module)
        except UnsureError as exc:
            findings.append(
                Finding("unknown", str(exc), "exclude whole linears, without layer numbers")
            )
            return question.declaration.groups[0]
        if excluded:
            return None
        if scheme is None and module.leaf not in SHARED:
            names = {"prefix": module.prefix, "leaf": module.leaf}
            findings += self.engine.rules("no_target", method=question.method, **names)
        return scheme

    def _plain(self, module: Module, parts: Stored) -> Iterator[Finding]:
        """A module that the engine takes as floats; quantized values have companions."""
        engine, dropped = self.engine, self.question.own.unknown_tensors
        for part, tensors in parts.items():
            shape, weight = self._shape(part), tensors.get("weight")
            companions = [t.name for suffix, t in tensors.items() if suffix in COMPANIONS]
            other = weight is not None and weight.shape != shape
            if not tensors:
                yield from engine.rules("absent", name=f"{part}.weight")
            elif companions and module.leaf == built.JOINED:  # engines take some of them as floats
                yield from engine.rules("untried", name=f"{part} as quantized values")
            elif companions or (weight is not None and weight.dtype not in FLOAT_DTYPES):
                name = companions[0] if companions else f"{module.name}.weight"
                yield from engine.rules(
                    "codes",
                    module=module.name,
                    has_companions=bool(companions),
                    unknown_tensors=dropped,
                    name=weight.name if other and weight else name,
                    in_engine=name.replace("midlayer", "layers.0"),
                    remedy=_declare(self, module),
                    is_other_shape=other,
                    stored=_listed(weight.shape if weight else shape),
                    shape=_listed(shape),
                )
            elif other and weight:
                yield from self._unlike(weight)

    def _unlike(self, tensor: TensorInfo) -> Iterator[Finding]:
        """Loaders may cut a part out of a larger tensor."""
        stored = f"{tensor.dtype} [{_listed(tensor.shape)}]"
        yield from self.engine.rules("unlike", name=tensor.name, stored_dtype=stored)

    def _quantized(self, module: Module, parts: Stored, scheme: LinearScheme) -> Iterator[Finding]:
        """A module that the engine takes as quantized: each part is stored so, none is missing."""
        question = self.question
        for part, tensors in parts.items():
            if not tensors:
                yield from self.engine.rules("absent", name=f"{part}.{scheme.suffix}")
            elif _is_float(tensors):
                told = question.declaration and question.declaration.exclude_remedy
                by_name = f"exclude {module.leaf} so that {self.engine.title} matches it as"
                yield from self.engine.rules(
                    "floats",
                    name=tensors["weight"].name,
                    module=module.name,
                    remedy=told or f"{by_name} {module.prefix!r}",
                    dtype=scheme.signature.dtype,
                    stored_dtype=tensors["weight"].dtype,
                    is_fused=len(module.parts) > 1,
                    is_mla=question.is_latent,
                )
            else:
                yield from self._parts(part, scheme, tensors)
        shards = [self._shard(module, part) for part in parts]
        linear = built.quantized_linear(question, module, scheme, shards)
        mixed = len({_is_float(tensors) for tensors in parts.values() if tensors}) > 1
        yield from self.engine.rules("linear", **linear, is_mixed=mixed)
        several = len(parts) > 1 and scheme.signature.dtype in _GLOBAL_SCALES
        if several and built.has_several_global_scales(question.checkpoint, parts):
            yield from self.engine.rules("several_scales", module=module.name)

    def _parts(
        self, name: str, scheme: LinearScheme, tensors: Mapping[str, TensorInfo]
    ) -> Iterator[Finding]:
        expected = scheme.parts(*self._shape(name))
        for suffix, part in expected.items():
            tensor = tensors.get(suffix)
            if tensor is None:
                if suffix not in NOT_READ:
                    yield from self.engine.rules("absent", name=f"{name}.{suffix}")
            else:
                alone = tensor.numel == 1 and {*part.shape} <= {1}  # loaded as () or (1,)
                dtype = FP8_DTYPE if tensor.dtype == _FNUZ else tensor.dtype
                if dtype not in part.dtypes or (tensor.shape != part.shape and not alone):
                    yield from self._unlike(tensor)
        for suffix, tensor in tensors.items():
            if suffix not in expected and suffix != "bias":
                yield from strangers(self.engine, self.question, tensor)

    def _shape(self, part: str) -> tuple[int, int]:
        rows, columns = (dim.size for dim in self.question.specs[f"{part}.weight"].shape)
        return rows, columns

    def _shard(self, module: Module, part: str) -> tuple[int, int]:
        """Rows and columns of one part in one shard; heads of k and v are never split."""
        (rows, columns), tp = self._shape(part), self.question.tp
        if module.sharding == "row":
            return rows, columns // tp
        if module.sharding == "column":
            shared = part.endswith((".k_proj", ".v_proj"))
            heads = (self.question.config.get("num_key_value_heads") or tp) if shared else tp
            return rows // min(tp, heads), columns
        return rows, columns


def _listed(shape: tuple[int, ...]) -> str:
    return str(list(shape))[1:-1]


def _is_float(tensors: Mapping[str, TensorInfo]) -> bool:
    weight = tensors.get("weight")
    return weight is not None and weight.dtype in FLOAT_DTYPES


def _declare(walk: Walk, module: Module) -> str:
    engine, question = walk.engine, walk.question
    if question.declaration and (as_floats := built.built_as_floats(question, module)) is not None:
        return as_floats
    if module.leaf in engine.plain(question):
        return engine.plain_remedy(question, module.leaf)
    return (
        "store it in layout compressed-tensors (draftquant transcode), or quantize the draft again:"
        f" {engine.title} takes {module.prefix!r} as floats, by what quantization_config says"
    )


def _experts(walk: Walk) -> Iterator[Finding]:
    """Routed experts of an MTP layer that are floats in a quantized target, unless they are kept.

    Engines fuse them into one module, which is not a linear: excludes mean it by separate rules.
    Executed: `experiments/engines/inside.json`.
    """
    engine, question, tensors = walk.engine, walk.question, walk.question.checkpoint.tensors
    served, declared = question.own.mtp, question.declaration
    routed = {n: t for n, t in tensors.items() if built.ROUTED in n and n.endswith(".weight")}
    floats = sorted(n for n, t in routed.items() if t.dtype in FLOAT_DTYPES)
    if served is None or not question.inside_target or declared is None or not floats:
        return
    first = built.first_prefix(question, served)
    single = [f"{first}{n[n.index('mlp.') : -len('.weight')]}" for n in floats]
    whole = single[0].partition(built.ROUTED)[0] + built.ROUTED.rstrip(".")

    def excluded(name: str) -> bool:
        return engine.is_excluded(question, Module(name, name, (), "column"))

    named = question.method in engine.experts_by_name and set(single) <= set(declared.excludes)
    by_name = question.method in BY_NAME
    try:
        kept = all(map(excluded, single)) if by_name else named or excluded(whole)
    except UnsureError:
        kept = False
    if not kept:
        yield from engine.rules("experts", module=whole)
