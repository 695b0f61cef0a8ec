"""SGLang 0.5.23 as its sources define it, with a shipped pair behind it.

/generate and /server_info; the gauges of /metrics lie in the real one, and nobody may ask for them.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from draftquant.validate.measure.measurement import EngineName
from stand.decoder import Decoder, Written
from stand.server import Object, Stand


@dataclass(kw_only=True)
class SGLangStand(Stand):
    """The server.

    Attributes:
        decoder: what it serves. drafts: whether it was started with a draft.
        info: instead of what /server_info says; None = the key is absent.
        incremental: started with --incremental-streaming-output.
        fetched: so many rounds are in one event of a stream, for nobody fetched them before.
        old_names: of the counts, up to 0.5.10.
    """

    decoder: Decoder
    drafts: bool = True
    info: Object = field(default_factory=dict)
    incremental: bool = False
    fetched: int = 1
    old_names: bool = False
    engine: EngineName = "sglang"

    def get(self, path: str) -> object:
        return {"/server_info": self._server_info}[path]()

    def post(self, path: str, body: Object) -> list[Object]:
        if path != "/generate":
            raise ValueError(f"no {path}")
        unknown = set(body) - {
            "input_ids", "sampling_params", "stream", "return_logprob", "top_logprobs_num",
        }  # fmt: skip
        if unknown:
            raise ValueError(f"unknown field {sorted(unknown)[0]}")
        sampling = body["sampling_params"]
        if sampling["temperature"] > 0:
            raise ValueError("this stand decodes greedily")
        written = self.decoder.write(
            body["input_ids"], sampling["max_new_tokens"], ignore_eos=sampling["ignore_eos"]
        )
        if not body.get("stream"):
            return [self._event(body, written, len(written.token_ids), 0)]
        return self._events(body, written)

    def _events(self, body: Object, written: Written) -> list[Object]:
        """After prefill and after every round, or after some of them."""
        chunks = written.chunks if self.drafts else [(t,) for t in written.token_ids[1:]]
        ends = list(itertools.accumulate(map(len, chunks), initial=1))
        kept = [*ends[:1], *ends[1:][self.fetched - 1 :: self.fetched]]
        if kept[-1] != ends[-1]:
            kept.append(ends[-1])
        begins = [0, *kept[:-1]] if self.incremental else [0] * len(kept)
        return [
            self._event(body, written, end, begin) for begin, end in zip(begins, kept, strict=True)
        ]

    def _event(self, body: Object, written: Written, end: int, begin: int) -> Object:
        """What is told after `end` tokens (tokenizer_manager.py:2514-2790)."""
        finished = end == len(written.token_ids)
        reasons: dict[str, Object] = {
            "stop": {"type": "stop", "matched": 0},
            "length": {"type": "length", "length": body["sampling_params"]["max_new_tokens"]},
        }
        meta: Object = {
            "id": "b1946ac92492d2347c6235b4d2611184",
            "finish_reason": reasons[written.ended] if finished else None,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
            "response_sent_to_client_ts": 1795350000.5,
        }
        if body.get("return_logprob"):
            meta |= self._logprobs(body, written.token_ids)
        if finished:
            meta["e2e_latency"] = 0.25
            meta |= self._counts(written) if self.drafts else {}
        return {"text": "", "output_ids": list(written.token_ids[begin:end]), "meta_info": meta}

    def _counts(self, written: Written) -> Object:
        """Of the request (tokenizer_manager.py:3138-3200): absent where no round was needed."""
        rounds, accepted = len(written.rounds), sum(written.rounds)
        proposed = rounds * self.decoder.num_draft_tokens
        if not rounds:
            return {}
        histogram = [written.rounds.count(j) for j in range(max(written.rounds) + 1)]
        common = {
            "spec_accept_rate": accepted / proposed,
            "spec_accept_length": len(written.token_ids) / rounds,
            "spec_verify_ct": rounds,
        }
        if self.old_names:
            return common | {
                "spec_accept_token_num": accepted,
                "spec_draft_token_num": proposed,
                "spec_accept_histogram": histogram,
            }
        return common | {
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": proposed,
            "spec_correct_drafts_histogram": histogram,
        }

    def _logprobs(self, body: Object, token_ids: tuple[int, ...]) -> Object:
        """[log-probability, id, text], the text null as nobody asked for it."""
        logprobs = self.decoder.logprobs(body["input_ids"], token_ids)
        own = [[float(p[t]), t, None] for p, t in zip(logprobs, token_ids, strict=True)]
        told: Object = {
            "input_token_logprobs": [],
            "output_token_logprobs": own,
            "output_token_logprobs_length": len(own),
        }
        if number := body.get("top_logprobs_num", 0):
            top = logprobs.topk(number)
            told["output_top_logprobs"] = [
                [[p, t, None] for p, t in zip(values, ids, strict=True)]
                for values, ids in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        return told

    def _server_info(self) -> Object:
        drafted: Object = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "/models/draft",
            "speculative_num_steps": self.decoder.num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.decoder.num_draft_tokens + 1,
            "speculative_draft_model_quantization": "fp8",
        }
        told: dict[str, Any] = {
            "model_path": "/models/target",
            "served_model_name": "target",
            "api_key": "a secret",
            "dtype": "bfloat16",
            "device": "cuda",
            "attention_backend": "fa3",
            "incremental_streaming_output": self.incremental,
            "speculative_adaptive": False,
            "speculative_accept_threshold_single": 1.0,
            "speculative_accept_threshold_acc": 1.0,
            "speculative_use_rejection_sampling": False,
            "version": "0.5.23",
            "frontend": "python",
            "launch_command": "python -m sglang.launch_server --api-key 'a secret'",
            "internal_states": [{"last_gen_throughput": 0.0}],
            **(drafted if self.drafts else dict.fromkeys(drafted)),
            **self.info,
        }
        absent = {key for key, value in self.info.items() if value is None}
        return {key: value for key, value in told.items() if key not in absent}
