"""A small HTTP server that answers as vLLM does when it records, for tests of the client.

Its target adds one to a token; its hidden states say which token, layer and element they are of.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftquant.calibration.vllm.states_file import STATES_KEY, Pages, StatesHead, write_states
from stand.server import Stand
from stand.server import served as served
from torch import Tensor

VOCAB, WIDTH, NUM_LAYERS, MAX_MODEL_LEN = 64, 8, 4, 48
END = 63  # the end-of-text token


def write_target(folder: Path, **changes: object) -> Path:
    """A folder that says it is such a target; its weights are one tensor's bytes."""
    folder.mkdir()
    config = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB, "hidden_size": WIDTH}
    config |= {"max_position_embeddings": 64, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def states_of(token_ids: Sequence[int], layer_inputs: Sequence[int]) -> Tensor:
    """[n, L, WIDTH] bfloat16: token + input of the layer / 8 + element / 64."""
    tokens = torch.tensor(token_ids)[:, None, None]
    layers = torch.tensor(layer_inputs)[None, :, None]
    return (tokens + layers / 8 + torch.arange(WIDTH) / 64).to(torch.bfloat16)


def write_file(
    path: Path,
    token_ids: Sequence[int],
    layer_inputs: Sequence[int],
    *,
    engine: str = "vllm 0.32.0",
) -> None:
    """As the connector does, from a cache of pages of four tokens in no order."""
    states = states_of(token_ids, layer_inputs)
    count = len(token_ids)
    blocks = torch.randperm(count // 4 + 3)[: count // 4 + 1].tolist()
    cache = torch.zeros(count // 4 + 3, len(layer_inputs), 4, WIDTH, dtype=torch.bfloat16)
    for i in range(count):
        cache[blocks[i // 4], :, i % 4] = states[i]
    head = StatesHead(layer_inputs=tuple(layer_inputs), engine=engine)
    write_states(path, Pages(cache, 4), blocks, token_ids, head, None)


@dataclass(kw_only=True)
class StatesServer(Stand):
    """What the server does, which tests change; `change` is of its one answer."""

    shared: Path
    layer_inputs: tuple[int, ...] = (1, 3)
    max_model_len: int = MAX_MODEL_LEN
    change: Callable[[Any], Any] = lambda answer: answer
    write: Callable[[Path, Sequence[int], Sequence[int]], None] = write_file
    model: str = "the-target"

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": self.model, "max_model_len": self.max_model_len}]}

    def get(self, path: str) -> object:
        del path
        return self.models()

    def lines(self, path: str, body: dict[str, Any], number: int) -> list[Any]:
        del path, number
        with suppress(FileNotFoundError):  # what a client that has given up removed
            return [self.complete(body)]
        return []

    def complete(self, body: dict[str, Any]) -> Any:
        prompt = body["prompt"]
        token_ids: list[int] = []
        while len(token_ids) < body["max_tokens"] and (body["ignore_eos"] or END not in token_ids):
            token_ids.append(([*prompt, *token_ids][-1] + 1) % VOCAB)
        name = f"{body['kv_transfer_params'][STATES_KEY]}-{uuid.uuid4().hex}.safetensors"
        self.write(self.shared / name, [*prompt, *token_ids[:-1]], self.layer_inputs)
        top = [
            {f"token_id:{t}": -0.5, "token_id:0": -9999.0, "token_id:9": -1.5} for t in token_ids
        ]
        answer: dict[str, Any] = {
            "choices": [
                {
                    "token_ids": token_ids,
                    "finish_reason": "stop" if token_ids[-1] == END else "length",
                    "logprobs": {"token_logprobs": [-0.5] * len(token_ids), "top_logprobs": top},
                }
            ],
            "kv_transfer_params": {STATES_KEY: name},
        }
        return self.change(answer)
