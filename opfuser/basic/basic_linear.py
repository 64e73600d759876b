"""Linear transformation without bias."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import gemm
from ..core.context import COMPUTE_DTYPES
from ..core.fusion import Env, Refusal
from ..distributed.collectives import (
    gather_input,
    gather_output_grad,
    reduce_input_grad,
    reduce_output,
    refuse_reference,
    shard_linear,
)
from ..errors import ArgumentError, NotSupportedError
from ..gemm_providers import GemmChoice
from ..op import Dtypes, OperationContext, OperationGrads
from ..quantization.recipe_state import init_new_operation
from ..quantization.tensor_quantizer import TensorQuantizer
from ..quantization.weights import layout_refusal, stored_in
from ._recipes import check_own_recipe, choices_of, quantizer_of, recipe_refusal
from ._stored_weight import StoresWeight
from ._weight_grad import (
    Product,
    WeightGradient,
    handed_over,
    keep_weights,
    kept_weights,
    refuse_both,
)


class BasicLinear(StoresWeight):
    r"""Linear transformation :math:`y = x W^T`, like ``torch.nn.Linear`` with ``bias=False``.

    Shapes: x ``(..., in_features)``, W ``(out_features, in_features)``, y ``(..., out_features)``.
    Computes in, and returns, the autocast dtype if autocast is active, else the weight's dtype:
    fp16, bf16, fp32 or fp64.

    Tensor parallelism (Shoeybi et al., Megatron-LM, arXiv:1909.08053) gives every rank a slice of
    W: of its rows in mode ``"column"`` (y is sliced along its last dimension), of its columns in
    mode ``"row"`` (x is). With sequence parallelism (Korthikanti et al., arXiv:2205.05198) the
    side that is not sliced along the last dimension is sliced along another one, by default the
    first. Mode ``"vocabulary"`` is ``"column"`` for the head of a language model, whose classes may
    not be a multiple of the ranks: the last slices may be smaller, as those of ``torch.chunk`` and
    of :class:`Embedding` are. ``CrossEntropy(tensor_parallel=True)`` takes its output.

    In a region of quantised compute (:class:`opfuser.autocast`) its GEMMs take FP8 operands;
    ``linear.recipe = None`` leaves this operation out, ``"inherit"`` takes it back in. Constructed
    within :func:`opfuser.quantized_model_init`, it stores the codes of its weight alone.

    Attributes:
        weight: W; or its codes, ``torch.float8_e4m3fn``, with gradients of ``weight_format.dtype``.
        weight_scale: a buffer, what codes are multiplied by: (1,), or one per 128 x 128 square.
            Only with codes.
        weight_format: how the weight is stored; None: in high precision.

    Args:
        in_features: last dimension of x, over all ranks.
        out_features: last dimension of y, over all ranks.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.
        tensor_parallel_mode: None, "column", "row" or "vocabulary".
        tensor_parallel_group: None is all ranks.
        sequence_parallel: slice also the side that tensor parallelism leaves whole.
        rng_state_tracker_function: returns an object whose ``fork()`` is a context manager that
            selects the random state for initialisation.
        accumulate_into_main_grad: add the weight's gradient to ``weight.main_grad`` and give
            autograd zeros. With ``weight.overwrite_main_grad`` the first gradient of a backward
            pass is written there; those of further uses of the weight in the same pass, recomputed
            by a reentrant checkpoint or not, are added. Where autograd would accumulate nothing,
            neither does this: ``torch.autograd.grad`` returns the gradient of the weight if it is
            asked for it, and else it is not computed.
        userbuffers_options: not supported.
        accumulate_into_grad: where ``weight.grad`` is there in backward, have the GEMM add to it,
            and give autograd nothing: 8 bytes of traffic per fp32 element in place of 12, and no
            memory for dW. Nothing changes in ``weight.grad`` but that it is rounded once less.
            Autograd gets the gradient as always where that would not do: ``grad`` is not a
            contiguous tensor of the dtype of the GEMM (or fp32, on a GPU); the weight is no leaf,
            of a subclass, or has hooks; ``torch.autograd.grad``, ``create_graph=True``,
            torch.compile; FP8 operands, whose products no GEMM adds to anything; on a GPU, another
            stream than the default one. Hooks on autograd's nodes themselves cannot be seen from
            here and get None, and anomaly detection sees nothing of dW. DistributedDataParallel,
            whose hook reads ``grad``, works; on a GPU it must have been constructed in the default
            stream too.
        weight_transposed: make ``weight`` the transpose, :math:`W^T` (in_features, out_features),
            as GPT-2's is in Hugging Face's transformers. Its gradient is of that shape; neither is
            copied. It is never stored as codes, and quantised compute leaves the operation out.
        sequence_dim: the dimension that sequence parallelism slices, such as 1 of (batch, sequence,
            features); other than 0 it costs a copy, unless the ones in front of it are of size 1.

    Raises:
        ArgumentError: arguments outside their domain.
        NotSupportedError: ``userbuffers_options`` other than None.
        InputError: the last dimension of x is not the local ``in_features``; x is not of a dtype
            above.
    """

    kernels = ("GEMM",)
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"in_features", "out_features", "sharding", "weight_transposed"}
    )

    class Saved(NamedTuple):
        input: Tensor | None
        weight: Tensor | None

    class Settings(NamedTuple):
        accumulate_into_main_grad: bool
        accumulate_into_grad: bool
        weight_transposed: bool

    recipe: str | None = "inherit"
    takes_part_in_recipes: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        accumulate_into_grad: bool = False,
        weight_transposed: bool = False,
        sequence_dim: int = 0,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        if userbuffers_options is not None:
            raise NotSupportedError.explained(
                "userbuffers_options must be None: communication is not overlapped with GEMMs",
                where=where,
                received=repr(userbuffers_options),
            )
        dtype = dtype or torch.get_default_dtype()
        if dtype not in COMPUTE_DTYPES:
            raise ArgumentError.explained(
                "A linear operation computes in float16, bfloat16, float32 or float64",
                where=where,
                received=str(dtype),
            )
        self.sharding = shard_linear(
            in_features,
            out_features,
            mode=tensor_parallel_mode,
            group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            where=where,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.accumulate_into_grad = accumulate_into_grad
        self.weight_transposed = weight_transposed
        self.make_settings()  # checks them
        self._rng_state_tracker_function = rng_state_tracker_function
        shape = self.sharding.local_out_features, self.sharding.local_in_features
        if weight_transposed:
            self.weight = nn.Parameter(torch.empty(*shape[::-1], device=device, dtype=dtype))
        else:
            self.make_weight(*shape, device, dtype)
        self.reset_parameters()
        init_new_operation(self)

    @property
    def tensor_parallel_mode(self) -> str | None:
        """Mode of tensor parallelism; None also where the group has a single rank.

        That of ``"vocabulary"`` is ``"column"``, with slices that may differ in size.
        """
        return self.sharding.mode

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """Group over which the weight is sliced."""
        return self.sharding.group

    @property
    def tensor_parallel_size(self) -> int:
        """Number of slices of the weight."""
        return self.sharding.ranks

    @property
    def sequence_parallel(self) -> bool:
        """Whether the side that tensor parallelism leaves whole is sliced along its rows."""
        return self.sharding.sequence_parallel

    @property
    def local_in_features(self) -> int:
        """Columns of this rank's slice of W."""
        return self.sharding.local_in_features

    @property
    def local_out_features(self) -> int:
        """Rows of this rank's slice of W."""
        return self.sharding.local_out_features

    def reset_parameters(self) -> None:
        """Uniform in ±1/√in_features, as ``torch.nn.Linear`` (He et al., arXiv:1502.01852)."""
        tracker = self._rng_state_tracker_function
        if not self.weight.numel():
            return
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            fill = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
            self.initialize_weight((lambda w: fill(w.t())) if self.weight_transposed else fill)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        stored = self.weight_format
        return dtypes.autocast or (dtypes.first_parameter if stored is None else stored.dtype)

    def make_settings(self) -> BasicLinear.Settings:
        both = self.accumulate_into_main_grad, self.accumulate_into_grad
        refuse_both(*both, type(self).__name__)
        check_own_recipe(self.recipe, type(self).__name__)
        return self.Settings(*both, self.weight_transposed)

    def quantized_refusal(self, env: Env) -> Refusal | None:
        features = self.local_out_features, self.local_in_features
        weight: Tensor | None = self.weight
        stored = self.weight_format
        dtype = None if weight is None else weight.dtype
        if stored is not None:
            dtype = stored.dtype
        refusal = recipe_refusal(self.recipe, features, dtype, env, stored=stored is not None)
        if refusal is not None or stored is None or env.recipe is None:
            return refusal
        why = layout_refusal(stored, env.recipe)
        return None if why is None else Refusal("LAYOUT", why)

    def gemm_choices(self, env: Env) -> Iterable[GemmChoice]:
        w: Tensor | None = self.weight
        if env.recipe is None or w is None:
            return ()
        features = self.local_out_features, self.local_in_features
        own = w.dtype if self.weight_format is None else self.weight_format.dtype
        into_main_grad = self.accumulate_into_main_grad
        return choices_of(env, features, own, into_main_grad=into_main_grad)

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def _quantizer(self, mode: str, index: int) -> TensorQuantizer | None:
        stored = self.weight_format
        return quantizer_of(
            self, self.weight, mode, index, None if stored is None else stored.recipe
        )

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        y = gemm.forward(*self.operands(ctx, input_))
        return y if self.sharding.mode is None else reduce_output(y, self.sharding)

    def operands(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        save: bool = True,
        gather: bool = True,
        codes: bool = False,
    ) -> tuple[gemm.Operand, gemm.Operand]:
        w: Tensor | None = self.weight
        if w is None:
            self._refuse_without_weight()
        stored = self.weight_format
        x = self.input_operand(input_, w.dtype if stored is None else stored.dtype)
        settings = self.frozen_settings(ctx)
        if any(settings):
            keep_weights(ctx, [w])
            if settings.weight_transposed:
                w = w.detach().t()  # of a view that is no leaf's, autograd's error of writes fits
        if stored is not None:
            w = self.stored_operand(ctx, w, x.dtype, codes)
        elif w.dtype != x.dtype:
            w = w.to(x.dtype)
        if save and ctx.requires_grad:
            needs = ctx.needs
            ctx.save_for_backward(x if needs.parameters[0] else None, w if needs.input else None)
        sharding = self.sharding
        return (x if sharding.mode is None or not gather else gather_input(x, sharding)), w

    def _refuse_without_weight(self) -> NoReturn:
        raise ArgumentError.explained(
            "A linear operation needs its weight",
            where=self._where(),
            received="weight = None",
            remedy="Assign a parameter to weight before the call",
        )

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        x, w = ctx.saved_tensors
        if self.weight_transposed and w is not None:
            (w,) = self.read_weights(ctx, (w,))
        needs, dy = ctx.needs, grad_output
        dx = dw = None
        if self.sharding.mode is not None:
            dy = gather_output_grad(dy, self.sharding)
            if needs.input:
                dx = reduce_input_grad(gemm.dgrad(dy, w), self.sharding)
            if needs.parameters[0]:
                x = gather_input(x, self.sharding)
        elif needs.input:
            dx = gemm.dgrad(dy, w)
        if needs.parameters[0]:
            dw = self.weight_grad(dy, x, ctx)
        return dx, (dw,)

    def weight_grad(
        self, dy: Tensor, x: Tensor, ctx: OperationContext | None = None, scale: float | None = None
    ) -> Tensor | None:
        """The weight's gradient for autograd.

        Args:
            dy: gradient of the output, (..., out).
            x: input, (..., in).
            ctx: this operation's context in backward. It knows what was set in forward, and which
                weight it used, and so whose ``main_grad`` or ``grad`` is meant. Without it what is
                set now counts, ``main_grad`` is that of the weight of now, and nothing is added to
                ``grad``.
            scale: a factor s of the gradient.

        Returns:
            ``s dyᵀ x``, as the weight is stored; zeros once that is in ``main_grad``; None once it
            is in ``grad``, or where it would be for ``main_grad`` and autograd does not want it.

        Raises:
            ArgumentError: ``main_grad`` is asked for and missing.
        """
        settings = self.settings if ctx is None else self.frozen_settings(ctx)
        if not any(settings):
            return gemm.wgrad(dy, x, scale=scale)
        return self.hand_over(Product(dy, x, scale), ctx)

    def hand_over(self, gradient: WeightGradient, ctx: OperationContext | None) -> Tensor | None:
        """As :meth:`weight_grad`, for a gradient of W in any form."""
        settings = self.settings if ctx is None else self.frozen_settings(ctx)
        return handed_over(
            gradient.transposed() if settings.weight_transposed else gradient,
            next(iter(kept_weights(ctx)), None),
            lambda: self.weight,
            type(self).__name__,
            main_grad=settings.accumulate_into_main_grad,
            grad=settings.accumulate_into_grad,
        )

    def weight_grads(
        self, dy: Tensor, x: Tensor, ctx: OperationContext, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        """:meth:`weight_grad` for each parameter, if it needs one."""
        return (self.weight_grad(dy, x, ctx, scale) if ctx.needs.parameters[0] else None,)

    def hand_over_all(
        self, gradient: Callable[[int | None], WeightGradient], ctx: OperationContext
    ) -> tuple[Tensor | None, ...]:
        """:meth:`hand_over` for each parameter.

        Args:
            gradient: returns that of a projection, or of all: None.
            ctx: this operation's context in backward.
        """
        return (self.hand_over(gradient(None), ctx),)

    def weight_grad_dtype(self, ctx: OperationContext, w: gemm.Operand) -> torch.dtype:
        """In forward, the dtype that the gradient of the weight, w of :meth:`operands`, goes to."""
        weight, stored = self._parameters.get("weight"), self.weight_format
        dtype = w.dtype if weight is None else weight.dtype  # None: it is parametrised
        if stored is not None:
            dtype = stored.dtype
        into_main_grad = self.frozen_settings(ctx).accumulate_into_main_grad
        return torch.promote_types(dtype, torch.float32) if into_main_grad else dtype

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if self.sharding.mode is not None:
            refuse_reference(self.sharding.group, type(self).__name__)
        stored = self.weight_format
        if stored is None:
            w = self.weight if self.weight_transposed else self.weight.t()
            return input_.to(w.dtype) @ w
        return input_.to(stored.dtype) @ self.read_weight().t()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        if self.sharding.mode is not None:
            text += f", tensor_parallel_mode={self.sharding.mode!r}"
        if self.sharding.sequence_parallel:
            text += ", sequence_parallel=True"
            if self.sharding.sequence_dim:
                text += f", sequence_dim={self.sharding.sequence_dim}"
        if self.weight_transposed:
            text += ", weight_transposed=True"
        return text + stored_in(self.weight_format)
