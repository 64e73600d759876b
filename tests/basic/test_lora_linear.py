"""LoRALinear: values and gradients of frozen weights with trained products of low rank beside them.

What all operations do alike: test_all.py and test_attributes.py. Fusions:
tests/fused/test_merged_linear.py.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opfuser
from opfuser import LoRAAdapter, LoRALinear, Sequential
from opfuser.errors import ArgumentError, InputError
from opfuser.recipe import Float8CurrentScaling
from opfuser.testing import check_op
from tests.basic.values import DTYPES, fill, saved_by

BF16 = torch.bfloat16

TWO = (LoRAAdapter("one", 3, 0.5, output=1), LoRAAdapter("two", 2, -2.0, output=1))
MADE: dict[str, dict[str, Any]] = {
    "one": {"out_features": 5, "adapters": (LoRAAdapter(rank=3, scale=2.0),)},
    "two of one output": {"out_features": (4, 5), "adapters": TWO},
    "inactive": {
        "out_features": 5,
        "adapters": (LoRAAdapter(rank=2), LoRAAdapter("other", 3, active=False)),
    },
    "none": {"out_features": (4, 5), "adapters": (), "bias": False},
    "of three": {
        "out_features": (4, 2, 3),
        "adapters": (LoRAAdapter("q", 2), LoRAAdapter("v", 3, 0.25, output=2)),
        "bias": (True, False, True),
    },
    "transposed": {"out_features": 5, "adapters": (LoRAAdapter(),), "weight_transposed": True},
}


def made(name: str, **others: Any) -> LoRALinear:
    return fill(LoRALinear(7, **{**MADE[name], **others}))


@pytest.mark.parametrize("name", MADE)
def test_as_exact_as_torch(name: str, device: torch.device) -> None:
    """Its reference; with adapters of the weights' dtype, and of another one."""
    for shape in [(5, 7), (7,), (2, 3, 4, 7)]:
        x = torch.randn(shape, device=device)
        check_op(made(name).to(device).requires_grad_(), x, dtypes=DTYPES)
        for of_weights, of_adapters in ((BF16, torch.float32), (torch.float32, BF16)):
            op = made(name, dtype=of_weights, adapter_dtype=of_adapters)
            check_op(op.to(device).requires_grad_(), x.to(of_weights))


@pytest.mark.parametrize("needed", ["x", "lora_A_one", "lora_B_two", "weight0", "bias1", ""])
def test_only_gradients_that_are_asked_for(needed: str) -> None:
    op = made("two of one output").double()
    for name, p in op.named_parameters():
        p.requires_grad_(name == needed)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=needed == "x")
    y, want = op(x), op.reference(x)
    torch.testing.assert_close(y, want)
    assert y.requires_grad == bool(needed)
    if needed:
        leaf = x if needed == "x" else getattr(op, needed)
        got, wanted = (torch.autograd.grad(t.cos().sum(), leaf) for t in (y, want))
        torch.testing.assert_close(got, wanted)


def test_of_frozen_weights_nothing_is_saved_but_what_others_read() -> None:
    op = made("one")
    assert [n for n, p in op.named_parameters() if p.requires_grad] == [
        "lora_A_default",
        "lora_B_default",
    ]
    x = torch.randn(3, 7)
    own = {t.data_ptr(): name for name, t in (("x", x), *op.named_parameters())}
    saved = [own[t.data_ptr()] for t in saved_by(lambda: op(x))]
    assert sorted(saved) == ["bias", "lora_A_default", "lora_B_default", "x"]
    op(x).sum().backward()
    assert op.weight.grad is None
    for p in op.parameters():
        p.requires_grad_(False)
    saved = [own[t.data_ptr()] for t in saved_by(lambda: op(x.requires_grad_()))]
    assert "x" not in saved


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_has_one_mask_for_both_passes(p: float, device: torch.device) -> None:
    adapters = LoRAAdapter("one", 2, 0.5, p), LoRAAdapter("two", 2, 2.0), LoRAAdapter("b", 1, 1, p)
    op = fill(LoRALinear(4, 3, adapters)).to(device, torch.float64).requires_grad_()
    inputs = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)

    def call(x: Tensor, *parameters: Tensor) -> Any:
        torch.manual_seed(3)
        named = dict(zip(dict(op.named_parameters()), parameters))
        return torch.func.functional_call(op, named, (x,))

    assert torch.autograd.gradcheck(call, (inputs, *op.parameters()))
    assert torch.autograd.gradcheck(
        lambda x: call(torch.stack([x, x]).unbind()[0], *op.parameters()), (inputs,)
    )
    op.eval()
    torch.testing.assert_close(op(inputs), op.reference(inputs))


def test_dropout_zeroes_entries_and_scales_the_others(device: torch.device) -> None:
    op = LoRALinear(8, 8, [LoRAAdapter(rank=8, scale=3.0, dropout=0.25)]).to(device)
    with torch.no_grad():
        op.weight.zero_()
        op.lora_A_default.copy_(torch.eye(8))
        op.lora_B_default.copy_(torch.eye(8))
    x = torch.rand(2000, 8, device=device) + 1
    y = op(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], (4 * x)[kept])
    assert 0.73 < kept.float().mean() < 0.77
    op.adapters = (op.adapters[0]._replace(dropout=1.0),)
    assert not op(x).any()


def test_autocast(device: torch.device) -> None:
    op = made("of three").to(device)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, torch.randn(3, 7, device=device))


def test_regions_of_quantized_compute_leave_it_out() -> None:
    seq = Sequential(LoRALinear(16, 32, [LoRAAdapter(rank=2)]), recipe=Float8CurrentScaling())
    assert seq.plan(torch.randn(2, 16)).quantized == ()
    assert "low rank" in str(opfuser.can_fuse(seq, "quantized_linear", torch.randn(2, 16)))


def test_checkpoints_of_peft_load() -> None:
    peft = pytest.importorskip("peft")
    model: Any = nn.Sequential(nn.Linear(7, 5))
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["0"], init_lora_weights=False)
    theirs = peft.get_peft_model(model, config).base_model.model[0]
    op = made("one", adapters=(LoRAAdapter(rank=3, scale=4.0),))
    op.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7)
    torch.testing.assert_close(op(x), theirs(x))
    assert sorted(op.state_dict()) == ["bias", "lora_A_default", "lora_B_default", "weight"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dtype": torch.int64}, "computes in float16"),
        ({"in_features": -1}, "sizes that are not negative"),
        ({"adapters": [LoRAAdapter(rank=0)]}, "a positive rank"),
        ({"adapters": [LoRAAdapter(), LoRAAdapter()]}, "a name of its own"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        LoRALinear(**{"in_features": 4, "out_features": 3, **wrong})


def test_wrong_calls() -> None:
    op = made("two of one output")
    with pytest.raises(InputError, match=re.escape("Received: shape (3, 6)")):
        op(torch.randn(3, 6))
    op.adapters = op.adapters[:1]
    with pytest.raises(ArgumentError, match="the names and ranks that they were made with"):
        op(torch.randn(3, 7))
    op = made("two of one output")
    op.weight1 = None
    with pytest.raises(ArgumentError, match=r"needs its weights, .* weight1 = None"):
        op(torch.randn(3, 7))
    assert "one: rank 3, scale 0.5" in repr(op)


def test_dropout_of_torch_is_what_the_reference_draws() -> None:
    op = LoRALinear(4, 3, [LoRAAdapter(rank=2, dropout=0.5)], bias=False)
    x = torch.randn(2, 4)
    torch.manual_seed(0)
    y = op.reference(x)
    torch.manual_seed(0)
    u = F.linear(F.dropout(x, 0.5), op.lora_A_default)
    torch.testing.assert_close(y, F.linear(x, op.weight) + F.linear(u, op.lora_B_default))


@pytest.mark.parametrize("name", ["one", "of three"])
def test_a_selective_checkpoint_may_keep_the_products(name: str) -> None:
    op, x = made(name).double(), torch.randn(4, 7, dtype=torch.float64)
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def selected(x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, products)
        y: Tensor = checkpoint(op, x, use_reentrant=False, context_fn=kept)
        return y

    leaves = [x.requires_grad_(), *[p for p in op.parameters() if p.requires_grad]]
    y, want = selected(x), op(x)
    dy = torch.randn_like(y)
    got, expected = ([z, *torch.autograd.grad(z, leaves, dy)] for z in (y, want))
    torch.testing.assert_close(got, expected)
