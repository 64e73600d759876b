"""A linear transformation for each group of rows: the experts of a mixture."""

# Longer than 500 lines: two thirds are one class, whose methods are
# the arguments, weights and passes of one operation; what it shares is in six other files.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.context import (
    COMPUTE_DTYPES,
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
    autocast_dtype,
    refuse_dtype,
)
from ..core.fusion import Env, Refusal
from ..errors import ArgumentError
from ..gemm import RowGroups, as_rows, reads_groups_on_device, row_groups
from ..gemm_providers import GemmChoice
from ..op import BasicOperation, Dtypes, OperationContext
from ..quantization.recipe_state import init_new_operation
from ._autograd_state import backward_pass
from ._grouped_bias import grouped_bias, grouped_bias_grad, scale_grad
from ._grouped_inputs import check_grouped_inputs
from ._grouped_products import PLAIN, GroupedProducts
from ._grouped_weight_grad import (
    DelayedWgrads,
    GroupedLinearSettings,
    GroupedProduct,
    GroupedWgrad,
    ScaledGroupedProduct,
)
from ._recipes import check_own_recipe, choices_of, recipe_refusal
from ._result_buffers import buffers_of_call, check_buffers, may_become_grad, overlap
from ._weight_grad import keep_weights, kept_weights, refuse_both


class GroupedGrad(NamedTuple):
    """The gradient of the output as products take it, and its groups of rows."""

    dy: Any
    groups: RowGroups


class GroupedLinear(BasicOperation):
    r"""One linear transformation per group of consecutive rows: :math:`y_g = x_g W_g^T + b_g`.

    Shapes: x ``(..., in_features)``, whose T rows are cut into groups; the extra input split sizes
    ``(num_groups,)``, integers that add up to T, zeros allowed; y ``(..., out_features)``. With
    ``scale_bias`` a second extra input s ``(T,)`` scales the bias of each row:
    ``y = x W_gᵀ + s · b_g``. Dtypes as in ``BasicLinear``.

    Parameters: ``weight0``, ``weight1``, … ``(out_features, in_features)`` and ``bias0``, …
    ``(out_features,)``; or ``weight`` ``(num_groups, out_features, in_features)`` and ``bias``
    ``(num_groups, out_features)`` where they are stored as one. Weights start as in
    ``torch.nn.Linear``, biases at zero. With ``weight_transposed`` each matrix is the transpose,
    ``(in_features, out_features)``, as GPT-OSS stores its experts; there is no quantised compute of
    those.

    On a GPU, bf16 with sizes that are multiples of 8 runs torch's grouped GEMM: split sizes on the
    GPU are then neither checked nor read back, and rows past their sum are left undefined. Weights
    stored as one spare that kernel a copy.

    In a region of quantised compute (:class:`opfuser.autocast`) its GEMMs take operands in the
    format of the recipe. In FP8 split sizes on a GPU stay there, too; those of MXFP8 and NVFP4 are
    read by the host. ``recipe`` is as in ``BasicLinear``.

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
            torch's grouped GEMM cannot add, nor can those of FP8 operands: there autograd does.
        weight_transposed: store the transpose of each matrix.

    Keywords of forward (``op_kwargs`` of a sequence), for results in memory of the caller's, such
    as that of a communication library:

    - ``output``: forward writes the output to this tensor, and returns a tensor that shares its
      memory.
    - ``grad_input``: so does backward, every time it runs, with the gradient of the input, if that
      needs one. Autograd gets a copy where the input is a leaf, whose ``grad`` would be this memory
      otherwise. Further up autograd itself may pass a gradient on as it is: where a leaf's ``grad``
      may come to lie in the buffer, through a view of the leaf, say, clone the input.
    - ``output_buffer``, ``grad_input_buffer``: other names of the two.

    Each is a contiguous tensor of the shape, dtype and device of what is written, does not require
    grad, and overlaps neither the other nor a tensor of the call. What autograd saved of an output
    notices if the buffer is written to before it was used: torch raises an error.

    Raises:
        ArgumentError: sizes below one; a dtype that is not a float; a bias missing in some groups.
        InputError: x, the split sizes or the scales have the wrong shape or dtype.
            Or a buffer cannot take its result.
        OpKwargsError: another keyword is passed to forward, or a buffer under both of its names.
        NotSupportedError: a buffer is passed while torch.compile traces. Or split sizes are on the
            meta device in a region of MXFP8 or NVFP4.
    """

    kernels = ("grouped GEMM",)
    num_extra_inputs: int = 1
    backward_reads_parameters: ClassVar[bool] = True
    recipe: str | None = "inherit"
    takes_part_in_recipes: ClassVar[bool] = True
    multiplies_whole: bool = False  # as a module that multiplies the parameter of all groups itself
    read_only: ClassVar[frozenset[str]] = frozenset(
        "num_groups in_features out_features use_bias scale_bias single_grouped_weight "
        "single_grouped_bias num_extra_inputs weight_transposed".split()
    )

    Settings = GroupedLinearSettings

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
        weight_transposed: bool = False,
    ) -> None:
        self.scale_bias = scale_bias and bias
        if self.scale_bias:
            self.num_extra_inputs = 2
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        if min(num_groups, in_features, out_features) < 1 or dtype not in COMPUTE_DTYPES:
            raise ArgumentError.explained(
                "GroupedLinear needs at least one group and feature, and computes in "
                "float16, bfloat16, float32 or float64",
                received=f"num_groups={num_groups}, in_features={in_features}, "
                f"out_features={out_features}, dtype={dtype}",
            )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.weight_transposed = weight_transposed
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.accumulate_into_grad = accumulate_into_grad
        self._delay_wgrad_compute = delay_wgrad_compute
        self.make_settings()  # checks them
        self._rng_state_tracker_function = rng_state_tracker_function
        self._delayed = DelayedWgrads()
        self._weight_names = _names("weight", num_groups, single_grouped_weight)
        self._bias_names = _names("bias", num_groups, single_grouped_bias)
        groups = (num_groups,) if single_grouped_weight else ()
        for name in self._weight_names:
            matrix = (
                (in_features, out_features) if weight_transposed else (out_features, in_features)
            )
            weight = torch.empty(*groups, *matrix, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
        groups = (num_groups,) if single_grouped_bias else ()
        for name in self._bias_names:
            value = torch.empty(*groups, out_features, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value) if bias else None)
        self.reset_parameters()
        init_new_operation(self)

    def make_settings(self) -> GroupedLinearSettings:
        both = self.accumulate_into_main_grad, self.accumulate_into_grad
        refuse_both(*both, type(self).__name__)
        check_own_recipe(self.recipe, type(self).__name__)
        return self.Settings(*both, self.delay_wgrad_compute)

    @property
    def delay_wgrad_compute(self) -> bool:
        """As the argument. Setting it takes effect at the next forward."""
        return self._delay_wgrad_compute

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, value: bool) -> None:
        self._delay_wgrad_compute = value
        for name in self._weight_names:
            self._tell_wrappers(getattr(self, name))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name.startswith("weight"):
            self._tell_wrappers(param)

    def _tell_wrappers(self, weight: nn.Parameter | None) -> None:
        """Tells data-parallel ones whether the gradient comes after the backward pass."""
        if weight is not None and (
            self.delay_wgrad_compute or hasattr(weight, "skip_backward_post_hook")
        ):
            weight.skip_backward_post_hook = self.delay_wgrad_compute  # type: ignore[attr-defined]

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return self.use_bias

    def make_grouped_weights(self) -> None:
        """Stores the weights as one parameter from now on, as ``single_grouped_weight`` does.

        The parameter is new: make optimisers, and wrappers of parameters, afterwards. Does nothing
        if there is one already.

        Raises:
            ArgumentError: a group has no weight.
        """
        if self.single_grouped_weight:
            return
        weights = self._current_weights()
        one = nn.Parameter(torch.stack([w.detach() for w in weights]), weights[0].requires_grad)
        biases = {name: self._parameters[name] for name in self._bias_names}
        # Weights come first: gradients are returned in the order of registration.
        self._parameters.clear()
        self._parameter_names.clear()
        self.__dict__.update(single_grouped_weight=True, _weight_names=["weight"])
        for name, parameter in {"weight": one, **biases}.items():
            self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Weights uniform in ±1/√in_features, as ``torch.nn.Linear``; biases zero."""
        tracker = self._rng_state_tracker_function
        for name in self._weight_names:
            (weight,) = self._oriented([getattr(self, name).detach()])
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
            raise ArgumentError.explained(
                "Every group needs its weight",
                where=type(self).__name__,
                received=f"None for {', '.join(missing)}",
                remedy="Assign a parameter before the call",
            )
        return weights

    def _current_biases(self) -> list[Tensor]:
        biases = [getattr(self, name) for name in self._bias_names]
        present = [b for b in biases if b is not None]
        if present and len(present) != len(biases):
            missing = [n for n, b in zip(self._bias_names, biases) if b is None]
            raise ArgumentError.explained(
                "Either all groups have a bias or none has",
                where=type(self).__name__,
                received=f"None for {', '.join(missing)}",
            )
        return present

    @property
    def only_launches(self) -> bool:
        """Whether no pass does more than launch kernels, if its GEMMs find groups on the device."""
        # Elsewhere the host reads the split sizes, or looks where a gradient goes.
        weight = getattr(self, self._weight_names[0])
        if weight is None or not (weight.is_cuda or weight.is_meta):
            return False
        return not (self.accumulate_into_main_grad or self.need_backward_dw())

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        if not self.only_launches:
            return False
        weight = getattr(self, self._weight_names[0])
        dtype = autocast_dtype(weight.device) or weight.dtype
        return reads_groups_on_device(dtype, self.in_features, self.out_features)

    def quantized_refusal(self, env: Env) -> Refusal | None:
        if self.weight_transposed:
            return Refusal("LAYOUT", "its weights are stored as their transposes")
        features = self.out_features, self.in_features
        weight = getattr(self, self._weight_names[0])
        dtype = None if weight is None else weight.dtype
        return recipe_refusal(self.recipe, features, dtype, env, groups=True)

    def gemm_choices(self, env: Env) -> Iterable[GemmChoice]:
        weight = getattr(self, self._weight_names[0])
        if env.recipe is None or weight is None:
            return ()
        features = self.out_features, self.in_features
        choices = choices_of(env, features, weight.dtype, into_main_grad=False)
        refusal = "groups of rows are multiplied at once"
        return [choice._replace(refusal=refusal) for choice in choices]

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.autocast or dtypes.first_parameter

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        return self.forward_by(PLAIN, basic_op_ctxs[0], input_, given)

    def forward_by(
        self,
        products: GroupedProducts,
        ctx: OperationContext,
        input_: Tensor,
        given: ForwardArguments,
    ) -> ForwardResult:
        """:meth:`fuser_forward` of this operation alone, with other products."""
        where = type(self).__name__
        output, grad_input = buffers_of_call("GroupedLinear", **given["basic_op_kwargs"][0])
        split_sizes, *others = given["basic_op_extra_inputs"][0]
        scales = others[0] if self.scale_bias else None
        assert split_sizes is not None
        check_grouped_inputs(
            input_,
            split_sizes,
            scales,
            num_groups=self.num_groups,
            in_features=self.in_features,
            where=where,
        )
        if input_.dtype not in COMPUTE_DTYPES:
            refuse_dtype(input_, self)
        weights, biases = self._current_weights(), self._current_biases()
        dtype = autocast_dtype(input_.device) or weights[0].dtype
        shape = *input_.shape[:-1], self.out_features
        if output is not None or grad_input is not None:
            others = [*given["basic_op_extra_inputs"][0], *weights, *biases]
            if isinstance(input_, Tensor):  # codes have memory that nobody else knows
                others.append(input_)
            like = {"output": (shape, dtype), "grad_input": (input_.shape, input_.dtype)}
            check_buffers((output, grad_input), like, input_.device, others, where)
        x = as_rows(input_).to(dtype)
        if split_sizes.is_cuda and products.reads_sizes(x, self.out_features):
            split_sizes = split_sizes.cpu()  # backward needs them there too: wait for the GPU once
        groups = row_groups(split_sizes, x, where)
        out = None if output is None else as_rows(output)
        save = ctx.requires_grad and self.wants_weights(ctx)
        y, saved = products.forward(x, self._oriented(weights), groups, out=out, save=save)
        if biases:
            y += grouped_bias(self._table(biases), scales, groups, x.shape[0])
        if any(self.frozen_settings(ctx)):
            keep_weights(ctx, weights)
        if ctx.requires_grad:
            reads_scales = any(ctx.needs.parameters[len(weights) :])
            ctx.save_for_backward(groups.sizes, scales if reads_scales else None, *saved)
            if scales is not None:
                ctx.scales_like = scales.shape, scales.dtype
            if grad_input is not None and ctx.needs.input:
                ctx.grad_input = grad_input
        if output is None:
            # Not a view if it need not be: backward of what reads it may overwrite its memory.
            return y if input_.dim() == 2 else y.view(shape), [()]
        # Autograd must not take the caller's tensor, nor a view of it, for one of its own.
        return output.detach(), [()]

    def _oriented(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights as (out, in)."""
        return [w.transpose(-2, -1) for w in weights] if self.weight_transposed else weights

    def holds_data(self, n: int) -> bool:
        return not self.multiplies_whole or n >= len(self._weight_names)

    @property
    def weight_count(self) -> int:
        """How many parameters are weights; these come first."""
        return len(self._weight_names)

    def wants_weights(self, ctx: OperationContext) -> bool:
        """Whether a gradient of a weight will be read."""
        return any(ctx.needs.parameters[: len(self._weight_names)])

    def _table(self, biases: Sequence[Tensor]) -> Tensor:
        return biases[0] if self.single_grouped_bias else torch.stack(list(biases))

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        return self.backward_by(PLAIN, basic_op_ctxs[0], grad_output)

    def backward_by(
        self, products: GroupedProducts, ctx: OperationContext, grad_output: Tensor
    ) -> BackwardResult:
        """:meth:`fuser_backward` of this operation alone, with other products."""
        dx, dy = self.input_grad(products, ctx, grad_output)
        _, _, *saved = ctx.saved_tensors
        grads, ds = self.parameter_grads(products, ctx, dy, saved)
        return dx, [grads], [(None, ds) if self.scale_bias else (None,)]

    def input_grad(
        self, products: GroupedProducts, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, GroupedGrad]:
        """The gradient of the input, if it is needed, and what :meth:`parameter_grads` takes."""
        sizes, _, *saved = ctx.saved_tensors
        weights = cast("tuple[Tensor, ...]", ctx.parameters)[: len(self._weight_names)]
        dy = products.output_grad(as_rows(grad_output), saved)
        groups = row_groups(sizes, dy, type(self).__name__)
        if not ctx.needs.input:
            return None, GroupedGrad(dy, groups)
        buffer = getattr(ctx, "grad_input", None)
        if buffer is not None and isinstance(dy, Tensor) and overlap(buffer, dy):
            dy = dy.clone()
        out = None if buffer is None else as_rows(buffer)
        dx = products.dgrad(dy, self._oriented(weights), groups, out=out)
        if buffer is not None:
            dx = buffer.clone() if may_become_grad(buffer) else buffer.detach()
        dx = dx.view(*grad_output.shape[:-1], self.in_features)
        return dx, GroupedGrad(dy, groups)

    def parameter_grads(
        self,
        products: GroupedProducts,
        ctx: OperationContext,
        of_output: GroupedGrad,
        saved: Sequence[Tensor | None],
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """The gradients of the parameters, and of the scales of the bias, as far as needed.

        Args:
            products: of the operation.
            ctx: its context in backward.
            of_output: as :meth:`input_grad` returns it.
            saved: what ``products`` saved in forward.
        """
        (dy, groups), needs = of_output, ctx.needs
        scales = ctx.saved_tensors[1]
        parameters = cast("tuple[Tensor, ...]", ctx.parameters)
        count = len(self._weight_names)
        weights, biases = parameters[:count], parameters[count:]
        grads: list[Tensor | None] = [None] * len(parameters)
        ds = None
        if self.wants_weights(ctx):
            product = products.wgrad(dy, saved, weights, groups)
            if self.weight_transposed and isinstance(product, GroupedProduct):
                product = product.transposed()
            grads[:count] = self._weight_grads(ctx, product)
        if any(needs.parameters[count:]):
            db = grouped_bias_grad(dy, scales, groups).to(biases[0].dtype)
            grads[count:] = [db] if self.single_grouped_bias else db.unbind(0)
        if self.scale_bias and biases and needs.extra_inputs[1]:
            shape, dtype = ctx.scales_like
            ds = scale_grad(dy, self._table(biases), groups).to(dtype).view(shape)
        return grads, ds

    def _weight_grads(
        self, ctx: OperationContext, product: GroupedProduct | ScaledGroupedProduct
    ) -> list[Tensor | None]:
        """What autograd gets for the weights."""
        settings, needed = (
            self.frozen_settings(ctx),
            ctx.needs.parameters[: len(self._weight_names)],
        )
        weights = kept_weights(ctx)
        of_forward = bool(weights)
        if not of_forward and (settings.accumulate_into_main_grad or settings.delay_wgrad_compute):
            weights = self._current_weights()
        stacked, number = self.single_grouped_weight, backward_pass()
        work = GroupedWgrad(product, needed, weights, stacked, settings, number)
        return work.grads(self._delayed, of_forward=of_forward)

    def need_backward_dw(self) -> bool:
        """Whether gradients of the weights are left to :meth:`backward_dw`."""
        return self.delay_wgrad_compute or bool(self._delayed.pending)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the weight gradients of the earliest backward pass that still lacks them.

        They are added to ``grad``, or to ``main_grad``, of the weights that forward used; then the
        hooks run. Does nothing if no backward pass waits.
        """
        if not self._delayed.pending:
            return
        self._delayed.take().accumulate()
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
        weights = list(self._oriented(weights))
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
            f"{', weight_transposed=True' if self.weight_transposed else ''}"
        )


def _names(stem: str, count: int, single: bool) -> list[str]:
    return [stem] if single else [f"{stem}{n}" for n in range(count)]
