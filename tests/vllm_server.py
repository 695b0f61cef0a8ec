"""A small HTTP server that answers completions as vLLM does, for tests of what measures it.

Its target adds one to a token. Its draft is right about some of them, as `accepted_at` says. Its
clock is wrong. The real engine is started by experiments/served.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from stand.server import Stand
from stand.server import served as served

VOCAB, END = 64, 63
MODEL = "the-target"
GAP = 0.75
"""Between the log-probabilities of the two most likely tokens, at every place."""


def accepted_at(token: int, num_draft_tokens: int) -> int:
    """Accepted draft tokens of a round behind this token."""
    return (token * 5 + 2) % (num_draft_tokens + 1)


def continued(prompt: list[int], count: int, *, ignore_eos: bool = False) -> list[int]:
    """The target's text."""
    token_ids: list[int] = []
    while len(token_ids) < count and (ignore_eos or END not in token_ids):
        token_ids.append(([*prompt, *token_ids][-1] + 1) % VOCAB)
    return token_ids


def rounds_of(token_ids: list[int], num_draft_tokens: int) -> list[int]:
    """Accepted tokens of each round, the last of which may go beyond the end."""
    steps, written = [], 1
    while written < len(token_ids):
        steps.append(accepted_at(token_ids[written - 1], num_draft_tokens))
        written += steps[-1] + 1
    return steps


@dataclass
class VLLMServer(Stand):
    """What the server does, which tests change.

    Attributes:
        num_draft_tokens: K; None = it drafts nothing.
        metrics: level of the per-request metrics. counts: whether it has /metrics.
        config: what /server_info tells; None = it has none.
        change: of the events of an answer to the request with this number, [DONE] at their end.
    """

    num_draft_tokens: int | None = 3
    metrics: Literal["none", "summary", "detailed"] = "detailed"
    counts: bool = True
    version: str = "0.32.0"
    models: Any = None
    config: dict[str, Any] | None = None
    change: Callable[[int, list[Any]], list[Any]] = lambda _number, events: events  # type: ignore[assignment]
    finished: int = 0
    tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * 16)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """That were asked for, without the probe."""
        found = (tuple(body["prompt"]) for body in self.asked)
        return [prompt for prompt in found if prompt != (1, 2, 3, 4)]

    def get(self, path: str) -> Any:
        """A document, or a text; None = there is none."""
        model = {"id": MODEL, "owned_by": "vllm", "root": "/models/target", "max_model_len": 4096}
        return {
            "/version": {"version": self.version},
            "/v1/models": self.models if self.models is not None else {"data": [model]},
            "/server_info?config_format=json": self.config,
            "/metrics": self._exposition() if self.counts else None,
        }.get(path)

    def lines(self, path: str, body: dict[str, Any], number: int) -> list[Any]:
        """Of one answer; the counters have moved when the last is sent."""
        del path
        text = continued(body["prompt"], body["max_tokens"], ignore_eos=body["ignore_eos"])
        most = self.num_draft_tokens
        steps = [0] * (len(text) - 1) if most is None else rounds_of(text, most)
        events, at = [], 0
        for size in (1, *(step + 1 for step in steps)):
            events.append(self._event(body, text[at : at + size], first=at == 0))
            at += size
        ended = "stop" if text[-1] == END and not body["ignore_eos"] else "length"
        events[-1]["choices"][0]["finish_reason"] = ended
        events.append(self._last(body, text, steps))
        with self.lock:
            self.finished += 1
            self.tokens += len(text)
            for step in steps if most is not None else ():
                self.histogram[step] += 1
        return self.change(number, [*events, "[DONE]"])

    def _event(self, body: dict[str, Any], new: list[int], *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "\u2028 is no line end", "logprobs": None}
        prompt = body["prompt"] if first else None
        choice |= {"finish_reason": None, "prompt_token_ids": prompt, "token_ids": new}
        if num := body.get("logprobs"):
            places = [{f"token_id:{t}": -0.5, "token_id:999": -0.5 - GAP} for t in new]
            top = [dict(list(place.items())[:num]) for place in places]
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(new), "top_logprobs": top}
        return {"created": -1, "model": MODEL, "choices": [choice]}

    def _last(self, body: dict[str, Any], text: list[int], steps: list[int]) -> dict[str, Any]:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(text)}
        last: dict[str, Any] = {"choices": [], "usage": usage, "system_fingerprint": "vllm-print"}
        most = self.num_draft_tokens
        if most is not None and self.metrics != "none":
            told: dict[str, Any] = {
                "num_spec_tokens": most,
                "acceptance_histogram": [steps.count(j) for j in range(most + 1)],
                "num_spec_steps": len(steps),
                "mean_acceptance_length": 1.0,
            }
            if self.metrics == "detailed" and steps:
                told |= {"per_step_accepted": steps, "per_step_drafted": [most] * len(steps)}
            last["metrics"] = {"speculative_decoding": told}
        return last

    def _exposition(self) -> str:
        """Two engines, of which the second does nothing."""
        lines = ["# HELP of something", "process_start_time_seconds 1.7e+09"]

        def counter(name: str, value: float, labels: str = "") -> None:
            for engine, own in (("0", value), ("1", 0)):
                lines.append(
                    f'vllm:{name}{{engine="{engine}",model_name="a{{}}\\""{labels}}} {own}'
                )

        counter("num_requests_running", float(self.running))
        counter("num_requests_waiting", 0.0)
        counter("request_success_total", float(self.finished), ',finished_reason="length"')
        counter("request_success_total", 0.0, ',finished_reason="stop"')
        counter("generation_tokens_total", float(self.tokens))
        if self.num_draft_tokens is not None:
            counter("spec_decode_num_drafts_total", float(sum(self.histogram)))
            for i in range(self.num_draft_tokens):
                name = "spec_decode_num_accepted_tokens_per_pos_total"
                counter(name, float(sum(self.histogram[i + 1 :])), f',position="{i}"')
        return "\n".join(lines) + "\n"
