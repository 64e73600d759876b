"""How fusion functions are called, and what they may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opfuser as te_ops
from opfuser import FusibleOperation
from tests.contract.tensors import rand


@pytest.mark.parametrize("keep", ["all but the last", "twice", "reversed"])
def test_a_function_that_loses_operations_is_named(keep: str) -> None:
    def broken(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        return {"all but the last": ops[:-1], "twice": ops * 2, "reversed": ops[::-1]}[keep]

    model = te_ops.Sequential(te_ops.SiLU(), te_ops.GELU())
    with (
        te_ops.register_forward_fusion(broken, name="broken-one"),
        pytest.raises(RuntimeError, match="broken-one"),
    ):
        model(rand(3, 8))


def test_functions_get_the_keywords_that_they_accept() -> None:
    seen: dict[str, Any] = {}

    def nothing(ops: Any) -> Any:
        seen["nothing"] = {}
        return ops

    def recipe_alone(ops: Any, *, recipe: Any) -> Any:
        seen["recipe_alone"] = {"recipe": recipe}
        return ops

    def env_alone(ops: Any, *, env: Any) -> Any:
        seen["env_alone"] = {"env": env}
        return ops

    def everything(ops: Any, **unused: Any) -> Any:
        seen["everything"] = unused
        return ops

    functions = (nothing, recipe_alone, env_alone, everything)
    handles = [te_ops.register_forward_fusion(f) for f in functions]
    te_ops.Sequential(te_ops.SiLU())(rand(3, 8))
    for handle in handles:
        handle.remove()
    assert set(seen) == {f.__name__ for f in functions}
    assert seen["recipe_alone"] == {"recipe": None}
    assert seen["everything"]["recipe"] is None
    env = seen["env_alone"]["env"]
    assert (env.device.type, env.dtype, env.recipe) == ("cpu", torch.float64, None)
    assert (env.grad_enabled, env.needs_backward) == (True, (False,))
