"""A running vLLM server, over its OpenAI interface: token ids in, token ids out.

It was started with the arguments that `EngineSetup.command` prints, and writes the hidden states
into a folder that it shares with this machine.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..recording.decoding import Decoding, prompt_seed
from ..server_client import KEY_VARIABLE, Patience, ServerClient
from .server_answers import Answer, Engine, most_likely
from .states_file import STATES_KEY

_PATIENCE = Patience(seconds=3600)
_TOKEN = "token_id:"  # how `return_tokens_as_token_ids` spells a token


@contextmanager
def server_engine(
    url: str,
    decoding: Decoding,
    *,
    session: str,
    max_new_tokens: int,
    max_model_len: int,
    most_in_flight: int,
) -> Iterator["ServerEngine"]:
    """Connect to a server; leaving the block gives up what is not answered.

    Args:
        url: such as http://host:8000, with or without /v1. The key of the server, if it asks for
            one, is read from the environment: `server_client.KEY_VARIABLE`.
        decoding: how tokens are chosen.
        session: see `states_file.STATES_KEY`.
        max_new_tokens: per prompt.
        max_model_len: tokens of the longest prompt with its continuation.
        most_in_flight: requests at a time.

    Raises:
        ServerError: nothing answers there.
        TraceError: it serves no model, or its context is shorter.
    """
    client = ServerClient(
        url, key=os.environ.get(KEY_VARIABLE), most_in_flight=most_in_flight, patience=_PATIENCE
    )
    with asyncio.Runner() as runner:
        engine = ServerEngine(client, runner, decoding, session, max_new_tokens)
        try:
            engine.check_context(max_model_len)
            yield engine
        finally:
            runner.run(engine.give_up())


class ServerEngine(Engine):
    """A server that runs elsewhere."""

    def __init__(
        self,
        client: ServerClient,
        runner: asyncio.Runner,
        decoding: Decoding,
        session: str,
        max_new_tokens: int,
    ) -> None:
        self._session = session
        self._client = client
        self._url = client.url
        self._runner = runner
        self._decoding = decoding
        self._max_new_tokens = max_new_tokens
        self._model = ""
        self._asked: dict[asyncio.Task[Answer], int] = {}

    def check_context(self, max_model_len: int) -> None:
        """Ask which model is served, and hold its context against what is needed.

        Raises:
            TraceError, ServerError: see `server_engine`.
        """
        served = self._runner.run(self._client.get_object("/v1/models")).get("data")
        if not isinstance(served, list) or not served or not isinstance(served[0], Mapping):
            raise TraceError(self._url, "serves no model", fix="give the address of a vLLM server")
        self._model = str(served[0].get("id"))
        longest = served[0].get("max_model_len")
        if type(longest) is int and longest < max_model_len:
            raise TraceError(
                self._url,
                f"its context has {longest} tokens, the longest prompt with its continuation needs"
                f" {max_model_len}",
                fix=f"start it with --max-model-len {max_model_len}, or shorten the prompts",
            )

    @override
    def submit(self, position: int, prompt: Prompt) -> None:
        task = self._runner.get_loop().create_task(self._complete(prompt))
        self._asked[task] = position

    @override
    def next_answer(self) -> tuple[int, Answer]:
        first = self._runner.run(self._first_done())
        return self._asked.pop(first), first.result()

    async def give_up(self) -> None:
        """End the requests that are on their way, and the connection."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self._client.close()

    async def _first_done(self) -> asyncio.Task[Answer]:
        done, _ = await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
        # What failed comes last: what is answered already is kept.
        return min(done, key=lambda task: task.exception() is not None)

    async def _complete(self, prompt: Prompt) -> Answer:
        decoding, spec = self._decoding, self._decoding.logprob_spec
        asked = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": self._max_new_tokens,
            "ignore_eos": decoding.ignore_eos,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k,
            # A server takes what is not said from the model's generation_config.json.
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "kv_transfer_params": {STATES_KEY: self._session},
        }
        if decoding.sampled:
            asked["seed"] = prompt_seed(decoding.seed, prompt.token_ids)
        if spec:
            asked["logprobs"] = spec.num_top
        reply = await self._client.post("/v1/completions", asked)
        try:
            return _read(reply.events[0].data, spec.num_top if spec else None)
        except (LookupError, TypeError, ValueError) as exc:
            raise TraceError(
                f"{self._url}: prompt {prompt.id}",
                f"its answer is not vLLM's: {type(exc).__name__}: {exc}",
                fix="give a vLLM server of 0.32 or later, not a proxy that rewrites answers",
            ) from exc


def _read(answer: Mapping[str, Any], num_top: int | None) -> Answer:
    choice = answer["choices"][0]
    token_ids = tuple(choice["token_ids"])
    token_logprob, top = None, None
    if num_top is not None:
        logprobs = choice["logprobs"]
        token_logprob = tuple(float(value) for value in logprobs["token_logprobs"])
        if num_top:
            top = tuple(
                most_likely([(_token(name), float(v)) for name, v in place.items()], num_top)
                for place in logprobs["top_logprobs"]
            )
    return Answer(
        token_ids=token_ids,
        ended=choice["finish_reason"],
        states=str(answer["kv_transfer_params"][STATES_KEY]),
        token_logprob=token_logprob,
        top=top,
    )


def _token(name: str) -> int:
    return int(name.removeprefix(_TOKEN))
