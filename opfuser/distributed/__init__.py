"""Exchanges among the ranks of a process group, and parameters that are parts of DTensors."""
