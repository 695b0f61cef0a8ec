"""Codes, zero points and groups of inputs that lie otherwise than the rows of the weight."""

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import Floats, read_integers, read_whole, unpack_int4_columns
from .layouts import DeclaredScheme
from .layouts.scheme import NIBBLES_PER_WORD, Zeros
from .packed_integers import WORD_BITS, unpacked

GROUPS_OF_INPUTS = "g_idx"
_FIX = "quantize the draft again"


class Columns:
    """Codes of which a row is an input, or some inputs: read whole, decoded by output.

    Args:
        tensor: with the codes, words of 32 bits.

    Attributes:
        stored: all bytes. out_features: rows of the weight.
    """

    def __init__(self, checkpoint: Checkpoint, tensor: TensorInfo, scheme: DeclaredScheme) -> None:
        self._scheme = scheme
        self.stored = read_whole(checkpoint, tensor)
        self._words = self.stored.view(np.int32).reshape(tensor.shape)
        self._along_inputs = scheme.layout.codes_along_inputs
        per_word = 1 if self._along_inputs else NIBBLES_PER_WORD
        self.out_features = tensor.shape[1] * per_word

    def codes(self, rows: range) -> Floats:
        """[rows, inputs and padding] float32, counted from the middle of their range."""
        scheme = self._scheme
        if self._along_inputs:
            bits, words = scheme.number.bits, self._words.view(np.uint32)
            count = len(words) * WORD_BITS // bits
            numbers = unpacked(words[:, rows.start : rows.stop], bits, count)
            return _from_the_middle(numbers, bits)
        first, last = rows.start // NIBBLES_PER_WORD, -(-rows.stop // NIBBLES_PER_WORD)
        method, offset = str(scheme.pack_method), scheme.layout.nibble_offset
        columns = unpack_int4_columns(self._words[:, first:last], method, offset=offset)
        start = rows.start - first * NIBBLES_PER_WORD
        return columns[start : start + len(rows)]


def zero_points(
    checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, out_features: int
) -> Floats | None:
    """What codes count from, relative to the middle of their range; None where it is the middle.

    Returns:
        [out_features, groups] float32.

    Raises:
        CheckpointError: they are others than those of the symmetric values that are declared, or
            tools read them in two ways.
    """
    where = scheme.layout.zeros(scheme)
    if where is None:
        return None
    tensor = checkpoint.tensors[f"{module}.{where.suffix}"]
    words = read_whole(checkpoint, tensor).view(np.uint32).reshape(tensor.shape)
    by_output = np.ascontiguousarray(words if where.outputs_first else words.T)
    if scheme.pack_method == "reorder":
        found = unpack_int4_columns(by_output.T.view(np.int32), "reorder", offset=8)
    else:
        bits = scheme.number.bits
        numbers = unpacked(by_output, bits, out_features)
        _check_not_ambiguous(checkpoint, tensor, where, numbers, bits)
        found = _from_the_middle(numbers.T, bits) + np.float32(where.plus)
    found = found[:out_features]
    if not found.any():
        return None
    if not scheme.asymmetric and scheme.layout.declares_symmetry:
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: symmetric values are declared, whose zero point is"
            f" {2 ** (scheme.number.bits - 1)}, got others",
            fix="declare them as they are (sym: false, or checkpoint_format), or quantize again",
        )
    return found


def _check_not_ambiguous(
    checkpoint: Checkpoint,
    tensor: TensorInfo,
    where: Zeros,
    numbers: npt.NDArray[np.uint8],
    bits: int,
) -> None:
    """A stored zero point to which no 1 can be added: what comes of it differs from tool to tool.

    GPTQModel adds to whole words, so that it becomes 0 and its neighbour is one more; kernels add
    to each number, so that it becomes 2^bits.
    """
    count = int(np.count_nonzero(numbers == 2**bits - 1)) if where.plus else 0
    if count:
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: {count} zero point(s) are stored as {2**bits - 1}, which in this"
            f" format GPTQModel reads as 0, and kernels as {2**bits}",
            fix='save the draft with GPTQModel\'s format "gptq_v2"',
        )


def input_groups(
    checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, in_features: int
) -> npt.NDArray[np.int64] | None:
    """The group of each input, [in_features]; None where groups are neighbours, in order.

    Raises:
        CheckpointError: they are no groups of the declared size, or out of order where nothing
            declares it.
    """
    tensor = checkpoint.tensors.get(f"{module}.{GROUPS_OF_INPUTS}")
    if tensor is None or GROUPS_OF_INPUTS not in scheme.layout.companions:
        return None
    found = read_integers(checkpoint, tensor)
    usual = np.arange(in_features) // (scheme.group_size or in_features)
    if np.array_equal(found, usual):
        return None
    if not scheme.ordered:
        what = "groups of neighbours are declared (desc_act: false), got others"
        fix = "declare desc_act: true, which engines look at, or quantize again"
        raise CheckpointError(checkpoint.folder, f"{tensor.name}: {what}", fix=fix)
    if found.min() < 0 or found.max() > usual[-1]:
        what = f"expected groups 0 to {usual[-1]}, got {found.min()} to {found.max()}"
        raise CheckpointError(checkpoint.folder, f"{tensor.name}: {what}", fix=_FIX)
    counts = np.bincount(found), np.bincount(usual)
    if not np.array_equal(*counts):
        group = int((counts[0] != counts[1]).argmax()) if len(counts[0]) == len(counts[1]) else 0
        what = f"expected {counts[1][group]} inputs in group {group}, got {counts[0][group]}"
        raise CheckpointError(checkpoint.folder, f"{tensor.name}: {what}", fix=_FIX)
    return found


def _from_the_middle(numbers: npt.NDArray[np.uint8], bits: int) -> Floats:
    """[columns, rows] -> [rows, columns] float32, two's complement's range."""
    counted = np.ascontiguousarray(numbers.T).astype(np.float32)
    return np.subtract(counted, np.float32(2 ** (bits - 1)), out=counted)
