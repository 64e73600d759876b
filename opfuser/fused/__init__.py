"""The built-in fusions. The order of ``FUSIONS`` is their precedence."""

from ..fusion import Fusion

FUSIONS: tuple[Fusion, ...] = ()
