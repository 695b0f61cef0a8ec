"""A target's cache for a batch whose rows come and go; imported where a target runs.

All rows end in the same column, so a run of the target on one token of each adds one column. A row
shorter than the longest has remains of other rows in front, which the attention mask hides. A new
row replaces one that has ended, and nothing else moves. Recurrent and convolution
states have no columns: they are put into their row unchanged.
"""

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_STATES = ("conv_states", "recurrent_states")


def unheld_layer(cache: DynamicCache) -> str | None:
    """The kind of the first layer that cannot be held in slots, in a target's cache."""
    kinds = [type(layer) for layer in cache.layers]
    if not any(map(_has_columns, kinds)):
        return kinds[0].__name__
    return next(
        (kind.__name__ for kind in kinds if not (_has_columns(kind) or _recurs(kind))), None
    )


def takes_padding(cache: DynamicCache) -> bool:
    """Whether every layer can be read past padding: recurrent states would include it."""
    return all(_has_columns(type(layer)) for layer in cache.layers)


def held_bytes(cache: DynamicCache) -> tuple[int, int]:
    """Bytes that a cache holds per token, and per row of any length."""
    columns = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    states = (layer for layer in cache.layers if _recurs(type(layer)))
    return (
        sum(column.nbytes for column in columns if isinstance(column, Tensor)),
        sum(state.nbytes for layer in states for _, _, state in _states_of(layer)),
    )


def _has_columns(kind: type) -> bool:
    return kind in (DynamicLayer, DynamicSlidingWindowLayer)


def _recurs(kind: type) -> bool:
    # By name: transformers before 5.10 have no such layer in this module. ("conv" is the same.)
    return kind.__name__ == "LinearAttentionLayer"


class SlotCache:
    """A cache of a number of rows, to be given to the target as `cache`."""

    def __init__(self, like: DynamicCache, num_rows: int) -> None:
        self.cache: Any = DynamicCache()
        self._columns: list[_Columns] = []
        self._states: list[Any] = []
        self.one_mask = DynamicSlidingWindowLayer not in map(type, like.layers)
        self.cache.layers = [self._held(layer, num_rows) for layer in like.layers]

    @property
    def num_columns(self) -> int:
        """Columns that the target sees; it adds those of its new tokens."""
        return self._columns[0].end - self._columns[0].begin

    def restart(self, num_columns: int) -> None:
        """Forget all rows."""
        for held in self._columns:
            held.restart(num_columns)

    def admit(self, read: DynamicCache, rows: Tensor, padding: Tensor | None) -> None:
        """Put b prompts that the target has read, ending in the last column, into rows [b].

        `padding`: [b, columns] bool, columns in front of a prompt that are not part of it.
        """
        with_columns, with_states = iter(self._columns), iter(self._states)
        for layer in read.layers:
            if _has_columns(type(layer)):
                next(with_columns).admit(layer, rows, padding)
            else:
                kept_layer = next(with_states)
                for name, i, state in _states_of(layer):
                    getattr(kept_layer, name)[i][rows] = state

    def trim(self, num_columns: int) -> None:
        """Show only the last columns, as no row is longer."""
        for held in self._columns:
            held.trim(num_columns)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, in this order, and free the others' memory."""
        for held in self._columns:
            held.keep(rows)
        for layer in self._states:
            for name, i, state in _states_of(layer):
                getattr(layer, name)[i] = state.index_select(0, rows)

    def _held(self, layer: Any, num_rows: int) -> Any:
        if _has_columns(type(layer)):
            window = getattr(layer, "sliding_window", None)
            held = _Columns(layer, num_rows) if window is None else _LastColumns(layer, num_rows)
            self._columns.append(held)
            return held
        copied = copy.copy(layer)
        for name in _STATES:
            setattr(copied, name, dict(getattr(layer, name)))
        for name, i, state in _states_of(layer):
            getattr(copied, name)[i] = state.new_zeros((num_rows, *state.shape[1:]))
        self._states.append(copied)
        return copied


def _states_of(layer: Any) -> list[tuple[str, int, Tensor]]:
    return [
        (name, i, state)
        for name in _STATES
        for i, state in getattr(layer, name).items()
        if state is not None
    ]


class _Columns(DynamicLayer):  # type: ignore[no-untyped-call] # its __init_subclass__
    """Keys and values [R, heads, columns, width], of which those from begin to end are shown."""

    def __init__(self, like: Any, num_rows: int) -> None:
        DynamicLayer.__init__(self)  # type: ignore[no-untyped-call]
        self.dtype, self.device = like.keys.dtype, like.keys.device
        self.is_initialized = True
        self.begin = self.end = 0
        self._buffers: tuple[Tensor, Tensor] = (
            _empty(like.keys, num_rows),
            _empty(like.values, num_rows),
        )
        self._show()

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add columns to all rows, as the target's attention asks."""
        added = key_states.shape[-2]
        self._reserve(added)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.end : self.end + added] = states
        self.end += added
        self._show()
        return self.keys, self.values

    def restart(self, num_columns: int) -> None:
        """Hold as many columns of zeros: hidden columns are multiplied by 0 and must be finite."""
        keys, values = self._buffers
        self._buffers = (_zeros(keys, num_columns), _zeros(values, num_columns))
        self.begin, self.end = 0, num_columns
        self._show()

    def admit(self, layer: Any, rows: Tensor, padding: Tensor | None) -> None:
        for buffer, states in zip(self._buffers, (layer.keys, layer.values), strict=True):
            count = states.shape[-2]
            if padding is not None:  # a kernel may have turned it into NaN
                states = states.masked_fill(padding[:, None, -count:, None], 0)
            buffer[rows, :, self.end - count : self.end] = states

    def trim(self, num_columns: int) -> None:
        self.begin = self.end - num_columns
        self._show()

    def keep(self, rows: Tensor) -> None:
        used = slice(self.begin, self.end)
        keys, values = (buffer[:, :, used].index_select(0, rows) for buffer in self._buffers)
        self._buffers = (keys, values)
        self.begin, self.end = 0, self.end - self.begin
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, self.begin : self.end] for buffer in self._buffers)

    def _reserve(self, added: int) -> None:
        """Move the shown columns to the front of larger buffers where there is no room."""
        if self.end + added <= self._buffers[0].shape[2]:
            return
        used = self.end - self.begin
        room = used + added + spare_columns(used)
        keys, values = (
            _moved(buffer[:, :, self.begin : self.end], room) for buffer in self._buffers
        )
        self._buffers = (keys, values)
        self.begin, self.end = 0, used


class _LastColumns(_Columns, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The same for a layer whose tokens see only the last columns; all columns are held."""

    def __init__(self, like: Any, num_rows: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, like.sliding_window)
        _Columns.__init__(self, like, num_rows)

    def _show(self) -> None:
        _Columns._show(self)
        self.cumulative_length = self.end - self.begin

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add columns, and return those that the first new token may see, and the new ones."""
        keys, values = _Columns.update(self, key_states, value_states)
        seen = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -seen:], values[:, :, -seen:]


def spare_columns(used: int) -> int:
    """Spare columns beyond those in use: few copies, and not much more memory."""
    return used // 4 + 64


def _empty(like: Tensor, num_rows: int) -> Tensor:
    return like.new_empty((num_rows, like.shape[1], 0, like.shape[3]))


def _zeros(buffer: Tensor, num_columns: int) -> Tensor:
    rows, heads, _, width = buffer.shape
    return buffer.new_zeros((rows, heads, num_columns, width))


def _moved(shown: Tensor, room: int) -> Tensor:
    rows, heads, used, width = shown.shape
    larger = shown.new_empty((rows, heads, room, width))
    larger[:, :, :used] = shown
    return larger
