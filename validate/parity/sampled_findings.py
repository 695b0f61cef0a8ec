"""Whether drawn output follows the target's own distribution: how likely it is to the target.

The mean log-probability per token, prompt by prompt, must change in neither direction. The target
scores, run by transformers, or a plain server of it that reads prompt and output as one prompt.
"""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.target_model import Placement, input_device, loaded_target
from ...calibration.server_client import Patience, ServerClient
from ...calibration.traces.prompt_trace import prompt_sha256
from ...recipes.errors import ParityError, short
from ...recipes.listener import Progress, unseen
from ..counting.paired_change import pooled_mean
from ..measure.measurement import Measurement, RequestRecord
from ..measure.server_answers import get_protocol, section
from .divergence_findings import check_settings
from .finding import Limits, ParityFinding, judged

ScoringEngine = Literal["vllm", "sglang"]
"""Engines that tell how likely the tokens of a prompt are."""

_MAX_LOGITS = 2**26  # elements of logits that are normalised together: 256 MB in float32
_IMPOSSIBLE = -9999.0
"""What vLLM writes for -infinity (entrypoints/generate/base/serving.py:370 of 0.32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and its output; at least one token each."""

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


Scores = tuple[float, ...]
"""For one text: the log-probability of each token of its output, at temperature 1, in nats."""


def score_by_target(
    target: Path,
    texts: Sequence[Text],
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress = unseen,
) -> list[Scores]:
    """Score with transformers, one text at a time; ParityError: no such token, or NaN."""
    scores = []
    placement = Placement(device=device)
    with loaded_target(target, dtype, placement, beside=target) as model, torch.inference_mode():
        vocabulary = model.get_input_embeddings().num_embeddings
        for done, text in enumerate(texts, start=1):
            whole = text.prompt + text.output
            if max(whole) >= vocabulary:
                raise _another(target, text, f"token {max(whole)} is not of its {vocabulary:,}")
            ids = torch.tensor([whole], device=input_device(model))
            # Positions that predict the output; the last one predicts a token that was not written.
            logits = model(ids, logits_to_keep=len(text.output) + 1, use_cache=False).logits[0, :-1]
            scores.append(_scores(logits, ids[0, len(text.prompt) :].to(logits.device)))
            if not all(map(math.isfinite, scores[-1])):
                raise _another(target, text, "its log-probabilities are not finite")
            on_progress(done, len(texts))
    return scores


def _scores(logits: torch.Tensor, token_ids: torch.Tensor) -> Scores:
    rows = max(1, _MAX_LOGITS // logits.shape[-1])
    parts = zip(torch.split(logits, rows), torch.split(token_ids, rows), strict=True)
    scored = [
        some.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0] for some, tokens in parts
    ]
    return tuple(torch.cat(scored).tolist())


def score_by_server(
    url: str,
    engine: ScoringEngine,
    texts: Sequence[Text],
    *,
    key: str | None = None,
    concurrency: int = 8,
    patience: Patience | None = None,
    on_progress: Progress = unseen,
) -> list[Scores]:
    """Score texts, shorter than the server's longest, with a server that drafts nothing."""
    done = 0

    async def scored() -> list[Scores]:
        free = asyncio.Semaphore(concurrency)
        async with ServerClient(
            url, key=key, most_in_flight=concurrency, patience=patience or Patience()
        ) as client:
            identity, speculation = await get_protocol(engine).identify(client)
            if speculation is not None:
                raise ParityError(
                    "--score-server",
                    f"{url} uses a draft itself ({speculation.num_draft_tokens} tokens): scores"
                    " have to come from a server without a draft",
                    fix="give the server without a draft, or --target M",
                )

            async def score(text: Text) -> Scores:
                nonlocal done
                async with free:
                    scores = await _ASK[engine](client, identity.model, text)
                done += 1
                on_progress(done, len(texts))
                return scores

            return await asyncio.gather(*map(score, texts))

    return asyncio.run(scored())


async def _ask_vllm(client: ServerClient, model: str, text: Text) -> Scores:
    """`prompt_logprobs` (entrypoints/openai/completion/protocol.py:98 of vLLM 0.32).

    One entry per token of the prompt, the first null, else {"TOKEN": {"logprob": X, ...}}.
    """
    body = {
        "model": model,
        "prompt": [*text.prompt, *text.output],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    reply = await client.post("/v1/completions", body)
    choices = reply.events[0].data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    entries = section({"first": first}, "first").get("prompt_logprobs")
    last = zip(text.output, _last(client, text, entries), strict=True)
    pairs = [(token, section({"at": at}, "at", str(token)).get("logprob")) for token, at in last]
    return _checked(client, text, pairs)


async def _ask_sglang(client: ServerClient, _model: str, text: Text) -> Scores:
    """`return_logprob` of the native interface (managers/io_struct.py of SGLang 0.5.23).

    `meta_info.input_token_logprobs`: [logprob, token id, text] per token of the prompt from
    `logprob_start_len` on, the first of them null (managers/tokenizer_manager.py:2868, :3098).
    """
    body = {
        "input_ids": [*text.prompt, *text.output],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = await client.post("/generate", body)
    entries = section(reply.events[0].data, "meta_info").get("input_token_logprobs")
    pairs = [
        (entry[1], entry[0]) if isinstance(entry, list) and len(entry) >= 2 else (None, None)
        for entry in _last(client, text, entries)
    ]
    return _checked(client, text, pairs)


_ASK: Mapping[ScoringEngine, Callable[[ServerClient, str, Text], Awaitable[Scores]]] = {
    "vllm": _ask_vllm,
    "sglang": _ask_sglang,
}


def _last(client: ServerClient, text: Text, entries: object) -> list[Any]:
    expected = len(text.prompt) + len(text.output)
    if not isinstance(entries, list) or len(entries) != expected:
        got = f"{len(entries)}" if isinstance(entries, list) else short(entries)
        raise _another(client.url, text, f"expected log-probabilities of {expected} tokens of the"
                       f" prompt, got {got}")  # fmt: skip
    return entries[len(text.prompt) :]


def _checked(client: ServerClient, text: Text, pairs: Sequence[tuple[Any, Any]]) -> Scores:
    scores = []
    for token, (named, logprob) in zip(text.output, pairs, strict=True):
        plain = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if named != token or not plain or not _IMPOSSIBLE < logprob < 1e-3:
            what = f"expected the log-probability of token {token}, got {short(logprob)}"
            raise _another(client.url, text, what)
        scores.append(float(logprob))
    return tuple(scores)


def _another(where: object, text: Text, what: str) -> ParityError:
    return ParityError(where, f"prompt {text.id}: {what}",
                       fix="score with the target that wrote these texts")  # fmt: skip


SCORED_AS_SERVED = 0.25
"""Nats, per token on average, by which a target that runs elsewhere may score a text unlike
server did. A shipped pair served by vLLM 0.32 and scored by transformers in float32: 0.007."""


def texts_of(run: Measurement, prompts: Sequence[Prompt]) -> list[Text]:
    """What a run was given and wrote, for the prompts that got any output."""
    by_hash = {prompt_sha256(prompt.token_ids): prompt.token_ids for prompt in prompts}
    lacking = [record.id for record in run.records if record.prompt_sha256 not in by_hash]
    if lacking:
        what = f"{len(lacking)} of its prompts are not in the prompt file, such as {lacking[0]}"
        fix = "give the --prompts that it was measured with, and its --tokenizer"
        raise ParityError(run.name, what, fix=fix)
    return [
        Text(id=record.id, prompt=by_hash[record.prompt_sha256], output=record.token_ids)
        for record in run.records
        if record.token_ids
    ]


def check_sampled(plain: Measurement, speculative: Measurement) -> None:
    """Refuse, before anything is scored, two runs that cannot be compared."""
    where = check_settings(plain, speculative, "sampling")
    if plain.setup.asked.temperature == 0:
        raise ParityError(
            where,
            "outputs were chosen greedily",
            fix="measure at a --temperature, or use 'parity divergence'",
        )
    if plain.setup.speculation is not None or speculative.setup.speculation is None:
        drafts = plain if plain.setup.speculation else speculative
        what = "uses a draft, but stands first" if drafts is plain else "drafts nothing"
        raise ParityError(drafts.name, what, fix="give PLAIN, then SPECULATIVE")


def sampled_finding(
    plain: Measurement,
    speculative: Measurement,
    scores: tuple[Sequence[Scores], Sequence[Scores]],
    *,
    max_logprob_drop: Limits,
    confidence: float,
) -> ParityFinding:
    """Judge the change of the mean log-probability per token, in nats, paired by prompt."""
    ours, theirs = (
        _means(run, some) for run, some in zip((plain, speculative), scores, strict=True)
    )
    common = [sha256 for sha256 in ours if sha256 in theirs]
    if not common:
        raise ParityError(
            speculative.name,
            "no prompt has output in both runs",
            fix="measure with a larger --max-new-tokens",
        )
    bounded = pooled_mean(
        [theirs[sha256] - ours[sha256] for sha256 in common],
        [1.0] * len(common),
        confidence=confidence,
    )
    doubt = _doubt(plain, scores[0])
    lossy = speculative.setup.speculation.lossy if speculative.setup.speculation else ()
    if lossy and not doubt:
        doubt = f"the server accepts lossily ({', '.join(lossy)})"
    finding = judged(
        "sampled",
        f"{speculative.name}: change of log-probability per token",
        bounded,
        max_logprob_drop,
        details=[
            {
                "plain": sum(ours[sha256] for sha256 in common) / len(common),
                "speculative": sum(theirs[sha256] for sha256 in common) / len(common),
                "prompts": len(common),
                "temperature": plain.setup.asked.temperature,
            }
        ],
    )
    if not doubt:
        return finding
    reason = f"{doubt[0].upper()}{doubt[1:]}; {finding.reason}"
    return dataclasses.replace(finding, verdict="ANOMALOUS", reason=reason)


def _means(run: Measurement, scores: Sequence[Scores]) -> dict[str, float]:
    """For each distinct prompt: the mean over its tokens, and over its copies."""
    by_prompt: dict[str, list[float]] = {}
    for record, logprobs in zip(_with_output(run), scores, strict=True):
        by_prompt.setdefault(record.prompt_sha256, []).append(sum(logprobs) / len(logprobs))
    return {sha256: sum(means) / len(means) for sha256, means in by_prompt.items()}


def _doubt(plain: Measurement, scores: Sequence[Scores]) -> str:
    """Where the server's log-probabilities are of the same distribution, they must be equal."""
    asked = plain.setup.asked
    if (asked.temperature, asked.top_p, asked.top_k) != (1, 1, 0):
        return ""
    apart: list[float] = []
    for record, logprobs in zip(_with_output(plain), scores, strict=True):
        apart += [abs(a - b) for a, b in zip(record.token_logprob or (), logprobs, strict=False)]
    mean = sum(apart) / len(apart) if apart else 0.0
    if mean <= SCORED_AS_SERVED:
        return ""
    return (
        f"the scores of the plain run's tokens differ by {mean:.2f} nats on average from those that"
        " its own server reported: they come from another target, or from a very different dtype"
    )


def _with_output(run: Measurement) -> list[RequestRecord]:
    return [record for record in run.records if record.token_ids]
