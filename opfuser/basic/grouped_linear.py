"""A linear transformation for each group of rows: the experts of a mixture."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..context import COMPUTE_DTYPES, autocast_dtype, refuse_dtype
from ..errors import ArgumentError, NotSupportedError, OpKwargsError, explain
from ..op import BasicOperation, OperationContext
from ._grouped_gemm import (
    RowGroups,
    add_grouped_wgrad,
    check_grouped_inputs,
    grouped_bias_grad,
    grouped_mm,
    grouped_wgrad,
    has_grouped_gemm,
    row_groups,
    scale_grad,
)
from ._wgrad import (
    as_rows,
    fitting_grad,
    grad_buffer,
    main_grad_buffer,
    mark_added,
    refuse_both,
)

__all__ = ["GroupedLinear"]


class _Wgrad(NamedTuple):
    """All that the gradients of the weights are made of."""

    dy: Tensor
    x: Tensor
    groups: RowGroups
    needed: tuple[bool, ...]
    weights: Sequence[nn.Parameter]


class _DelayedWgrads:
    """What waits for ``backward_dw``. Not copied or pickled along with its operation."""

    def __init__(self) -> None:
        self.pending: deque[_Wgrad] = deque()
        self.hooks: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[type[_DelayedWgrads], tuple[()]]:
        return type(self), ()


class GroupedLinear(BasicOperation):
    r"""One linear transformation per group of consecutive rows: :math:`y_g = x_g W_g^T + b_g`.

    Shapes: x ``(..., in_features)``, whose T rows are cut into groups; the extra input split sizes
    ``(num_groups,)``, integers that add up to T, zeros allowed; y ``(..., out_features)``. With
    ``scale_bias`` a second extra input s ``(T,)`` scales the bias of each row:
    ``y = x W_gᵀ + s · b_g``. Dtypes as in ``BasicLinear``.

    Parameters: ``weight0``, ``weight1``, … ``(out_features, in_features)`` and ``bias0``, …
    ``(out_features,)``; or ``weight`` ``(num_groups, out_features, in_features)`` and ``bias``
    ``(num_groups, out_features)`` where they are stored as one. Weights start as in
    ``torch.nn.Linear``, biases at zero.

    On a GPU, bf16 with sizes that are multiples of 8 runs torch's grouped GEMM: split sizes on the
    GPU are then neither checked nor read back, and rows past their sum are left undefined. Weights
    stored as one spare that kernel a copy.

    Args:
        num_groups: number of transformations.
        in_features: last dimension of x.
        out_features: last dimension of y.
        bias: whether to add a bias.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        rng_state_tracker_function: see ``BasicLinear``.
        accumulate_into_main_grad: see ``BasicLinear``; for the weights.
        single_grouped_weight: store the weights as one parameter.
        single_grouped_bias: store the biases as one parameter.
        delay_wgrad_compute: leave the gradients of the weights to :meth:`backward_dw`.
        scale_bias: take the scales of the bias; has no effect with ``bias=False``.
        accumulate_into_grad: see ``BasicLinear``; for the weights, all of them or none in a call.
            torch's grouped GEMM cannot add: where that runs, autograd does.

    Raises:
        ArgumentError: sizes below one; a dtype that is not a float; a bias missing in some groups.
        InputError: x, the split sizes or the scales have the wrong shape or dtype.
        OpKwargsError: a keyword is passed to forward.
        NotSupportedError: the keyword is te.ops' ``output`` or ``grad_input``.
    """

    num_extra_inputs: int = 1
    backward_reads_parameters: ClassVar[bool] = True

    class Saved(NamedTuple):
        split_sizes: Tensor
        scales: Tensor | None
        input: Tensor | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        accumulate_into_grad: bool = False,
    ) -> None:
        self.scale_bias = scale_bias and bias
        if self.scale_bias:
            self.num_extra_inputs = 2
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        if min(num_groups, in_features, out_features) < 1 or dtype not in COMPUTE_DTYPES:
            raise ArgumentError(
                explain(
                    "GroupedLinear needs at least one group and feature, and computes in "
                    "float16, bfloat16, float32 or float64",
                    received=f"num_groups={num_groups}, in_features={in_features}, "
                    f"out_features={out_features}, dtype={dtype}",
                )
            )
        refuse_both(accumulate_into_main_grad, accumulate_into_grad, type(self).__name__)
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.accumulate_into_grad = accumulate_into_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self._rng_state_tracker_function = rng_state_tracker_function
        self._delayed = _DelayedWgrads()
        self._weight_names = _names("weight", num_groups, single_grouped_weight)
        self._bias_names = _names("bias", num_groups, single_grouped_bias)
        groups = (num_groups,) if single_grouped_weight else ()
        for name in self._weight_names:
            weight = torch.empty(*groups, out_features, in_features, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
        groups = (num_groups,) if single_grouped_bias else ()
        for name in self._bias_names:
            value = torch.empty(*groups, out_features, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value) if bias else None)
        self.reset_parameters()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None and name.startswith("weight") and self.delay_wgrad_compute:
            # Tells data-parallel wrappers that the gradient comes after the backward pass.
            param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Weights uniform in ±1/√in_features, as ``torch.nn.Linear``; biases zero."""
        tracker = self._rng_state_tracker_function
        for name in self._weight_names:
            weight = getattr(self, name)
            for matrix in weight if self.single_grouped_weight else [weight]:
                with tracker().fork() if tracker is not None else contextlib.nullcontext():
                    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        for name in self._bias_names:
            if getattr(self, name) is not None:
                nn.init.zeros_(getattr(self, name))

    def _current_weights(self) -> list[nn.Parameter]:
        weights = [getattr(self, name) for name in self._weight_names]
        if any(w is None for w in weights):
            missing = [n for n, w in zip(self._weight_names, weights) if w is None]
            raise ArgumentError(
                explain(
                    "Every group needs its weight",
                    where=type(self).__name__,
                    received=f"None for {', '.join(missing)}",
                    remedy="Assign a parameter before the call",
                )
            )
        return weights

    def _current_biases(self) -> list[Tensor]:
        biases = [getattr(self, name) for name in self._bias_names]
        present = [b for b in biases if b is not None]
        if present and len(present) != len(biases):
            missing = [n for n, b in zip(self._bias_names, biases) if b is None]
            raise ArgumentError(
                explain(
                    "Either all groups have a bias or none has",
                    where=type(self).__name__,
                    received=f"None for {', '.join(missing)}",
                )
            )
        return present

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        if basic_op_kwargs[0]:
            _refuse_keywords(basic_op_kwargs[0])
        ctx = basic_op_ctxs[0]
        split_sizes, *others = basic_op_extra_inputs[0]
        scales = others[0] if self.scale_bias else None
        assert split_sizes is not None
        check_grouped_inputs(
            input_,
            split_sizes,
            scales,
            num_groups=self.num_groups,
            in_features=self.in_features,
            where=type(self).__name__,
        )
        if input_.dtype not in COMPUTE_DTYPES:
            refuse_dtype(input_, self)
        weights = self._current_weights()
        biases = self._current_biases()
        dtype = autocast_dtype(input_.device) or weights[0].dtype
        x = as_rows(input_).to(dtype)
        if split_sizes.is_cuda and not has_grouped_gemm(x, self.out_features):
            split_sizes = split_sizes.cpu()  # backward needs them there too: wait for the GPU once
        groups = row_groups(split_sizes, x, type(self).__name__)
        y = grouped_mm(x, self._matrices(weights, dtype), groups, transpose=True)
        if biases:
            added = groups.spread(self._table(biases), x.shape[0])
            y += added if scales is None else added * scales.reshape(-1, 1)
        if ctx.requires_grad:
            wants_weights = any(ctx.needs.parameters[: len(weights)])
            ctx.save_for_backward(split_sizes, scales, x if wants_weights else None)
            keep = (
                self.accumulate_into_main_grad
                or self.accumulate_into_grad
                or self.delay_wgrad_compute
            )
            if wants_weights and keep and not torch.compiler.is_compiling():
                # Not saved: unpacking a saved tensor may give another object, without main_grad.
                ctx.grad_weights = weights
        return y.view(*input_.shape[:-1], self.out_features), [()]

    def _matrices(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
        matrices = [w.to(dtype) for w in weights]
        return matrices[0] if self.single_grouped_weight else matrices

    def _table(self, biases: Sequence[Tensor]) -> Tensor:
        return biases[0] if self.single_grouped_bias else torch.stack(list(biases))

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        ctx = basic_op_ctxs[0]
        split_sizes, scales, x = cast("GroupedLinear.Saved", ctx.saved_tensors)
        parameters = cast("tuple[Tensor, ...]", ctx.parameters)
        needs = ctx.needs
        count = len(self._weight_names)
        weights, biases = parameters[:count], parameters[count:]

        dy = as_rows(grad_output)
        if x is not None:
            dy = dy.to(x.dtype)
        groups = row_groups(split_sizes, dy, type(self).__name__)
        dx = ds = None
        if needs.input:
            dx = grouped_mm(dy, self._matrices(weights, dy.dtype), groups, transpose=False)
            dx = dx.view(*grad_output.shape[:-1], self.in_features)
        grads: list[Tensor | None] = [None] * len(parameters)
        if x is not None:
            owners = getattr(ctx, "grad_weights", ())  # none if a fusion of the user's filled it in
            if not owners and (self.accumulate_into_main_grad or self.delay_wgrad_compute):
                owners = self._current_weights()
            work = _Wgrad(dy, x, groups, needs.parameters[:count], owners)
            grads[:count] = self._weight_grads(work)
        if any(needs.parameters[count:]):
            db = grouped_bias_grad(dy, scales, groups)
            grads[count:] = [db] if self.single_grouped_bias else db.unbind(0)
        if scales is not None and biases and needs.extra_inputs[1]:
            ds = scale_grad(dy, self._table(biases), scales, groups)
        return dx, [grads], [(None, ds) if self.scale_bias else (None,)]

    def _weight_grads(self, work: _Wgrad) -> list[Tensor | None]:
        """What autograd gets for the weights now."""
        if self.delay_wgrad_compute:
            self._delayed.pending.append(work)
        elif self.accumulate_into_main_grad:
            self._add_to_main_grads(work)
        elif not (self.accumulate_into_grad and self._add_to_grads(work, grad_buffer)):
            return self._compute(work)
        if not self.accumulate_into_main_grad:
            return [None] * len(work.needed)
        return [
            mark_added(weight) if needed else None
            for weight, needed in zip(work.weights, work.needed)
        ]

    def _compute(self, work: _Wgrad) -> list[Tensor | None]:
        dw = grouped_wgrad(work.dy, work.x, work.groups, stacked=self.single_grouped_weight)
        grads = [dw] if isinstance(dw, Tensor) else dw
        return [g if needed else None for g, needed in zip(grads, work.needed)]

    def _add_to_main_grads(self, work: _Wgrad) -> None:
        buffers = [
            main_grad_buffer(weight, type(self).__name__) if needed else None
            for weight, needed in zip(work.weights, work.needed)
        ]
        self._add(work, buffers)

    def _add_to_grads(
        self, work: _Wgrad, buffer: Callable[[Tensor, Tensor], Tensor | None]
    ) -> bool:
        """Adds to the ``grad`` of each weight, if ``buffer`` finds all of them; tells whether."""
        if work.groups.bounds is None or not work.weights:
            return False
        buffers: list[tuple[Tensor, bool] | None] = []
        for weight, needed in zip(work.weights, work.needed):
            grad = buffer(weight, work.x) if needed else None
            if needed and grad is None:
                return False
            buffers.append(None if grad is None else (grad, True))
        self._add(work, buffers)
        return True

    def _add(self, work: _Wgrad, buffers: list[tuple[Tensor, bool] | None]) -> None:
        if self.single_grouped_weight and buffers[0] is not None:
            whole, add = buffers[0]
            buffers = [(matrix, add) for matrix in whole]
        add_grouped_wgrad(buffers, work.dy, work.x, work.groups)

    def need_backward_dw(self) -> bool:
        """Whether the gradients of the weights are left to :meth:`backward_dw`."""
        return self.delay_wgrad_compute

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the weight gradients of the earliest backward pass that still lacks them.

        They are added to ``grad``, or to ``main_grad``, of the weights that forward used; then the
        hooks run. Does nothing if no backward pass waits.
        """
        if not self._delayed.pending:
            return
        work = self._delayed.pending.popleft()
        if self.accumulate_into_main_grad:
            self._add_to_main_grads(work)
        elif not (self.accumulate_into_grad and self._add_to_grads(work, fitting_grad)):
            for weight, dw in zip(work.weights, self._compute(work)):
                if dw is not None:
                    cast_dw = dw.to(weight.dtype)
                    weight.grad = cast_dw if weight.grad is None else weight.grad + cast_dw
        for hook in self._delayed.hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Has ``hook()`` called at the end of every :meth:`backward_dw`."""
        self._delayed.hooks.append(hook)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        sizes = extra_inputs[0].tolist()
        biases = self._current_biases()
        weights = [getattr(self, name) for name in self._weight_names]
        weights = list(weights[0]) if self.single_grouped_weight else weights
        biases = list(biases[0]) if biases and self.single_grouped_bias else biases
        x = as_rows(input_).to(weights[0].dtype)
        scales = extra_inputs[1].reshape(-1, 1).split(sizes) if self.scale_bias else None
        parts = []
        for g, rows in enumerate(x.split(sizes)):
            y = rows @ weights[g].t()
            if biases:
                y = y + (biases[g] if scales is None else scales[g].to(y.dtype) * biases[g])
            parts.append(y)
        return torch.cat(parts).view(*input_.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )


def _refuse_keywords(keywords: dict[str, Any]) -> None:
    buffers = sorted(keywords.keys() & {"output", "grad_input"})
    if buffers:
        raise NotSupportedError(
            explain(
                "GroupedLinear allocates its results, and writes to no buffer of the caller",
                received=", ".join(buffers),
            )
        )
    raise OpKwargsError(
        explain("The forward of GroupedLinear takes no keywords", received=", ".join(keywords))
    )


def _names(stem: str, count: int, single: bool) -> list[str]:
    return [stem] if single else [f"{stem}{n}" for n in range(count)]
