"""An engine's tables applied to a folder: every linear as it is built, and its tensors."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import lt
from typing import Any

from ..drafts.engine_traits import MLA_DOWN, Finding
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import FLOAT_DTYPES
from ..stored.stored_declaration import COMPANIONS
from .built_linears import (
    GRAFT,
    GRAFTED,
    ROUTED,
    built_as_floats,
    first_prefix,
    fits,
    has_several_global_scales,
    holds,
    is_widened,
    of_other_layer,
    parameters,
    quantized_linear,
)
from .contract import Layer, Module, Question, Scheme, UnsureError
from .engine import Engine
from .excludes import NAMED_EXPERTS, scheme_of
from .folder_findings import SHARED, Folder, Stored, built_biases, folder_findings, strangers
from .linear_scheme import LinearScheme, Signature

_IN_BYTES = ("fp8", "mxfp8", "int8")
"""Formats whose values a float can be cast to, one by one."""


@dataclass(frozen=True, kw_only=True)
class Walk(Folder):
    """Every linear of a folder. `fc_remedy`: what to do where the stored fc has other columns."""

    fc_remedy: str

    def layers_and_findings(self) -> tuple[list[Layer], list[Finding]]:
        """Every linear, and everything that differs from what the folder means."""
        layers: list[Layer] = []
        declared, findings = self.question.declaration, list[Finding]()
        rows = self._rows(findings)
        if declared is not None and not rows:  # nor is it known which names and shapes it wants
            what = declared.problem or f"quant_method {declared.method}"
            return layers, findings or [*self.engine.rules("untried", name=what)]
        stored = self.stored
        findings += [*folder_findings(self), *filter(None, [_experts(self)])]
        built: list[Scheme] = []
        for module in self.engine.modules(self.question):
            if any(f"{part}.weight" not in self.specs for part in module.parts):
                findings += self.engine.rules("untried", name=f"{module.name} of such a draft")
                continue
            parts = {part: stored.get(part, {}) for part in module.parts}
            if module.leaf in SHARED and not any(parts.values()):
                absent = self._scheme(module, [], even_plain=module.prefix != module.leaf)
                stored_as = vars(absent.signature) if absent else {}
                findings += self.engine.rules("absent_head", prefix=module.prefix, **stored_as)
                continue
            scheme = self._scheme(module, findings)
            row = rows.get(scheme.signature) if scheme else None
            if scheme is not None and row is None:
                continue  # how it takes this linear is not known
            findings += (
                self._quantized(module, parts, scheme, row)
                if scheme is not None and row is not None
                else self._plain(module, parts)
            )
            built += [row] if row else []
            shards = [self._shard(module, part) for part in parts]
            biased, tp = all(map(self._is_biased, parts)), self.question.tp
            built_as = parameters(module, parts, shards, scheme, tp, biased=biased)
            taken = row.name if row else None
            layers.append(
                Layer(module=module.name, parameters=built_as, scheme=taken, quantized=bool(row))
            )
        for row in dict.fromkeys(rows.values()):
            problem = row.problem
            if problem is not None and (row in built or problem.stage == "config"):
                findings.append(problem)
        return layers, findings

    def _rows(self, findings: list[Finding]) -> dict[Signature, Scheme]:
        """For every declared scheme, its row of the engine's table."""
        rows: dict[Signature, Scheme] = {}
        declared = self.question.declaration
        for group in declared.groups if declared else ():
            row = self.engine.row(group.scheme.signature, self.question.arch)
            if row is None:
                findings += self.engine.rules("untried", name=str(group.scheme.signature))
            else:
                rows[group.scheme.signature] = row
        return rows

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
            findings.append(Finding("unknown", str(exc), "write excludes without layer numbers"))
            return question.declaration.groups[0].scheme
        if isinstance(excluded, Finding):
            findings.append(excluded)
        elif excluded:
            return None
        elif scheme is None and module.leaf not in SHARED:
            names = {"prefix": module.prefix, "leaf": module.leaf}
            findings += self.engine.rules("no_target", method=question.method, **names)
        return scheme

    def _plain(self, module: Module, parts: Stored) -> Iterator[Finding]:
        for part, tensors in parts.items():
            shape, weight = self._shape(part), tensors.get("weight")
            companions = [t.name for suffix, t in tensors.items() if suffix in COMPANIONS]
            if not tensors:
                yield from self._absent(module, f"{part}.weight")
            elif is_widened(self.engine.name, module, part, tensors):
                continue
            elif companions or (weight is not None and weight.dtype not in FLOAT_DTYPES):
                name, remedy = f"{module.name}.weight", _declare(self, module)
                name = companions[0] if companions else name
                facts = {
                    "has_companions": bool(companions),
                    "suffix": name.rpartition(".")[2],
                    "columns": shape[1],
                }
                yield self._in_place("codes", module, name, remedy, weight, shape, facts)
            elif weight is not None and weight.shape != shape:
                yield self._unlike(module, weight, shape)

    def _unlike(self, module: Module, tensor: TensorInfo, shape: tuple[int, ...]) -> Finding:
        """Loaders may cut a part out of a larger tensor."""
        remedy = self.fc_remedy if module.leaf == "fc" else ""
        smaller = any(map(lt, tensor.shape, shape)) and tensor.dtype not in FLOAT_DTYPES
        finding = self.engine.rule(
            "shape",
            is_other_shape=self.engine.checks_shapes and (bool(remedy) or smaller),
            name=tensor.name,
            stored_dtype=tensor.dtype,
            stored=_listed(tensor.shape),
            shape=_listed(shape),
            remedy=remedy or "quantize the draft again",
        )
        assert finding is not None  # the last row matches always
        return finding

    def _floats_into_codes(
        self,
        module: Module,
        scheme: LinearScheme,
        weight: TensorInfo,
        shape: tuple[int, int],
        *,
        mixed: bool,
    ) -> Finding:
        """What the engine makes of a one-part float weight that should have [rows, columns]."""
        codes = scheme.parts(*shape).get("weight")
        columns = weight.shape[-1] if weight.shape else 0
        return self._in_place(
            "floats",
            module,
            weight.name,
            _exclude(self, module, mixed=mixed),
            weight,
            codes.shape if codes else weight.shape,
            {
                **vars(scheme.signature),
                "suffix": scheme.suffix,
                "is_mixed": mixed,
                "is_joined": module.leaf in MLA_DOWN.names,
                "is_bytes": codes is not None and scheme.signature.dtype in _IN_BYTES,
                "wanted_dtype": codes.dtypes[0] if codes else "",
                "half": columns // 2,
                "columns": columns,
            },
        )

    def _in_place(
        self,
        about: str,
        module: Module,
        name: str,
        remedy: str,
        weight: TensorInfo | None,
        shape: tuple[int, ...],
        facts: Mapping[str, Any],
    ) -> Finding:
        """What happens to floats, or codes, where the engine expects the other, in this shape."""
        question = self.question
        other = weight is not None and weight.shape != shape and self.engine.checks_shapes
        finding = self.engine.rule(
            about,
            leaf=module.leaf,
            module=module.name,
            unknown_tensors=question.own.unknown_tensors,
            floats_into_fp8=question.own.floats_into_fp8,
            name=weight.name if other and weight else name,
            in_engine=name.replace("midlayer", "layers.0"),
            remedy=remedy,
            refused=self.engine.stranger(question, name),
            stored_dtype=weight.dtype if weight else "",
            is_other_shape=other,
            stored=_listed(weight.shape if weight else shape),
            shape=_listed(shape),
            **facts,
        )
        assert finding is not None  # the last row matches always
        return finding

    def _quantized(
        self, module: Module, parts: Stored, scheme: LinearScheme, row: Scheme
    ) -> Iterator[Finding]:
        """A module that the engine takes as quantized: each part is stored so, none is missing."""
        shapes = [self._shape(part) for part in parts]
        mixed = len({_is_float(tensors) for tensors in parts.values() if tensors}) > 1
        for (part, tensors), shape in zip(parts.items(), shapes, strict=True):
            if not tensors:
                yield from self._absent(module, f"{part}.{scheme.suffix}")
            elif _is_float(tensors):
                weight = tensors["weight"]
                yield self._floats_into_codes(module, scheme, weight, shape, mixed=mixed)
            else:
                yield from self._parts(module, scheme, tensors, shape, row.not_read)
        shards = [self._shard(module, part) for part in parts]
        linear = quantized_linear(self.question, module, scheme, shards)
        if (problem := self.engine.rule("linear", **linear, is_mixed=mixed)) is not None:
            yield problem
        several = len(parts) > 1 and scheme.has_global_scale
        if several and has_several_global_scales(self.checkpoint, parts):
            told = row.own_global_scales
            yield from self.engine.rules("several_scales", module=module.name, refused=told)

    def _parts(
        self,
        module: Module,
        scheme: LinearScheme,
        tensors: Mapping[str, TensorInfo],
        shape: tuple[int, int],
        not_read: tuple[str, ...],
    ) -> Iterator[Finding]:
        expected = scheme.parts(*shape)
        for suffix, part in expected.items():
            tensor = tensors.get(suffix)
            if tensor is None:
                if suffix not in (*scheme.not_read, *not_read):
                    yield from self._absent(module, suffix)
            elif not (holds(tensor, part.dtypes) and fits(tensor, part.shape)):
                yield self._unlike(module, tensor, part.shape)
        for suffix, tensor in tensors.items():
            if suffix not in expected and suffix != "bias":
                yield from strangers(self.engine, self.question, tensor)

    def _absent(self, module: Module, name: str) -> Iterator[Finding]:
        return self.engine.rules("never_written", module=module.name, name=name)

    def _shape(self, part: str) -> tuple[int, int]:
        rows, columns = (dim.size for dim in self.specs[f"{part}.weight"].shape)
        return rows, columns

    def _is_biased(self, part: str) -> bool:
        spec = self.specs.get(f"{part}.bias")
        built = built_biases(self.engine, self.question)
        return bool(spec and not spec.optional) or part.rpartition(".")[2] in built

    def _shard(self, module: Module, part: str) -> tuple[int, int]:
        """Rows and columns of one part in one shard; heads of k and v are never split."""
        (rows, columns), tp = self._shape(part), self.question.tp
        if module.sharding == "row":
            return rows, columns // tp
        if module.sharding == "column":
            shared = part.endswith((".k_proj", ".v_proj"))
            heads = (self.checkpoint.config.get("num_key_value_heads") or tp) if shared else tp
            return -(-rows // min(tp, heads)), columns
        return rows, columns


def _listed(shape: tuple[int, ...]) -> str:
    return str(list(shape))[1:-1]


def _is_float(tensors: Mapping[str, TensorInfo]) -> bool:
    weight = tensors.get("weight")
    return weight is not None and weight.dtype in FLOAT_DTYPES


# ---- What to do where a declaration contradicts what is stored


def _declare(walk: Walk, module: Module) -> str:
    """What to do where the engine takes quantized values as floats."""
    engine, question = walk.engine, walk.question
    if question.declaration and (as_floats := built_as_floats(question, module)) is not None:
        return as_floats
    if module.leaf in engine.plain(question):
        asked = engine.plain_remedy(question, module.leaf)
        return asked or f"keep {module.leaf} in BF16: {engine.title} never quantizes it"
    return (
        "store it in layout compressed-tensors (draftquant transcode), or quantize the draft again:"
        f" {engine.title} takes {module.prefix!r} as floats, by what quantization_config says"
    )


def _exclude(walk: Walk, module: Module, *, mixed: bool) -> str:
    """What to do where it takes floats as quantized values."""
    question = walk.question
    if question.declaration and question.declaration.exclude_remedy:
        return question.declaration.exclude_remedy
    if mixed:
        return f"quantize all parts of {module.leaf} or none: they are fused"
    return excluding(walk.engine, question, module)


def excluding(engine: Engine, question: Question, module: Module) -> str:
    """What excludes a module: its own name, or those of its parts, if no other layer has them."""

    def excluded(asked: Module | None, names: tuple[str, ...]) -> bool:
        declared = question.declaration and replace(question.declaration, excludes=names)
        with suppress(UnsureError):
            return asked is not None and (
                engine.is_excluded(replace(question, declaration=declared), asked) is True
            )
        return False

    twin = of_other_layer(question, module)
    names: tuple[str, ...] = (module.prefix,)
    if not excluded(module, names) and excluded(module, module.part_prefixes):
        names = module.part_prefixes
    if excluded(twin, names):
        graft = f"{GRAFT}, and " if question.method in GRAFTED else ""
        what = f"{engine.title} knows the layer's linears by names that others of the target have"
        return f"{graft}serve it with another engine: {what}"
    quoted = ", ".join(map(repr, names))
    return f"exclude {module.leaf} so that {engine.title} matches it as {quoted}"


# ---- Routed experts of an MTP layer that are stored as floats in a quantized target
# Engines fuse them into one module, which is not a linear: excludes mean it by separate rules.
# Executed: `experiments/engines/inside.json`.


FIRST_EXPERT = f"{ROUTED}0."
"""The one whose linears decide for all: `unfused_names` of both engines."""


def _experts(walk: Walk) -> Finding | None:
    """What happens to experts that are floats, or some of them; None where that is as declared."""
    engine, question, tensors = walk.engine, walk.question, walk.checkpoint.tensors
    served, declared = question.own.mtp, question.declaration
    routed = {n: t for n, t in tensors.items() if ROUTED in n and n.endswith(".weight")}
    floats = sorted(n for n, t in routed.items() if t.dtype in FLOAT_DTYPES)
    if served is None or not question.inside_target or declared is None or not floats:
        return None
    first = first_prefix(question, served)

    def in_engine(name: str) -> str:
        return f"{first}{name[name.index('mlp.') : -len('.weight')]}"

    single = [in_engine(name) for name in floats]
    deciding = [in_engine(name) for name in walk.specs if FIRST_EXPERT in name]
    whole = single[0].partition(ROUTED)[0] + ROUTED.rstrip(".")

    def excluded(name: str) -> bool:
        return engine.is_excluded(question, Module(name, name, (), "column")) is True

    try:
        by_whole = excluded(whole)
        by_single = set(map(excluded, deciding))
    except UnsureError as exc:
        return Finding("unknown", str(exc), "write excludes as plain patterns")
    by_name = question.method in engine.experts_by_name
    if question.method in NAMED_EXPERTS:
        taken_as_floats = by_single == {True}
    else:
        taken_as_floats = by_whole or (by_name and set(single) <= set(declared.excludes))
    if taken_as_floats:
        return None
    remedy = excluding(engine, question, Module(whole, whole, (), "column"))
    if remedy.startswith("exclude"):
        remedy = f"exclude each expert of the layer by its name, and {whole!r}"
        remedy += f"; or {GRAFT}" if question.method in GRAFTED else ""
    what = f"{engine.title} takes {whole} as quantized, and its experts are stored as floats"
    return Finding("unknown", f"{what}: it ends with an error, or serves empty memory", remedy)
