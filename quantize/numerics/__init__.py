"""From a weight to quantized values and scales, and packing them, in torch. Knows no names."""
