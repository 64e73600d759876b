"""Models with adapters of PEFT, to which apply was applied: read whole, exact, and followed."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.applying import report
from opfuser.reading.kept import KeptError
from tests.reading.families import stream
from tests.reading.recomputed import Example, assert_recomputed, operations_in, read_of
from tests.reading.tiny import model_of

from ..reading.test_grammar import example_of
from .models import assert_as_exact, assert_equal_steps, inputs_of, llama, paths, step

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads what transformers has renamed
        yield


def config(**others: Any) -> Any:
    chosen = {"target_modules": TARGETS, "r": 4, "lora_alpha": 8, "init_lora_weights": False}
    return peft.LoraConfig(**{**chosen, **others})


def adapted(model: nn.Module, **others: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(**others), autocast_adapter_dtype=False).double()


def linear(**others: Any) -> nn.Module:
    """One linear module with an adapter."""
    model = nn.Sequential(nn.Linear(32, 48))
    wrapped = adapted(model, target_modules=["0"], **others)
    module: nn.Module = wrapped.base_model.model[0]
    return module


def layers_of(model: nn.Module) -> list[str]:
    """The operations of the layers that are computed whole, and what else these call."""
    found = [e for e in report(model).computed if e.path.rpartition(".")[0].endswith("layers")]
    assert [e.called for e in found] == [()] * len(found)
    return [e.operations for e in found]


def test_layers_are_read_whole_and_base_weights_get_no_gradient() -> None:
    model = adapted(llama())
    want = step(model)
    without = [p.grad is None for p in model.parameters()]
    told = opfuser.apply(model, example=inputs_of(model))
    assert_equal_steps(step(model), want)
    assert [p.grad is None for p in model.parameters()] == without
    assert any(without)
    attention = "x + (Norm, LoRALinear x3, Rotary, Attention, Linear)"
    assert layers_of(model) == [f"{attention}, x + (Norm, LoRALinear x2, Gated, LoRALinear)"] * 3
    assert paths(told) == paths(report(model))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "dropout that zeroes all": {"lora_dropout": 1.0},
    "ranks that differ": {"rank_pattern": {"0": 3}},
    "DoRA": {"use_dora": True},
    "bias of the adapter": {"lora_bias": True},
}
KEPT = {"DoRA", "bias of the adapter"}


@pytest.mark.parametrize("name", KINDS)
def test_a_linear_module_of_peft(name: str) -> None:
    module = linear(**KINDS[name])
    example = Example(module, (stream().requires_grad_(),))
    if name in KEPT:
        ops = {type(op).__name__ for op in operations_in(_read_or_nothing(example))}
        assert "LoRALinear" not in ops
        return
    assert [type(op).__name__ for op in assert_recomputed(example).operations] == ["LoRALinear"]


def _read_or_nothing(example: Example) -> Any:
    try:
        return read_of(example).operations
    except KeptError:
        return ()


def test_dropout_is_that_of_the_adapter_alone() -> None:
    module = linear(lora_dropout=0.5)
    x = stream().requires_grad_()
    (operation,) = read_of(Example(module, (x,))).operations
    assert [a.dropout_p for a in operation.adapters] == [0.5]  # type: ignore[union-attr]
    assert_recomputed(Example(module.eval(), (x,)))


SUMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "in another order": (lambda m, x: 0.5 * m.b2(m.a2(x)) + m.up(x), True),
    "two": (lambda m, x: m.up(x) + m.b2(m.a2(x)) * 2 - m.b3(m.a3(x)), False),
    "two, both added": (lambda m, x: m.up(x) + m.b2(m.a2(x)) * 2 + -m.b3(m.a3(x)), True),
    "of another input": (lambda m, x: m.up(x) + m.b2(m.a2(x.relu())), False),
    "with something in between": (lambda m, x: m.up(x) + m.b2(m.a2(x).relu()), False),
    "of the result": (lambda m, x: m.up(x) + m.b2(m.a2(m.up(x))), False),
    "broadcast": (lambda m, x: m.up(x) + m.b2(m.a2(x))[:, :1], False),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_is_an_adapter_and_others_that_are_not(name: str) -> None:
    function, is_adapter = SUMS[name]
    example = example_of(function)
    for n in (2, 3):
        torch.manual_seed(n)
        setattr(example.module, f"a{n}", nn.Linear(8, n, bias=False).double())
        setattr(example.module, f"b{n}", nn.Linear(n, 8, bias=False).double())
    found = _read_or_nothing(example)
    names = [type(op).__name__ for op in operations_in(found)]
    assert (names[:1] == ["LoRALinear"]) == is_adapter
    if is_adapter:
        assert_recomputed(example)


def test_a_sum_in_fp32_beside_bf16_has_to_be_rounded() -> None:
    def gated(m: Any, x: Tensor) -> Tensor:
        up = m.up(x) + 2 * m.b2(m.a2(x.float()))
        return (F.silu(m.gate(x)) * (up.to(x.dtype) if rounds else up)).to(x.dtype)

    example = example_of(gated)
    module: Any = example.module.bfloat16()
    module.a2, module.b2 = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    example = example._replace(args=(torch.randn(3, 5, 8, dtype=torch.bfloat16),))
    for rounds in (True, False):
        names = {type(op).__name__ for op in operations_in(_read_or_nothing(example))}
        assert ("LoRALinear" in names) == rounds


def moved(model: nn.Module) -> None:
    """All parameters lie elsewhere, and nothing of worth where they lay."""
    for p in model.parameters():
        before = p.data
        p.data = before.clone()
        before.fill_(math.nan)


def disabled_for_a_step(model: Any) -> None:
    with model.disable_adapter():
        step(model)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "disabled for a step": disabled_for_a_step,
    "other memory": moved,
    "the scale": lambda m: [
        module.scaling.update(default=0.25)
        for module in m.modules()
        if isinstance(getattr(module, "scaling", None), dict)
    ],
    "another adapter": lambda m: m.set_adapter("other"),
    "both adapters": lambda m: m.base_model.set_adapter(["default", "other"]),
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "merged": lambda m: m.merge_adapter(),
    "deleted": lambda m: (m.set_adapter("other"), m.delete_adapter("default")),
    "a trained base weight": lambda m: m.get_submodule(
        "base_model.model.layers.1.self_attn.q_proj.base_layer"
    ).requires_grad_(),
    "unloaded": lambda m: m.merge_and_unload(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_adapters_are_seen(name: str) -> None:
    def made() -> Any:
        model = adapted(llama())
        model.add_adapter("other", config(r=3, lora_alpha=3, target_modules=["q_proj", "k_proj"]))
        model.get_input_embeddings().weight.requires_grad_()
        return model.double()

    model, plain = made(), made()
    plain.load_state_dict(model.state_dict())
    opfuser.apply(model)
    for _ in range(3):  # the second one is recorded
        step(model)
    model_now, plain_now = (
        changed if isinstance(changed := CHANGES[name](m), nn.Module) and name == "unloaded" else m
        for m in (model, plain)
    )
    want = step(plain_now)
    for _ in range(3):
        assert_equal_steps(step(model_now), want)
    assert [p.grad is None for p in model_now.parameters()] == [
        p.grad is None for p in plain_now.parameters()
    ]
    assert paths(report(model_now))


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_in_fp32_beside_bf16(autocast: bool) -> None:
    """As PEFT makes them; errors are at most twice those of torch."""
    exact = adapted(llama())
    models = [copy.deepcopy(exact).to(torch.float32 if autocast else torch.bfloat16) for _ in "12"]
    for model in models:
        for name, p in model.named_parameters():
            if "lora" in name:
                p.data = p.data.float()
    opfuser.apply(models[0])
    exact.load_state_dict(models[0].state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, plain = map(step, models)
    found = [e for e in report(models[0]).computed if "LoRALinear" in e.operations]
    assert [e.called for e in found] == [()] * 3
    assert_as_exact(got, plain, step(exact), floor=1e-9)


@pytest.mark.parametrize("layers", [2, 16])
def test_errors_in_bf16_are_at_most_twice_those_of_torch(layers: int) -> None:
    """Of the output, and of the gradients of the adapters of a kind: of one, either is by chance.

    In deep models one of the two may err four times as much as the other, in either direction.
    """
    base = model_of("llama", num_hidden_layers=layers).train()
    exact = adapted(base).bfloat16().double()
    ours, plain = (copy.deepcopy(exact).bfloat16() for _ in "12")
    opfuser.apply(ours)
    step(ours), step(ours)  # the third one is recorded
    names = ["output", *[name for name, _ in exact.named_parameters()]]
    errors: dict[str, list[tuple[float, float]]] = {}
    for name, a, b, c in zip(names, step(ours), step(plain), step(exact)):
        if name == "output" or "lora" in name:
            kind = re.sub(r"layers\.\d+", "layers", name)
            pair = tuple(float((t.double() - c).norm() / c.norm()) for t in (a, b))
            errors.setdefault(kind, []).append(pair)
    assert sorted(map(len, errors.values())) == [1, *[layers] * 2 * len(TARGETS)]
    for kind, pairs in errors.items():
        error, allowed = (math.hypot(*of) for of in zip(*pairs))
        assert 0 < error <= 2 * allowed, kind


def test_transposed_weights() -> None:
    model = adapted(
        model_of("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train(),
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
    )
    want = step(model)
    opfuser.apply(model)
    assert_equal_steps(step(model), want)
    assert sum("LoRALinear" in e.operations for e in report(model).computed) == 2
