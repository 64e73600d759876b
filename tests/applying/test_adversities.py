"""Whatever is done to a model after its first calls, it computes what an untouched one does."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import opfuser
from opfuser.applying import report

from .models import IDS, assert_equal_steps, llama, paths, step

Change = Callable[[Any], Any]
FUNCTIONS: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
functional = torch.nn.functional


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Adapted(nn.Module):
    """A linear module with a branch of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.a, self.b = base, nn.Linear(32, 4).double(), nn.Linear(4, 48).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Odd(Tensor):
    """Doubles what linear functions return."""

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        return out * 2 if function is functional.linear else out


class Reading(nn.Linear):
    """Computes with another weight than it holds."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * 2 if name == "weight" else value


def mid(model: Any) -> Any:
    return model.layers[1]


def up(model: Any) -> Any:
    return mid(model).mlp.up_proj


def norm(model: Any) -> Any:
    return mid(model).input_layernorm


def attributes(model: Any) -> None:
    norm(model).variance_epsilon = 0.5
    mid(model).self_attn.scaling = 0.1
    model.layers[2].self_attn.is_causal = False


def a_configuration_of_one_layer(model: Any) -> None:
    mid(model).self_attn.config = copy.copy(model.config)
    mid(model).self_attn.config._attn_implementation = "eager"


def eager_and_back(model: Any) -> None:
    model.set_attn_implementation("eager")
    step(model)
    model.set_attn_implementation("sdpa")


def a_child_that_is_a_function(model: Any) -> None:
    del mid(model).mlp.act_fn
    mid(model).mlp.__dict__["act_fn"] = torch.tanh


def children_swapped(model: Any) -> None:
    mlp = mid(model).mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def a_layer_added(model: Any) -> None:
    model.layers.append(copy.deepcopy(model.layers[0]))
    model.config.num_hidden_layers = 4


def a_layer_deleted(model: Any) -> None:
    del model.layers[1]
    model.config.num_hidden_layers = 2


def a_shallow_copy_of_a_child(model: Any) -> None:
    mid(model).mlp = copy.copy(mid(model).mlp)
    mid(model).mlp.act_fn = nn.Tanh()


def another_dict_of_children(model: Any) -> None:
    mid(model)._modules = {**mid(model)._modules, "mlp": model.layers[2].mlp}


def a_class_of_a_layer(model: Any) -> None:
    class Doubled(type(mid(model))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    mid(model).__class__ = Doubled


def a_wrapped_forward(model: Any) -> None:
    old = mid(model).mlp.forward
    mid(model).mlp.forward = lambda x: 3 * old(x)


def a_parametrized_norm(model: Any) -> None:
    parametrize.register_parametrization(norm(model), "weight", Twice())


def a_parametrization_removed(model: Any) -> None:
    a_parametrized_norm(model)
    step(model)
    parametrize.remove_parametrizations(norm(model), "weight")


def parametrizations_cached(model: Any) -> None:
    a_parametrized_norm(model)
    with parametrize.cached():
        step(model)


def parameters_of_a_call(model: Any) -> None:
    with torch.no_grad():
        state = {name: 1.3 * p for name, p in model.named_parameters()}
        torch.func.functional_call(model, state, (IDS,))


def interrupt(call: Callable[[], object], after: int) -> None:
    """Calls a function that Ctrl+C ends after so many lines of Python."""
    left = [after]

    def look(frame: Any, event: str, argument: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)


def calls_that_are_interrupted(model: Any) -> None:
    """Also the first ones of a copy, while they are traced."""
    for called in (model, copy.deepcopy(model)):
        for after in (*range(100, 4000, 500), *range(5000, 60000, 5000)):
            interrupt(lambda: step(called), after)  # noqa: B023
        assert_equal_steps(step(called), step(llama()))
        assert sys.getprofile() is None


def pruned_for_good(model: Any) -> None:
    prune.l1_unstructured(up(model), "weight", 0.5)
    step(model)
    prune.remove(up(model), "weight")


def a_buffer_for_a_weight(model: Any) -> None:
    weight = norm(model).weight.detach() * 3
    del norm(model).weight
    norm(model).register_buffer("weight", weight)


def a_tensor_for_a_weight(model: Any) -> None:
    weight = norm(model).weight.detach() * 3
    del norm(model).weight
    norm(model).weight = weight


def to_fp32_and_back(model: Any) -> None:
    model.float()
    step(model)
    model.double()


def data_of_other_shapes(model: Any) -> None:
    mlp = mid(model).mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:40].clone()
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :40].clone()


def data_of_fewer_heads(model: Any) -> None:
    attention = mid(model).self_attn
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.weight.data = linear.weight.data.chunk(2)[0].clone()
    attention.o_proj.weight.data = attention.o_proj.weight.data[:, :16].clone()


def one_number_for_a_norm(model: Any) -> None:
    norm(model).weight.data = norm(model).weight.data[:1].clone()


def transposed_data(model: Any) -> None:
    linear = mid(model).self_attn.q_proj
    linear.weight.data = linear.weight.data.t()


def data_swapped(model: Any) -> None:
    a, b = model.layers[0].mlp.up_proj.weight, up(model).weight
    a.data, b.data = b.data, a.data


def fewer_parameters(model: Any) -> None:
    mlp = mid(model).mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight.detach()[:40].clone())
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach()[:, :40].clone())


def to_meta_and_empty(model: Any) -> None:
    values = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    model.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            t.copy_(values[name])


def some_frozen(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(len(name) % 2 == 0)


def frozen_and_back(model: Any) -> None:
    model.layers.requires_grad_(False)
    step(model)
    model.layers.requires_grad_()


def a_pre_hook_of_keywords(model: Any) -> None:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}

    mid(model).self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def hooks_exchanged(model: Any) -> None:
    """One is removed for good, and another one takes the place of a third."""
    for module in (mid(model).mlp, model.layers[2].mlp):
        handle = module.register_forward_hook(lambda m, args, y: 2 * y)
        step(model)
        handle.remove()
    mid(model).mlp.register_forward_hook(lambda m, args, y: 3 * y)


def hooks_of_state(model: Any) -> None:
    mid(model).mlp.register_state_dict_post_hook(lambda m, state, prefix, local: None)
    mid(model).mlp.register_state_dict_pre_hook(lambda m, prefix, keep: None)
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})


def hooked(hook: Callable[..., Any]) -> Change:
    """A hook of a feed-forward network, which gets the module, its arguments and its output."""
    return lambda model: mid(model).mlp.register_forward_hook(hook)


CHANGES: dict[str, Change] = {
    **{
        change.__name__: change
        for change in (
            attributes, a_configuration_of_one_layer, eager_and_back, a_child_that_is_a_function,
            children_swapped, a_layer_added, a_layer_deleted, a_shallow_copy_of_a_child,
            another_dict_of_children, a_class_of_a_layer, a_wrapped_forward, a_parametrized_norm,
            a_parametrization_removed, parametrizations_cached, parameters_of_a_call,
            calls_that_are_interrupted, pruned_for_good, a_buffer_for_a_weight,
            a_tensor_for_a_weight, to_fp32_and_back, data_of_other_shapes, data_of_fewer_heads,
            one_number_for_a_norm, transposed_data, data_swapped, fewer_parameters,
            to_meta_and_empty, some_frozen, frozen_and_back, a_pre_hook_of_keywords,
            hooks_exchanged, hooks_of_state,
        )
    },
    # Attributes, children and classes
    "eps as a tensor": lambda m: setattr(
        norm(m), "variance_epsilon", torch.tensor(0.3, dtype=torch.float64)
    ),
    "a child that is none": lambda m: setattr(mid(m), "post_attention_layernorm", nn.Identity()),
    "a child shared": lambda m: setattr(mid(m).mlp, "up_proj", mid(m).mlp.gate_proj),
    "a layer shared": lambda m: m.layers.__setitem__(1, m.layers[0]),
    "an adapter": lambda m: setattr(mid(m).mlp, "up_proj", Adapted(up(m))),
    "a class that reads otherwise": lambda m: setattr(up(m), "__class__", Reading),
    "a forward of a sibling": lambda m: setattr(mid(m).mlp, "forward", m.layers[0].mlp.forward),
    "the forward of its class bound to a sibling": lambda m: setattr(
        mid(m).mlp, "forward", types.MethodType(type(mid(m).mlp).forward, m.layers[0].mlp)
    ),
    "a forward deleted": lambda m: vars(mid(m)).pop("forward", None),
    # Parameters and buffers
    "weight norm": lambda m: parametrizations.weight_norm(up(m)),
    "spectral norm": lambda m: (torch.manual_seed(0), parametrizations.spectral_norm(up(m))),
    "swapped tensors": lambda m: torch.utils.swap_tensors(
        up(m).weight, nn.Parameter(2 * up(m).weight.detach())
    ),
    "pruned": lambda m: prune.l1_unstructured(up(m), "weight", 0.5),
    "a bias": lambda m: setattr(
        up(m), "bias", nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.float64))
    ),
    "a weight of a subclass": lambda m: setattr(
        up(m), "weight", nn.Parameter(up(m).weight.detach().as_subclass(Odd))
    ),
    "frequencies in place": lambda m: m.rotary_emb.inv_freq.mul_(0.5),
    "frequencies replaced": lambda m: setattr(
        m.rotary_emb, "inv_freq", m.rotary_emb.inv_freq * 0.3
    ),
    "a norm in fp32": lambda m: norm(m).float(),
    "all in fp32": lambda m: m.float(),
    "loaded by assignment": lambda m: m.load_state_dict(
        {k: v * 1.1 for k, v in m.state_dict().items()}, assign=True
    ),
    # Hooks
    "of the layer": lambda m: mid(m).register_forward_hook(lambda module, args, y: 2 * y),
    "before": lambda m: mid(m).mlp.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "rounds": hooked(lambda module, args, y: y.bfloat16()),
    "takes a part": hooked(lambda module, args, y: y[:1]),
    "detaches": hooked(lambda module, args, y: y.detach()),
    "in place": hooked(lambda module, args, y: y.mul_(2)),
    "before backward": lambda m: mid(m).mlp.register_full_backward_pre_hook(
        lambda module, dy: (dy[0] * 2,)
    ),
    "backward of a projection": lambda m: up(m).register_full_backward_hook(
        lambda module, dx, dy: (dx[0] * 2,)
    ),
    "of a parameter": lambda m: up(m).weight.register_hook(lambda grad: 2 * grad),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_changed(name: str) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    step(model)
    for m in (model, plain):
        CHANGES[name](m)
    single = any(p.dtype == torch.float32 for p in plain.parameters())
    for _ in range(2):
        assert_equal_steps(numbers(model), numbers(plain), 1e-4 if single else 1e-6)
    assert {"layers.0", "norm"} <= set(paths(report(model)))


def numbers(model: nn.Module) -> list[Tensor]:
    return [t.as_subclass(Tensor) for t in step(model)]


# What all models read


def nothing_attends(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    return q.transpose(1, 2).contiguous() / 2, None


def halved(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.up_proj(x)) / 2


RMSNorm, MLP, Layer = (
    getattr(modeling_llama, f"Llama{name}") for name in ("RMSNorm", "MLP", "DecoderLayer")
)
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a global function": (
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *others, **kwargs: (q * 2, k + 1),
    ),
    "a function of an attention": (sdpa_attention, "sdpa_attention_forward", nothing_attends),
    "its helper": (sdpa_attention, "use_gqa_in_sdpa", lambda *args: False),
    "attention": (
        functional, "scaled_dot_product_attention",
        functools.partial(lambda old, *a, **kw: 2 * old(*a, **kw),
                          functional.scaled_dot_product_attention),
    ),
    "linear": (functional, "linear", functools.partial(lambda f, *a: 2 * f(*a), functional.linear)),
    "silu": (functional, "silu", lambda x, inplace=False: x.sin()),
    "a function of torch": (torch, "rsqrt", lambda x: x * 2),
    "a forward": (MLP, "forward", halved),
    "the forward of layers": (
        Layer, "forward", functools.partialmethod(lambda self, f, *a, **kw: 2 * f(self, *a, **kw),
                                                  Layer.forward),
    ),
    "the forward of torch": (
        nn.Linear, "forward", lambda self, x: 2 * functional.linear(x, self.weight, self.bias),
    ),
    "the code of a forward": (MLP.forward, "__code__", halved.__code__),
    "a call": (RMSNorm, "__call__", lambda self, x: x),
    "a property over a parameter": (
        RMSNorm, "weight", property(lambda self: 2 * self._parameters["weight"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_of_what_all_models_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    before = step(model)
    with monkeypatch.context() as patch:
        patch.setattr(*PATCHES[name], raising=False)
        want = step(plain)
        assert_equal_steps(step(model), want, 1e-5)
        opfuser.apply(model)
        assert_equal_steps(step(model), want, 1e-5)
    assert_equal_steps(step(model), before)


@pytest.mark.parametrize("mapping", [FUNCTIONS._local_mapping, type(FUNCTIONS)._global_mapping])
def test_an_attention_function_in_the_place_of_torchs(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    step(model)
    monkeypatch.setitem(mapping, "sdpa", nothing_attends)
    assert_equal_steps(step(model), step(plain))
