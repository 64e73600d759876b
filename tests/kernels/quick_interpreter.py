"""Triton's interpreter in less than half of its time: what it computes again and again is kept.

Of the time of an interpreted operation, numpy's is a small part. The rest are descriptions of types
and shapes, of which there are few; and a check of integers for overflow, whose result the
interpreter reads in its debug mode only (tests/kernels/test_overflows.py finds those that matter).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    """Changes the interpreter of this process."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    Block, Tensor, Constant = tl.core.block_type, tl.core.tensor, tl.constexpr
    describe, describe_block, make = interpreter._get_np_dtype, Block.__init__, Tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    of_numpy: dict[str, Any] = {}
    of_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_modules: dict[Any, list[tuple[str, Any]]] = {}

    def np_dtype(dtype: Any) -> Any:
        found = of_numpy.get(dtype.name)
        if found is None:
            found = of_numpy[dtype.name] = describe(dtype)
        return found

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([n.value if isinstance(n, Constant) else n for n in shape])
        if sizes not in of_blocks:
            describe_block(self, element_ty, shape)
            of_blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_blocks[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in of_tensors:
            make(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    def broadcast_pair(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if module not in of_modules:
            of_modules[module] = inspect.getmembers(module, tl.core.is_builtin)
        for name, member in of_modules[module]:
            interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._get_np_dtype, interpreter._patch_builtin = np_dtype, patch_builtin
    Block.__init__, Tensor.__init__ = block, tensor
    TritonSemantic.broadcast_impl_value = broadcast_pair
