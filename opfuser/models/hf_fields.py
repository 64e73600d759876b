"""Fields of configurations of Hugging Face's transformers that several families share."""

from __future__ import annotations

from typing import Any

from opfuser import RopeScaling
from opfuser.attention.rope_configuration import read_configuration
from opfuser.errors import NotSupportedError


def rope(config: Any, base: float) -> dict[str, Any]:
    """Base and scaling of the frequencies, in layers without a window if they differ."""
    # Types of layers with frequencies of their own are those of Gemma 3 alone.
    kind = "full_attention" if config.model_type == "gemma3_text" else None
    found = read_configuration(config, kind, base)
    if found.partial != 1 or found.rotary_dim is not None or found.sections is not None:
        raise NotSupportedError.explained(
            "A decoder here rotates whole heads by one position for each token",
            where=f"from_hf of a {config.model_type}",
            received=f"partial_rotary_factor={found.partial}, rotary_dim={found.rotary_dim}, "
            f"mrope_section={found.sections}",
        )
    scaling = RopeScaling.from_hf(config, layer_type=kind)
    if kind is not None and scaling.truncate is False:  # where transformers 5 does not look for it
        raise NotSupportedError.explained(
            "Frequencies of types of layers are truncated",
            where=f"from_hf of a {config.model_type}",
            received="truncate=False",
        )
    plain = scaling.rope_type == "default"
    return {"rope_base": found.base, "rope_scaling": None if plain else scaling}


def one_window(config: Any) -> int | None:
    """The window of all layers, whatever their types are."""
    window = config.sliding_window
    return None if window is None else _window(config)


def _window(config: Any) -> int:
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window < 1:
        raise unknown(config, "A window must be one position or more", "sliding_window")
    return window


def windows(config: Any) -> int | tuple[int | None, ...] | None:
    """One window for all layers, or one for each."""
    kinds, layers = getattr(config, "layer_types", None), config.num_hidden_layers
    if kinds is None and not getattr(config, "sliding_window", None):
        return None
    known = {"sliding_attention", "full_attention"}
    if kinds is None or len(kinds) < layers or not {*kinds} <= known:
        raise unknown(
            config,
            "layer_types says of each layer 'sliding_attention' or 'full_attention'",
            *("layer_types", "sliding_window"),
            remedy="Set config.layer_types, which transformers before 4.53 leaves out",
        )
    each = tuple(_window(config) if n == "sliding_attention" else None for n in kinds[:layers])
    return each if len({*each}) > 1 else each[0]


def named(names: dict[str, str], config: Any, attribute: str) -> str:
    """Our name of the activation that this attribute names."""
    value = getattr(config, attribute, None)
    if not isinstance(value, str) or value not in names:
        raise unknown(config, f"{attribute} must be one of {', '.join(names)}", attribute)
    return names[value]


def refuse(config: Any, *attributes: str) -> None:
    """Raises NotSupportedError if one of these is set."""
    for attribute in attributes:
        if getattr(config, attribute, None):
            raise unknown(config, f"A model here is one without {attribute}", attribute)


def refuse_bidirectional(config: Any) -> None:
    """Raises NotSupportedError unless each position attends to earlier ones alone."""
    if not getattr(config, "is_causal", True):
        raise unknown(config, "A decoder here attends to earlier positions alone", "is_causal")


def unknown(config: Any, invariant: str, *attributes: str, remedy: str = "") -> NotSupportedError:
    """The error about the values of these attributes."""
    received = ", ".join(f"{name}={getattr(config, name, None)!r}" for name in attributes)
    where = f"from_hf of a {config.model_type}"
    return NotSupportedError.explained(invariant, where=where, received=received, remedy=remedy)
