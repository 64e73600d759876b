"""What every operation does alike: values, dtypes, copies, compilation, what is saved, errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from opfuser import ClampedSwiGLU, RotaryEmbedding, Sequential, basic
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.op import BasicOperation, GradNeeds, OperationContext
from opfuser.testing import check_op
from tests.basic.attributes import CASES, EACH_KIND, make, results, same
from tests.basic.values import DTYPES, fill, saved_by

# Those that hand a tensor on, whatever its dtype.
ANY_DTYPE = {
    "AddExtraInput", "AllGather", "AllReduce", "Combine", "ConstantScale", "Dispatch", "DropTokens",
    "Dropout", "Identity", "LoadBalancingLoss", "MakeExtraOutput", "Quantize", "ReduceScatter",
    "Reshape", "RestoreTokens", "StartCombine", "SwapExtra",
}  # fmt: skip
# Their own files say what they refuse.
OWN_TEXT = {
    "AddEmbedding", "CrossEntropy", "DotProductAttention", "Embedding", "Permute",
    "PositionEmbedding", "RotaryEmbedding", "Unpermute",
}  # fmt: skip
# Theirs compare under autocast too, with shapes of their own.
OWN_AUTOCAST = {
    "BasicLinear", "DotProductAttention", "GroupedLinear", "L2Normalization", "LayerNorm",
    "Permute", "PointwiseOperation", "QKNorm", "RMSNorm", "Unpermute",
}  # fmt: skip
TRAINED = [name for name in CASES if list(make(name).parameters())]


def made(name: str, device: torch.device | None = None) -> tuple[BasicOperation, list[Tensor]]:
    op = fill(make(name)).to(device)
    return op, [t.to(device) for t in CASES[name].inputs()]


@pytest.mark.parametrize("name", sorted({*CASES} - OWN_AUTOCAST))
def test_values_and_gradients_under_autocast(name: str, device: torch.device) -> None:
    """Without it, the files of the operations hold them to formulas in every dtype."""
    op, inputs = made(name, device)
    # A mean over no rows is nan; sizes and slots are those of so many rows.
    zero_rows = name not in {"CrossEntropy", "DropTokens", "Reshape", "RestoreTokens"}
    if name in ANY_DTYPE:
        check_op(op, *inputs, dtypes=DTYPES, zero_rows=zero_rows)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, *inputs, zero_rows=zero_rows)


@pytest.mark.parametrize("name", CASES)
def test_copies(name: str) -> None:
    op, inputs = made(name)
    wanted = results(op, inputs)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(twin) == repr(op)
        assert same(results(twin, inputs), wanted)
    assert list(op.state_dict()) == [key for key, _ in op.named_parameters()]


@pytest.mark.parametrize("name", TRAINED)
def test_other_parameters(name: str) -> None:
    op, inputs = made(name)
    op.requires_grad_()  # of LoRALinear, all are not
    other = {key: torch.randn_like(p).requires_grad_() for key, p in op.named_parameters()}
    inputs = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    y = functional_call(op, other, tuple(inputs))
    got = torch.autograd.grad(y.square().sum(), list(other.values()))
    op.load_state_dict(other)
    wanted = torch.autograd.grad(op(*inputs).square().sum(), list(op.parameters()))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", TRAINED)
def test_hazard_11_meta_construction_then_materialization_then_backward(name: str) -> None:
    op = make(name, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in op.parameters()} == {("meta", torch.float64)}
    op.to_empty(device="cpu")
    torch.manual_seed(5)
    op.reset_parameters()
    torch.manual_seed(5)
    fresh = make(name, dtype=torch.float64)
    inputs = [t.double() if t.is_floating_point() else t for t in CASES[name].inputs()]
    assert same(results(op, inputs), results(fresh, inputs))


@pytest.mark.parametrize("name", TRAINED)
def test_device_and_dtype_default_to_those_of_torch(name: str) -> None:
    assert {(p.device.type, p.dtype) for p in make(name).parameters()} == {("cpu", torch.float32)}
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in make(name).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert {p.device.type for p in make(name).parameters()} == {"meta"}


@pytest.mark.parametrize("name", sorted({*EACH_KIND} - {"GroupedLinear"}))
def test_shapes_on_the_meta_device(name: str) -> None:
    """Those of groups of rows are values."""
    op, inputs = made(name)
    shapes = [t.shape for t in results(op, inputs)]
    torch.manual_seed(7)
    leaves = [t.to("meta").requires_grad_(t.is_floating_point()) for t in inputs]
    module = op.to("meta")
    y = module(*leaves)
    ys = y if isinstance(y, tuple) else (y,)
    of_numbers = [y for y in ys if y.is_floating_point()]
    torch.autograd.backward(of_numbers, [torch.empty_like(y) for y in of_numbers])
    grads = [t.grad for t in (*leaves, *op.parameters())]
    found = [t.shape for t in (*ys, *grads) if t is not None]
    assert found == shapes[: len(found)]
    assert len(found) + len(list(op.parameters())) == len(shapes), "the rest is main_grad"


# Each way of computing once, but for those whose own files trace them.
COMPILED = [
    "AddEmbedding", "ClampedSwiGLU", "CrossEntropy", "DotProductAttention", "Embedding", "GELU",
    "L2Normalization", "LayerNorm", "LoRALinear", "PositionEmbedding", "QKNorm", "RMSNorm",
    "RotaryEmbedding", "ScaledSiTUGLU", "TopKRouter",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op, inputs = made(name)
    model = Sequential(op)
    inputs[0] = torch.stack([inputs[0], inputs[0]], -1)[..., 0]  # with gaps
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(results(compiled, inputs), results(model, inputs))


# What is saved besides the first input and the parameters: other inputs, numbers of bytes. A few
# numbers per row, never an intermediate of the input's size.
SAVED: dict[str, list[str | int]] = {
    "AddEmbedding": ["input 1"],
    "CrossEntropy": ["input 1", 4],
    "DotProductAttention": [480, 80],
    "GroupedLinear": ["input 1"],
    "L2Normalization": [12],
    "LayerNorm": [12, 12],
    "DropTokens": [48],
    "Jitter": [96],
    "LoadBalancingLoss": [32],
    "Permute": [80],
    "QKNorm": [120],
    "RMSNorm": [12],
    "RestoreTokens": ["input 1"],
    "ScaledClampedQGeGLU": ["input 1"],
    "ScaledSReLU": ["input 1"],
    "ScaledSiTUGLU": ["input 1"],
    "ScaledSwiGLU": ["input 1"],
    "ScaledTanhSReLU": ["input 1"],
    "TopKRouter": [216],
    "Unpermute": ["input 1"],
}
NOTHING = ANY_DTYPE - {"Dropout"} | {
    "AddEmbedding", "Bias", "Jitter", "Permute", "PositionEmbedding", "RotaryEmbedding",
    "Unpermute",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*CASES} - {"Dropout"}))
def test_saved_for_backward(name: str) -> None:
    op, inputs = made(name)
    inputs = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    known = {t.data_ptr(): f"input {n}" for n, t in enumerate(inputs)}
    known |= {p.data_ptr(): "a parameter" for p in op.parameters()}
    saved = [known.get(t.data_ptr(), t.nbytes) for t in saved_by(lambda: op(*inputs))]
    rest = [s for s in saved if s not in ("input 0", "a parameter")]
    assert rest == SAVED.get(name, [])
    assert saved.count("input 0") == (name not in NOTHING)
    with torch.no_grad():
        assert not saved_by(lambda: op(*inputs))


# Permute's extra input has the gradient that arrives at an extra output; here none does.
@pytest.mark.parametrize("name", sorted({*EACH_KIND} - ANY_DTYPE - {"Permute"}))
def test_gradients_that_nobody_reads_are_not_computed(name: str) -> None:
    """Only one is, or those of all parameters. The biases of groups are summed in one go."""
    op, inputs = made(name)
    differentiable = [t.is_floating_point() for t in inputs]
    slots = len(tuple(op.parameter_slots()))
    one_by_one = range(slots if name != "GroupedLinear" else 0)
    for who in ("input", "parameters", *one_by_one, "extra inputs"):
        needs = GradNeeds(
            who == "input" and differentiable[0],
            tuple(who in ("parameters", n) for n in range(slots)),
            tuple(who == "extra inputs" and wanted for wanted in differentiable[1:]),
        )
        assert computed(op, inputs, needs) == needs


def computed(op: BasicOperation, inputs: list[Tensor], needs: GradNeeds) -> GradNeeds:
    """The gradients that backward returns where ``needs`` are wanted."""
    ctx = OperationContext()
    ctx.needs = needs
    with torch.no_grad():
        y, _ = op.fuser_forward(
            [ctx],
            inputs[0],
            basic_op_extra_inputs=[inputs[1:]],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{}],
        )
        ctx.saved_tensors, ctx.parameters = tuple(ctx.to_save or ()), tuple(op.parameters())
        dx, (of_parameters,), (of_extras,) = op.fuser_backward(
            [ctx], torch.ones_like(y), basic_op_grad_extra_outputs=[[]]
        )

    def given(grads: Sequence[Tensor | None]) -> tuple[bool, ...]:
        return tuple(grad is not None for grad in grads)

    return GradNeeds(dx is not None, given(tuple(of_parameters)), given(of_extras))


@pytest.mark.parametrize("name", EACH_KIND)
def test_other_keywords_are_refused(name: str) -> None:
    op, inputs = made(name)
    with pytest.raises(OpKwargsError, match=rf"{type(op).__name__}.*Received: alpha\."):
        Sequential(op)(*inputs, op_kwargs={0: {"alpha": 2}})


@pytest.mark.parametrize("name", sorted({*EACH_KIND} - ANY_DTYPE - OWN_TEXT))
def test_inputs_of_other_dtypes_are_refused(name: str) -> None:
    """A cast would change them, also that of autocast."""
    op, (x, *extras) = made(name)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2):
        text = rf"(fp64|floating point).* Received: .*{dtype}"
        for autocast in (False, True):
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                pytest.raises(InputError, match=text),
            ):
                op(x.to(dtype), *extras)


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "Embedding"])
def test_parameters_of_other_dtypes_are_refused(name: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        text = rf"(fp32 or fp64|float32 or float64).* Received: .*{dtype}"
        with pytest.raises(ArgumentError, match=text):
            make(name, dtype=dtype)


@pytest.mark.parametrize(
    "text",
    [
        "AddEmbedding(5, 3)",
        "BasicLinear(in_features=3, out_features=2)",
        "Bias(3)",
        "CrossEntropy(ignore_index=3, label_smoothing=0.5, reduction='sum')",
        "CrossEntropy(ignore_index=-100, label_smoothing=0.0, reduction='mean', z_loss=0.0001)",
        "DotProductAttention(4, 2, causal=False, scale=0.5)",
        "Dropout(p=0.25)",
        "Embedding(5, 3, padding_idx=0)",
        "GELU(approximate='none')",
        "GroupedLinear(num_groups=2, in_features=5, out_features=4, bias=True)",
        "L2Normalization(eps=1e-06)",
        "LayerNorm((4,), eps=1e-05)",
        "PositionEmbedding(5, 3)",
        "QKNorm(num_heads=4, head_dim=6, num_kv_heads=1, eps=0.1, zero_centered_gamma=True)",
        "RMSNorm((2, 4), eps=0.5, zero_centered_gamma=True)",
        "Softplus(beta=2.0, threshold=20.0)",
    ],
)
def test_arguments_show(text: str) -> None:
    """As the expression that makes such an operation."""
    assert repr(eval(text, vars(basic))) == text


def test_arguments_are_readable() -> None:
    op = ClampedSwiGLU(limit=5.0, alpha=1.5, glu_linear_offset=0.5, glu_interleave_size=4)
    assert (op.limit, op.alpha, op.glu_linear_offset, op.glu_interleave_size) == (5, 1.5, 0.5, 4)
    assert RotaryEmbedding(4, 6).num_kv_heads == 4
