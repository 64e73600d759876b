"""Pipeline stages of the models, for ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from opfuser import (
    AddEmbedding,
    Embedding,
    MakeExtraOutput,
    PositionEmbedding,
    PrivateChannel,
    Sequential,
    SwapExtra,
)
from opfuser.core.change_tracking import has_hooks
from opfuser.core.op_base import BasicOperation, FusibleOperation
from opfuser.engine.plan import expand
from opfuser.errors import ArgumentError, ChannelError, ExtraInputCountError, OpKwargsError, counted
from opfuser.sequence.module_sequence import flatten

__all__ = ["StageModule", "StageTensors", "own_loss", "split"]

_TABLES = (AddEmbedding, Embedding, PositionEmbedding, nn.Embedding)


class StageTensors(NamedTuple):
    """The extra tensors that enter and leave a pipeline stage.

    Attributes:
        extra_inputs: which of the model's extra inputs its operations read.
        outputs: how many extra outputs of the model come from the stages before.
        received: the channels that come from there, in order, behind these outputs.
        taken: those of them that its operations read.
        given: the channels that its operations feed and later stages read.
        sent: the channels that go to the next stage.
    """

    extra_inputs: slice
    outputs: int = 0
    received: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()


class StageModule(Sequential):
    """A pipeline stage of a model: some of its modules, under the names that they have there.

    :func:`split` makes it. It is a Sequential, so that it is planned, fused and sharded as one, and
    its parameters have the names of the whole model.

    Attributes:
        tensors: what it exchanges with other stages.

    Call:
        ``stage(input, *received, extra_inputs=(), op_kwargs=None)``. ``received`` is what the stage
        before returned behind its output, ``extra_inputs`` all that the whole model is called with,
        of which the stage takes its own; one that takes none needs none. ``op_kwargs`` maps
        operations of the model to keywords, those of other stages being left out. Returns the
        output, and behind it, in a tuple, what the next stage takes: the extra outputs of the model
        so far, and channels that later stages read. Of the last stage they are those of the model.

    Raises:
        ExtraInputCountError: a call passed fewer extra inputs than the stage takes, or another
            number of tensors of the stage before than that returns.
        OpKwargsError: a key of ``op_kwargs`` is no operation.
    """

    tensors: StageTensors

    def forward(
        self,
        input: Any,
        *received: Tensor,
        extra_inputs: Sequence[Tensor] = (),
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Runs the modules of this stage; see the class."""
        tensors = self.tensors
        reads = tensors.extra_inputs
        self._check_counts(len(received), len(extra_inputs))
        channels = dict(zip(tensors.received, received[tensors.outputs :]))
        given = (*(channels[name] for name in tensors.taken), *extra_inputs[reads])
        result = super().forward(input, *given, op_kwargs=self._own(op_kwargs))
        y, *extras = result if isinstance(result, tuple) else (result,)
        public = len(extras) - len(tensors.given)
        channels.update(zip(tensors.given, extras[public:]))
        behind = (
            *received[: tensors.outputs],
            *extras[:public],
            *(channels[name] for name in tensors.sent),
        )
        return _WithGradients.apply(y, *behind) if behind else y

    def _check_counts(self, received: int, extra_inputs: int) -> None:
        tensors = self.tensors
        expected = tensors.outputs + len(tensors.received)
        if received != expected:
            raise ExtraInputCountError.explained(
                f"This stage takes {counted(expected, 'tensor')} behind the output of the "
                "one before it",
                where="StageModule",
                received=f"{received}",
                remedy="Pass the extra inputs of the model as extra_inputs=(...)",
            )
        if extra_inputs < tensors.extra_inputs.stop > tensors.extra_inputs.start:
            raise ExtraInputCountError.explained(
                "extra_inputs are all extra inputs of the whole model, of which this stage "
                f"takes {tensors.extra_inputs.start} to {tensors.extra_inputs.stop - 1}",
                where="StageModule",
                received=counted(extra_inputs, "tensor"),
                remedy="Call schedule.step(..., extra_inputs=(targets,)) on its process",
            )

    def _own(
        self, op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None
    ) -> Mapping[nn.Module | int, dict[str, Any]] | None:
        if not op_kwargs:
            return None
        for key in op_kwargs:
            if not isinstance(key, nn.Module):
                raise OpKwargsError.explained(
                    "A pipeline stage is given keywords by operation",
                    where="StageModule",
                    received=repr(key),
                    remedy="Use the operation itself as the key",
                )
        own = {op for module in self.modules() for op in _parts(module)}
        keys = [key for key in op_kwargs if isinstance(key, nn.Module) and {*_parts(key)} & own]
        return {key: op_kwargs[key] for key in keys}


class _WithGradients(torch.autograd.Function):
    """Its arguments. Of those that get no gradient it is zeros: every tensor that is sent has one.

    Before torch 2.13 a stage waits for the gradient of all that it has sent.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_non_differentiable(*[t for t in tensors if not t.is_floating_point()])
        return tuple([t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return tuple([dy if need else None for dy, need in zip(grads, ctx.needs_input_grad)])


def own_loss(output: Tensor | tuple[Tensor, ...], target: Any) -> Tensor:
    """The main output of the last stage: the ``loss_fn`` of a model that ends with a loss.

    Args:
        output: what the last stage returns.
        target: is not read. torch computes losses where ``schedule.step`` is given one.
    """
    return output[0] if isinstance(output, tuple) else output


class _Unit(NamedTuple):
    """What is not cut: a module, and the Sequential that directly holds it, by path."""

    path: str
    module: nn.Module
    inside: str


def split(model: Sequential, stages: int | Sequence[str]) -> list[StageModule]:
    """The pipeline stages of ``model``: its modules, in order, each of them in one stage.

    They are for ``torch.distributed.pipelining.PipelineStage``. The modules are those of ``model``,
    not copies: on the meta device, or on a CPU, every process may build the whole model, keep its
    own stages and drop the others. State dicts of all stages together are that of the model. A
    model that ends with its loss keeps it, fused with the head; ``loss_fn`` of the schedule is
    :func:`own_loss` then, and the targets are ``extra_inputs`` of its step.

    Extra outputs go from stage to stage and are those of the last one. So do channels, unless they
    are private. Blocks hold their residual stream themselves: between two of them it is the one
    tensor that is sent. Nothing is fused across the border of two stages.

    Args:
        model: a Sequential, such as of :func:`opfuser.models.decoder_lm`. Recipe, configuration of
            fusions and replay of the stages are its.
        stages: the paths of the modules at which the second stage and those behind it begin, such
            as ``["layers.4", "layers.8.mlp"]``; or the number of stages. Then the model is cut
            between blocks, and the largest number of parameters in a stage is as small as it can
            be. Tables of embeddings count nothing: rows are looked up, not multiplied.

    Raises:
        ArgumentError: there are more stages than units, or none; a path is no module of a
            Sequential, or is out of order; ``model`` carries hooks or has a forward of its own; a
            parameter would be in two stages, such as that of a tied head.
        ChannelError: a private channel would cross from stage to stage, as within a Residual.

    Source: Huang et al., "GPipe", 2018, arXiv 1811.06965; Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", 2021, arXiv 2104.04473.
    """
    if has_hooks(model) or model.overrides_forward():
        raise _wrong(
            "A model is split before it is wrapped",
            f"{type(model).__name__} with hooks or a forward of its own",
            "Split the model, then register hooks on its stages or wrap these",
        )
    if isinstance(stages, int):
        units = list(_units(model, lambda _, seq: all(isinstance(m, Sequential) for m in seq)))
        parts = _balanced(units, stages)
    else:
        starts = list(stages)
        units = list(_units(model, lambda path, _: any(s.startswith(path) for s in starts)))
        parts = _begun(units, starts)
    _check_parameters(parts)
    return _modules(model, parts)


def _wrong(invariant: str, received: str, remedy: str) -> ArgumentError:
    return ArgumentError.explained(invariant, where="split", received=received, remedy=remedy)


def _units(
    seq: Sequential, opens: Callable[[str, Sequential], bool], prefix: str = ""
) -> Iterator[_Unit]:
    """The modules, in order; those of nested Sequentials where ``opens`` says so."""
    for name, module in seq._modules.items():
        assert module is not None
        path = f"{prefix}{name}"
        plain = isinstance(module, Sequential) and module.joins_outer() and len(module) > 0
        if plain and opens(f"{path}.", cast(Sequential, module)):
            yield from _units(cast(Sequential, module), opens, f"{path}.")
        else:
            yield _Unit(path, module, prefix)


def _weight(unit: _Unit) -> int:
    return sum(
        p.numel()
        for m in unit.module.modules()
        if not isinstance(m, _TABLES)
        for p in m.parameters(recurse=False)
    )


def _balanced(units: Sequence[_Unit], stages: int) -> list[list[_Unit]]:
    """The units in that many stages, the heaviest of which is as light as it can be."""
    if not 1 <= stages <= len(units):
        raise _wrong(
            "Every pipeline stage has a block, and a model has as many as it has",
            f"{counted(stages, 'stage')}, {len(units)} blocks and other modules",
            "Ask for fewer stages, or name the modules at which they begin",
        )
    weights = [_weight(unit) for unit in units]
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if len(_filled(weights, middle, 1)) < stages else (middle + 1, high)
        )
    starts = [0, *_filled(weights, low, stages)]
    return [list(units[a:b]) for a, b in pairwise([*starts, len(units)])]


def _filled(weights: Sequence[int], limit: int, stages: int) -> list[int]:
    """Where stages begin if each takes all that fits; at least so many that ``stages`` result."""
    starts: list[int] = []
    held = 0
    for n, weight in enumerate(weights):
        if n and (held + weight > limit or len(weights) - n < stages - len(starts)):
            starts.append(n)
            held = 0
        held += weight
    return starts


def _begun(units: Sequence[_Unit], starts: Sequence[str]) -> list[list[_Unit]]:
    """The units in stages that begin at those paths, and one before them."""
    places = {unit.path: n for n, unit in enumerate(units)}
    found = [places.get(start, 0) for start in starts]
    if any(a >= b for a, b in zip([0, *found], found)):
        raise _wrong(
            "Pipeline stages begin, in order, at modules of a Sequential behind the first",
            ", ".join(map(repr, starts)),
            f"Name some of {', '.join([*places][1:9])}, or of the modules in these",
        )
    bounds = [0, *found, len(units)]
    return [list(units[a:b]) for a, b in pairwise(bounds)]


def _check_parameters(parts: Sequence[Sequence[_Unit]]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for n, units in enumerate(parts):
        for unit in units:
            for name, p in unit.module.named_parameters(unit.path, remove_duplicate=False):
                stage, first = seen.setdefault(id(p), (n, name))
                if stage != n:
                    raise _wrong(
                        "A parameter is in one pipeline stage",
                        f"{first} of stage {stage} is {name} of stage {n}",
                        "Untie them (tied_head=False), or have both in one stage",
                    )


class _Ends(NamedTuple):
    """A channel that operations of a stage feed or read; ``crosses`` says whether it may leave."""

    channel: str
    key: str
    crosses: bool


def _ends(units: Iterable[_Unit], names: str) -> Iterator[_Ends]:
    """The channels of extra inputs or outputs, as the attribute ``names`` of operations has them.

    Private ones are known where the Sequential that directly holds the operation is cut.
    """
    for unit in units:
        for op in _operations(unit.module):
            for channel in getattr(op, names):
                if isinstance(channel, PrivateChannel):
                    if unit.module is op:
                        yield _Ends(channel, f"{unit.inside}/{channel}", False)
                elif channel is not None:
                    yield _Ends(channel, channel, True)


def _operations(module: nn.Module) -> list[BasicOperation]:
    """Operations that exchange tensors through channels with others outside of ``module``."""
    if isinstance(module, Sequential) and module.joins_outer():
        return [op for inner, _ in flatten(module) for op in _parts(inner)]
    return _parts(module)


def _parts(module: nn.Module) -> list[BasicOperation]:
    return expand(module) if isinstance(module, FusibleOperation) else []


def _modules(model: Sequential, parts: Sequence[Sequence[_Unit]]) -> list[StageModule]:
    """A module for each stage."""
    given, sent = _crossings(parts)
    out: list[StageModule] = []
    extra_inputs = outputs = 0
    received: tuple[str, ...] = ()
    for n, units in enumerate(parts):
        read = {end.channel for end in _ends(units, "_extra_input_channels")}
        taken = tuple(name for name in received if name in read)
        modules = _nested(model, {unit.path for unit in units})
        if taken:
            entries = [_relay(None, name) for name in taken]
            modules = {"stage_received": Sequential(*entries), **modules}
        if given[n]:
            modules["stage_sent"] = Sequential(*[_relay(name, None) for name in given[n]])
        stage = StageModule(
            modules, replay=model.replay, recipe=model.recipe, fusion_config=model.fusion_config
        )
        stop = extra_inputs + stage.num_extra_inputs - len(taken)
        reads = slice(extra_inputs, stop)
        stage.tensors = StageTensors(reads, outputs, received, taken, given[n], sent[n])
        extra_inputs = stop
        outputs += stage.num_extra_outputs - len(given[n])
        received = sent[n]
        out.append(stage.train(model.training))
    return out


def _crossings(
    parts: Sequence[Sequence[_Unit]],
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Per stage, the channels that it feeds for later ones, and those that it sends on."""
    made = [{end.key: end for end in _ends(units, "_extra_output_channels")} for units in parts]
    last: dict[str, int] = {}  # the last stage that reads a channel
    for n, units in enumerate(parts):
        for end in _ends(units, "_extra_input_channels"):
            last[end.key] = n
    given: list[tuple[str, ...]] = []
    for n, ends in enumerate(made):
        crossing = [end for key, end in ends.items() if last.get(key, n) > n]
        for end in crossing:
            if not end.crosses:
                raise ChannelError.explained(
                    "A private channel stays within one pipeline stage",
                    where="split",
                    received=f"{str(end.channel)!r}, read in stage {last[end.key]}, fed in "
                    f"stage {n}",
                    remedy="Begin a stage at a block, such as a Residual, not within it",
                )
        given.append(tuple(end.channel for end in crossing))
    alive = accumulate(given, lambda before, new: (*before, *new))
    sent = [tuple(c for c in names if last[c] > n) for n, names in enumerate(alive)]
    return given, sent


def _nested(seq: Sequential, paths: set[str], prefix: str = "") -> dict[str, nn.Module]:
    """The modules at those paths, in Sequentials like those that hold them."""
    out: dict[str, nn.Module] = {}
    for name, module in seq._modules.items():
        assert module is not None
        path = f"{prefix}{name}"
        if path in paths:
            out[name] = module
        elif isinstance(module, Sequential):
            inside = _nested(module, paths, f"{path}.")
            if inside:
                out[name] = Sequential(inside, fusion_config=module.fusion_config)
    return out


def _wired(op: SwapExtra | MakeExtraOutput, takes: str | None, gives: str | None) -> Any:
    """``op`` with its extra input and its extra output bound, or the caller's where None."""
    if takes is not None:
        op.set_extra_input_channel(0, takes)
    if gives is not None:
        op.set_extra_output_channel(0, gives, output_to_caller=False)
    return op


def _relay(takes: str | None, gives: str | None) -> Sequential:
    """Has an extra tensor go from ``takes`` to ``gives``; None is the caller."""
    main, unread = PrivateChannel("main"), PrivateChannel("unread")
    return Sequential(
        _wired(SwapExtra(), takes, main),
        _wired(MakeExtraOutput(), None, gives),
        _wired(SwapExtra(), main, unread),
    )
