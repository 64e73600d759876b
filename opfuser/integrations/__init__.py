"""Bridges to other libraries, none of which ``import opfuser`` brings in."""
