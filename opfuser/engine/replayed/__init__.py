"""Calls that are replayed as CUDA graphs."""
