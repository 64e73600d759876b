"""Operations whose weight may be stored in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..op import FusibleOperation, OperationContext
from ..quantization.weights import (
    WeightFormat,
    check_scale,
    decode_weight,
    empty_codes_of_weight,
    encode_weight,
    format_of_new_weight,
    is_fp8,
    keep_initial_value,
    keeping_codes,
)
from ._linear_operation import LinearOperation

# An attribute of parameters that have a scale somewhere.
_TAKEN = "opfuser_has_scale"


class StoresWeight(LinearOperation):
    """Abstract. A linear operation whose parameter ``weight`` (N, K) may be stored as codes.

    Codes have the dtype ``torch.float8_e4m3fn``. Their ``grad_dtype`` is the dtype that the
    operation computes in, so that autograd does not round gradients to FP8.
    """

    weight: nn.Parameter
    weight_scale: Tensor
    weight_format: WeightFormat | None = None

    def make_weight(
        self, rows: int, cols: int, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        """Registers memory for a weight, as :func:`quantized_model_init` says."""
        stored = format_of_new_weight(rows, cols, dtype)
        if stored is None:
            weight = torch.empty(rows, cols, device=device, dtype=dtype)
        else:
            self.weight_format = stored
            weight, scale = empty_codes_of_weight(rows, cols, stored, device)
            self.register_buffer("weight_scale", scale)
        self.register_parameter("weight", nn.Parameter(weight))

    def initialize_weight(self, fill: Callable[[Tensor], Any]) -> None:
        """Initializes the weight, also where it is stored in FP8, which ``torch.nn.init`` refuses.

        Args:
            fill: writes initial values to a tensor in high precision, as functions of
                ``torch.nn.init`` do.
        """
        stored = self.weight_format
        if stored is None:
            fill(self.weight)
            return
        values = torch.empty_like(self.weight, dtype=stored.dtype, requires_grad=False)
        fill(values)
        self.write_weight(values)
        if stored.keeps_initial_value:
            keep_initial_value(values, self.weight)

    def read_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the weight, dequantized where it is stored in FP8; not differentiable.

        Args:
            dtype: of the result; None is the one in which the operation computes.
        """
        weight, stored = self.weight.detach(), self.weight_format
        scale = self.scale_of(weight)
        if stored is None or scale is None:
            return weight.to(dtype or weight.dtype)
        return decode_weight(weight, scale, dtype or stored.dtype)

    @torch.no_grad()
    def write_weight(self, values: Tensor) -> None:
        """Writes values to the weight in place, quantized where it is stored in FP8.

        Scales are made from the values: ``largest / amax`` of them, or of each square.
        """
        stored = self.weight_format
        if stored is None:
            self.weight.copy_(values)
            return
        values = values.to(self.weight.device)
        codes, scale = encode_weight(values, stored.recipe)
        self.weight.copy_(codes)
        check_scale(self._buffers.get("weight_scale"), self._where()).copy_(scale)

    def scale_of(self, weight: Tensor) -> Tensor | None:
        """What codes are multiplied by; None for a weight in high precision."""
        if self.weight_format is None or not is_fp8(weight.dtype):
            return None
        return check_scale(self._buffers.get("weight_scale"), self._where())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            self.refuse_codes_of_others(param)
        super().register_parameter(name, param)
        if name == "weight":
            self.weight_was_set()

    def refuse_codes_of_others(self, param: nn.Parameter | None) -> None:
        """Raises ArgumentError for codes whose scale this operation does not have."""
        if param is None or param is self._parameters.get("weight") or not is_fp8(param.dtype):
            return
        taken = hasattr(param, _TAKEN)
        if taken or self.weight_format is None:
            raise ArgumentError.explained(
                "Codes of a weight go together with their scale",
                where=self._where(),
                received=f"a parameter of {param.dtype}"
                + " that is the weight of another operation" * taken,
                remedy="Load a state dict, or use one operation in both places",
            )

    def weight_was_set(self) -> None:
        """What has been assigned in high precision stays so; codes get their ``grad_dtype``."""
        weight = self._parameters.get("weight")
        if self.weight_format is not None and weight is not None and not is_fp8(weight.dtype):
            self.weight_format = None
            del self._buffers["weight_scale"]
        self.set_grad_dtype()

    def set_grad_dtype(self) -> None:
        """Lets the gradient of a weight in FP8 have the dtype that the operation computes in.

        Not what copies, pickles and whoever replaces the parameter keep.
        """
        weight, stored = self._parameters.get("weight"), self.weight_format
        if weight is None or stored is None or not is_fp8(weight.dtype) or not weight.is_leaf:
            return
        setattr(weight, _TAKEN, True)
        if weight.grad_dtype not in (None, stored.dtype):  # None: its optimizer takes any
            weight.grad_dtype = stored.dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set_grad_dtype()

    def share_parameters_with(self, owner: FusibleOperation) -> None:
        super().share_parameters_with(owner)
        if self.weight_format is not None:  # the scale is one of the owner's buffers likewise
            owner._buffers.update(self._buffers)
            self.__dict__["_buffers"] = owner._buffers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self.moved_by(super()._apply, fn, recurse)

    def moved_by(
        self, apply: Callable[..., Any], fn: Callable[[Tensor], Tensor], recurse: bool
    ) -> Any:
        """``apply(fn, recurse)``, which keeps codes and their scale as they are.

        A cast changes the dtype that the operation computes in, and casts the gradient.

        Args:
            apply: ``_apply`` of the module that owns the weight.
        """
        stored, weight = self.weight_format, self._parameters.get("weight")
        if stored is None or weight is None:
            return apply(fn, recurse)
        grad, weight.grad = weight.grad, None
        kept = weight, self._buffers.get("weight_scale")
        out = apply(keeping_codes(fn, kept), recurse)
        dtype = fn(torch.empty(0, dtype=stored.dtype, device=weight.device)).dtype
        self.weight_format = stored._replace(dtype=dtype)
        self.set_grad_dtype()
        weight = self._parameters["weight"]
        if grad is not None and weight is not None:
            weight.grad = fn(grad)
        return out

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.load_weight(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_weight(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Makes what a state dict has for the weight what the operation stores.

        Values in high precision are quantized, and codes with a scale are dequantized.
        """
        value, scale = state_dict.get(prefix + "weight"), state_dict.get(prefix + "weight_scale")
        weight, stored = self._parameters.get("weight"), self.weight_format
        if not isinstance(value, Tensor) or weight is None or value.shape != weight.shape:
            return
        if stored is None:
            if scale is not None and is_fp8(value.dtype):
                state_dict[prefix + "weight"] = decode_weight(value, scale, weight.dtype)
                del state_dict[prefix + "weight_scale"]
            return
        keeps = [weight] if stored.keeps_initial_value else []
        if is_fp8(value.dtype):
            keep_initial_value(None, *keeps)
            return
        codes, state_dict[prefix + "weight_scale"] = encode_weight(value.detach(), stored.recipe)
        state_dict[prefix + "weight"] = loaded = nn.Parameter(codes, weight.requires_grad)
        if keeps:  # assign=True puts the loaded one in the place of the other
            keep_initial_value(value, weight, loaded)

    def stored_operand(
        self, ctx: OperationContext, w: Tensor, dtype: torch.dtype, codes: bool
    ) -> Tensor:
        """A weight of :attr:`weight_format` as a GEMM takes it.

        Args:
            w: the weight; in high precision where a caller has put another tensor in its place.
            codes: whether codes are taken as they are.
        """
        scale = self.scale_of(w)
        if scale is None:
            return w if w.dtype == dtype else w.to(dtype)
        if ctx.requires_grad and ctx.needs.parameters[0] and not ctx.traced:
            self._refuse_rounded_grad(w)
        return w if codes else decode_weight(w, scale, dtype)

    def _refuse_rounded_grad(self, w: Tensor) -> None:
        grad_dtype = w.grad_dtype if w.is_leaf else w.dtype
        if grad_dtype is None or not is_fp8(grad_dtype):
            return
        raise ArgumentError.explained(
            "The gradient of a weight in FP8 is not rounded to FP8",
            where=self._where(),
            received="a leaf with grad_dtype in FP8"
            if w.is_leaf
            else "a tensor that is no leaf, whose gradient has its dtype",
            remedy="Pass a leaf, with grad_dtype = weight_format.dtype",
        )
