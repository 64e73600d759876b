"""Contestants from other libraries, as far as these are installed.

``PEERS`` declares them. Where one cannot be imported on a machine with a GPU, its rows say which
packages it needs. Every entry is built at its first call, so that a changed interface is reported
as the failure of that contestant. Options with which a backward overwrites its incoming gradient
are off: the other contestants read it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.problem import Function, Missing

LIGER = "Liger-Kernel"
LIGER_CUTE = "Liger-Kernel, CuTe"
QUACK = "quack"
QUACK_AS_IS = "quack, not tuned"  # its GEMMs in their default configuration
TE = "Transformer Engine"
TORCHAO = "torchao"
QUACK_IN_TORCH = "quack in torch"
FLEX_GEMM = "FlexGEMM"
TORCH_LOSS = "torch, linear_cross_entropy"


class Peer(NamedTuple):
    """What is imported of a library, as ``"module"`` or ``"module:name"``, and what that takes."""

    found: str
    needs: str


_DSL = "nvidia-cutlass-dsl[cu13]==4.6.2, apache-tvm-ffi<0.2"
_QUACK = Peer("quack.gemm_interface", f"quack-kernels==0.6.4, {_DSL}, torch-c-dlpack-ext, einops")
# Private; what torch has of quack 0.6.4, for its own kernels.
_IN_TORCH = Peer("torch._vendor.quack.gemm_interface", f"torch>=2.15, {_DSL}, einops")
_CUTE = "liger_kernel.ops.cutedsl.ops"
_CHUNKED = "LinearCrossEntropyOptions"  # else it computes all logits at once
PEERS = {
    LIGER: Peer("liger_kernel.ops", "liger-kernel==0.8.5"),
    LIGER_CUTE: Peer(_CUTE, f"liger-kernel==0.8.5, {_DSL}"),
    QUACK: _QUACK,
    QUACK_AS_IS: _QUACK,
    TE: Peer("transformer_engine.pytorch", "transformer-engine[pytorch]==2.20"),
    TORCHAO: Peer("torchao", "torchao"),
    QUACK_IN_TORCH: _IN_TORCH,
    FLEX_GEMM: _IN_TORCH,  # its backend
    TORCH_LOSS: Peer("torch.nn.functional:linear_cross_entropy", "torch>=2.15"),
}

Functions = dict[str, Function]


@functools.cache
def lacking(name: str) -> str | None:
    """Why a library cannot take part, or None; all of them need a GPU."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        attribute(PEERS[name].found)
    except Exception as error:  # noqa: BLE001 - a clash of versions may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"not installed: needs {PEERS[name].needs} ({lines[0][:200]})"
    return None


def installed(name: str) -> bool:
    """Whether the library can take part."""
    return lacking(name) is None


def load_cudnn() -> None:
    """Imports Transformer Engine with the cuDNN that torch has.

    It would load that of the system. With two of them in a process torch's attention falls back to
    a kernel that takes twice as long, for everybody but Transformer Engine.
    """
    package = PEERS[TE].found.partition(".")[0]
    if torch.cuda.is_available() and importlib.util.find_spec(package) is not None:
        with contextlib.suppress(ImportError, OSError):
            _load_cudnn_of_torch()  # before the import, which loads whichever is not there yet
        installed(TE)  # or its rows say why not


# What Transformer Engine links to, dependencies first: else these come from LD_LIBRARY_PATH.
_CUDNN = (
    "graph", "ops", "cnn", "adv", "engines_runtime_compiled", "engines_precompiled", "heuristic",
)  # fmt: skip


def _load_cudnn_of_torch() -> None:
    """Loads the cuDNN that was installed with torch, if there is one, for all that ask for any."""
    own = importlib.util.find_spec("nvidia.cudnn")
    if own is None or own.submodule_search_locations is None:
        return
    folder = Path(next(iter(own.submodule_search_locations)))
    os.environ.setdefault("CUDNN_HOME", str(folder))
    for name in (*(f"libcudnn_{part}.so.9" for part in _CUDNN), "libcudnn.so.9"):
        if (folder / "lib" / name).exists():
            ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)


def peer(name: str, build: Callable[[], Function]) -> Functions:
    """The entry of one library; without a GPU none."""
    why = lacking(name)
    if why is None:
        return {name: late(build)}
    return {name: Missing(why)} if torch.cuda.is_available() else {}


def late(build: Callable[[], Function]) -> Function:
    """What ``build`` returns, built at the first call."""
    made: list[Function] = []

    def function(*args: Tensor) -> Any:
        if not made:
            made.append(build())
        return made[0](*args)

    return function


@functools.cache
def attribute(path: str) -> Any:
    """The object that ``"package.module:name"`` names, or the module."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def quack(build: Callable[[bool], Function]) -> Functions:
    """The entries of what quack can tune: some 40 kernels for each GEMM."""

    def tuned() -> Function:
        quack_tunes_quickly()
        return build(True)

    return {**peer(QUACK_AS_IS, lambda: build(False)), **peer(QUACK, tuned)}


@functools.cache
def quack_tunes_quickly() -> None:
    """Makes its tuner time a kernel 20 times, not 200: that takes minutes for large GEMMs."""
    tuner, name = attribute("quack.autotuner"), "_bench_cuda_graph_l2_rotate"
    how: Any = {"warmup_target_ms": 20.0, "n_timed_calls": 20}
    setattr(tuner, name, functools.partial(getattr(tuner, name), **how))


@functools.cache
def liger(name: str) -> Function:
    function: Function = attribute(f"liger_kernel.ops:Liger{name}Function").apply
    return function


def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Any:
    return liger("LayerNorm")(x, w, b, eps)


def liger_loss(x: Tensor, w: Tensor, t: Tensor, b: Tensor | None = None) -> Any:
    return liger("FusedLinearCrossEntropy")(x, w, t, b)[0]


def quack_loss(x: Tensor, w: Tensor, t: Tensor) -> Any:
    return attribute("quack.linear_cross_entropy:chunked_linear_cross_entropy")(x, w, t)


def engine(name: str) -> Any:
    return attribute(f"transformer_engine.pytorch:{name}")


def engine_ops(
    *operations: tuple[str, tuple[Any, ...], dict[str, nn.Parameter]], eps: float = 1e-5
) -> Function:
    """A sequence of te.ops: their names, arguments as te.ops takes them, and parameters by name."""
    ops, made = importlib.import_module("transformer_engine.pytorch.ops"), []
    for name, args, parameters in operations:
        options: dict[str, Any] = {"bias": "bias" in parameters} if name == "Linear" else {}
        if name.endswith("Norm"):
            options = {"eps": eps}
        like = next(iter(parameters.values()), None)
        if like is not None:
            options |= {"device": like.device, "dtype": like.dtype}
        op = getattr(ops, name)(*args, **options)
        for key, parameter in parameters.items():
            setattr(op, key, parameter)
        made.append(op)
    sequence: Function = ops.Sequential(*made)
    return sequence


def rms_norm(w: nn.Parameter, eps: float) -> Functions:
    def for_liger() -> Function:
        apply = liger("RMSNorm")
        return lambda x: apply(x, w, eps, 0.0, "llama", False)

    def for_quack() -> Function:
        norm = attribute("quack.rmsnorm:rmsnorm")
        return lambda x: norm(x, w, eps=eps)

    def for_te() -> Function:
        norm = engine("RMSNorm")(w.numel(), eps=eps, device=w.device, dtype=w.dtype)
        norm.weight = w
        module: Function = norm
        return module

    return {**peer(LIGER, for_liger), **peer(QUACK, for_quack), **peer(TE, for_te)}


def add_rms_norm(w: nn.Parameter, eps: float) -> Functions:
    def for_liger() -> Function:
        apply = liger("FusedAddRMSNorm")
        return lambda x, r: apply(x, r, w, eps, 0.0, "llama", False)

    def for_quack() -> Function:
        norm = attribute("quack.rmsnorm:rmsnorm")
        return lambda x, r: norm(x, w, residual=r, eps=eps, prenorm=True)

    def for_te() -> Function:
        norm = ("RMSNorm", (w.numel(),), {"weight": w})
        return engine_ops(("AddExtraInput", (), {}), ("MakeExtraOutput", (), {}), norm, eps=eps)

    return {**peer(LIGER, for_liger), **peer(QUACK, for_quack), **peer(TE, for_te)}


def layer_norm(w: nn.Parameter, b: nn.Parameter, eps: float) -> Functions:
    def for_liger() -> Function:
        apply = liger("LayerNorm")
        return lambda x: apply(x, w, b, eps)

    def for_te() -> Function:
        norm = engine("LayerNorm")(w.numel(), eps=eps, device=w.device, dtype=w.dtype)
        norm.weight, norm.bias = w, b
        module: Function = norm
        return module

    return {**peer(LIGER, for_liger), **peer(TE, for_te)}


def swiglu() -> Functions:
    def for_liger() -> Function:
        apply = liger("FusedGateUpSiLUMul")
        return lambda x: apply(x, False)

    return {**peer(LIGER, for_liger), **peer(TE, lambda: engine_ops(("SwiGLU", (), {})))}


def geglu() -> Functions:
    def for_liger() -> Function:
        apply = liger("GELUMul")
        return lambda x: apply(*x.chunk(2, dim=-1))

    return {**peer(LIGER, for_liger), **peer(TE, lambda: engine_ops(("GEGLU", (), {})))}


def cross_entropy() -> Functions:
    def for_liger(apply: Function) -> Function:
        return lambda x, t: apply(x, t, None, -100, 0.0, 0.0, "mean", None, False)[0]

    def for_cute() -> Function:
        return for_liger(attribute(f"{_CUTE}:LigerCrossEntropyFunction").apply)

    def for_quack() -> Function:
        loss = attribute("quack.cross_entropy:cross_entropy")
        return lambda x, t: loss(x, t, inplace_backward=True)

    def for_te() -> Function:
        loss = attribute("transformer_engine.pytorch.cross_entropy:parallel_cross_entropy")
        return lambda x, t: loss(x[None], t[None], 0.0, True).view(())

    return {
        **peer(LIGER, lambda: for_liger(liger("CrossEntropy"))),
        **peer(LIGER_CUTE, for_cute),
        **peer(QUACK, for_quack),
        **peer(TE, for_te),
    }


def linear_cross_entropy(w: nn.Parameter) -> Functions:
    def for_liger() -> Function:
        apply = liger("FusedLinearCrossEntropy")
        return lambda x, t: apply(x, w, t)[0]

    def for_cute() -> Function:
        name = "fused_linear_cross_entropy_sm90"
        loss = attribute(f"{_CUTE}.{name}:liger_{name}")
        return lambda x, t: loss(x, w, t)

    def for_torch() -> Function:
        loss, options = attribute(PEERS[TORCH_LOSS].found), attribute(f"torch.nn:{_CHUNKED}")()
        return lambda x, t: loss(x, w, t, options=options)

    return {
        **peer(LIGER, for_liger),
        **peer(LIGER_CUTE, for_cute),
        **peer(QUACK, lambda: lambda x, t: quack_loss(x, w, t)),
        **peer(TORCH_LOSS, for_torch),
    }
