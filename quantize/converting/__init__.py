"""Writing existing quantized values in another layout or storage dtype."""
