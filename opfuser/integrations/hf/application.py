"""Finding the modules of a model that sequences can take the place of."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opfuser import MergedLinear
from opfuser.errors import ArgumentTypeError, explain

from . import leaves
from .forwards import Forward, Shared
from .loss import LossForward, has_loss
from .reading import foreign_forward, replaced_forward
from .reports import Kept, Replaced, Report
from .structures import Rotary
from .verification import Verified

__all__ = ["apply", "report", "revert"]


def apply(
    model: nn.Module,
    *,
    dry_run: bool = False,
    fused_loss: bool = False,
    merge_storages: bool = False,
) -> Report:
    """Runs a model of Hugging Face with fused operations, and says what of it.

    Decoder and encoder layers, attention, feed-forward blocks, mixtures of experts and norms get a
    ``forward`` of their own, which runs an :class:`opfuser.Sequential` with their parameters. They
    are recognised by their structure, and by their results: a small copy with random parameters has
    to compute what the sequence does. Everything else of the model stays: its modules, its
    parameters under their names, its hooks, its head and its loss.

    Sequences are built at the first call, and again after modules were replaced (by PEFT, say) or
    have got hooks: linear modules that are no longer torch's own are called from the sequence. A
    call that asks for what a sequence does not have, such as ``output_attentions=True``, is taken
    by the untouched forward, and counted in :func:`report`; so are all calls under
    ``torch.compile``. Embeddings stay as they are, and so do head and loss without ``fused_loss``.

    Results are those of the model up to rounding; masks of dropout are others. Gradients do not
    flow into keys and values that a cache returns.

    Args:
        model: a ``PreTrainedModel``, or any module that holds layers such as its.
        dry_run: whether to change nothing, and only report.
        fused_loss: whether calls with labels, in training, compute the loss of a language model
            from its hidden states, for some tokens at a time. ``logits`` are then None: in fp32
            they are often the largest tensor of a step.
        merge_storages: whether to move the weights of q, k and v, and of gate and up, into one
            storage each, so that each is one GEMM. Parameters stay the same objects.

    Returns:
        What was replaced, and what was not and why.

    Raises:
        ArgumentTypeError: ``model`` is no ``torch.nn.Module``.
    """
    _check(model)
    shared = Shared(Verified(_tables_of_model(model)))
    replaced: list[Replaced] = []
    kept: list[Kept] = []
    for path, module, forward in _units(model, shared):
        if isinstance(forward, LossForward) and not fused_loss:
            kept.append(Kept(path, "returns logits; with fused_loss=True it would not store them"))
            continue
        if isinstance(forward, str):
            kept.append(Kept(path, forward))
            continue
        replaced.append(_entry(path, forward))
        if not dry_run:
            if merge_storages:
                _merge(forward)
            module.__dict__["forward"] = forward
    return _outermost(model, replaced, kept)


def revert(model: nn.Module) -> None:
    """Gives all modules of a model back the forward of their class.

    What others have wrapped around a replaced forward since stays, and calls that of the class.

    Args:
        model: to which :func:`apply` was applied; nothing is done to others.

    Raises:
        ArgumentTypeError: ``model`` is no ``torch.nn.Module``.
    """
    _check(model)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            forward = replaced_forward(value)
            if forward is not None:
                forward.reverted = True  # wrappers may hold it too
                del module.__dict__[name]
                if name != "forward":
                    module.__dict__[name] = types.MethodType(type(module).forward, module)


def report(model: nn.Module) -> Report:
    """What of a model is replaced now, with the calls that the untouched forwards took.

    Args:
        model: to which :func:`apply` was applied.

    Raises:
        ArgumentTypeError: ``model`` is no ``torch.nn.Module``.
    """
    _check(model)
    replaced: list[Replaced] = []
    kept: list[Kept] = []
    for path, module in model.named_modules():
        found = [replaced_forward(value) for value in module.__dict__.values()]
        for forward in {f for f in found if isinstance(f, Forward)}:
            why = forward.refusal()
            if why:
                kept.append(Kept(path, why, forward.counts))
            else:
                replaced.append(_entry(path, forward))
    return _outermost(model, replaced, kept)


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            explain(
                "A model is a torch.nn.Module",
                where="opfuser.hf",
                received=type(model).__name__,
                remedy="Load it first: AutoModelForCausalLM.from_pretrained(name)",
            )
        )


def _units(model: nn.Module, shared: Shared) -> Iterator[tuple[str, nn.Module, Forward | str]]:
    """The modules that may be replaced, each with its forward, or why there is none."""
    for path, module in model.named_modules():
        kinds = _kinds(module)
        if not kinds:
            continue
        if foreign_forward(module):
            yield path, module, "has a forward of its own, which something else has set"
            continue
        why = ""
        for kind in kinds:
            forward = (LossForward if kind == "loss" else Forward)(module, kind, shared)
            refusal = forward.refusal()
            if not refusal:
                yield path, module, forward
                break
            why = why or refusal
        else:
            yield path, module, why


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """What a module may be by what it holds; the reasons why it is not are worth telling."""
    if leaves.is_norm(module):
        return ("norm",)
    if has_loss(module, _names(module)):
        return ("loss",)
    if isinstance(module, nn.ModuleList) or module._parameters:
        return ()
    if leaves.experts_of(module) is not None:
        return ("experts",)
    inside = list(module.modules())[1:]
    children = [m for m in module._modules.values() if m is not None]
    linears = [m for m in children if leaves.is_linear(m)]
    if hasattr(module, "is_causal"):
        return ("attention",) if linears else ()
    if any(isinstance(m, nn.ModuleList) for m in inside):
        return ()
    attends = [m for m in inside if hasattr(m, "is_causal")]
    if not attends:
        feeds = len(linears) in (2, 3) and not any(map(leaves.is_norm, children))
        return ("mlp",) if feeds else ()
    # What holds attention and more than one projection behind it is a layer, or wants to be.
    behind = [m for m in inside if leaves.is_linear(m) and m not in set(attends[0].modules())]
    whole = len(attends) == 1 and len(children) > 2 and (behind or len(children) > 3)
    return ("layer",) if whole and "attention_mask" in _names(module) else ()


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)


def _outermost(model: nn.Module, replaced: list[Replaced], kept: list[Kept]) -> Report:
    paths = [entry.path + "." for entry in replaced if entry.what != "loss"]

    def shown(entry: Replaced | Kept) -> bool:
        inside = any(entry.path.startswith(outer) for outer in paths)
        # Sequences call experts as the modules that they are, replaced or not.
        own = inside and leaves.experts_of(model.get_submodule(entry.path)) is not None
        return own or not inside or bool(entry.calls)

    return Report(tuple(filter(shown, replaced)), tuple(filter(shown, kept)))


def _entry(path: str, forward: Forward) -> Replaced:
    matched = sorted({r.name for r in forward.plan().history if r.status == "matched"})
    notes = forward.built().notes
    return Replaced(path, forward.kind, tuple(matched), notes, forward.counts)


def _merge(forward: Forward) -> None:
    for op in forward.built().sequence.modules():
        if isinstance(op, MergedLinear) and not op.own_forward():
            op.merge_storages()


def _tables_of_model(model: nn.Module) -> tuple[Rotary, ...]:
    """The kinds of tables that the modules with inverse frequencies make."""
    found: list[Rotary] = []
    for module in model.modules():
        if not any(name.endswith("inv_freq") for name in module._buffers):
            continue
        kinds: list[Any] = [{}]
        if "layer_type" in _names(module):
            kinds = [{"layer_type": kind} for kind in getattr(module, "layer_types", ())]
        for kind in kinds:
            found += [tables for tables in _tables_of_module(module, kind) if tables not in found]
    return tuple(found)


def _tables_of_module(module: nn.Module, kind: dict[str, Any]) -> list[Rotary]:
    """What the tables of a module may be for."""
    device = next(buffer.device for buffer in module.buffers())
    positions = torch.arange(5, device=device)[None]
    x = torch.zeros(1, 5, 1, device=device)
    try:
        cos, sin = type(module).forward(module, x, positions, **kind)
    # Whatever a module of somebody else raises when it is called so.
    except Exception:  # noqa: BLE001
        return []
    if not isinstance(cos, Tensor) or cos.dim() != 3 or cos.shape[-1] % 2:
        return []
    size, tables = cos.shape[-1], (cos, sin)
    if cos.is_meta or all(torch.equal(*t.chunk(2, -1)) for t in tables):
        return [Rotary(size, False, False), Rotary(size, False, True)]
    if all(torch.equal(t[..., ::2], t[..., 1::2]) for t in tables):
        return [Rotary(size, True, True)]
    return []
