"""An engine's tables applied to a folder: every linear as it is built, and its tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..drafts.engine_traits import Finding
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import FLOAT_DTYPES
from ..stored.stored_declaration import COMPANIONS
from .built_linears import (
    built_biases,
    fits,
    holds,
    never_fits,
    one_global_scale,
    other_shape,
    parameters,
    quantized_linear,
    refused_shape,
)
from .contract import Layer, Module, Scheme, UnsureError
from .engine_rows import first_rule, said
from .exclude_findings import float_experts, floats_into_codes
from .excludes import NAMED_HEADS, scheme_of
from .folder_findings import SHARED, Folder, Stored, folder_findings, no_such_name, strangers
from .linear_scheme import LinearScheme
from .mtp_linears import built_as_floats


@dataclass(frozen=True, kw_only=True)
class Walk(Folder):
    """Every linear of a folder. `fc_remedy`: what to do where the stored fc has other columns."""

    fc_remedy: str

    def layers_and_findings(self) -> tuple[list[Layer], list[Finding]]:
        """Every linear, and everything that is not as the folder means it."""
        layers: list[Layer] = []
        declared = self.question.declaration
        if declared is not None and not declared.groups:  # nor which names and shapes it wants
            what = declared.problem or f"quant_method {declared.method}"
            return layers, [said("not-executed", what=what)]
        stored, findings = self.stored, list(folder_findings(self))
        if (experts := float_experts(self.engine, self.question)) is not None:
            findings.append(experts)
        rows = self._rows(findings)
        built: list[Scheme] = []
        for module in self.engine.modules(self.question):
            if any(f"{part}.weight" not in self.specs for part in module.parts):
                findings.append(said("not-executed", what=f"{module.name} of such a draft"))
                continue
            parts = {part: stored.get(part, {}) for part in module.parts}
            if module.leaf in SHARED and not any(parts.values()):
                # a head that is the target's, and whose scales are looked for before it is
                absent = self._scheme(module, []) if self.engine.absent_head else None
                if absent and (text := self.engine.absent_head.get(absent.signature)):
                    findings.append(Finding("after load", text, f"exclude {module.leaf}"))
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

    def _rows(self, findings: list[Finding]) -> dict[str, Scheme]:
        """Of every scheme that is declared, its row of the engine's table."""
        found: dict[str, Scheme] = {}
        declared = self.question.declaration
        for group in declared.groups if declared else ():
            row = self.engine.row(group.scheme.signature, self.question.arch)
            if row is None:
                findings.append(said("not-executed", what=group.scheme.signature))
            else:
                found[group.scheme.signature] = row
        return found

    def _scheme(self, module: Module, findings: list[Finding]) -> LinearScheme | None:
        """As what the engine builds a module; None = as floats."""
        if self.question.declaration is None or module.leaf in self.engine.plain(self.question):
            return None
        scheme = None
        try:
            excluded = self.engine.is_excluded(self.question, module)
            scheme = scheme_of(self.question, module)
        except UnsureError as exc:
            findings.append(said("unsure-exclude", why=str(exc)))
            return self.question.declaration.groups[0].scheme
        if isinstance(excluded, Finding):
            findings.append(excluded)
        elif excluded:
            return None
        elif (
            scheme is None
            and module.leaf not in SHARED
            and (text := self.engine.no_target.get(self.question.method or ""))
        ):
            text = text.format(prefix=module.prefix)
            findings.append(said("no-target", text=text, leaf=module.leaf))
        return scheme

    def _plain(self, module: Module, parts: Stored) -> Iterator[Finding]:
        for part, tensors in parts.items():
            shape = self._shape(part)
            companions = [t.name for suffix, t in tensors.items() if suffix in COMPANIONS]
            weight = tensors.get("weight")
            codes = weight is not None and weight.dtype not in FLOAT_DTYPES
            if not tensors:
                yield said("never-written", module=module, name=f"{part}.weight")
            elif companions or codes:
                refused = self.engine.codes_in_floats(self.question, module)
                yield refused or self._codes_into_floats(module, companions, weight, shape)
            elif weight is not None and weight.shape != shape:
                yield self._other_shape(module, weight, shape)

    def _other_shape(self, module: Module, weight: TensorInfo, shape: tuple[int, int]) -> Finding:
        """Loaders may cut rows out of a weight, or columns of one that is split by them."""
        may_fit = module.sharding == "row" or weight.shape[1:] == shape[1:]
        remedy = self._reshaped(module) or "correct the sizes in config.json"
        return self._unlike(weight, shape, None if may_fit else remedy)

    def _unlike(self, tensor: TensorInfo, shape: tuple[int, ...], remedy: str | None) -> Finding:
        if remedy is None or not self.engine.checks_shapes:
            return other_shape(tensor, shape)
        return refused_shape(tensor, shape, remedy)

    def _reshaped(self, module: Module) -> str:
        return self.fc_remedy if module.leaf == "fc" else ""

    def _codes_into_floats(
        self,
        module: Module,
        companions: list[str],
        weight: TensorInfo | None,
        shape: tuple[int, int],
    ) -> Finding:
        remedy = _declare(self, module)
        if weight is not None and weight.shape != shape and self.engine.checks_shapes:
            return refused_shape(weight, shape, remedy)
        name = companions[0] if companions else f"{module.name}.weight"
        own = self.question.own
        if companions and own.unknown_tensors == "refused":
            return no_such_name(name, remedy)
        if companions and (text := self.engine.stranger(self.question, name)):
            return Finding("load", text, remedy)
        names = {"module": module, "name": name, "remedy": remedy}
        casts = own.floats_into_fp8 != "unknown"  # a refusal is one of the other direction
        if casts and own.unknown_tensors == "dropped":
            return self.say("drops-codes" if companions else "reads-codes", **names)
        return self.say("codes-into-floats", **names)

    def _quantized(
        self, module: Module, parts: Stored, scheme: LinearScheme, row: Scheme
    ) -> Iterator[Finding]:
        """A module that the engine takes as quantized: each part stored so, nothing absent."""
        shapes = [self._shape(part) for part in parts]
        mixed = {self._is_float(tensors) for tensors in parts.values() if tensors}
        for (part, tensors), shape in zip(parts.items(), shapes, strict=True):
            if not tensors:
                yield said("never-written", module=module, name=f"{part}.{scheme.suffix}")
            elif self._is_float(tensors):
                weight = tensors["weight"]
                yield floats_into_codes(self, module, scheme, weight, shape, mixed=len(mixed) > 1)
            else:
                yield from self._parts(module, scheme, tensors, shape, row.not_read)
        shards = [self._shard(module, part) for part in parts]
        linear = quantized_linear(self.question, module, scheme, shards)
        problem = first_rule(self.engine.name, self.engine.version, "linear", linear)
        if problem is not None:
            yield problem
        if len(parts) > 1 and scheme.has_global_scale:
            yield from one_global_scale(self.checkpoint, module, parts, row)
        if row.whole_rows and module.sharding == "row" and self.question.tp > 1:
            name = next(t.name for part in parts.values() for t in part.values())
            yield said("dropped-scales", name=name.rpartition(".")[0])

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
                    yield said("never-written", module=module, name=suffix)
            elif not (holds(tensor, part.dtypes) and fits(tensor.shape, part.shape)):
                never = module.sharding == "replicated" or never_fits(tensor.shape, part.shape)
                remedy = self._reshaped(module) or "quantize the draft again"
                yield self._unlike(tensor, part.shape, remedy if never else None)
            elif len(tensor.shape) != len(part.shape) and tensor.numel > 1:
                yield self._other_axes(tensor, part.shape)
        for suffix, tensor in tensors.items():
            if suffix not in expected and suffix != "bias":
                yield from strangers(self.engine, self.question, tensor)

    def _other_axes(self, tensor: TensorInfo, shape: tuple[int, ...]) -> Finding:
        """Scales [out] where the layout has [out, 1], or the other way round."""
        if not self.engine.scale_shape:
            return other_shape(tensor, shape)
        remedy = f"store {tensor.name} as {list(shape)}, not {list(tensor.shape)}"
        return Finding("load", self.engine.scale_shape, remedy)

    def _is_float(self, tensors: Mapping[str, TensorInfo]) -> bool:
        weight = tensors.get("weight")
        return weight is not None and weight.dtype in FLOAT_DTYPES

    def _shape(self, part: str) -> tuple[int, int]:
        rows, columns = (dim.size for dim in self.specs[f"{part}.weight"].shape)
        return rows, columns

    def _is_biased(self, part: str) -> bool:
        own = self.specs.get(f"{part}.bias")
        built = built_biases(self.engine, self.question)
        return bool(own and not own.optional) or part.rpartition(".")[2] in built

    def _shard(self, module: Module, part: str) -> tuple[int, int]:
        """Rows and columns of one part in one shard; heads of k and v are never cut."""
        (rows, columns), tp = self._shape(part), self.question.tp
        if module.sharding == "row":
            return rows, columns // tp
        if module.sharding == "column":
            shared = part.endswith((".k_proj", ".v_proj"))
            heads = (self.checkpoint.config.get("num_key_value_heads") or tp) if shared else tp
            return -(-rows // min(tp, heads)), columns
        return rows, columns


def _declare(walk: Walk, module: Module) -> str:
    """What makes the engine take a module for quantized, or that nothing does."""
    engine, declare = walk.engine, f"declare {module.leaf} as quantized"
    if walk.question.declaration is None:
        return f"{declare}: {engine.title} reads no quantization_config here"
    if (as_floats := built_as_floats(walk.question, module)) is not None:
        return as_floats
    if module.leaf in engine.plain(walk.question):
        asked = engine.plain_remedy(walk.question, module.leaf)
        return asked or f"keep {module.leaf} in BF16: {engine.title} never quantizes it"
    if module.leaf == "lm_head" and walk.question.method in NAMED_HEADS:
        return f"{declare}: no target names it, such as 're:.*lm_head$'"
    return f"{declare}: an exclude matches {module.prefix!r}"
