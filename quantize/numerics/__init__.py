"""From a weight to codes and scales, and packing them, in torch. Knows tensors, not names."""
