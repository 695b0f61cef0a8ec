"""Engines that take prompts and return answers as they come: vLLM in this process, or servers.

Servers are called over their OpenAI interface, token ids in and token ids out, and write the hidden
states into a folder that they share with this machine. Each request goes to the server with
the fewest of them; when a server stops answering, the others take its requests.
"""

import asyncio
import importlib.util
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ...recipes.errors import NoAnswerError, TraceError
from ...recipes.installing import install_itself
from ..prompts.prompt_file import Prompt
from ..recording.decoding import prompt_seed
from ..recording.target_shape import RecordingPlan
from ..server_client import KEY_VARIABLE, Patience, Reply, ServerClient
from .states_file import STATES_KEY

LEAST_LOGPROB = -9999.0  # what vLLM's server writes for the logarithm of 0, which JSON cannot say
_MAX_UNREAD_BYTES = 4 * 2**30

TopLogprobs = tuple[tuple[float, ...], ...]
"""Pairs of a token and its log-probability, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One continuation, ended by an end of text or with the last token requested."""

    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    states: str
    token_logprob: tuple[float, ...] | None = None
    top: tuple[TopLogprobs, ...] | None = None


def answers(
    engine: "Engine",
    prompts: Sequence[tuple[int, Prompt]],
    *,
    most_in_flight: int,
    bytes_per_token: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, Continuation]]:
    """The answer to each prompt, as they come.

    At most a fixed number of prompts is in flight, and their states take at most
    4 GiB: an answer is in flight until the next one is requested, so a caller that removes its file
    meanwhile bounds the shared folder.
    """
    waiting = deque(prompts)
    sizes: dict[int, int] = {}
    while waiting or sizes:
        while waiting and len(sizes) < most_in_flight:
            position, prompt = waiting[0]
            size = (len(prompt.token_ids) + max_new_tokens) * bytes_per_token
            if sizes and sum(sizes.values()) + size > _MAX_UNREAD_BYTES:
                break
            engine.submit(position, prompt)
            sizes[position] = size
            waiting.popleft()
        position, answer = engine.next_answer()
        yield position, answer
        del sizes[position]


def most_likely(logprobs: Sequence[tuple[int, float]], count: int) -> TopLogprobs:
    """The `count` most likely of some tokens; engines add the emitted one to those requested."""
    bounded = [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in logprobs]
    return tuple(sorted(bounded, key=lambda pair: (-pair[1], pair[0]))[:count])


_ENVIRONMENT = {
    # The engine, in a separate process, continues and writes while this one reads.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
}


@contextmanager
def offline_engine(
    arguments: Mapping[str, object], plan: RecordingPlan, session: str
) -> Iterator["OfflineEngine"]:
    """Start vLLM with these arguments; leaving the block ends it."""
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
    except Exception as exc:  # the engine may raise anything
        fix = "see vLLM's own messages above; --engine-arg sets its arguments"
        raise TraceError("vLLM", f"does not start: {_said(exc)}", fix=fix) from exc
    try:
        yield OfflineEngine(engine, plan, session)
    finally:
        engine.llm_engine.engine_core.shutdown()


class OfflineEngine:
    """vLLM in this process; takes prompts and returns answers, in any order."""

    def __init__(self, engine: Any, plan: RecordingPlan, session: str) -> None:
        self._engine = engine.llm_engine
        self._session, self._decoding = session, plan.decoding
        self._max_new_tokens = plan.max_new_tokens
        self._finished: list[Any] = []

    def submit(self, position: int, prompt: Prompt) -> None:
        """Submit a prompt; `position` names its answer."""
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
            what = f"vLLM refuses it: {_said(exc)}"
            fix = "change the prompt or the engine's arguments (--engine-arg)"
            raise TraceError(f"prompt {prompt.id}", what, fix=fix) from exc

    def next_answer(self) -> tuple[int, Continuation]:
        """Wait for an answer: the position of its prompt, and the answer."""
        while not self._finished:
            try:
                self._finished = [done for done in self._engine.step() if done.finished]
            except Exception as exc:
                fix = "run the same command again: what was recorded is kept"
                raise TraceError("vLLM", f"died: {_said(exc)}", fix=fix) from exc
        output = self._finished.pop()
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        spec, token_logprob, top = self._decoding.logprob_spec, None, None
        if spec:
            places = [{t: p.logprob for t, p in each.items()} for each in completion.logprobs]
            pairs = zip(token_ids, places, strict=True)
            token_logprob = tuple(place[token] for token, place in pairs)
            if spec.num_top:
                top = tuple(most_likely(list(place.items()), spec.num_top) for place in places)
        return int(output.request_id), Continuation(
            token_ids=token_ids,
            ended=completion.finish_reason,
            states=(output.kv_transfer_params or {}).get(STATES_KEY, ""),
            token_logprob=token_logprob,
            top=top,
        )


def _said(exc: BaseException) -> str:
    """The message on one line; engines put the cause last."""
    return " ".join(str(exc).split()) or repr(exc)


_PATIENCE = Patience(seconds=3600)
_TOKEN = "token_id:"  # how `return_tokens_as_token_ids` spells a token


@contextmanager
def server_engine(
    urls: Sequence[str], plan: RecordingPlan, session: str, on_warning: Callable[[str], None]
) -> Iterator["ServerEngine"]:
    """Connect to servers; leaving the block abandons unanswered requests.

    The key of the servers, if they want one, is read from the environment: `KEY_VARIABLE`.
    """
    key = os.environ.get(KEY_VARIABLE)
    clients = [
        ServerClient(url, key=key, most_in_flight=plan.batch_size, patience=_PATIENCE)
        for url in urls
    ]
    twice = [url for url, count in Counter(client.url for client in clients).items() if count > 1]
    if twice:
        raise TraceError("--server", f"{twice[0]} is given twice", fix="give each server once")
    with asyncio.Runner() as runner:
        engine = ServerEngine(clients, runner, plan, session, on_warning)
        try:
            engine.check_context()
            yield engine
        finally:
            runner.run(engine.give_up())


class ServerEngine:
    """Servers that run elsewhere; takes prompts and returns answers, in any order."""

    def __init__(
        self,
        clients: Sequence[ServerClient],
        runner: asyncio.Runner,
        plan: RecordingPlan,
        session: str,
        on_warning: Callable[[str], None],
    ) -> None:
        self._session = session
        self._clients, self._live = tuple(clients), list(clients)
        self._on_their_way: Counter[ServerClient] = Counter()
        self._on_warning = on_warning
        self._runner = runner
        self._plan = plan
        self._model = ""
        self._asked: dict[asyncio.Task[Continuation], int] = {}

    def check_context(self) -> None:
        """Ask which model is served, and compare its context with what is needed."""
        for client in self._clients:
            model = self._served_model(client)
            if client is not self._clients[0] and model != self._model:
                what = f"serves {model!r}, and {self._clients[0].url} serves {self._model!r}"
                fix = "start all servers with the same model and arguments"
                raise TraceError(client.url, what, fix=fix)
            self._model = model

    def _served_model(self, client: ServerClient) -> str:
        served = self._runner.run(client.get_object("/v1/models")).get("data")
        if not isinstance(served, list) or not served or not isinstance(served[0], Mapping):
            raise TraceError(client.url, "serves no model", fix="give the address of a vLLM server")
        longest, needed = served[0].get("max_model_len"), self._plan.max_model_len
        if type(longest) is int and longest < needed:
            raise TraceError(
                client.url,
                f"its context has {longest} tokens, the longest prompt with its continuation needs"
                f" {needed}",
                fix=f"start it with --max-model-len {needed}, or shorten the prompts",
            )
        return str(served[0].get("id"))

    def submit(self, position: int, prompt: Prompt) -> None:
        """Submit a prompt; `position` names its answer."""
        task = self._runner.get_loop().create_task(self._complete(prompt))
        self._asked[task] = position

    def next_answer(self) -> tuple[int, Continuation]:
        """Wait for an answer: the position of its prompt, and the answer."""
        first = self._runner.run(self._first_done())
        return self._asked.pop(first), first.result()

    async def give_up(self) -> None:
        """End the requests in flight, and the connection."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _first_done(self) -> asyncio.Task[Continuation]:
        done, _ = await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
        # Failures come last: answers that exist are kept.
        return min(done, key=lambda task: task.exception() is not None)

    async def _complete(self, prompt: Prompt) -> Continuation:
        decoding, spec = self._plan.decoding, self._plan.decoding.logprob_spec
        asked = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": self._plan.max_new_tokens,
            "ignore_eos": decoding.ignore_eos,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k,
            # A server takes missing settings from the model's generation_config.json.
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
        client, reply = await self._post(asked)
        try:
            return _read(reply.events[0].data, spec.num_top if spec else None)
        except (LookupError, TypeError, ValueError) as exc:
            what = f"its answer is not vLLM's: {type(exc).__name__}: {exc}"
            fix = "give a vLLM server of 0.32 or later, not a proxy that rewrites answers"
            raise TraceError(f"{client.url}: prompt {prompt.id}", what, fix=fix) from exc

    async def _post(self, asked: Mapping[str, Any]) -> tuple[ServerClient, Reply]:
        """The answer of the server with the fewest requests, or of another that still runs."""
        while True:
            client = min(self._live, key=self._on_their_way.__getitem__)
            self._on_their_way[client] += 1
            try:
                return client, await client.post("/v1/completions", asked)
            except NoAnswerError as exc:
                if client in self._live and len(self._live) > 1:
                    self._live.remove(client)
                    left = f"{len(self._live)} of {len(self._clients)} servers"
                    self._on_warning(f"{client.url}: {exc.what}; {left} take its requests")
                elif client in self._live:
                    raise  # the last one
            finally:
                self._on_their_way[client] -= 1


Engine = OfflineEngine | ServerEngine


def _read(answer: Mapping[str, Any], num_top: int | None) -> Continuation:
    choice = answer["choices"][0]
    token_ids = tuple(choice["token_ids"])
    token_logprob, top = None, None
    if num_top is not None:
        logprobs = choice["logprobs"]
        token_logprob = tuple(float(value) for value in logprobs["token_logprobs"])
        if num_top:
            top = tuple(
                most_likely(
                    [(int(name.removeprefix(_TOKEN)), float(v)) for name, v in place.items()],
                    num_top,
                )
                for place in logprobs["top_logprobs"]
            )
    return Continuation(
        token_ids=token_ids,
        ended=choice["finish_reason"],
        states=str(answer["kv_transfer_params"][STATES_KEY]),
        token_logprob=token_logprob,
        top=top,
    )
