"""What plans of a model say, for people and for other programs."""

from __future__ import annotations
