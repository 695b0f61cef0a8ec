"""AutoAWQ, version `gemm`: INT4 groups with the constant zero point 8 (symmetric)."""

from .reader import ObjectReader
from .scheme import DeclaredScheme


def read(keys: ObjectReader) -> DeclaredScheme:
    """Read a `quantization_config` with quant_method "awq".

    Raises:
        VerifyError: it says something that is not understood.
    """
    keys.choice("bits", 4)
    keys.choice("zero_point", True)
    keys.choice("version", "gemm", "GEMM")
    size = keys.choice("group_size", 32, 64, 128)
    return DeclaredScheme(
        layout="awq",
        weight_dtype="int4",
        granularity="group",
        group_size=size,
        pack_method="reorder",
        activations="none",
        excludes=keys.strings("modules_to_not_convert"),
    )
