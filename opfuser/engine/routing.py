"""Extra inputs, extra outputs and channels, resolved once into slots.

A Sequential consists of groups: consecutive operations that are fused together, and single
operations or plain modules that are called. What a group cannot route inside itself crosses its
boundary as one more input or output.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..errors import ChannelError, explain
from ..op import BasicOperation


class Slot(NamedTuple):
    """One extra input or output of the basic operation with this index."""

    op: int
    slot: int


class Routing(NamedTuple):
    """How extra tensors flow through one group of operations.

    Attributes:
        sources: for each operation and extra input, the slot of the operation in this group that
            produces it, or the position of the argument of the group that holds it.
        inputs: the slot that each argument of the group feeds, in argument order.
        outputs: the slots that the group returns, in order.
        consumers: for each operation and extra output, the operations in this group that read it.
    """

    sources: tuple[tuple[Slot | int, ...], ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    consumers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def trivial(self) -> bool:
        """Whether no operation has extra tensors."""
        return not self.inputs and not any(self.sources) and not any(self.consumers)


class RoutedGroup(NamedTuple):
    """One group of a Sequential, as routing sees it.

    Attributes:
        ops: its basic operations; empty for a module that is opaque to routing.
        scopes: for each operation, what distinguishes its private channels from others so named.
        inputs, outputs: number of extra tensors of an opaque module.
        fused: whether channels may stay inside.
        name: for messages.
    """

    ops: tuple[BasicOperation, ...]
    scopes: tuple[Hashable, ...]
    inputs: int = 0
    outputs: int = 0
    fused: bool = True
    name: str = ""


class Route(NamedTuple):
    """How a Sequential feeds one group.

    Attributes:
        routing: inside the group, if its operations are fused together.
        takes: for each extra input of the group, the position of the caller's argument, or the
            key under which an earlier group stored it.
        gives: for each extra output, the key to store it under (None: no group reads it), and
            whether the caller gets it.
    """

    routing: Routing | None
    takes: tuple[int | Slot, ...]
    gives: tuple[tuple[Slot | None, bool], ...]


class Routes(NamedTuple):
    """How a Sequential feeds all its groups."""

    groups: tuple[Route, ...]
    expects: tuple[str, ...]
    """For each extra input that the caller passes, the operation or module that reads it."""


class PrivateChannel(str):
    """The name of a channel that only the operations of one Sequential see.

    ``set_extra_output_channel`` and ``set_extra_input_channel`` take it in place of a string. It
    connects operations that the same Sequential directly holds, not those of Sequentials inside or
    around it, nor those of another place where it occurs: such a sequence can be copied, nested and
    used twice, as :func:`opfuser.Residual` can.
    """

    __slots__ = ()


def public_routing(ops: Sequence[BasicOperation]) -> Routing:
    """The routing of operations called alone: every extra tensor is the caller's."""
    inputs = tuple(Slot(i, s) for i, op in enumerate(ops) for s in range(op.num_extra_inputs))
    position = {slot: n for n, slot in enumerate(inputs)}
    return Routing(
        tuple(
            tuple(position[Slot(i, s)] for s in range(op.num_extra_inputs))
            for i, op in enumerate(ops)
        ),
        inputs,
        tuple(Slot(i, s) for i, op in enumerate(ops) for s in range(op.num_extra_outputs)),
        tuple(((),) * op.num_extra_outputs for op in ops),
    )


def describe(index: int, op: BasicOperation) -> str:
    """The name of an operation in error texts."""
    return f"op {index} ({type(op).__name__})"


def _key(channel: str, scope: Hashable) -> Hashable:
    return (scope, channel) if isinstance(channel, PrivateChannel) else channel


class _Producers:
    """Every named extra output, by channel; positions count basic operations over all groups."""

    def __init__(
        self, ops: Sequence[BasicOperation], scopes: Sequence[Hashable], closed: Sequence[str]
    ) -> None:
        self.ops = ops
        self.closed = closed
        self.slots: dict[Hashable, Slot] = {}
        for i, op in enumerate(ops):
            for s, channel in enumerate(op._extra_output_channels):
                if channel is None:
                    continue
                slot = self.slots.setdefault(_key(channel, scopes[i]), Slot(i, s))
                if slot != (i, s):
                    raise ChannelError(
                        explain(
                            f"Channel {str(channel)!r} has multiple producers",
                            where=f"{describe(slot.op, ops[slot.op])} and {describe(i, op)}",
                            remedy="Give each extra output a channel name of its own",
                        )
                    )

    def _hint(self) -> str:
        if not self.closed:
            return ""
        return f". Channels do not reach into {', '.join(self.closed)}, which is called as a module"

    def find(self, channel: str, scope: Hashable, reader: int) -> Slot:
        slot = self.slots.get(_key(channel, scope))
        where = describe(reader, self.ops[reader])
        if slot is None:
            raise ChannelError(
                explain(
                    f"Channel {str(channel)!r} has no producer",
                    where=f"read by {where}",
                    remedy="Bind an extra output of an earlier operation in the same Sequential "
                    "to it with set_extra_output_channel" + self._hint(),
                )
            )
        if slot.op >= reader:
            raise ChannelError(
                explain(
                    f"Channel {str(channel)!r} has no earlier producer",
                    where=f"read by {where}, produced by {describe(slot.op, self.ops[slot.op])}",
                    remedy="Move the producer before the operation that reads the channel",
                )
            )
        return slot


def route(groups: Sequence[RoutedGroup]) -> Routes:
    """The routes of all channels and extra tensors of a Sequential.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    ops = [op for group in groups for op in group.ops]
    scopes = [scope for group in groups for scope in group.scopes]
    closed = [group.name for group in groups if not group.ops]
    producers = _Producers(ops, scopes, closed)
    readers: dict[Slot, list[int]] = {slot: [] for slot in producers.slots.values()}
    feeds: dict[Slot, Slot] = {}
    for i, op in enumerate(ops):
        for s, channel in enumerate(op._extra_input_channels):
            if channel is not None:
                feeds[Slot(i, s)] = source = producers.find(channel, scopes[i], i)
                readers[source].append(i)

    expects: list[str] = []
    routes: list[Route] = []
    first = 0
    for group in groups:
        routes.append(_route_group(group, first, feeds, readers, expects))
        first += len(group.ops)
    return Routes(tuple(routes), tuple(expects))


def _route_group(
    group: RoutedGroup,
    first: int,
    feeds: dict[Slot, Slot],
    readers: dict[Slot, list[int]],
    expects: list[str],
) -> Route:
    stop = first + len(group.ops)
    takes: list[int | Slot] = []
    sources: list[list[Slot | int]] = []
    inputs: list[Slot] = []

    def outside(asked_by: str) -> int:
        expects.append(asked_by)
        return len(expects) - 1

    for i, op in enumerate(group.ops):
        sources.append([])
        for s in range(op.num_extra_inputs):
            feed = feeds.get(Slot(first + i, s))
            if feed is not None and group.fused and first <= feed.op < stop:
                sources[i].append(Slot(feed.op - first, feed.slot))
                continue
            sources[i].append(len(inputs))
            inputs.append(Slot(i, s))
            takes.append(outside(describe(first + i, op)) if feed is None else feed)
    takes += [outside(group.name) for _ in range(group.inputs)]

    outputs: list[Slot] = []
    gives: list[tuple[Slot | None, bool]] = []
    consumers: list[list[tuple[int, ...]]] = []
    for i, op in enumerate(group.ops):
        consumers.append([])
        for s in range(op.num_extra_outputs):
            here = Slot(first + i, s)
            reading = readers.get(here, [])
            within = [r - first for r in reading if group.fused and first <= r < stop]
            consumers[i].append(tuple(within))
            to_caller = op._extra_output_to_caller[s]
            crossing = len(within) < len(reading)
            if to_caller or crossing or not group.fused:
                outputs.append(Slot(i, s))
                gives.append((here if crossing else None, to_caller))
    gives += [(None, True)] * group.outputs

    routing = Routing(
        tuple(tuple(row) for row in sources),
        tuple(inputs),
        tuple(outputs),
        tuple(tuple(row) for row in consumers),
    )
    return Route(routing if group.ops else None, tuple(takes), tuple(gives))
