"""Why a module is kept as it is."""

from __future__ import annotations


class KeptError(Exception):
    """The reason why a module is kept: an operation that is not explained, and where it is.

    It is an answer about the module, not a mistake of the caller, and never leaves the library.

    Attributes:
        reason: a predicate of the module, such as "computes clamp in 'mlp'".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotNowError(KeptError):
    """The reason why a module cannot be read in this call, though it may be in a later one."""
