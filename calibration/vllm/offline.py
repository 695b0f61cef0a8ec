"""vLLM as an engine of our own: `vllm.LLM` with its workers, on as many GPUs as it is told."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from ...recipes.install_line import install_itself
from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..recording.decoding import Decoding, prompt_seed
from .server_answers import Answer, Engine, most_likely
from .states_file import STATES_KEY

_ENVIRONMENT = {
    # The engine in a process of its own goes on, and writes, while this one reads.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
}


@contextmanager
def offline_engine(
    arguments: Mapping[str, object], decoding: Decoding, *, session: str, max_new_tokens: int
) -> Iterator["OfflineEngine"]:
    """Start vLLM with these arguments; leaving the block ends it.

    Args:
        arguments: of `vllm.LLM`.
        decoding: how tokens are chosen.
        session: see `states_file.STATES_KEY`.

    Raises:
        TraceError: vLLM is not installed, or does not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise TraceError(
            "--engine vllm",
            "vLLM is not installed beside draftquant",
            fix=f"install draftquant into vLLM's own environment ({install_itself()}) and record"
            " there, or give a running server: --server URL",
        )
    os.environ.update(_ENVIRONMENT)
    import vllm

    try:
        engine = vllm.LLM(**arguments)
    except Exception as exc:  # whatever the engine says is the answer
        raise TraceError(
            "vLLM",
            f"does not start: {_said(exc)}",
            fix="see vLLM's own messages above; --engine-arg sets its arguments",
        ) from exc
    try:
        yield OfflineEngine(engine, decoding, session, max_new_tokens)
    finally:
        engine.llm_engine.engine_core.shutdown()


class OfflineEngine(Engine):
    """vLLM in this process."""

    def __init__(self, engine: Any, decoding: Decoding, session: str, max_new_tokens: int) -> None:
        self._engine = engine.llm_engine
        self._session = session
        self._decoding = decoding
        self._max_new_tokens = max_new_tokens
        self._finished: list[Any] = []

    @override
    def submit(self, position: int, prompt: Prompt) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        decoding, spec = self._decoding, self._decoding.logprob_spec
        params = SamplingParams(
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=prompt_seed(decoding.seed, prompt.token_ids) if decoding.sampled else None,
            max_tokens=self._max_new_tokens,
            ignore_eos=decoding.ignore_eos,
            logprobs=spec.num_top if spec else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {STATES_KEY: self._session}},
        )
        given = {"prompt_token_ids": list(prompt.token_ids)}
        try:
            self._engine.add_request(str(position), given, params)
        except Exception as exc:
            raise TraceError(
                f"prompt {prompt.id}",
                f"vLLM refuses it: {_said(exc)}",
                fix="change the prompt or the engine's arguments (--engine-arg)",
            ) from exc

    @override
    def next_answer(self) -> tuple[int, Answer]:
        while not self._finished:
            try:
                self._finished = [done for done in self._engine.step() if done.finished]
            except Exception as exc:
                raise TraceError(
                    "vLLM",
                    f"died: {_said(exc)}",
                    fix="run the same command again: what was recorded is kept",
                ) from exc
        output = self._finished.pop()
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        logprobs, spec = completion.logprobs, self._decoding.logprob_spec
        top = None
        if spec and spec.num_top:
            top = tuple(
                most_likely([(t, one.logprob) for t, one in place.items()], spec.num_top)
                for place in logprobs
            )
        return int(output.request_id), Answer(
            token_ids=token_ids,
            ended=completion.finish_reason,
            states=(output.kv_transfer_params or {}).get(STATES_KEY, ""),
            token_logprob=tuple(
                place[t].logprob for t, place in zip(token_ids, logprobs, strict=True)
            )
            if spec
            else None,
            top=top,
        )


def _said(exc: BaseException) -> str:
    """On one line; engines put the cause last."""
    return " ".join(str(exc).split()) or repr(exc)
