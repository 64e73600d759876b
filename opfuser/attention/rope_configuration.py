"""What configurations of Hugging Face models say about rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ArgumentError

# What tells a whole configuration, as saved in JSON, from its parameters of the rotary embedding.
_OF_A_MODEL = ("rope_parameters", "rope_scaling", "model_type", "hidden_size")
# Names that models gave to the type of their own.
_TYPE_ALIASES = {"mrope": "default", "su": "longrope"}
_STRETCHED = ("llama3", "yarn", "longrope")


class RotaryConfiguration(NamedTuple):
    """The rotary embedding of a model, or of one type of its layers.

    Attributes:
        scaling: what remains of the parameters: the arguments of a RopeScaling, and names that no
            RopeScaling has.
        base: ``rope_theta``.
        partial: the part of a head that turns, where ``rotary_dim`` is None.
        rotary_dim: entries of a head that turn, or None.
        sections: ``mrope_section``, or None.
        interleave_sections: ``mrope_interleaved``.
    """

    scaling: dict[str, Any]
    base: float
    partial: float
    rotary_dim: int | None
    sections: tuple[int, ...] | None
    interleave_sections: bool


def field_of(config: Any, *names: str) -> Any:
    """The first of these fields that a configuration, or a dict, has; None if it has none."""
    for name in names:
        own = isinstance(config, Mapping)
        value = config.get(name) if own else getattr(config, name, None)
        if value is not None:
            return value
    return None


def read_configuration(
    config: Any, layer_type: str | None, default_base: float = 10000.0
) -> RotaryConfiguration:
    """What ``config`` says, which it leaves as it is.

    Args:
        config: a configuration, its dict, or the dict of its ``rope_parameters``
            (``rope_scaling``).
        layer_type: of the layers, where their types have parameters of their own.
        default_base: where it has none.

    Raises:
        ArgumentError: ``layer_type`` has no parameters, or is None where they differ.
    """
    if isinstance(config, Mapping) and not any(name in config for name in _OF_A_MODEL):
        config = {"rope_parameters": config}
    # Where there are parameters, transformers does not read it.
    size = None if field_of(config, "rope_parameters") else field_of(config, "rotary_dim")
    given = field_of(config, "rope_parameters", "rope_scaling") or {}
    # Of types of layers the length of training stands with the other parameters alone.
    of_types = any(isinstance(value, Mapping) for value in given.values())
    original = None if of_types else field_of(config, "original_max_position_embeddings")
    given = _of_layers(config, given, layer_type)
    given = {name: value for name, value in given.items() if value is not None}
    kind, base = given.pop("type", "default"), given.pop("rope_theta", None)
    kind = given.pop("rope_type", kind)
    kind = _TYPE_ALIASES.get(kind, kind)
    if base is None:
        base = field_of(config, "rope_theta", "rotary_emb_base") or default_base
    if kind != "proportional":
        partial = given.pop("partial_rotary_factor", None)
        partial = partial or field_of(config, "partial_rotary_factor", "rotary_pct") or 1.0
    else:
        partial = 1.0  # the frequencies of the others are zero
    sections = given.pop("mrope_section", None)
    interleave = bool(given.pop("mrope_interleaved", False))
    longest = given.pop("max_position_embeddings", None)
    longest = field_of(config, "max_position_embeddings") or longest
    scaling = {"rope_type": kind, **given, **_lengths(original, kind, given, longest)}
    sections = None if sections is None else tuple(sections)
    return RotaryConfiguration(scaling, base, partial, size, sections, interleave)


def _lengths(
    original: int | None, kind: str, given: Mapping[str, Any], longest: int | None
) -> dict[str, Any]:
    """The length of training and the factor, where the configuration holds them elsewhere."""
    if kind == "dynamic":
        return {} if longest is None else {"original_max_position_embeddings": longest}
    if kind not in _STRETCHED:
        return {}
    original = original or given.get("original_max_position_embeddings", longest)
    lengths = {} if original is None else {"original_max_position_embeddings": original}
    if kind != "llama3" and "factor" not in given and original and longest:
        lengths["factor"] = longest / original
    return lengths


def _of_layers(config: Any, given: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The parameters of one type of layers; all of them where types do not differ."""
    local = field_of(config, "rope_local_base_freq")
    if any(isinstance(value, Mapping) for value in given.values()):
        of_types: Mapping[str, Any] = given
    elif local is not None:  # Gemma 3 before transformers 5
        of_types = {"full_attention": given, "sliding_attention": {"rope_theta": local}}
    else:
        return given
    chosen = None if layer_type is None else of_types.get(layer_type)
    if isinstance(chosen, Mapping):
        return chosen
    raise ArgumentError.explained(
        "The types of layers have rotary embeddings of their own",
        where="from_hf",
        received=f"layer_type={layer_type!r}",
        remedy=f"Pass layer_type: one of {', '.join(map(repr, of_types))}",
    )
