"""vLLM's KV connector that writes a target's hidden states to files; only the engine loads it.

vLLM's method `extract_hidden_states` keeps the states of chosen layers of every token in pages of
its KV cache. When a request ends, a thread copies its pages into a file, piece by piece, and
only then are they freed: an engine whose disk is slow waits for pages, and no memory fills up. The
code serves CPUs and GPUs. Files are written under another name and renamed: none is incomplete.

Written with vLLM 0.32 and 0.33, whose own example needs CUDA, pinned memory and a lock file.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.request import RequestStatus

from .states_file import FAILED, FOLDER_KEY, SESSION, STATES_KEY, Pages, StatesHead, write_states

_WRITERS = 2  # threads; pages of as many requests are read at a time
_LAYER = "cache_only_layers."  # in the name of the one layer that keeps hidden states

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A request that has ended: its tokens except the last, which was never read, and its pages."""

    request: str
    file: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass(slots=True)
class _Saves(KVConnectorMetadata):
    """What the scheduler's side tells the workers in one step."""

    saves: list[_Save] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides: the scheduler's names the files, the worker's writes them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ValueError(
                "draftquant: context parallelism spreads a request's tokens over GPUs; fix: use"
                " tensor, pipeline or data parallelism"
            )
        self._folder = Path(self._kv_transfer_config.get_from_extra_config(FOLDER_KEY, ""))
        self._group, self._block_size = _group_of_states(kv_cache_config)
        self._ended: list[_Save] = []
        self._pages: Pages | None = None
        self._head: StatesHead | None = None
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="draftquant-states")
        self._writing: dict[str, Future[None]] = {}

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def build_connector_meta(self, _scheduler_output: Any) -> KVConnectorMetadata:
        """Pass the requests that ended to the workers."""
        ended, self._ended = self._ended, []
        return _Saves(ended)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the pages of a request that asked for its states; its answer names the file."""
        session = str((request.kv_transfer_params or {}).get(STATES_KEY))
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        if aborted or not SESSION.fullmatch(session):  # the name of a file begins with it
            return False, None
        file = f"{session}-{uuid.uuid4().hex}.safetensors"
        self._ended.append(
            _Save(
                request=request.request_id,
                file=file,
                token_ids=list(request.all_token_ids)[:-1],
                block_ids=list(block_ids[self._group]),
            )
        )
        return True, {STATES_KEY: file}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine whose cache has one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def get_finished_count(self) -> int:
        """One worker reports each request: see `register_kv_caches`."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, _vllm_config: Any) -> str:
        """The states of a token lie side by side."""
        return "LBNHC"

    # ---- the workers' side

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Find the pages.

        Every tensor-parallel rank holds the whole state, so rank 0 writes. Of pipeline stages only
        the last one has the layer; models that can pass it the states of earlier stages do so.
        """
        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        if layers and get_tensor_model_parallel_rank() == 0:
            (layer,) = layers
            self._pages = Pages(kv_caches[layer], self._block_size)
            draft = self._vllm_config.speculative_config.draft_model_config.hf_config
            self._head = StatesHead(
                layer_inputs=tuple(sorted(draft.eagle_aux_hidden_state_layer_ids)),
                engine=f"vllm {vllm.__version__}",
            )
            self._folder.mkdir(parents=True, exist_ok=True)

    def get_finished(self, _finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin to write what has ended; requests whose files are written may go."""
        if self._pages is None or self._head is None:
            return None, None
        if self.has_connector_metadata():
            for save in self._get_connector_metadata().saves:
                ready = self._pages.ready()
                self._writing[save.request] = self._threads.submit(self._write, save, ready)
        done = {request for request, future in self._writing.items() if future.done()}
        for request in done:
            self._writing.pop(request)
        return done or None, None

    def shutdown(self) -> None:
        """Finish what is being written."""
        self._threads.shutdown()

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Nothing is ever loaded, the layer itself keeps the states, pages wait for their file."""

    update_state_after_alloc = wait_for_layer_load = start_load_kv
    save_kv_layer = wait_for_save = start_load_kv

    def _write(self, save: _Save, ready: Any) -> None:
        assert self._pages is not None
        assert self._head is not None
        path = self._folder / save.file
        try:
            write_states(path, self._pages, save.block_ids, save.token_ids, self._head, ready)
        except Exception as exc:
            logger.exception("draftquant: the states of %s are lost", save.request)
            with contextlib.suppress(OSError):  # the reader must not wait forever
                path.with_suffix(FAILED).write_text(
                    f"{type(exc).__name__}: {exc}", encoding="utf-8"
                )


def _group_of_states(kv_cache_config: Any) -> tuple[int, int]:
    """The group of the cache that the layer belongs to, found by its name, and its block size.

    MLA targets: the states are put into the group of the MLA layers, which have equal blocks.
    vLLM's example looks for a group of their own, and refuses targets that have several others.
    """
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    indices = [i for i, group in enumerate(groups) if any(_LAYER in n for n in group.layer_names)]
    if len(indices) != 1:
        raise ValueError(
            "draftquant: expected one group of the KV cache with hidden states, got"
            f" {len(indices)} of {len(groups)}; fix: start the engine with the arguments that"
            " 'draftquant record --print-server-args' prints"
        )
    return indices[0], groups[indices[0]].kv_cache_spec.block_size
