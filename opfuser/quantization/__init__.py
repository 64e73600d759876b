"""Quantized compute: where it applies, the scales that it keeps, and tensors on their way to it."""
