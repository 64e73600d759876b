"""Router, permutation by expert and its inverse: values, errors, the same as Hugging Face."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import LoadBalancingLoss, Permute, Sequential, SwapExtra, TopKRouter, Unpermute
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.op import BasicOperation
from opfuser.report.kernel_counts import counting
from opfuser.testing import check_op
from tests.basic.values import DTYPES, EXACT, check_values

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "Mixtral": {"norm_topk_prob": True, "aux_loss": True, "z_loss": True},
    "sigmoid, balanced": {"score_function": "sigmoid", "scaling_factor": 2.5, "aux_loss": True},
    "DeepSeek-V3": {
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "scaling_factor": 2.5,
        "score_correction_bias": True,
        "num_groups": 4,
        "top_k_groups": 2,
        "z_loss": True,
    },
    "corrected softmax": {"score_correction_bias": True},
    "sigmoid, terms": {"score_function": "sigmoid", "aux_loss": True, "balance_terms": True},
    "softmax, terms": {"z_loss": True, "balance_terms": True},
}


def router(name: str, num_experts: int = 8, top_k: int = 3) -> TopKRouter:
    op = TopKRouter(num_experts, top_k, **ROUTERS[name])
    if op.score_correction_bias is not None:
        torch.nn.init.normal_(op.score_correction_bias)
    return op


def choices(tokens: int, num_experts: int, k: int) -> Tensor:
    """Indices of different experts for each token."""
    return torch.rand(tokens, num_experts).topk(k).indices


@pytest.mark.parametrize("name", ROUTERS)
def test_router_as_exact_as_torch(name: str, device: torch.device) -> None:
    check_values(router(name).to(device), torch.randn(2, 9, 8, device=device))


def test_router_of_equal_and_huge_logits() -> None:
    op = router("Mixtral")
    weights, indices, tokens, aux, z = op(torch.zeros(4, 8))
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))
    assert torch.equal(indices, torch.zeros(4, 8).topk(3).indices)
    assert tokens.tolist() == torch.bincount(indices.flatten(), minlength=8).tolist()
    torch.testing.assert_close(aux, torch.tensor(3.0))
    torch.testing.assert_close(z, torch.tensor(8.0).log().square())
    x = torch.full((2, 8), -200.0, requires_grad=True)  # whose sigmoids are 0
    weights, *_ = TopKRouter(8, 3, score_function="sigmoid", norm_topk_prob=True)(x)
    weights.sum().backward()
    assert x.grad is not None
    assert weights.isfinite().all()
    assert x.grad.isfinite().all()


def test_router_without_tokens() -> None:
    x = torch.empty(2, 0, 8, requires_grad=True)
    weights, indices, tokens, aux, z = router("Mixtral")(x)
    (weights.sum() + aux + z).backward()
    assert weights.shape == indices.shape == (2, 0, 3)
    assert tokens.tolist() == [0] * 8
    assert aux == z == 0
    assert x.grad is not None


def test_correction_chooses_but_does_not_weigh() -> None:
    op = TopKRouter(4, 1, score_correction_bias=True)
    assert op.state_dict()["score_correction_bias"].tolist() == [0.0] * 4
    assert op.score_correction_bias is not None
    op.score_correction_bias[3] = 2.0  # in place, as a training loop does
    x = torch.randn(5, 4)
    weights, _, tokens = op(x)
    assert tokens.tolist() == [0, 0, 0, 5]
    assert torch.equal(weights, x.softmax(-1)[:, 3:])
    op.reset_parameters()
    assert torch.equal(op(x)[1], x.topk(1).indices)


def test_the_correction_follows_the_tokens_of_experts() -> None:
    """As in algorithm 1 of Wang et al., until all experts get about the same."""
    op = TopKRouter(8, 2, score_function="sigmoid", score_correction_bias=True)
    bias = op.score_correction_bias
    assert bias is not None
    op.update_score_correction_bias(torch.tensor([0, 9, 3, 3, 3, 3, 3, 0]), 0.5)
    assert bias.tolist() == [0.5, -0.5, *[0.0] * 5, 0.5]
    many = torch.full((8,), 2**40)
    many[3] += 1
    op.update_score_correction_bias(many.contiguous(), 0.5)
    assert bias.tolist() == [1.0, 0.0, 0.5, -0.5, 0.5, 0.5, 0.5, 1.0]
    bias.zero_()
    logits = torch.randn(512, 8) + torch.linspace(-1, 1, 8)
    first = op(logits)[2]
    for _ in range(200):
        op.update_score_correction_bias(op(logits)[2], 0.01)
    last = op(logits)[2]
    assert first.max() > 200
    assert (last - 128).abs().max() < 16


@pytest.mark.parametrize(
    ("op", "tokens", "rate", "error", "text"),
    [
        (TopKRouter(4, 1), torch.ones(4).long(), 0.1, ArgumentError, "score_correction_bias=False"),
        (None, torch.ones(4).long(), math.inf, ArgumentError, "finite rate.*rate=inf"),
        (None, torch.ones(5).long(), 0.1, InputError, r"\(4,\) integers.*\(5,\) of torch.int64"),
        (None, torch.ones(4), 0.1, InputError, r"\(4,\) integers.* of torch.float32"),
    ],
)
def test_what_a_correction_cannot_follow(
    op: TopKRouter | None, tokens: Tensor, rate: float, error: type[Exception], text: str
) -> None:
    op = op or TopKRouter(4, 1, score_correction_bias=True)
    with pytest.raises(error, match=text):
        op.update_score_correction_bias(tokens, rate)


def test_losses_reach_the_logits_without_the_weights() -> None:
    """And each alone: a training loss may read one of them."""
    op, x = router("Mixtral").double(), torch.randn(6, 8, dtype=torch.float64)
    for n in (0, 3, 4):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        op(ours)[n].sum().backward()
        op.reference(theirs)[n].sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss_is_that_of_transformers(padded: bool) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]]) if padded else None
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    aux = TopKRouter(8, 2, aux_loss=True)(ours, mask=mask)[3]
    wanted = mixtral.load_balancing_loss_func((theirs.flatten(0, 1),), 8, 2, mask)
    torch.testing.assert_close(aux, wanted, check_dtype=False, rtol=1e-6, atol=0)
    aux.backward()
    wanted.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_one_loss_of_several_routers_is_that_of_transformers() -> None:
    """As of the tokens of all of them together."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    x = torch.randn(3, 2, 7, 8, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    op, balance = TopKRouter(8, 2, balance_terms=True), LoadBalancingLoss(3, 0.5)
    terms = [op(logits, mask=mask)[3] for logits in ours]
    loss, aux = balance(torch.tensor(2.0), *terms)
    wanted = mixtral.load_balancing_loss_func(tuple(theirs.flatten(1, 2)), 8, 2, mask)
    torch.testing.assert_close(aux, wanted, check_dtype=False, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, 2 + 0.5 * wanted, check_dtype=False, rtol=1e-6, atol=0)
    (3 * loss + aux).backward()
    (2.5 * wanted).backward()
    assert ours.grad is not None
    assert theirs.grad is not None  # partly in fp32
    assert (ours.grad - theirs.grad).norm() <= 1e-6 * theirs.grad.norm()


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_load_balancing_loss_as_exact_as_torch(coefficient: float, device: torch.device) -> None:
    x, *terms = (torch.rand(s, device=device) for s in ((), (2, 6), (2, 6), (2, 6)))
    check_values(LoadBalancingLoss(3, coefficient), x, *terms, zero_rows=False)


def test_load_balancing_loss_says_what_it_cannot_take() -> None:
    x, terms = torch.tensor(1.0), torch.rand(2, 6)
    with pytest.raises(ArgumentError, match=r"^num_routers must be positive \(LoadBalancingLoss\)"):
        LoadBalancingLoss(0)
    with pytest.raises(ArgumentError, match=r"^coefficient must be finite .*coefficient=nan\.$"):
        LoadBalancingLoss(1, float("nan"))
    for wrong in (torch.rand(2, 5), torch.rand(3, 6), torch.rand(6)):
        with pytest.raises(InputError) as error:
            LoadBalancingLoss(2)(x, wrong, terms)
        assert str(error.value) == (
            "The terms of every router must be (2, E) (LoadBalancingLoss). "
            f"Received: {tuple(wrong.shape)}, (2, 6)."
        )
    with pytest.raises(OpKwargsError, match=r"^LoadBalancingLoss takes no keywords.*: mask"):
        LoadBalancingLoss(1)(x, terms, mask=terms)


def test_groups_of_experts_are_those_of_transformers() -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=16, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2
    )
    theirs = deepseek.DeepseekV3TopkRouter(config)
    ours = router("DeepSeek-V3")
    assert config.norm_topk_prob
    assert config.routed_scaling_factor == ours.scaling_factor
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.copy_(ours.score_correction_bias)
    x, y = (torch.randn(50, 16) for _ in range(2))
    x, y = x.requires_grad_(), x.detach().clone().requires_grad_()
    _, wanted, indices = theirs(y)
    logits = x @ theirs.weight.t()
    weights, chosen, *_ = ours(logits)
    # In which order they come is open.
    order, theirs_order = chosen.argsort(-1), indices.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), indices.gather(-1, theirs_order))
    weights, wanted = weights.gather(-1, order), wanted.gather(-1, theirs_order)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(weights)
    weights.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Mixtral", "sigmoid, terms"])
def test_router_with_a_mask(name: str, device: torch.device) -> None:
    op, x = router(name).to(device), torch.randn(4, 9, 8, device=device)
    mask = torch.rand(4, 9, device=device) < 0.5
    check_values(op, x, kwargs={"mask": mask}, zero_rows=False)
    none = torch.zeros_like(mask)
    leaf = x.clone().requires_grad_()
    weights, _, tokens, *losses = op(leaf, mask=none)
    assert not any(loss.any() for loss in losses)
    assert tokens.sum() == 4 * 9 * 3
    (weights.square().sum() + sum(loss.sum() for loss in losses)).backward()
    alone = x.clone().requires_grad_()
    op(alone)[0].square().sum().backward()
    torch.testing.assert_close(leaf.grad, alone.grad)


@pytest.mark.parametrize("name", ["Mixtral", "sigmoid, terms"])
def test_padding_that_is_nan(name: str, device: torch.device) -> None:
    op, real = router(name).to(device), torch.randn(5, 8, device=device)
    padding = torch.ones(2, 8, device=device)
    padding[:, 3] = math.nan
    mask = torch.arange(7, device=device) < 5
    leaf = torch.cat([real, padding]).requires_grad_()
    alone = real.double().requires_grad_()
    weights, _, _, *losses = op(leaf, mask=mask)
    wanted_weights, _, _, *wanted = op.reference(alone)
    torch.testing.assert_close(losses, [loss.to(torch.float32) for loss in wanted])
    (weights[:5].square().sum() + sum(loss.square().sum() for loss in losses)).backward()
    (wanted_weights.square().sum() + sum(loss.square().sum() for loss in wanted)).backward()
    torch.testing.assert_close(leaf.grad[:5], alone.grad.float())
    reference = op.reference(leaf, mask=mask)[3:]
    torch.testing.assert_close([*reference], losses)


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 8).bool(), torch.ones(4).bool(), torch.ones(3)], ids=["E", "T", "dtype"]
)
def test_a_mask_that_does_not_fit(mask: Tensor) -> None:
    with pytest.raises(
        InputError,
        match=r"^The mask must be bool, of the logits' shape without the last dimension "
        r"\(TopKRouter\)\. Received: logits \(3, 8\), mask \(.*\) of torch\.",
    ):
        TopKRouter(8, 2)(torch.randn(3, 8), mask=mask)


def test_router_says_what_it_cannot_take() -> None:
    with pytest.raises(InputError) as error:
        TopKRouter(8, 2)(torch.randn(3, 7))
    assert str(error.value) == (
        "Logits must be (..., 8), one for each expert (TopKRouter). Received: input (3, 7)."
    )


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("leading", [(7,), (2, 5)], ids=str)
def test_permute_as_exact_as_torch(
    leading: tuple[int, ...], weighted: bool, device: torch.device
) -> None:
    x, indices = torch.randn(*leading, 6), torch.randint(4, (*leading, 3))
    indices[..., 0] = 1  # expert 3 may have no token, expert 1 has all
    extras = [indices, torch.rand(*leading, 3)][: 1 + weighted]
    op = Permute(4, weighted=weighted)
    tensors = [t.to(device) for t in (x, *extras)]
    check_values(op, *tensors, floors=EXACT, zero_rows=False)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("leading", [(7,), (2, 5)], ids=str)
def test_unpermute_as_exact_as_torch(
    leading: tuple[int, ...], weighted: bool, device: torch.device
) -> None:
    row_map = torch.randperm(3 * torch.Size(leading).numel()).view(*leading, 3)
    extras = [row_map, torch.randn(*leading, 3)][: 1 + weighted]
    tensors = [t.to(device) for t in (torch.randn(row_map.numel(), 6), *extras)]
    check_values(Unpermute(weighted=weighted), *tensors, zero_rows=False)


@pytest.mark.parametrize(
    ("dtype", "index"), [(torch.bfloat16, torch.int64), (torch.float64, torch.int32)], ids=str
)
def test_weights_of_another_dtype(dtype: torch.dtype, index: torch.dtype) -> None:
    """As the router's, which are in fp32 whatever the tokens are."""
    x, indices, weights = torch.randn(5, 6).to(dtype), choices(5, 4, 2).to(index), torch.rand(5, 2)
    check_op(Permute(4), x, indices, weights, zero_rows=False)
    rows, row_map = torch.randn(10, 6).to(dtype), torch.randperm(10).view(5, 2).to(index)
    check_op(Unpermute(weighted=True), rows, row_map, weights, zero_rows=False)


def test_permute_is_stable_and_unpermute_its_inverse() -> None:
    indices = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 2]])
    x = torch.arange(4.0).unsqueeze(-1)
    rows, row_map, sizes = Permute(4, weighted=False)(x, indices)
    assert rows.flatten().tolist() == [0, 1, 3, 2, 0, 1, 2, 3]
    assert sizes.tolist() == [3, 1, 4, 0]
    assert row_map.tolist() == [[4, 0], [1, 5], [6, 3], [2, 7]]
    assert torch.equal(Unpermute()(rows, row_map), 2 * x)
    rows, _, sizes, weights = Permute(4)(x, indices.int(), indices + x)
    assert sizes.dtype is torch.int64
    assert weights.tolist() == [0, 1, 3, 3, 2, 3, 4, 5]


def test_no_tokens() -> None:
    x, none = torch.empty(2, 0, 6, requires_grad=True), torch.empty(2, 0, 3)
    rows, row_map, sizes, weights = Permute(4)(x, none.long(), none)
    assert rows.shape == (0, 6)
    assert sizes.tolist() == [0] * 4
    y = Unpermute(weighted=True)(rows, row_map, none)
    assert y.shape == x.shape
    (y.sum() + weights.sum()).backward()
    assert x.grad is not None


@pytest.mark.parametrize("weighted", [True, False])
def test_there_and_back_is_reproducible(weighted: bool, device: torch.device) -> None:
    """Bit by bit, as no sum depends on the order in which threads come."""
    x = torch.randn(257, 33, device=device).bfloat16()
    indices, weights = choices(257, 8, 4).to(device), torch.rand(257, 4, device=device)

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        rows, row_map, _, row_weights = Permute(8)(leaves[0], indices, leaves[1])
        rows = rows * row_weights.unsqueeze(-1)
        extras = [row_map, leaves[1]][: 1 + weighted]
        y = Unpermute(weighted=weighted)(rows.bfloat16(), *extras)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    first = run()
    assert all(all(map(torch.equal, run(), first)) for _ in range(3))


def launches(
    op: BasicOperation, *inputs: Tensor, mask: Tensor | None = None
) -> tuple[tuple[int, int], int]:
    """Of forward and of backward, as on a GPU, and the bytes of both."""
    kwargs = {} if mask is None else {"mask": mask}
    with counting() as counter:
        counter.enter("forward")
        made = op(*inputs, **kwargs)
        made = [made] if isinstance(made, Tensor) else made
        outputs = [y for y in made if y.requires_grad]
        counter.enter("nowhere")
        grads = [torch.ones_like(y) for y in outputs]
        counter.enter("backward")
        torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads)
    passes = counter.counts["forward"], counter.counts["backward"]
    return (passes[0].launches, passes[1].launches), passes[0].bytes + passes[1].bytes


def test_a_router_is_two_launches_and_one() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    x = torch.empty(512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    mask = torch.empty(512, dtype=torch.bool, device="meta")
    for name in ROUTERS:
        op = router(name, 64, 4).to("meta")
        assert launches(op, x)[0] == (2, 1), name
        assert launches(op, x, mask=mask)[0] == (2, 1), name


def test_rows_move_as_often_as_they_must() -> None:
    """Histograms, row map, the check of indices and copies; and one launch for all gradients."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    tokens, k, cols = 512, 4, 256
    x = torch.empty(tokens, cols, dtype=torch.bfloat16, device="meta", requires_grad=True)
    rows = torch.empty(tokens * k, cols, dtype=torch.bfloat16, device="meta", requires_grad=True)
    chosen = torch.empty(tokens, k, dtype=torch.int64, device="meta")
    weights = torch.empty(tokens, k, device="meta", requires_grad=True)
    copy = x.nbytes + rows.nbytes
    small = 1.2  # of maps and weights
    for op, inputs, passes, copies in (
        (Permute(16), (x, chosen, weights), (4, 1), 2),
        (Permute(16, weighted=False), (x, chosen), (4, 1), 2),
        (Unpermute(), (rows, chosen), (1, 1), 2),
        (Unpermute(weighted=True), (rows, chosen, weights), (1, 1), 3),
    ):
        found, moved = launches(op, *inputs)  # type: ignore[arg-type]
        assert found == passes, op
        assert moved <= small * copies * copy, op


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(no_waiting: Any) -> None:
    op = TopKRouter(8, 2, norm_topk_prob=True, aux_loss=True, z_loss=True)
    permute, unpermute = Permute(8), Unpermute(weighted=True)
    logits = torch.randn(64, 8, device="cuda", requires_grad=True)
    x = torch.randn(64, 16, device="cuda", requires_grad=True)
    with no_waiting():
        weights, indices, _, aux, z = op(logits)
        rows, row_map, _, row_weights = permute(x, indices, weights)
        y = unpermute(rows * row_weights.unsqueeze(-1), row_map, weights)
        (y.square().sum() + aux + z).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


X, ROWS, NONE = torch.randn(5, 6), torch.randn(10, 6), torch.zeros(5, 2).long()
OF_INDICES = r"The experts' indices must be \(\.\.\., k\) for an input \(\.\.\., D\)"
OF_ROWS = r"The row map must have one entry for each row of an input \(R, D\)"
SHAPE = "The weights must have the shape of the "
WRONG: list[tuple[BasicOperation, tuple[Tensor, ...], str]] = [
    (Permute(4), (X, NONE[:4], torch.rand(4, 2)), OF_INDICES),
    (Permute(4), (X, NONE[:, 0], torch.rand(5)), OF_INDICES),
    (Permute(4), (X, NONE.float(), torch.rand(5, 2)), "The experts' indices must be int32 or"),
    (Permute(4), (X, NONE, torch.rand(5, 3)), f"{SHAPE}experts' indices"),
    (Unpermute(weighted=True), (ROWS[:9], NONE, torch.rand(5, 2)), OF_ROWS),
    (Unpermute(weighted=True), (ROWS.view(2, 5, 6), NONE, torch.rand(5, 2)), OF_ROWS),
    (Unpermute(weighted=True), (ROWS, NONE.float(), torch.rand(5, 2)), "The row map must be int32"),
    (Unpermute(weighted=True), (ROWS, NONE, torch.rand(5, 3)), f"{SHAPE}row map"),
]


@pytest.mark.parametrize(("op", "inputs", "text"), WRONG)
def test_what_permutations_cannot_take(
    op: BasicOperation, inputs: tuple[Tensor, ...], text: str
) -> None:
    where = rf" \({type(op).__name__}\)\. Received: input .*, weights "
    with pytest.raises(InputError, match=rf"^{text}.*{where}"):
        op(*inputs)


@pytest.mark.parametrize("index", [-1, 4, 2**31])
def test_an_index_that_is_no_experts_fails(index: int) -> None:
    text = r"^The experts' indices must be from 0 to 3 \(Permute\)\."
    with pytest.raises(InputError, match=text):
        Permute(4, weighted=False)(torch.randn(2, 3), torch.tensor([[0], [index]]))


def test_swap_goes_on_with_the_other_branch() -> None:
    check_values(SwapExtra(), torch.randn(3, 4), torch.randn(5), dtypes=DTYPES, zero_rows=False)
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, 2).bfloat16().requires_grad_()
    seq = Sequential(SwapExtra())
    y, aside = seq(x, other)
    assert y.dtype is torch.bfloat16
    y.sum().backward()  # the other output is not read
    assert x.grad is None or not x.grad.any()
    assert other.grad is not None
    assert other.grad.eq(1).all()
    assert torch.equal(aside, x)
    assert seq.plan(x, other).basic_ops
