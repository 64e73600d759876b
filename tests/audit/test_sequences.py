"""What keeps registered fusions from matching in a Sequential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from benchmarks.memory import Size, items
from opfuser import GELU, Linear, QKNorm, Residual, RMSNorm, RotaryEmbedding, Sequential
from opfuser.report.audit import MissedFusion, audit

D, H = 32, 64


class Subclass(GELU):
    """What fusions may not take for GELU."""


def block(activation: nn.Module) -> nn.Module:
    return Residual(RMSNorm(D), Linear(D, H), activation, Linear(H, D))


def missed(model: nn.Module, x: Tensor | None = None) -> dict[str, MissedFusion]:
    x = torch.randn(2, 8, D).requires_grad_() if x is None else x
    return {m.fused_op: m for m in audit(model, [x]).missed_fusions}


def plain(model: Any) -> None:
    model[1][3] = nn.GELU("tanh")


def hooked(model: Any) -> None:
    model[1][3].register_forward_hook(lambda *args: None)


def subclass(model: Any) -> None:
    model[1][3] = Subclass()


def assigned(model: Any) -> None:
    model[1][3].forward = torch.sin


def execute(model: Any, note: str) -> None:
    exec(note.partition(", if ")[0], {"opfuser": opfuser, "model": model})


def unhook(model: Any, note: str) -> None:
    assert note == "remove the hooks of model[1][3]"
    model[1][3]._forward_hooks.clear()


def replace(model: Any, note: str) -> None:
    assert note == "opfuser.GELU in the place of model[1][3], if it computes the same"
    model[1][3] = GELU()


EXISTS = "use_existing_kernel"


@pytest.mark.parametrize(
    ("spoil", "code", "detail", "recommendation", "mend"),
    [
        (plain, "GROUP_SPLIT", "nn.GELU stands where opfuser.GELU could", EXISTS, execute),
        (hooked, "HOOK", "GELU carries hooks", EXISTS, unhook),
        (subclass, "SUBCLASS", "Subclass is a subclass of GELU", "defer", replace),
        (assigned, "FORWARD", "GELU has a forward of its own", "defer", execute),
    ],
)
def test_what_stands_in_the_way_is_told_and_can_be_taken_away(
    spoil: Callable[[Any], None],
    code: str,
    detail: str,
    recommendation: str,
    mend: Callable[[Any, str], None],
) -> None:
    with torch.device("meta"):
        model = Sequential(*(block(GELU()) for _ in range(3)))
        assert missed(model) == {}
        spoil(model)
        plan = model.plan(torch.randn(2, 8, D).requires_grad_())
        (found,) = missed(model).values()
        assert (found.fused_op, found.source, found.stage) == (
            "activation_linear", "opfuser", "joint",
        )  # fmt: skip
        assert found.blocked_by == (code, detail)
        assert found.recommendation == recommendation
        assert found.component_ops == ("Bias", "GELU", "BasicLinear", "Bias")
        (site,) = found.instances
        assert site.op_loc == "1.2 to 1.4"
        assert f"(1.4): {model[1][4]!r}" in site.module_segment
        assert "1.4 BasicLinear" in site.plan_segment
        assert detail in site.notes
        # Nothing of the model has changed.
        assert model.plan(torch.randn(2, 8, D).requires_grad_()) == plan
        (note,) = (note for note in site.notes.split("; ") if "model[" in note)
        mend(model, note)
        assert missed(model) == {}


def test_every_site_and_only_those_that_are_blocked() -> None:
    with torch.device("meta"):
        model = Sequential(*(block(nn.GELU() if n % 2 else GELU()) for n in range(5)))
        found = missed(model)["activation_linear"]
    assert [site.op_loc for site in found.instances] == ["1.2 to 1.4", "3.2 to 3.4"]


def test_plain_modules_that_follow_each_other_are_one_finding() -> None:
    with torch.device("meta"):
        model = Sequential(RMSNorm(D), Linear(D, H), nn.GELU(), nn.Linear(H, D))
        (found,) = missed(model).values()
        assert (found.fused_op, found.recommendation) == ("activation_linear", EXISTS)
        assert found.blocked_by is not None
        assert found.blocked_by.detail == (
            "nn.GELU stands where opfuser.GELU could; nn.Linear stands where opfuser.Linear could"
        )
        (site,) = found.instances
        for note in site.notes.split("; "):
            if "model[" in note:
                execute(model, note)
        assert missed(model) == {}
        # Where a subclass stands too, somebody has to decide.
        model[2], model[3] = Subclass(), nn.Linear(H, D)
        (found,) = missed(model).values()
    assert (found.recommendation, found.numeric_risk.partition(":")[0]) == ("defer", "high")


def test_operations_that_are_called_outside_of_a_sequence() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = RMSNorm(D), Linear(D, H)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.linear(self.norm(x)))

    with torch.device("meta"):
        model = Alone()
        (found,) = missed(model).values()
    assert (found.fused_op, found.component_ops) == ("norm_linear", ("RMSNorm", "Linear"))
    assert "self.linear(self.norm(x))" in found.instances[0].module_segment


def test_inside_of_a_plain_model() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = block(nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.body(torch.cos(x)))

    with torch.device("meta"):
        (found,) = missed(Holder()).values()
    assert found.fused_op == "activation_linear_add"
    assert found.instances[0].op_loc == "body.2 to body.5"
    assert "in the Sequential body" in found.instances[0].notes


def test_a_module_that_changes_the_shape_is_counted_with() -> None:
    with torch.device("meta"):
        model = Sequential(nn.Flatten(1), Linear(D, H), nn.GELU("tanh"), Linear(H, D))
        flat = missed(Sequential(*model[1:]), torch.randn(512, D).requires_grad_())
        found = missed(model, torch.randn(512, 2, D // 2).requires_grad_())
    (one,), (other,) = found.values(), flat.values()
    assert one.estimate == other.estimate
    assert one.estimate.bytes_saved_per_call > 0


def test_a_subclass_that_takes_other_inputs_is_no_obstacle() -> None:
    class Sum(GELU):
        num_extra_inputs = 1

        def fuser_forward(
            self, ctxs: Any, x: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
        ) -> Any:
            ((other,),) = basic_op_extra_inputs
            return torch.sin(x) + other, [()]

        def fuser_backward(self, ctxs: Any, dy: Tensor, **unused: Any) -> Any:
            raise NotImplementedError

    x = torch.randn(2, 8, D, device="meta")
    model = Sequential(block(Sum()), block(nn.GELU())).to("meta")
    found = audit(model, [x, torch.empty(2, 8, H, device="meta")]).missed_fusions
    assert [m.fused_op for m in found] == ["activation_linear_add"]
    assert [site.op_loc for site in found[0].instances] == ["1.2 to 1.5"]


def test_a_sequence_that_is_called_twice_is_one_site() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = block(nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(torch.sin(self.body(x)))

    with torch.device("meta"):
        (found,) = missed(Twice()).values()
    assert (len(found.instances), found.estimate.calls_per_step) == (1, 2)


def test_what_hooks_belong_to_is_not_copied() -> None:
    class Trainer:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

        def watch(self, *args: Any) -> None:
            pass

        def run(self, x: Tensor) -> Tensor:
            return x[..., :D]

    with torch.device("meta"):
        model: Any = Sequential(*(block(GELU()) for _ in range(3)))
        model[1][3].register_forward_hook(Trainer().watch)
        model[1][4].forward = Trainer().run
        assert "activation_linear" in missed(model)


def test_without_gradients_nothing_is_kept() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Sequential(opfuser.ConstantScale(2.0), nn.Tanh(), opfuser.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.body(x)

    with torch.device("meta"):
        found = missed(Frozen())["pointwise_chain"]
    a = 2 * 8 * D * 4
    assert found.estimate[:3] == (2, 4 * a, 1)
    assert "0 kept less" in found.instances[0].notes


def test_a_fusion_that_was_switched_off() -> None:
    with torch.device("meta"):
        model = Sequential(block(GELU()), block(GELU()))
        with opfuser.disable("norm_linear"):
            found = audit(model, [torch.randn(2, 8, D).requires_grad_()]).missed_fusions
            sites = [site for m in found for site in m.instances]
            told = {note for site in sites for note in site.notes.split("; ")}
            (switch,) = (note for note in told if "switches it on" in note)
            with eval(switch.removesuffix(" switches it on"), {"opfuser": opfuser}):
                assert missed(model) == {}
    assert {m.fused_op for m in found} == {"norm_linear"}
    assert {m.blocked_by for m in found} == {("DISABLED", "switched off by opfuser.disable")}
    assert {site.op_loc for site in sites} == {"0.0 to 0.2", "0.5 to 1.2"}


def test_a_fusion_that_refuses_for_a_reason_of_its_own() -> None:
    with torch.device("meta"):
        model = Sequential(
            Linear(D, H),
            QKNorm(head_dim=8, num_heads=4, num_kv_heads=2),
            RotaryEmbedding(head_dim=8, num_heads=2, num_kv_heads=3),
        )
        found = missed(model)
    (why,) = {m.blocked_by for m in found.values()}
    assert why is not None
    assert why.code == "SHAPE"
    assert set(found) == {"forward_qk_norm_rotary", "backward_qk_norm_rotary"}
    assert {m.recommendation for m in found.values()} == {"defer"}
    forward = found["forward_qk_norm_rotary"]
    assert forward.component_ops == ("QKNorm", "RotaryEmbedding")
    assert forward.estimate[:3] == (0, 0, 1)
    assert "not counted" in forward.instances[0].notes


def test_a_fusion_of_a_user_is_a_plugin() -> None:
    class Scales(opfuser.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
            return input_ * (self.basic_ops[0].scale * self.basic_ops[2].scale), [(), (), ()]

        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
            factor = self.basic_ops[0].scale * self.basic_ops[2].scale
            return grad_output * factor, [(), (), ()], [(), (), ()]

    scale, nothing = opfuser.ConstantScale, opfuser.Identity
    rule = opfuser.Fusion("scales", "joint", (scale, nothing, scale), lambda *ops: Scales(ops))
    model = Sequential(scale(2.0), nn.Identity(), scale(3.0))
    with opfuser.register_forward_backward_fusion(rule, prepend=True), torch.device("meta"):
        found = missed(model)["scales"]
    assert (found.source, found.blocked_by) == (
        "plugin", ("GROUP_SPLIT", "nn.Identity stands where opfuser.Identity could"),
    )  # fmt: skip
    assert found.estimate[:3] == (2, 2 * 2 * (2 * 8 * D * 4), 1)


def test_kept_bytes_are_those_of_the_memory_benchmark() -> None:
    size = Size("meta", "fp32", D, H, 4, 2, 2, 8)
    with torch.device("meta"):
        # The gate keeps its input with or without; what the last linear reads is kept no more.
        now, then = (
            Sequential(Linear(D, H), act, Linear(H, D)) for act in (nn.GELU("tanh"), GELU())
        )
        x = torch.randn(size.batch, size.length, D).requires_grad_()
        (site,) = missed(now, x)["activation_linear"].instances
        saved = [sum(item.bytes for item in items(model, size)) for model in (now, then)]
    assert saved[0] - saved[1] == size.batch * size.length * H * 4
    assert f"{saved[0] - saved[1]} kept less" in site.notes
