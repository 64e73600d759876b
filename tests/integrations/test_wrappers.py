"""Libraries that wrap, replace or parametrize modules do so with operations in a Sequential.

With torch's own, such as parametrizations, ``tests/engine/test_other_parameters.py`` does that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import NotSupportedError

F64 = torch.float64


def model(dtype: torch.dtype = F64) -> opfuser.Sequential:
    """Compounds, basic operations, a nested sequence with a channel, and a plain module."""
    torch.manual_seed(1)
    return opfuser.Sequential(
        {
            "norm": opfuser.LayerNorm(8),
            "mlp": opfuser.Residual(opfuser.Linear(8, 16), opfuser.GELU(), opfuser.Linear(16, 8)),
            "plain": nn.Linear(8, 8),
            "scale": opfuser.RMSNorm(8),
            "head": opfuser.Sequential(opfuser.BasicLinear(8, 4), opfuser.Bias(4)),
        }
    ).to(dtype)


def example(dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(3, 8, dtype=dtype, requires_grad=True)


def same_as_untouched(wrapped: nn.Module, x: Tensor) -> None:
    """The output and the gradient of the input; twice, as the first call may change something."""
    expected = model()(x)
    (expected_dx,) = torch.autograd.grad(expected.sin().sum(), x)
    for _ in range(2):
        y = wrapped(x)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
        (dx,) = torch.autograd.grad(y.sin().sum(), x)
        torch.testing.assert_close(dx, expected_dx, rtol=1e-12, atol=1e-14)


# accelerate puts a forward in place of each module's, which moves parameters there and back.


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="needs the extra opfuser[hf]")


def on_cpu(accelerate: Any, seq: nn.Module, folder: Any) -> None:
    accelerate.cpu_offload(seq, execution_device=torch.device("cpu"))


def on_disk(accelerate: Any, seq: nn.Module, folder: Any) -> None:
    accelerate.disk_offload(seq, folder, execution_device=torch.device("cpu"))


def on_both(accelerate: Any, seq: nn.Module, folder: Any) -> None:
    places = {"norm": "cpu", "mlp": "disk", "plain": "cpu", "scale": "disk", "head": "disk"}
    accelerate.dispatch_model(seq, places, offload_dir=folder, main_device="cpu")


def at_once(accelerate: Any, seq: nn.Module, folder: Any) -> None:
    """Those of a sequence when it is called, so that what is in it is fused."""
    whole = {"preload_module_classes": ["Sequential"]}
    accelerate.cpu_offload(seq, execution_device=torch.device("cpu"), **whole)


@pytest.mark.parametrize("offload", [on_cpu, on_disk, on_both, at_once])
def test_parameters_are_brought_for_each_call(
    accelerate: Any, offload: Callable[..., None], tmp_path: Any
) -> None:
    seq, x = model(), example()
    offload(accelerate, seq, tmp_path)
    same_as_untouched(seq, x)
    assert seq.get_parameter("mlp.1.weight").is_meta
    assert seq.last_plan is not None
    assert len(seq.last_plan.record("norm_linear").matches) == (offload is at_once)
    accelerate.hooks.remove_hook_from_submodules(seq)
    same_as_untouched(seq, x)
    assert not any(p.is_meta for p in seq.parameters())


def test_the_plan_says_what_is_called_and_why(accelerate: Any) -> None:
    seq, x = model(), example()
    accelerate.cpu_offload(seq, execution_device=torch.device("cpu"))
    seq(x)
    for plan in (seq.plan(x), seq.last_plan):
        assert plan is not None
        assert plan.env.device.type == "cpu"
        (_, why), *_ = plan.record("norm_linear").refusals
        assert str(why).endswith("has a forward of its own")
    assert "RMSNorm is called once by the forward in its place" in seq.plan(x).assumed
    assert seq[2:].plan(x).env.device.type == "cpu"  # behind a module with its weight on meta


def test_once_the_wrapper_is_gone_it_is_fused_again(accelerate: Any) -> None:
    """accelerate leaves the module's own forward behind, as an attribute."""
    seq = opfuser.Sequential(opfuser.LayerNorm(8), opfuser.Linear(8, 8))
    for module in (seq[0], seq):
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    for matches in (0, 1):
        seq(torch.randn(2, 8))
        assert seq.last_plan is not None
        assert len(seq.last_plan.record("norm_linear").matches) == matches
        accelerate.hooks.remove_hook_from_module(seq, recurse=True)
        assert "forward" in vars(seq[0])
    assert not seq.overrides_forward()


def test_a_conversion_takes_no_wrapper_along_that_is_gone(accelerate: Any) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.linear(x)

    theirs = nn.Sequential(Doubling(), nn.Linear(8, 8))
    hook = accelerate.hooks.ModelHook()
    for module in list(theirs.modules()):
        accelerate.hooks.add_hook_to_module(module, hook)
    with pytest.raises(NotSupportedError, match="carries hooks or a forward of its own"):
        opfuser.from_torch(theirs)
    accelerate.hooks.remove_hook_from_submodules(theirs)
    ours = opfuser.from_torch(theirs)
    assert [type(m) for m in ours] == [
        opfuser.Linear, opfuser.ConstantScale, opfuser.Linear
    ]  # fmt: skip
    assert not [m for m in ours.modules() if "forward" in vars(m)]
    torch.testing.assert_close(ours(torch.ones(1, 8)), theirs(torch.ones(1, 8)))


def test_a_sequence_that_is_wrapped_inside_another_is_called(accelerate: Any) -> None:
    seq, x = model(), example()
    seen: list[int] = []

    class Count(accelerate.hooks.ModelHook):  # type: ignore[misc,name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(args))
            return args, kwargs

    accelerate.hooks.add_hook_to_module(seq.mlp, Count())
    same_as_untouched(seq, x)
    assert seen == [1, 1]


@pytest.mark.gpu
def test_on_a_gpu_one_operation_at_a_time(accelerate: Any) -> None:
    seq, x = model(), example()
    expected = model()(x)
    accelerate.cpu_offload(seq, execution_device=torch.device("cuda"))
    y = seq(x.cuda())
    torch.testing.assert_close(y.cpu(), expected.cpu(), rtol=1e-10, atol=1e-12)
    assert all(p.is_meta for p in seq.parameters())


# A wrapper of one's own.


def counted(module: nn.Module, seen: list[str]) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return plain(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def test_each_wrapper_runs_once_per_call() -> None:
    seq, x = model(), example()
    seen: list[str] = []
    for module in list(seq.modules()):
        counted(module, seen)
    same_as_untouched(seq, x)
    assert len(seen) == 2 * len(list(seq.modules()))


class Doubling(opfuser.Sequential):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 2


@pytest.mark.parametrize("kind", ["subclass", "attribute"])
def test_a_forward_around_a_sequence_with_a_recipe_runs_once(kind: str) -> None:
    """A sequence with a recipe opens a region for its own call."""
    recipe = opfuser.recipe.Float8CurrentScaling()
    cls = Doubling if kind == "subclass" else opfuser.Sequential
    seq, x = cls(opfuser.ReLU(), recipe=recipe), torch.randn(2, 8)
    if kind == "attribute":
        plain = seq.forward
        seq.forward = lambda *args: plain(*args) * 2
    assert torch.equal(seq(x), 2 * x.relu())


# PEFT puts a module with the operation inside in the operation's place.


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="needs the extra opfuser[hf]")


TARGETS = r"mlp\.1|mlp\.3|plain"


def lora(peft: Any, config: Any = None) -> Any:
    """A configuration for Linear of opfuser too, as PEFT documents for layers of others."""
    if config is None:
        config = peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False)
    config._register_custom_module({opfuser.Linear: peft.tuners.lora.Linear})
    return config


def test_lora_on_linear_operations(peft: Any, tmp_path: Any) -> None:
    seq, x = model(), example()
    adapted = peft.get_peft_model(seq, lora(peft))
    y = adapted(x)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 6
    assert all("lora" in name for name in trained)
    for grad in torch.autograd.grad(y.sin().sum(), list(trained.values())):
        assert grad.norm() > 0
    with adapted.disable_adapter():
        same_as_untouched(adapted, x)
    adapted.save_pretrained(tmp_path)
    config = lora(peft, peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path, config=config)
    torch.testing.assert_close(loaded(x), y, rtol=0, atol=0)
    merged = adapted.merge_and_unload()
    assert type(merged.mlp[1]) is opfuser.Linear
    torch.testing.assert_close(merged(x), y, rtol=1e-12, atol=1e-13)


def test_lora_s_gradients_are_those_on_torch_s_linear(peft: Any) -> None:
    """Of the same model in torch.nn, converted back from the sequence."""
    ours = opfuser.Sequential(
        {
            "plain": opfuser.Linear(8, 8),
            "act": opfuser.GELU(),
            "last": opfuser.Linear(8, 4),
        }
    ).to(F64)
    theirs = opfuser.to_torch(ours)
    x, found = example(), []
    for module in (ours, theirs):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["plain", "last"], init_lora_weights=False)
        adapted = peft.get_peft_model(module, lora(peft, config))
        y = adapted(x)
        trained = [p for p in adapted.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *trained])])
    for mine, other in zip(*found):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_what_peft_has_wrapped_is_read_by_a_conversion(peft: Any) -> None:
    theirs = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).to(F64)
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, config).base_model.model
    ours = opfuser.from_torch(adapted)
    x = example()
    torch.testing.assert_close(ours(x), adapted(x), rtol=1e-12, atol=1e-14)
    assert type(ours[0]) is opfuser.LoRALinear
    assert {id(p) for p in ours.parameters()} == {id(p) for p in adapted.parameters()}
    assert type(ours[2]) is opfuser.Linear
