"""Advice is tried: what a finding recommends is applied, and the finding is gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser import BasicOperation, Linear, MergedLinear, RMSNorm, Sequential
from opfuser.report.audit import MissedFusion, audit
from opfuser.report.audit.chains import Fused, chains, fused, inputs_of, merged, residuals
from opfuser.report.audit.estimates import Cost, unfused
from opfuser.report.audit.finding import find
from opfuser.report.audit.kernels import KNOWN, advice
from opfuser.report.audit.remedies import written
from opfuser.report.audit.tracing import trace
from opfuser.report.target import Target
from opfuser.report.traffic import model_traffic

from .ground_truth import TRUTHS, D, DiTBlock, Truth, X
from .test_formulas import Written, rms, var

H = 64
HEADS = 4


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, dim=-1)


def swapped(x: Tensor) -> Tensor:
    return torch.cat(halves(x)[::-1], dim=-1)


def attended(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT / x.shape[-1] ** 0.5, -1) @ x


def turned(x: Tensor) -> Tensor:
    """Every head turns by its position, as in Llama."""
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    half = heads.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * frequencies
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    a, b = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-b, a), dim=-1) * sin).transpose(1, 2).flatten(2)


def merged_at_once(m: Any, x: Tensor) -> Tensor:
    parts = {"a": nn.Linear(D, D, device="meta"), "b": nn.Linear(D, D, device="meta")}
    parts["a"].weight, parts["b"].weight = m.matrix, m.other
    parts["a"].bias, parts["b"].bias = m.w, m.b
    return MergedLinear.of(parts)(x)


class OfD(Written):
    """Calls a function with itself and its input, of width D."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(function)
        del self.m
        self.w, self.b = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.matrix, self.other = (nn.Parameter(torch.randn(D, D)) for _ in range(2))
        self.double()


Function = Callable[[Any, Tensor], Tensor]
# How each formula is written, and how with the kernel that is looked up first.
FORMULAS: dict[str, tuple[Function, Function]] = {
    "rms_norm": (
        lambda m, x: x * torch.rsqrt(rms(x)) * m.w,
        lambda m, x: F.rms_norm(x, (D,), m.w, 1e-6),
    ),
    "layer_norm": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(var(x)),
        lambda m, x: F.layer_norm(x, (D,)),
    ),
    "gelu": (
        lambda m, x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
        lambda m, x: F.gelu(x),
    ),
    "gelu_tanh": (
        lambda m, x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        lambda m, x: F.gelu(x, approximate="tanh"),
    ),
    "silu": (lambda m, x: x * torch.sigmoid(x), lambda m, x: F.silu(x)),
    "quick_gelu": (lambda m, x: x * torch.sigmoid(1.702 * x), lambda m, x: opfuser.QGELU()(x)),
    "squared_relu": (lambda m, x: F.relu(x) ** 2, lambda m, x: opfuser.SReLU()(x)),
    "swiglu": (
        lambda m, x: F.silu(halves(x)[0]) * halves(x)[1],
        lambda m, x: opfuser.SwiGLU()(x),
    ),
    "geglu": (
        lambda m, x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1],
        lambda m, x: opfuser.GEGLU()(x),
    ),
    "reglu": (lambda m, x: F.relu(halves(x)[0]) * halves(x)[1], lambda m, x: opfuser.ReGLU()(x)),
    "sreglu": (
        lambda m, x: F.relu(halves(x)[0]) ** 2 * halves(x)[1], lambda m, x: opfuser.SReGLU()(x),
    ),
    "glu": (
        lambda m, x: torch.sigmoid(halves(x)[0]) * halves(x)[1],
        lambda m, x: F.glu(swapped(x)),
    ),
    "qgeglu": (
        lambda m, x: (g := halves(x)[0]) * torch.sigmoid(1.702 * g) * halves(x)[1],
        lambda m, x: opfuser.QGEGLU()(x),
    ),
    "linear": (lambda m, x: x @ m.matrix.T + m.b, lambda m, x: F.linear(x, m.matrix, m.b)),
    "merged_linear": (
        lambda m, x: torch.cat((F.linear(x, m.matrix, m.w), F.linear(x, m.other, m.b)), -1),
        merged_at_once,
    ),
    "attention": (
        lambda m, x: attended(x), lambda m, x: F.scaled_dot_product_attention(x, x, x),
    ),
    "rotary_embedding": (
        lambda m, x: turned(x),
        lambda m, x: opfuser.RotaryEmbedding(HEADS, D // HEADS, num_kv_heads=0)(x),
    ),
}  # fmt: skip


def test_every_formula_with_a_kernel_here_is_tried() -> None:
    here = {kind for kind in KNOWN if advice(kind, gradient=True)[0] in ("torch", "opfuser")}
    assert set(FORMULAS) == here


@pytest.mark.parametrize("kind", FORMULAS)
def test_the_kernel_of_a_formula_takes_its_place(kind: str) -> None:
    """Values and gradients are the same."""
    torch.manual_seed(0)
    before, after = (OfD(function) for function in FORMULAS[kind])
    after.load_state_dict(before.state_dict())
    x = torch.randn(2, 8, D, dtype=torch.float64, requires_grad=True)
    missed = [
        {m.fused_op: m for m in audit(model.float(), [x.float()]).missed_fusions}
        for model in (before, after)
    ]
    found = missed[0][kind]
    assert found.recommendation == "use_existing_kernel"
    assert found.existing_kernel.evidence[0].startswith(f"{found.source}.")
    assert kind not in missed[1]
    models = before.double(), after.double()
    dy = torch.randn_like(before(x))
    sides = [(y := model(x), *torch.autograd.grad(y, x, dy)) for model in models]
    torch.testing.assert_close(sides[1], sides[0], rtol=1e-6, atol=1e-6)


class Block(nn.Module):
    """Modules that a forward of the user calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Rewritten(nn.Module):
    """Two of them, as an audit says that they be written."""

    def __init__(self, codes: dict[str, str]) -> None:
        super().__init__()
        self.first, self.second = (eval(codes[name], {"opfuser": opfuser}) for name in "01")

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(self.second(torch.sin(self.first(x)))))


class Sine(nn.Sequential):
    """Something that no operation computes is behind."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(x))


class SineBlock(Block):
    """Something that no operation computes is behind."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(x))


def own_forward() -> nn.Module:
    return Sine(SineBlock(), SineBlock())


def read_blocks() -> nn.Module:
    return Sine(Block(), Block())


def residual_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H), nn.GELU("tanh"), nn.Linear(H, D))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(D, HEADS, H, batch_first=True)


class Mixed(Block):
    """A Sequential of torch, and the same in the forward of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(torch.cos(self.body(x))))


def rows() -> Tensor:
    return torch.randn(2, 8, D, device="meta").requires_grad_()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def notes(missed: list[MissedFusion] | tuple[MissedFusion, ...]) -> dict[tuple[str, str], str]:
    """The notes of each site."""
    return {(m.fused_op, site.op_loc): site.notes for m in missed for site in m.instances}


def calls(model: nn.Module, x: Tensor) -> dict[str, set[tuple[str, str]]]:
    """The sites that each call replaces, by the call; empty for those that have to be written."""
    out: dict[str, set[tuple[str, str]]] = {}
    for site, text in notes(audit(model, [x]).missed_fusions).items():
        found = re.search(r"(opfuser\.\S+\(model.*?\)) replaces this", text)
        assert found or "write it as opfuser.Sequential(" in text
        out.setdefault(found.group(1) if found else "", set()).add(site)
    return out


@pytest.mark.parametrize("make", [feed_forward, encoder_layer, residual_blocks])
def test_what_from_torch_replaces(make: Callable[[], nn.Module]) -> None:
    model, x = on_meta(make), rows()
    assert set(calls(model, x)) == {"opfuser.from_torch(model)"}
    assert audit(opfuser.from_torch(model), [x]).missed_fusions == ()


def test_what_apply_replaces_inside_of_a_model_of_ones_own() -> None:
    model, x = on_meta(read_blocks), rows()
    assert set(calls(model, x)) == {"opfuser.apply(model)"}
    opfuser.apply(model, example=x)
    assert audit(model, [x]).missed_fusions == ()


class Around(nn.Module):
    """A block of a diffusion transformer, and what no operation computes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DiTBlock()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return torch.sin(self.inner(x, condition))


@pytest.mark.parametrize(("make", "path"), [(DiTBlock, "model"), (Around, "model.inner")])
def test_why_a_module_is_kept_is_said_beside_what_it_misses(make: Any, path: str) -> None:
    model, inputs = Truth(make, (*X, (2, D)), {}).build()
    found = {name: text for (name, _), text in notes(audit(model, inputs).missed_fusions).items()}
    assert "opfuser.apply(model) replaces this" in found["attention"]
    assert f"opfuser.apply(model) keeps {path}, which computes mul; " in found["activation_linear"]
    assert "keeps" not in found["adaptive_layer_norm"]  # which no operation computes


def test_what_is_no_sequence_as_a_whole_is_written_as_several() -> None:
    """And computes the same."""
    model, x = own_forward().double(), torch.randn(2, 8, D, dtype=torch.float64, requires_grad=True)
    assert set(calls(model, x)) == {""}
    codes: dict[str, str] = {}
    for (_, place), text in notes(audit(model, [x]).missed_fusions).items():
        code = text.removeprefix("write it as ").partition("; ")[0]
        assert codes.setdefault(place[0], code) == code  # all findings of a block say the same
    other = Rewritten(codes).double()
    assert audit(other, [x]).missed_fusions == ()
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    dy = torch.randn_like(x)
    sides = [(y := m(x), *torch.autograd.grad(y, [x, *m.parameters()], dy)) for m in (model, other)]
    torch.testing.assert_close(sides[1], sides[0], rtol=1e-9, atol=1e-9)


def test_from_torch_is_said_only_where_it_converts() -> None:
    model, x = on_meta(Mixed), rows()
    of_body = calls(model, x)["opfuser.apply(model)"]
    assert {(name, place.partition(" ")[0]) for name, place in of_body} == {
        ("norm_linear", "body.1"), ("activation_linear", "body.3"),
    }  # fmt: skip
    model.body = opfuser.from_torch(model.body)
    left = calls(model, x)
    assert set(left) == {""}
    assert not any("body" in place for _, place in left[""])


def test_from_torch_is_not_said_of_what_it_leaves_blocked() -> None:
    """Hooks stay where they are, and keep a fusion from matching there alone."""
    model, x = on_meta(lambda: nn.Sequential(*feed_forward(), *feed_forward())), rows()
    model[1].register_forward_hook(lambda *args: None)
    found = calls(model, x)
    assert {place for _, place in found[""]} == {"1 (Linear)", "3 (Linear)"}
    assert {"5 (Linear)", "7 (Linear)"} <= {p for _, p in found["opfuser.from_torch(model)"]}


def test_a_model_that_reads_values_is_not_changed() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.count = feed_forward(), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.count(x)) if x.sum().item() < 1e9 else x

    model, x = Reads(), torch.randn(2, 8, D, requires_grad=True)
    state = torch.get_rng_state()
    assert set(calls(model, x)) == {"opfuser.apply(model)"}
    assert model.count.num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_what_hugging_face_models_are_told() -> None:
    hugging_face = pytest.importorskip("tests.cli.hugging_face", exc_type=ImportError)
    model, tokens = on_meta(hugging_face.plain), torch.zeros(2, 8, dtype=torch.int64, device="meta")
    found = calls(model, tokens)
    assert set(found) == {"opfuser.hf.apply(model)", ""}
    # Between the last layer and the norm behind it there are two Sequentials.
    assert {name for name, _ in found[""]} == {"forward_add_rms_norm"}


def fused_in(model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Fused]:
    traced = trace(model, inputs)
    return fused(chains(merged(find(traced)), traced))


def operations_alone() -> nn.Module:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([RMSNorm(D), Linear(D, H)])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    return Alone()


def unregistered() -> nn.Module:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = RMSNorm(D), Linear(D, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))

    return Hidden()


class Gated(nn.Module):
    """A gated block and its loss, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(D), nn.LayerNorm(D)
        self.gate, self.up = nn.Linear(D, H, bias=False), nn.Linear(D, H)
        self.down, self.head = nn.Linear(H, D), nn.Linear(D, 8192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        x = x + F.dropout(self.down(F.silu(self.gate(hidden)) * self.up(hidden)), 0.1)
        logits = self.head(self.last(x)).flatten(0, 1)
        return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))


PLAIN: dict[str, Truth] = {
    **{name: truth for name, truth in TRUTHS.items() if truth.missed},
    "own forward": Truth(own_forward, X, {}),
    "operations": Truth(operations_alone, X, {}),
    "operations of nobody": Truth(unregistered, X, {}),
    "gated": Truth(Gated, ((2, 512, D),), {}),
}
FUSING = ("residual and norm", "bias, dropout, residual", "own forward", "operations",
          "operations of nobody", "gated", "diffusion transformer")  # fmt: skip


@pytest.mark.parametrize("name", FUSING)
def test_a_sequence_as_it_is_written_fuses(name: str) -> None:
    model, inputs = PLAIN[name].build()
    found = list(fused_in(model, inputs))
    assert found
    for one in found:
        assert_fuses(one, model)


def assert_fuses(one: Fused, model: nn.Module) -> None:
    """The Sequential that is recommended, called as its operations say, has the fusion."""
    with torch.device("meta"):
        sequence = eval(written(one.whole), {"opfuser": opfuser, "model": model})
    of_chain = iter(inputs_of(one.whole))
    x = next(of_chain)
    inside = {residual.stop for residual in residuals(one.whole).values()}
    extras = []
    for n, module in enumerate(one.whole.modules):
        if isinstance(module, BasicOperation) and module.num_extra_inputs:
            extra = next(of_chain)
            extras += [] if n in inside else [extra]
    with torch.set_grad_enabled(one.whole.differentiated):
        plan = sequence.plan(x.to(next(sequence.parameters()).dtype), *extras)
    assert one.name in plan.fused("forward") | plan.fused("backward")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "mixtral"])
def test_sequences_of_hugging_face_models_fuse_as_they_are_written(name: str) -> None:
    models = pytest.importorskip("tests.audit.test_hugging_face").MODELS
    make, inputs, _ = models[name]
    model = on_meta(make)
    for one in fused_in(model, (inputs,)):
        assert_fuses(one, model)


def test_options_are_those_of_the_model() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(D, eps=1e-3), nn.RMSNorm(D, eps=None)
            self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cos(self.down(self.second(torch.sin(self.up(self.first(x))))))

    found = [written(one.whole) for one in fused_in(on_meta(Norms), (rows(),))]
    assert [re.findall(r"eps=([\d.e-]+)\)|bias=(\w+)", code) for code in found] == [
        [("0.001", ""), ("", "False")],
        [(str(torch.finfo(torch.float32).eps), ""), ("", "True")],
    ]


# Numbers.


def test_what_is_moved_more_is_said_so_and_counted() -> None:
    """A norm and a linear operation: the norm is computed and written a second time."""

    class Between(nn.Module):
        """Others read what is computed before, and compute from the result."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.body(torch.cos(x)))

    model, x = on_meta(Between), rows()
    (found,) = audit(model, [x]).missed_fusions
    model.body = opfuser.from_torch(model.body)
    after = Target("", model, (x,))
    with unfused():
        apart = model_traffic(after)
    together = model_traffic(after)
    a = 2 * 8 * D * 4
    assert found.estimate == (
        apart.counts.launches - together.counts.launches,
        a,
        1,
        together.counts.bytes - apart.counts.bytes,
        together.saved_bytes - apart.saved_bytes,
        None,
    )
    assert found.estimate[3:5] == (a, -a)
    assert (
        f"0 launches less; {a} bytes moved more, {a} kept less for backward; saves memory, not"
        in (found.instances[0].notes)
    )


class Wasteful(opfuser.FusedOperation):
    """A launch less, and many more bytes."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        wide = torch.cat([input_] * 9)
        return wide[: len(input_)] * self.basic_ops[0].scale, [() for _ in self.basic_ops]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        empty = [() for _ in self.basic_ops]
        return grad_output * self.basic_ops[0].scale, empty, empty


def test_what_costs_more_bytes_than_it_saves_is_not_recommended() -> None:
    scale, nothing = opfuser.ConstantScale, opfuser.Identity
    rule = opfuser.Fusion(
        "wasteful", "joint", (scale, nothing, scale, scale), lambda *ops: Wasteful(ops)
    )
    with opfuser.register_forward_backward_fusion(rule, prepend=True):
        model = Sequential(scale(2.0), nn.Identity(), scale(3.0), scale(3.0))
        (found,) = (m for m in audit(model, [rows()]).missed_fusions if m.fused_op == "wasteful")
    assert found.recommendation == "defer"
    launches, less, _, moved, kept, _ = found.estimate
    assert launches > 0 == less == kept
    assert moved > 0
    text = found.instances[0].notes
    assert f"{launches} launches less; {moved} bytes moved more, 0 kept less for backward" in text
    assert "pays only where launches take the time, as with small inputs" in text


def test_costs_that_are_gains() -> None:
    assert not Cost(0, -512, 512).loses
    assert Cost(3, -512, 0).loses
