"""A running vLLM server, over its OpenAI interface: token ids in, token ids out.

It was started with the arguments that `EngineSetup.command` prints, and writes the hidden states
into a folder that it shares with this machine.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from ...recipes.errors import short
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..recording.decoding import Decoding, prompt_seed
from .answers import Answer, most_likely
from .states_file import STATES_KEY

_ATTEMPTS = 5
_FIRST_PAUSE = 1.0  # seconds, doubled before each further attempt
_TIMEOUT = httpx2.Timeout(connect=10, write=60, pool=None, read=3600)
_TOKEN = "token_id:"  # how `return_tokens_as_token_ids` spells a token
_KEY = "VLLM_API_KEY"
_AGAIN = "start the server again and run the same command: what was recorded is kept"


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
            one, is read from VLLM_API_KEY.
        decoding: how tokens are chosen.
        session: see `states_file.STATES_KEY`.
        max_new_tokens: per prompt.
        max_model_len: tokens of the longest prompt with its continuation.
        most_in_flight: requests at a time.

    Raises:
        TraceError: nothing answers there, or its context is shorter.
    """
    key = os.environ.get(_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx2.AsyncClient(
            base_url=f"{base}/v1/",
            headers=headers,
            timeout=_TIMEOUT,
            limits=httpx2.Limits(max_connections=most_in_flight),
        )
    except httpx2.InvalidURL as exc:
        raise TraceError("--server", f"{short(url)}: {exc}", fix="give http://HOST:PORT") from exc
    with asyncio.Runner() as runner:
        engine = ServerEngine(client, url, runner, decoding, session, max_new_tokens)
        try:
            engine.check_context(max_model_len)
            yield engine
        finally:
            runner.run(engine.give_up())


class ServerEngine:
    """See `answers.Engine`."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        url: str,
        runner: asyncio.Runner,
        decoding: Decoding,
        session: str,
        max_new_tokens: int,
    ) -> None:
        self._session = session
        self._client = client
        self._url = url
        self._runner = runner
        self._decoding = decoding
        self._max_new_tokens = max_new_tokens
        self._model = ""
        self._asked: dict[asyncio.Task[Answer], int] = {}

    def check_context(self, max_model_len: int) -> None:
        """Ask which model is served, and hold its context against what is needed.

        Raises:
            TraceError: see `server_engine`.
        """
        served = self._runner.run(self._ask("GET", "models", None, attempts=1)).get("data")
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

    def submit(self, position: int, prompt: Prompt) -> None:
        """See `answers.Engine`."""
        task = self._runner.get_loop().create_task(self._complete(prompt))
        self._asked[task] = position

    def next_answer(self) -> tuple[int, Answer]:
        """See `answers.Engine`."""
        first = self._runner.run(self._first_done())
        return self._asked.pop(first), first.result()

    async def give_up(self) -> None:
        """End the requests that are on their way, and the connection."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self._client.aclose()

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
        answer = await self._ask("POST", "completions", asked)
        try:
            return _read(answer, spec.num_top if spec else None)
        except (LookupError, TypeError, ValueError) as exc:
            raise TraceError(
                f"{self._url}: prompt {prompt.id}",
                f"its answer is not vLLM's: {type(exc).__name__}: {exc}",
                fix="give a vLLM server of 0.32 or later, not a proxy that rewrites answers",
            ) from exc

    async def _ask(
        self, method: str, path: str, body: object, *, attempts: int = _ATTEMPTS
    ) -> Mapping[str, Any]:
        """One request; a server that does not answer, or is overloaded, is asked again."""
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                answer = await self._client.request(method, path, json=body)
            except httpx2.HTTPError as exc:
                problem = f"{type(exc).__name__}: {exc}"
                continue
            if answer.status_code >= 500:
                problem = f"{answer.status_code}: {short(answer.text)}"
                continue
            return self._object(answer)
        raise TraceError(self._url, f"no answer after {attempts} attempt(s): {problem}", fix=_AGAIN)

    def _object(self, answer: httpx2.Response) -> Mapping[str, Any]:
        if answer.status_code != 200:
            raise TraceError(
                self._url,
                f"{answer.status_code}: {short(answer.text)}",
                fix=f"mend the request, or set {_KEY} where the server asks for a key",
            )
        try:
            value = parse_json(answer.text)
        except JsonProblem as exc:
            raise TraceError(self._url, f"its answer is {exc}",
                             fix="give the address of a vLLM server") from exc  # fmt: skip
        if not isinstance(value, Mapping):
            raise TraceError(self._url, f"expected a JSON object, got {short(value)}",
                             fix="give the address of a vLLM server")  # fmt: skip
        return value


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
