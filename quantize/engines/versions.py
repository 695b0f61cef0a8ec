"""The engines that rows are about: rows of versions.toml, each with the rules of its engine."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from ..drafts.engine_traits import Finding
from .contract import EngineName, Question, data_file, taken_by
from .engine import Engine, Serving
from .sglang_rules import Sglang
from .vllm_rules import Vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtLlm(Engine):
    """One version of TensorRT-LLM; the linears that it builds were not read."""

    @override
    def launched(self, question: Question, tokens: int, serving: Serving) -> Mapping[str, object]:
        """JSON is YAML. The draft is split as the target is."""
        model = {"speculative_model": serving.draft} if serving.draft is not None else {}
        config = {"decoding_type": question.own.served_as, "max_draft_len": tokens, **model}
        return {"config": json.dumps({"speculative_config": config})}

    @override
    def config_problem(self, question: Question) -> Finding | None:
        """All that is known of a draft: how its declaration is read."""
        declared = question.declaration
        hides_it = question.has_side_file and question.method != "modelopt"
        signature = None if hides_it else question.signature
        row = taken_by(self.name, signature, question.gpu) if signature else None
        if row is not None and row.problem is not None:
            return row.problem
        return self.rule(
            "config",
            is_declared=declared is not None,
            method=question.method,
            taken=row.name if row else "",
            is_read=question.traits.tensorrt_llm.read,
        )


_CLASSES: Mapping[str, Callable[..., Engine]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "tensorrt-llm": TensorRtLlm,
}
ENGINES: Mapping[EngineName, Engine] = {
    row["name"]: _CLASSES[row["name"]](**row) for row in data_file("versions")["engine"]
}
"""The one version of each engine that rows are about; of another one the engine is asked."""
