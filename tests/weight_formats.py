"""The formats of weights and inputs that many tests quantize to."""

from dataclasses import replace

from draftquant.recipes import ActivationFormat, WeightFormat

INT4 = WeightFormat(dtype="int4", granularity="channel", symmetric=True)
INT4_GROUPS = WeightFormat(dtype="int4", granularity="group", group_size=32, symmetric=True)
INT4_F16 = replace(INT4_GROUPS, group_size=128, scale_dtype="float16")
TWO_STAGES = replace(INT4, first_stage="fp8_e4m3")
FP8_TENSOR = WeightFormat(dtype="fp8_e4m3", granularity="tensor", symmetric=True)
FP8_CHANNEL = WeightFormat(dtype="fp8_e4m3", granularity="channel", symmetric=True)
FP8_BLOCK = WeightFormat(dtype="fp8_e4m3", granularity="block", group_size=128, symmetric=True)
NVFP4 = WeightFormat(dtype="nvfp4", granularity="group", group_size=16, symmetric=True)
MXFP4 = WeightFormat(dtype="mxfp4", granularity="group", group_size=32, symmetric=True)

PER_TOKEN = ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True)
PER_GROUP = ActivationFormat(dtype="fp8_e4m3", granularity="group", dynamic=True)
STATIC = ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False)
NVFP4_INPUTS = ActivationFormat(dtype="nvfp4", granularity="group", dynamic=True)
