"""The comparison of a module with what was built of it finds small differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.reading.construction import build

from .recomputed import Example, InDouble, assert_equal_steps, read_of
from .tiny import calls_of, model_of

BIAS = "attention.self.key.bias"


@pytest.fixture(scope="module")
def example() -> Example:
    """A layer whose softmax is in fp32, so that its keys' bias has a gradient of noise alone."""
    calls = calls_of(model_of("markuplm").eval())
    return next(call.example for call in calls if call.path == "encoder.layer.0")


def test_noise_of_fp32_is_no_difference(example: Example) -> None:
    bias = example.module.get_parameter(BIAS)

    def gradient() -> Tensor:
        (dx,) = torch.autograd.grad(example.module(*example.args, **example.kwargs)[0].sum(), bias)
        return dx.abs().max()

    assert gradient() > 1e-9
    with InDouble():
        assert gradient() < 1e-13
    assert_equal_steps(example, build(read_of(example), example.module))


def bias_of(example: Example) -> Tensor:
    total = example.module.get_parameter(BIAS).sum()
    return total - total.detach()


WRONG: dict[str, tuple[Callable[[Example, Tensor], Tensor], str]] = {
    "a value": (lambda example, y: y * (1 + 1e-9), "output 0"),
    "a gradient that is 0": (lambda example, y: y + 1e-9 * bias_of(example), "gradient 4 of"),
    "another gradient": (
        lambda example, y: y + 1e-9 * (example.args[0] - example.args[0].detach()),
        "gradient 0 of",
    ),
    "no gradient": (lambda example, y: y.detach(), "of output 0"),
    "a dtype": (lambda example, y: y.float(), "output 0 has .*float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_small_difference_is_found(name: str, example: Example) -> None:
    wrong, where = WRONG[name]
    built: Any = build(read_of(example), example.module)
    with pytest.raises(AssertionError, match=where):
        assert_equal_steps(example, lambda *given: wrong(example, built(*given)))  # type: ignore[arg-type]
    assert torch.get_default_dtype() == torch.float32
