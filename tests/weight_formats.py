"""The formats of weights that many tests quantize to."""

from draftquant.recipes import WeightFormat

INT4 = WeightFormat(dtype="int4", granularity="channel", symmetric=True)
INT4_GROUPS = WeightFormat(dtype="int4", granularity="group", group_size=32, symmetric=True)
TWO_STAGES = WeightFormat(
    dtype="int4", granularity="channel", symmetric=True, first_stage="fp8_e4m3"
)
FP8_TENSOR = WeightFormat(dtype="fp8_e4m3", granularity="tensor", symmetric=True)
FP8_CHANNEL = WeightFormat(dtype="fp8_e4m3", granularity="channel", symmetric=True)
NVFP4 = WeightFormat(dtype="nvfp4", granularity="group", group_size=16, symmetric=True)
MXFP4 = WeightFormat(dtype="mxfp4", granularity="group", group_size=32, symmetric=True)
