"""Extra inputs, extra outputs and channels, resolved once into slots.

A Sequential consists of members: runs of operations that are fused together, single operations
that run on their own, and plain modules. Whatever a member cannot route inside itself crosses
its boundary as one more input or output.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .errors import ChannelError, explain
from .op import BasicOperation


class Slot(NamedTuple):
    """One extra input or output of the basic operation with this index."""

    op: int
    slot: int


class Wiring(NamedTuple):
    """How extra tensors flow through one run of basic operations.

    Attributes:
        sources: for each operation and extra input, the slot of the operation in this run that
            produces it, or the position of the argument of the run that holds it.
        inputs: the slots that arguments of the run go to, in argument order.
        outputs: the slots that the run returns, in order.
        consumers: for each operation and extra output, the operations in this run that read it.
    """

    sources: tuple[tuple[Slot | int, ...], ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    consumers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def trivial(self) -> bool:
        """Whether no operation has extra tensors."""
        return not self.inputs and not any(self.sources) and not any(self.consumers)


class WiredMember(NamedTuple):
    """One member of a Sequential, as wiring sees it.

    Attributes:
        ops: its basic operations; empty for a module that wiring cannot look into.
        scopes: for each operation, what makes its private channels differ from others of that name.
        inputs, outputs: number of extra tensors of a module that wiring cannot look into.
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
    """How a Sequential feeds one member.

    Attributes:
        wiring: inside the member, if it is a run of operations.
        takes: for each extra input of the member, the position of the caller's argument, or the
            key under which an earlier member stored it.
        gives: for each extra output, the key to store it under (None: nobody reads it), and
            whether the caller gets it.
    """

    wiring: Wiring | None
    takes: tuple[int | Slot, ...]
    gives: tuple[tuple[Slot | None, bool], ...]


class Routes(NamedTuple):
    """How a Sequential feeds all its members."""

    members: tuple[Route, ...]
    expects: tuple[str, ...]
    """For each extra input that the caller brings, who asks for it."""


class PrivateChannel(str):
    """A channel name that is visible only inside the Sequential that directly holds it."""

    __slots__ = ()


def public_wiring(ops: Sequence[BasicOperation]) -> Wiring:
    """The wiring of operations called on their own: every extra tensor is the caller's."""
    inputs = tuple(Slot(i, s) for i, op in enumerate(ops) for s in range(op.num_extra_inputs))
    position = {slot: n for n, slot in enumerate(inputs)}
    return Wiring(
        tuple(
            tuple(position[Slot(i, s)] for s in range(op.num_extra_inputs))
            for i, op in enumerate(ops)
        ),
        inputs,
        tuple(Slot(i, s) for i, op in enumerate(ops) for s in range(op.num_extra_outputs)),
        tuple(((),) * op.num_extra_outputs for op in ops),
    )


def describe(index: int, op: BasicOperation) -> str:
    """How error texts name an operation."""
    return f"op {index} ({type(op).__name__})"


def _key(channel: str, scope: Hashable) -> Hashable:
    return (scope, channel) if isinstance(channel, PrivateChannel) else channel


class _Producers:
    """Every named extra output, by channel; positions count basic operations over all members."""

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


def route(members: Sequence[WiredMember]) -> Routes:
    """Resolves all channels and extra tensors of a Sequential.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    ops = [op for member in members for op in member.ops]
    scopes = [scope for member in members for scope in member.scopes]
    closed = [member.name for member in members if not member.ops]
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
    for member in members:
        routes.append(_route_member(member, first, feeds, readers, expects))
        first += len(member.ops)
    return Routes(tuple(routes), tuple(expects))


def _route_member(
    member: WiredMember,
    first: int,
    feeds: dict[Slot, Slot],
    readers: dict[Slot, list[int]],
    expects: list[str],
) -> Route:
    stop = first + len(member.ops)
    takes: list[int | Slot] = []
    sources: list[list[Slot | int]] = []
    inputs: list[Slot] = []

    def outside(asked_by: str) -> int:
        expects.append(asked_by)
        return len(expects) - 1

    for i, op in enumerate(member.ops):
        sources.append([])
        for s in range(op.num_extra_inputs):
            feed = feeds.get(Slot(first + i, s))
            if feed is not None and member.fused and first <= feed.op < stop:
                sources[i].append(Slot(feed.op - first, feed.slot))
                continue
            sources[i].append(len(inputs))
            inputs.append(Slot(i, s))
            takes.append(outside(describe(first + i, op)) if feed is None else feed)
    takes += [outside(member.name) for _ in range(member.inputs)]

    outputs: list[Slot] = []
    gives: list[tuple[Slot | None, bool]] = []
    consumers: list[list[tuple[int, ...]]] = []
    for i, op in enumerate(member.ops):
        consumers.append([])
        for s in range(op.num_extra_outputs):
            here = Slot(first + i, s)
            reading = readers.get(here, [])
            within = [r - first for r in reading if member.fused and first <= r < stop]
            consumers[i].append(tuple(within))
            to_caller = op._extra_output_to_caller[s]
            crossing = len(within) < len(reading)
            if to_caller or crossing or not member.fused:
                outputs.append(Slot(i, s))
                gives.append((here if crossing else None, to_caller))
    gives += [(None, True)] * member.outputs

    wiring = Wiring(
        tuple(tuple(row) for row in sources),
        tuple(inputs),
        tuple(outputs),
        tuple(tuple(row) for row in consumers),
    )
    return Route(wiring if member.ops else None, tuple(takes), tuple(gives))
