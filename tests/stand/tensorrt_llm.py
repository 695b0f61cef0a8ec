"""trtllm-serve as the sources of 1.0 to 1.3 define it, with a shipped pair behind it.

/v1/completions as a stream of what every step wrote, /v1/models, /version, and metrics that are
emptied by who reads them. The request is strict: an unknown field is refused.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from draftquant.validate.measure.measurement import EngineName
from stand.decoder import Decoder, Written
from stand.server import Object, Stand

KNOWN = frozenset((
    "model", "prompt", "max_tokens", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "n",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "detokenize", "stream", "seed",
    "stream_options", "logprobs", "min_tokens",
))  # fmt: skip
"""Of serve/openai_protocol.py's CompletionRequest, those that the stand knows."""


@dataclass(kw_only=True)
class TensorRTLLMStand(Stand):
    """The server.

    Attributes:
        decoder: what it serves. drafts: whether it was started with a draft.
        config_info: whether /prometheus/metrics tells how it was started (1.3).
        stream_interval: steps between two events.
        keeps_stop: whether the token that ends the output stays in it.
        labels: instead of those of trtllm_speculative_config_info; None = it is absent.
        iterations: of /metrics, since somebody read it.
        paths: instead of what these answer.
    """

    decoder: Decoder
    drafts: bool = True
    config_info: bool = True
    stream_interval: int = 1
    keeps_stop: bool = True
    labels: dict[str, str | None] = field(default_factory=dict)
    iterations: list[Object] = field(default_factory=list)
    paths: Object = field(default_factory=dict)
    engine: EngineName = "tensorrt-llm"

    def get(self, path: str) -> object:
        if path in self.paths:
            return self.paths[path]
        if path == "/prometheus/metrics" and self.config_info:
            return self._config_info()
        if path == "/metrics":
            told, self.iterations = self.iterations, []
            return json.dumps(told)
        model = {"id": "target", "object": "model", "owned_by": "tensorrt_llm"}
        models = {"object": "list", "data": [model]}
        return {"/version": {"version": "1.3.0"}, "/v1/models": models}[path]

    def post(self, path: str, body: Object) -> list[Object]:
        if path != "/v1/completions":
            raise ValueError(f"no {path}")
        if unknown := set(body) - KNOWN:
            raise ValueError(f"Extra inputs are not permitted: {sorted(unknown)[0]}")
        if body["temperature"] > 0 and body["top_k"] != 1:
            raise ValueError("this stand decodes greedily")
        if not body["stream"] or body["detokenize"]:
            raise ValueError("this stand streams token ids")
        text = self.decoder.write(body["prompt"], body["max_tokens"], ignore_eos=body["ignore_eos"])
        chunks = [(text.first,), *text.chunks]
        if not self.drafts:
            chunks = [(token,) for token in text.token_ids]
        self._count(text, len(chunks) - 1)
        return self._events(body, text, chunks)

    def _events(
        self, body: Object, written: Written, chunks: Sequence[tuple[int, ...]]
    ) -> list[Object]:
        """After the first step, the last, and every `stream_interval`-th."""
        ends = list(itertools.accumulate(map(len, chunks)))
        events: list[Object] = []
        begin = 0
        for step, end in enumerate(ends, start=1):
            last = step == len(ends)
            if not (step == 1 or last or step % self.stream_interval == 0):
                continue
            ids = list(written.token_ids[begin:end])
            if last and written.ended == "stop" and not self.keeps_stop:
                ids.pop()
            choice: Object = {
                "index": 0,
                "text": "",
                "token_ids": ids,
                "logprobs": self._logprobs(body, written.token_ids, begin, begin + len(ids)),
                "finish_reason": written.ended if last else None,
                "stop_reason": None,
                "avg_decoded_tokens_per_iter": float(np.float32(end) / np.float32(step)),
            }
            events.append(self._chunk([choice], None))
            begin = end
        if body.get("stream_options", {}).get("include_usage"):
            told = sum(len(e["choices"][0]["token_ids"]) for e in events)
            prompt = len(body["prompt"])
            usage = {"prompt_tokens": prompt, "completion_tokens": told}
            events.append(self._chunk([], usage | {"total_tokens": prompt + told}))
        return events

    @staticmethod
    def _chunk(choices: list[Object], usage: Object | None) -> Object:
        return {
            "id": "cmpl-7",
            "object": "text_completion",
            "created": 1795350000,
            "model": "target",
            "choices": choices,
            "usage": usage,
        }

    def _logprobs(
        self, body: Object, token_ids: tuple[int, ...], begin: int, end: int
    ) -> Object | None:
        number = body.get("logprobs")
        if not number:
            return None
        logprobs = self.decoder.logprobs(body["prompt"], token_ids)[begin:end]
        top = logprobs.topk(number)
        own = [float(p[t]) for p, t in zip(logprobs, token_ids[begin:end], strict=True)]
        return {
            "text_offset": [0] * len(own),
            "token_logprobs": own,
            "tokens": ["?"] * len(own),
            "top_logprobs": [
                {f"text of {t}": p for t, p in zip(ids, values, strict=True)}
                for values, ids in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ],
        }

    def _count(self, written: Written, num_rounds: int) -> None:
        """Iterations have zeros where nothing is drafted: in prefill, or without a draft."""
        drafted = written.rounds if self.drafts else ()
        for i in range(num_rounds + 1):
            stats: Object = {"iter": i, "iterLatencyMS": 1.5, "numActiveRequests": 1}
            if self.drafts:
                stats["specDecodingStats"] = self._specdec(drafted[i - 1] if i else None)
            self.iterations.append(stats)

    def _specdec(self, accepted: int | None) -> Object:
        """Drafted tokens of id 0 are left out of the sum, as of every third round here."""
        drafted = 0 if accepted is None else self.decoder.num_draft_tokens
        if len(self.iterations) % 3 == 1:
            drafted = max(drafted - 1, 0)
        return {
            "numDraftTokens": drafted,
            "numAcceptedTokens": accepted or 0,
            "numRequestsWithDraftTokens": int(drafted > 0),
            "acceptanceLength": 0.0 if accepted is None else accepted + 1.0,
            "iterLatencyMS": 0.0,
            "draftOverhead": 0.0,
        }

    def _config_info(self) -> str:
        labels: dict[str, str | None] = {
            "engine_type": "pytorch",
            "model_name": "target",
            "spec_draft_model": "/models/draft",
            "spec_enabled": "true",
            "spec_method": "Eagle3",
            "spec_num_tokens": str(self.decoder.num_draft_tokens),
            **self.labels,
        }
        told = ",".join(f'{k}="{v}"' for k, v in labels.items() if v is not None)
        lines = [
            "# TYPE trtllm_model_config_info gauge",
            'trtllm_model_config_info{dtype="bfloat16",model="/models/target"} 1.0',
            'trtllm_parallel_config_info{gpu_count="1",tensor_parallel_size="1"} 1.0',
        ]
        if self.drafts:
            lines.append(f"trtllm_speculative_config_info{{{told}}} 1.0")
        lines.append('trtllm_avg_decoded_tokens_per_iter{model_name="target"} 1.0')
        return "\n".join(lines) + "\n"
