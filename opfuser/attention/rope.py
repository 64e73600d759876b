"""Scaled frequencies of rotary position embeddings, by the names of Hugging Face configurations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from .rope_configuration import read_configuration


@dataclass(frozen=True, kw_only=True, repr=False)
class RopeScaling:
    r"""How the frequencies of a rotary embedding differ from ``base ** (-2i / rotary_dim)``.

    Equal by value. With ω that unscaled frequency of pair i, s = ``factor``, and L =
    ``original_max_position_embeddings``, the length that the model was trained for, the types give

    - ``"default"``: ω
    - ``"linear"``: ω / s
    - ``"dynamic"``: ω with the base ``base * (s n / L - (s - 1)) ** (d / (d - 2))``, where d is
      ``rotary_dim``, for a sequence of n > L tokens; for others ω
    - ``"yarn"``: a mix of ω / s and ω by a ramp over the pairs, from those that turn ``beta_slow``
      times in L tokens to those that turn ``beta_fast`` times; ``truncate`` rounds its ends to
      whole pairs
    - ``"llama3"``: ω / s for wavelengths above ``L / low_freq_factor``, ω for those below
      ``L / high_freq_factor``, a mix in between
    - ``"longrope"``: ω / ``long_factor`` for a sequence of more than L tokens, ω /
      ``short_factor`` for others; both have a number for each pair
    - ``"proportional"``: ω / s for the first ``partial_rotary_factor`` of the pairs, 0 for the rest
    - ``"axial"``: for each section ω of a rotary embedding as wide as the section, for positions in
      two or more dimensions
    - ``"custom"``: ``frequencies``, whatever they are

    Cosine and sine are multiplied by :attr:`attention_scaling`; q · k grows with its square.

    Arithmetic has the order of that with which the models were trained: in fp32 the frequencies are
    the same to the last bit as those that ``transformers`` computes on a CPU. On a GPU those of
    "dynamic" beyond L, and all in compiled code, are computed there, with other last bits.

    Sources: linear: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", arXiv 2306.15595; dynamic and yarn: Peng et al., "YaRN", arXiv 2309.00071;
    llama3: "The Llama 3 Herd of Models", arXiv 2407.21783; longrope: Ding et al., "LongRoPE", arXiv
    2402.13753. Names are those of ``rope_parameters`` in transformers 5.

    Args:
        rope_type: the type, as above.
        factor: how many times longer sequences get.
        original_max_position_embeddings: tokens. Configurations with "dynamic" call it
            ``max_position_embeddings``.
        attention_factor: of cosine and sine, with yarn, longrope and custom; None follows from the
            factor, as in the papers, and is 1 for custom.
        beta_fast, beta_slow, truncate: of yarn; None is 32, 1 and True.
        mscale, mscale_all_dim: of yarn: if both are given, the default attention factor is that of
            ``mscale`` divided by that of ``mscale_all_dim``.
        low_freq_factor, high_freq_factor: of llama3.
        short_factor, long_factor: of longrope, which needs ``factor`` or ``attention_factor`` too.
        partial_rotary_factor: of proportional; None is 1.
        frequencies: of custom: radians per position, one for each pair; a sequence, or a tensor
            of that shape and any dtype, whose values are read here and now.

    Raises:
        ArgumentError: the type is unknown, lacks an argument or does not take one; or a number is
            outside of its domain.
        ArgumentTypeError: an argument is not a number, or not a sequence of numbers.
    """

    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: Sequence[float] | None = None
    long_factor: Sequence[float] | None = None
    partial_rotary_factor: float | None = None
    frequencies: Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.rope_type)
        if kind is None:
            near = difflib.get_close_matches(str(self.rope_type), _KINDS, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Types are {', '.join(_KINDS)}"
            _refuse("rope_type must be a known one", f"{self.rope_type!r}", remedy)
        given = {name for name in _NAMES if getattr(self, name) is not None}
        where = f"RopeScaling {self.rope_type}"
        if not given >= kind.required:
            missing = ", ".join(sorted(kind.required - given))
            _refuse(f"{missing} must be given", f"{_list(given)}", where=where)
        if not given <= kind.required | kind.optional:
            unused = given - kind.required - kind.optional
            takes = _list(kind.required | kind.optional)
            _refuse(f"It takes {takes}", _list(unused), "Leave out what it does not take", where)
        for name in sorted(given - {"truncate"}):
            value = getattr(self, name)
            if name in _OF_EACH_PAIR:
                value = tuple(_number(name, n, where) for n in _sequence(name, value, where))
            else:
                value = _number(name, value, where)
            object.__setattr__(self, name, value)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            _refuse("high_freq_factor must be above low_freq_factor", f"{low}, {high}", where=where)
        if self.rope_type == "longrope" and not given & {"factor", "attention_factor"}:
            _refuse("factor or attention_factor must be given", _list(given), where=where)

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in ("rope_type", *_NAMES)}
        arguments = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"RopeScaling({', '.join(arguments)})"

    @classmethod
    def from_hf(cls, config: Any, *, layer_type: str | None = None) -> RopeScaling:
        """The scaling that a configuration describes; base, partial rotation and sections apart.

        :meth:`opfuser.RotaryEmbedding.from_hf` reads those too. Parameters that the type does not
        use are left out, as transformers leaves them out.

        Args:
            config: a configuration of transformers 4 or 5, its dict, or the dict of its
                ``rope_parameters`` or ``rope_scaling`` alone. It is not changed.
            layer_type: such as "full_attention", where types of layers differ.

        Raises:
            ArgumentError: a parameter is unknown, or as for :class:`RopeScaling`; or ``layer_type``
                does not say which of several to take.
        """
        given = read_configuration(config, layer_type).scaling
        for name in given:
            if name not in _NAMES and name != "rope_type":
                near = difflib.get_close_matches(name, _NAMES, 1)
                remedy = f"Did you mean {near[0]!r}?" if near else f"Known are {_list(_NAMES)}"
                _refuse("Rope parameters must be known ones", repr(name), remedy)
        kind = _KINDS.get(given["rope_type"])
        if kind is not None:
            used = kind.required | kind.optional | {"rope_type"}
            given = {name: value for name, value in given.items() if name in used}
        return cls(**given)

    @property
    def attention_scaling(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        factor = self.factor or 1.0
        if factor <= 1 or self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.rope_type == "longrope":
            original = self.original_max_position_embeddings or 0
            return math.sqrt(1 + math.log(factor) / math.log(original))
        if not self.mscale or not self.mscale_all_dim:
            return _attention_of_yarn(factor, 1.0)
        of_all = _attention_of_yarn(factor, self.mscale_all_dim)
        return _attention_of_yarn(factor, self.mscale) / of_all

    def counted_length(self, length: int) -> int | None:
        """The length as far as frequencies depend on it; None for all lengths of training."""
        original = self.original_max_position_embeddings
        if self.rope_type not in ("dynamic", "longrope") or original is None or length <= original:
            return None
        return length if self.rope_type == "dynamic" else original + 1

    def check_pairs(self, pairs: int, sections: tuple[int, ...] | None, where: str) -> None:
        """Raises ArgumentError unless it is for so many pairs, in such sections."""
        for name in _OF_EACH_PAIR:
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != pairs:
                received = f"{len(numbers)} numbers, rotary_dim={2 * pairs}"
                _refuse(f"{name} must have a number for each pair", received, where=where)
        if self.rope_type == "axial" and sections is None:
            _refuse("An axial scaling needs sections", "sections=None", where=where)
        if self.rope_type == "dynamic" and pairs == 1:
            _refuse("A dynamic scaling needs two pairs or more", "rotary_dim=2", where=where)


class Frequencies(NamedTuple):
    """All that the angles of a call depend on besides the positions.

    Attributes:
        base: of the frequencies.
        size: ``rotary_dim``, twice the number of pairs.
        sections: pairs that turn by the same row of positions, or None.
        scaling: or None.
        length: as :meth:`RopeScaling.counted_length` counts it.
    """

    base: float
    size: int
    sections: tuple[int, ...] | None
    scaling: RopeScaling | None
    length: int | None = None

    def of_length(self, length: int) -> Frequencies:
        """Frequencies of a sequence of so many tokens."""
        counted = None if self.scaling is None else self.scaling.counted_length(length)
        return self if counted is None else self._replace(length=counted)

    @property
    def attention_scaling(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.attention_scaling

    def tensor(self, device: torch.device | None, dtype: torch.dtype) -> Tensor:
        """Radians per position, (pairs,)."""
        scaling = self.scaling
        if scaling is None:
            return 1.0 / _powers(self.base, self.size, device, dtype)
        if scaling.rope_type == "axial":
            sizes = [2 * section for section in self.sections or ()]
            return 1.0 / torch.cat([_powers(self.base, size, device, dtype) for size in sizes])
        powers = _powers(_stretched_base(self), self.size, device, dtype)
        return _KINDS[scaling.rope_type].tensor(scaling, powers, self)

    def tensor_of_host(self, like: Tensor) -> Tensor:
        """Frequencies that a CPU computes, on the device and in the dtype of ``like``.

        Powers of a GPU differ in the last bits, which far positions multiply. Where every token of
        a decoding step has frequencies of its own they are the GPU's: this is 60 launches.
        """
        if self.scaling is not None and self.scaling.rope_type == "dynamic" and self.length:
            return self.tensor(like.device, like.dtype)
        return _filled(self.tensor(torch.device("cpu"), like.dtype).tolist(), like)


def _powers(base: Any, size: int, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Positions per radian, without any scaling."""
    exponents = torch.arange(0, size, 2, device=device, dtype=dtype)
    powers: Tensor = base ** (exponents / size)
    return powers


def _stretched_base(f: Frequencies) -> float:
    if f.scaling is None or f.scaling.rope_type != "dynamic" or f.length is None:
        return f.base
    s, original = f.scaling.factor or 1.0, f.scaling.original_max_position_embeddings or 1
    stretch: float = (s * f.length / original - (s - 1)) ** (f.size / (f.size - 2))
    return f.base * stretch


def _linear(scaling: RopeScaling, powers: Tensor, f: Frequencies) -> Tensor:
    return 1.0 / powers / (scaling.factor or 1.0)


def _yarn(scaling: RopeScaling, powers: Tensor, f: Frequencies) -> Tensor:
    original = scaling.original_max_position_embeddings or 1

    def pair_of(turns: float) -> float:
        """The pair, counted continuously, that turns so often in the original length."""
        return f.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(f.base))

    first, last = pair_of(scaling.beta_fast or 32), pair_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, f.size - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(f.size // 2, device=powers.device, dtype=powers.dtype)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / ((scaling.factor or 1.0) * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(scaling: RopeScaling, powers: Tensor, f: Frequencies) -> Tensor:
    original, factor = scaling.original_max_position_embeddings or 1, scaling.factor or 1.0
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 1.0
    plain = 1.0 / powers
    wavelengths = 2 * math.pi / plain
    kept = (original / wavelengths - low) / (high - low)
    mixed = (1 - kept) * plain / factor + kept * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, mixed)
    return torch.where(wavelengths < original / high, plain, scaled)


def _longrope(scaling: RopeScaling, powers: Tensor, f: Frequencies) -> Tensor:
    factors = scaling.short_factor if f.length is None else scaling.long_factor
    return 1.0 / (_filled(factors or (), powers) * powers)


def _proportional(scaling: RopeScaling, powers: Tensor, f: Frequencies) -> Tensor:
    part = scaling.partial_rotary_factor
    turning = f.size // 2 if part is None else int(part * f.size // 2)
    plain = 1.0 / powers / (scaling.factor or 1.0)
    return torch.cat([plain[:turning], torch.zeros_like(plain[turning:])])


def _filled(numbers: Iterable[float], like: Tensor) -> Tensor:
    # Fills, where a copy from the host would wait for the device and could not be captured.
    fills = [torch.full((), n, device=like.device, dtype=like.dtype) for n in numbers]
    return torch.stack(fills)


class _Kind(NamedTuple):
    """A type: the arguments that it must and may have, and its frequencies."""

    required: frozenset[str]
    optional: frozenset[str]
    tensor: Callable[[RopeScaling, Tensor, Frequencies], Tensor]


def _kind(
    tensor: Callable[[RopeScaling, Tensor, Frequencies], Tensor],
    required: str = "",
    optional: str = "",
) -> _Kind:
    return _Kind(frozenset(required.split()), frozenset(optional.split()), tensor)


_ORIGINAL = "original_max_position_embeddings"
_KINDS: dict[str, _Kind] = {
    "default": _kind(lambda scaling, powers, f: 1.0 / powers),
    "linear": _kind(_linear, "factor"),
    # Of its base, as _stretched_base says.
    "dynamic": _kind(lambda scaling, powers, f: 1.0 / powers, f"factor {_ORIGINAL}"),
    "yarn": _kind(
        _yarn,
        f"factor {_ORIGINAL}",
        "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
    "llama3": _kind(_llama3, f"factor {_ORIGINAL} low_freq_factor high_freq_factor"),
    "longrope": _kind(
        _longrope, f"short_factor long_factor {_ORIGINAL}", "factor attention_factor"
    ),
    "proportional": _kind(_proportional, "", "factor partial_rotary_factor"),
    # Section by section, in Frequencies.tensor.
    "axial": _kind(lambda scaling, powers, f: 1.0 / powers),
    "custom": _kind(
        lambda scaling, powers, f: _filled(cast("tuple[float, ...]", scaling.frequencies), powers),
        "frequencies",
        "attention_factor",
    ),
}
_OF_EACH_PAIR = ("short_factor", "long_factor", "frequencies")
_NAMES = [field.name for field in fields(RopeScaling) if field.name != "rope_type"]


def _attention_of_yarn(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _refuse(
    invariant: str, received: str, remedy: str = "", where: str = "RopeScaling"
) -> NoReturn:
    raise ArgumentError.explained(invariant, where=where, received=received, remedy=remedy)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _sequence(name: str, value: Any, where: str) -> Iterable[Any]:
    """Entries of a sequence or tensor, which must be on a device that has values."""
    if isinstance(value, Tensor) and not value.is_meta and value.dim() == 1:
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, (str, Tensor)):
        return value
    received = repr(value)
    if isinstance(value, Tensor):
        received = f"a tensor {tuple(value.shape)} on {value.device}"
    raise ArgumentTypeError.explained(
        f"{name} must be a sequence of numbers", where=where, received=received
    )


def _number(name: str, value: Any, where: str) -> float:
    """``value`` as Python's int or float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        received = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ArgumentTypeError.explained(
            f"{name} must be a number", where=where, received=received
        )
    number = int(value) if isinstance(value, Integral) else float(value)
    domain, inside = "finite and positive", 0 < number < math.inf
    if name == "frequencies":
        domain, inside = "finite", math.isfinite(number)
    elif name in ("mscale", "mscale_all_dim"):
        domain, inside = "finite and not negative", 0 <= number < math.inf
    elif name == "partial_rotary_factor":
        domain, inside = "positive and at most 1", 0 < number <= 1
    elif name == _ORIGINAL:
        domain, inside = "an integer above 1", isinstance(number, int) and number > 1
    if not inside:
        _refuse(f"{name} must be {domain}", repr(number), where=where)
    return number
