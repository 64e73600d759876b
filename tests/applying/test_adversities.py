"""Whatever is done to a model before or after apply, it computes what an untouched one does."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.models.llama import modeling_llama

import opfuser

from .models import IDS, assert_equal_steps, llama, step

Change = Callable[[Any], Any]
FUNCTIONS = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
CHANGES: dict[str, Change] = {}
# Of these, masks or caches are checked by other tests.
AROUND: dict[str, Callable[[], Any]] = {}

def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def mid(model: Any) -> Any:
    return model.layers[1]


# Attributes

@change
def eps_as_tensor(model): mid(model).input_layernorm.variance_epsilon = torch.tensor(0.3, dtype=torch.float64)
@change
def head_dim(model): mid(model).self_attn.head_dim = 4; 
@change
def groups(model): mid(model).self_attn.num_key_value_groups = 2; mid(model).self_attn.scaling = 0.9
@change
def dropout_of_one(model): mid(model).self_attn.attention_dropout = 1.0
@change
def own_attention_of_layer(model):
    mid(model).self_attn.config = copy.copy(model.config)
    mid(model).self_attn.config._attn_implementation = "eager"
@change
def set_eager(model): model.set_attn_implementation("eager")
@change
def set_eager_and_back(model): model.set_attn_implementation("eager"); step(model); model.set_attn_implementation("sdpa")
def other_attention(module, q, k, v, mask, **kwargs):
    return (q.transpose(1, 2) * 0.5).contiguous(), None
@change
def registered(model):
    FUNCTIONS.register("other_of_test", other_attention)
    model.set_attn_implementation("other_of_test")
@change
def registered_locally(model):
    FUNCTIONS["sdpa"] = other_attention
@change
def registered_for_all(model):
    type(FUNCTIONS)._global_mapping["sdpa"] = other_attention
@change
def replaced_rotation(model):
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *a, **kw: (q * 2, k + 1)
@change
def replaced_repeat(model):
    transformers.integrations.sdpa_attention.repeat_kv = lambda x, n: 2 * x.repeat_interleave(n, 1)
@change
def replaced_sdpa(model):
    old = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **kw: old(q, k, v, **kw) * 2
@change
def replaced_linear(model):
    old = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *a: old(*a) * 2
@change
def replaced_silu(model):
    torch.nn.functional.silu = lambda x, inplace=False: x.sin()
@change
def replaced_rsqrt(model):
    torch.rsqrt = lambda x: x * 2
@change
def class_forward(model):
    modeling_llama.LlamaMLP.forward = lambda self, x: self.down_proj(x[..., :32].repeat(1, 1, 2)[..., :48])
@change
def class_forward_of_layer(model):
    old = modeling_llama.LlamaDecoderLayer.forward
    modeling_llama.LlamaDecoderLayer.forward = lambda self, *a, **kw: 2 * old(self, *a, **kw)
@change
def class_forward_of_linear(model):
    nn.Linear.forward = lambda self, x: 2 * torch.nn.functional.linear(x, self.weight, self.bias)
@change
def class_attribute(model):
    modeling_llama.LlamaRMSNorm.__call__ = lambda self, x: x
@change
def class_property(model):
    modeling_llama.LlamaRMSNorm.weight = property(lambda self: self._parameters["weight"] * 2)
@change
def class_getattr(model):
    cls = type("Odd", (nn.Linear,), {"__getattr__": lambda self, name: nn.Module.__getattr__(self, name) * 2 if name == "weight" else nn.Module.__getattr__(self, name)})
    mid(model).mlp.up_proj.__class__ = cls
@change
def code_of_forward(model):
    def forward(self, x): return self.up_proj(x)[..., :32]
    modeling_llama.LlamaMLP.forward.__code__ = forward.__code__
@change
def default_arguments(model):
    pass
@change
def deleted_child(model):
    del mid(model).mlp.act_fn
    mid(model).mlp.__dict__["act_fn"] = torch.tanh
@change
def bound_in_dict(model):
    mid(model).mlp.__dict__["down_proj"] = mid(model).mlp._modules.pop("down_proj")
    mid(model).mlp.__dict__["down_proj"] = lambda x: x[..., :32] 
@change
def replaced_by_identity(model): mid(model).post_attention_layernorm = nn.Identity()
@change
def swapped_children(model):
    m = mid(model).mlp; m.gate_proj, m.up_proj = m.up_proj, m.gate_proj
@change
def shared_child(model):
    mid(model).mlp.up_proj = mid(model).mlp.gate_proj
@change
def shared_layer(model): model.layers[1] = model.layers[0]
@change
def added_layer(model):
    model.layers.append(copy.deepcopy(model.layers[0])); model.config.num_hidden_layers = 4
@change
def deleted_layer(model):
    del model.layers[1]; model.config.num_hidden_layers = 2
@change
def shallow_copy(model): model.layers[1] = copy.copy(model.layers[0]); model.layers[1].input_layernorm = copy.deepcopy(model.layers[2].input_layernorm)
@change
def shallow_copied_mlp(model):
    mid(model).mlp = copy.copy(mid(model).mlp)
    mid(model).mlp.act_fn = nn.Tanh()
@change
def deep_copied_layer(model): model.layers[1] = copy.deepcopy(model.layers[2])
@change
def whole_copy(model): return copy.deepcopy(model)
@change
def pickled(model): return pickle.loads(pickle.dumps(model))
@change
def weight_norm_of_linear(model): parametrizations.weight_norm(mid(model).mlp.up_proj)
@change
def old_weight_norm(model):
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(mid(model).mlp.up_proj)
    with torch.no_grad(): mid(model).mlp.up_proj.weight_g.mul_(2)
@change
def spectral(model): torch.manual_seed(0); parametrizations.spectral_norm(mid(model).mlp.up_proj)
@change
def orthogonal(model): torch.manual_seed(0); parametrizations.orthogonal(mid(model).self_attn.o_proj)
class Twice(nn.Module):
    def forward(self, w): return 2 * w
@change
def parametrised_norm(model): parametrize.register_parametrization(mid(model).input_layernorm, "weight", Twice())
@change
def parametrised_and_removed(model):
    parametrize.register_parametrization(mid(model).input_layernorm, "weight", Twice()); step(model)
    parametrize.remove_parametrizations(mid(model).input_layernorm, "weight")
@change
def pruned(model): prune.l1_unstructured(mid(model).mlp.up_proj, "weight", 0.5)
@change
def pruned_and_made_permanent(model):
    prune.l1_unstructured(mid(model).mlp.up_proj, "weight", 0.5); step(model); prune.remove(mid(model).mlp.up_proj, "weight")
@change
def buffer_for_weight(model):
    n = mid(model).input_layernorm; w = n.weight.detach() * 3; del n.weight; n.register_buffer("weight", w)
@change
def plain_tensor_for_weight(model):
    n = mid(model).input_layernorm; w = n.weight.detach() * 3; del n.weight; n.weight = w
@change
def tensor_with_gradient_for_weight(model):
    n = mid(model).mlp.up_proj; w = n.weight; del n.weight; n.base = w; n.__dict__["weight"] = w * 2
@change
def none_for_bias(model):
    lin = mid(model).mlp.up_proj; lin.bias = nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.float64))
@change
def inverse_frequencies(model): model.rotary_emb.inv_freq.mul_(0.5)
@change
def inverse_frequencies_replaced(model): model.rotary_emb.inv_freq = model.rotary_emb.inv_freq * 0.3
@change
def attention_scaling(model): model.rotary_emb.attention_scaling = 0.5
@change
def norm_in_fp32(model): mid(model).input_layernorm.float()
@change
def layer_in_fp32(model):
    mid(model).float()
    mid(model).register_forward_pre_hook(lambda m, a, kw: ((a[0].float(),), {k: v if not isinstance(v, tuple) else tuple(t.float() for t in v) for k, v in kw.items()}), with_kwargs=True)
    mid(model).register_forward_hook(lambda m, a, y: y.double())
@change
def all_in_bf16_but_norms(model):
    model.bfloat16()
    for m in model.modules():
        if "Norm" in type(m).__name__: m.float()
@change
def data_of_other_shape(model):
    m = mid(model).mlp
    for lin in (m.gate_proj, m.up_proj): lin.weight.data = lin.weight.data[:40].clone()
    m.down_proj.weight.data = m.down_proj.weight.data[:, :40].clone()
@change
def heads_pruned_by_data(model):
    a = mid(model).self_attn
    a.q_proj.weight.data = a.q_proj.weight.data[:16].clone()
    a.k_proj.weight.data = a.k_proj.weight.data[:8].clone(); a.v_proj.weight.data = a.v_proj.weight.data[:8].clone()
    a.o_proj.weight.data = a.o_proj.weight.data[:, :16].clone()
@change
def pruned_by_parameters(model):
    m = mid(model).mlp
    for lin in (m.gate_proj, m.up_proj): lin.weight = nn.Parameter(lin.weight.data[:40].clone())
    m.down_proj.weight = nn.Parameter(m.down_proj.weight.data[:, :40].clone())
@change
def transposed_data(model):
    lin = mid(model).self_attn.q_proj; lin.weight.data = lin.weight.data.t()
@change
def expanded_data(model):
    n = mid(model).input_layernorm; n.weight.data = n.weight.data[:1].expand(32)
@change
def one_for_norm(model):
    n = mid(model).input_layernorm; n.weight.data = n.weight.data[:1].clone()
@change
def data_of_other_dtype(model):
    for p in mid(model).parameters(): p.data = p.data.float()
    model.float()
@change
def pre_hook(model): mid(model).mlp.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
@change
def pre_hook_with_kwargs(model): mid(model).self_attn.register_forward_pre_hook(lambda m, a, kw: (a, {**kw, "hidden_states": kw["hidden_states"] * 2}), with_kwargs=True)
@change
def hook_of_attention(model): mid(model).self_attn.register_forward_hook(lambda m, a, y: (y[0] * 2, *y[1:]))
@change
def hook_added_and_removed(model):
    h = mid(model).mlp.register_forward_hook(lambda m, a, y: 2 * y); step(model); h.remove()
@change
def hook_of_other_dtype(model): mid(model).mlp.register_forward_hook(lambda m, a, y: y.float())
@change
def hook_of_norm_of_other_dtype(model): mid(model).input_layernorm.register_forward_hook(lambda m, a, y: y.float().double())
@change
def hook_of_other_shape(model): mid(model).mlp.register_forward_hook(lambda m, a, y: y[:1])
@change
def hook_of_norm_of_other_shape(model): mid(model).input_layernorm.register_forward_hook(lambda m, a, y: y[:, :, :1].expand_as(y))
@change
def hook_in_place(model): mid(model).mlp.register_forward_hook(lambda m, a, y: y.mul_(2))
@change
def pre_hook_in_place(model): mid(model).mlp.register_forward_pre_hook(lambda m, a: a[0].mul_(2) and None if a[0].numel() == 1 else (a[0].mul_(2),))
@change
def pre_hook_that_detaches(model): mid(model).mlp.register_forward_pre_hook(lambda m, a: (a[0].detach(),))
@change
def hook_that_detaches(model): mid(model).mlp.register_forward_hook(lambda m, a, y: y.detach())
@change
def exchanged_hook(model):
    h = mid(model).mlp.register_forward_hook(lambda m, a, y: 2 * y); step(model); h.remove()
    mid(model).mlp.register_forward_hook(lambda m, a, y: 3 * y)
@change
def backward_pre_hook(model): mid(model).mlp.register_full_backward_pre_hook(lambda m, dy: (dy[0] * 2,))
@change
def backward_hook_of_linear(model): mid(model).mlp.up_proj.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2,))
@change
def backward_hook_of_layer(model): mid(model).register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2 if dx[0] is not None else None, *dx[1:]))
@change
def hook_of_parameter(model): mid(model).mlp.up_proj.weight.register_hook(lambda g: 2 * g)
@change
def accumulate_hook(model): mid(model).mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2) and None)
@change
def state_dict_hooks(model):
    mid(model).mlp.register_state_dict_post_hook(lambda m, d, p, x: None)
    mid(model).mlp.register_state_dict_pre_hook(lambda m, p, keep: None)
    mid(model).mlp.register_load_state_dict_post_hook(lambda m, keys: None)
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})
@change
def load_by_assignment(model):
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True)
@change
def forward_of_child_bound_to_another(model): mid(model).mlp.forward = model.layers[0].mlp.forward
@change
def forward_of_class_bound_to_another(model): mid(model).mlp.down_proj.forward = types.MethodType(nn.Linear.forward, model.layers[0].mlp.down_proj)
@change
def forward_deleted(model): mid(model).__dict__.pop("forward", None)
@change
def frozen_half(model):
    for n, p in model.named_parameters(): p.requires_grad_(hash(n) % 2 == 0 if False else len(n) % 2 == 0)
@change
def frozen_and_back(model): model.layers.requires_grad_(False); step(model); model.layers.requires_grad_(True)
@change
def moved_to_fp32(model): model.float()
@change
def moved_there_and_back(model): model.float(); step(model); model.double()
@change
def half_of_layers_in_eval(model): model.layers[0].eval(); mid(model).self_attn.eval()
@change
def training_flag_of_child(model): mid(model).self_attn.attention_dropout = 1.0; mid(model).self_attn.eval(); 
@change
def to_empty_and_loaded(model):
    values = {k: v.clone() for k, v in model.state_dict().items()}
    freq = model.rotary_emb.inv_freq.clone()
    model.to("meta"); model.to_empty(device="cpu"); model.load_state_dict(values); model.rotary_emb.inv_freq.copy_(freq)
    model.rotary_emb.original_inv_freq = freq
@change
def lora(model):
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__(); self.base = base; self.a = nn.Linear(32, 4, bias=False).double(); self.b = nn.Linear(4, 48, bias=False).double()
        def forward(self, x): return self.base(x) + self.b(self.a(x))
    torch.manual_seed(1); mid(model).mlp.up_proj = Lora(mid(model).mlp.up_proj)
@change
def weights_swapped(model): 
    a, b = model.layers[0].mlp.up_proj.weight, mid(model).mlp.up_proj.weight
    a.data, b.data = b.data, a.data
@change
def subclass_parameter(model):
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            out = super().__torch_function__(f, types, args, kwargs or {})
            return out * 2 if f is torch.nn.functional.linear else out
    w = mid(model).mlp.up_proj.weight
    mid(model).mlp.up_proj.weight = nn.Parameter(w.detach().as_subclass(Odd))


@contextmanager
def restored() -> Iterator[None]:
    f = torch.nn.functional
    holders = [modeling_llama.__dict__, transformers.integrations.sdpa_attention.__dict__]
    before = [(modeling_llama, n, vars(modeling_llama)[n]) for n in ("apply_rotary_pos_emb",)]
    before += [(transformers.integrations.sdpa_attention, "repeat_kv", transformers.integrations.sdpa_attention.repeat_kv)]
    before += [(f, n, getattr(f, n)) for n in ("scaled_dot_product_attention", "linear", "silu")]
    before += [(torch, "rsqrt", torch.rsqrt), (nn.Linear, "forward", nn.Linear.forward)]
    before += [(modeling_llama.LlamaMLP, "forward", modeling_llama.LlamaMLP.forward), (modeling_llama.LlamaDecoderLayer, "forward", modeling_llama.LlamaDecoderLayer.forward)]
    code = modeling_llama.LlamaMLP.forward.__code__
    mappings = [(m, dict(m)) for m in (FUNCTIONS._local_mapping, type(FUNCTIONS)._global_mapping)]
    try:
        yield
    finally:
        for h, n, v in before: setattr(h, n, v)
        modeling_llama.LlamaMLP.forward.__code__ = code
        for n in ("__call__", "weight"):
            if n in vars(modeling_llama.LlamaRMSNorm): delattr(modeling_llama.LlamaRMSNorm, n)
        for m, d in mappings: m.clear(); m.update(d)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str, when: str) -> None:
    with restored():
        model, plain = llama(), llama()
        if when == "after":
            opfuser.apply(model); step(model); 
        new = CHANGES[name](model); model = model if not isinstance(new, nn.Module) or name not in ("whole_copy", "pickled") else new
        p2 = CHANGES[name](plain) if not name.startswith(("class_", "code_", "replaced_s", "replaced_l", "replaced_r")) or name in ("class_getattr",) else None
        if when == "before": opfuser.apply(model)
        try: want = step(plain)
        except Exception as e:
            with pytest.raises(type(e)): step(model)
            pytest.skip(f"plain fails: {e}")
        low = min(p.dtype.itemsize for p in plain.parameters())
        rtol = {8: 1e-6, 4: 1e-4, 2: 0.1}[low]
        assert_equal_steps(step(model), want, rtol)
        assert_equal_steps(step(model), step(plain), rtol)
