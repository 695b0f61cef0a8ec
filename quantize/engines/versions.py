"""The known versions of engines: rows of versions.toml, each with the rules of its engine.

A later version is one more row. Where it treats a family differently, its class returns other
traits in `own`: those of families describe the oldest version here.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from ..drafts.engine_traits import Finding
from .contract import ENGINE_NAMES, EngineName, Module, Question, Scheme, version_rows
from .declared_forms import Signature
from .engine import Engine, Serving, flag
from .sglang_rules import Sglang
from .vllm_rules import Vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtLlm(Engine):
    """One version of TensorRT-LLM; the linears that it builds were not read."""

    @override
    def launch(self, question: Question, num_draft_tokens: int, serving: Serving) -> str:
        """JSON is YAML. The draft is split as the target is."""
        config = {
            "decoding_type": question.own.served_as,
            "max_draft_len": num_draft_tokens,
            **({"speculative_model": serving.draft} if serving.draft is not None else {}),
        }
        return serving.line(
            f"echo {shlex.quote(json.dumps({'speculative_config': config}))} > draft.yaml &&",
            f"trtllm-serve {shlex.quote(serving.target)} --tp_size {question.tp}",
            flag("--max_seq_len", serving.context),
            "--config draft.yaml",
        )

    @override
    def config_problem(self, question: Question) -> Finding | None:
        """All that is known of a draft: how its declaration is read."""
        declared = question.declaration
        hides_it = question.has_side_file and question.method != "modelopt"
        signature = None if hides_it else question.signature
        row = Engine.row(self, signature, "") if signature else None
        if row is not None and row.problem is not None:
            return row.problem
        return self.rule(
            "config",
            is_declared=declared is not None,
            method=question.method,
            taken=row.name if row else "",
            is_read=question.traits.tensorrt_llm.read,
        )

    @override
    def row(self, signature: Signature, arch: str) -> Scheme | None:
        """`config_problem` reports what is refused."""
        row = Engine.row(self, signature, arch)
        return row and row._replace(problem=None)

    @override
    def modules(self, _question: Question) -> tuple[Module, ...]:
        return ()


_CLASSES: Mapping[str, Callable[..., Engine]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "tensorrt-llm": TensorRtLlm,
}
ENGINES: Mapping[tuple[EngineName, str], Engine] = {
    (engine.name, engine.version): engine
    for engine in (_CLASSES[row["name"]](**row) for row in version_rows())
}
"""Engines by name and version; older versions of an engine first."""


def known_versions(name: EngineName) -> tuple[Engine, ...]:
    """The versions of one engine, the newest last."""
    return tuple(engine for engine in ENGINES.values() if engine.name == name)


def choose(name: EngineName, version: str | None = None) -> Engine:
    """One version of an engine; the newest for None, and for an unknown one."""
    return ENGINES.get((name, version or ""), known_versions(name)[-1])


def newest_engines() -> tuple[Engine, ...]:
    """The newest known version of every engine."""
    return tuple(choose(name) for name in ENGINE_NAMES)
