"""Triton functions. Imported at the first launch only."""
