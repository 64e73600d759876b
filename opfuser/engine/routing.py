"""Extra inputs, extra outputs and channels, resolved once into slots.

A Sequential consists of groups: consecutive operations that are fused together, and single
operations or plain modules that are called. What a group cannot route inside itself crosses its
boundary as one more input or output.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..core.context import Dtypes
from ..core.op_base import BasicOperation
from ..errors import ChannelError, ExtraInputCountError, counted, explain


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


ExtraInput: TypeAlias = str | None
"""The channel that an extra input reads; None: the caller passes it."""


class ExtraOutput(NamedTuple):
    """An extra output: the channel that it is bound to, and whether the caller gets it."""

    channel: str | None
    to_caller: bool


_PUBLIC = ExtraOutput(None, True)


class Channels(NamedTuple):
    """Channels that cross the border of a Sequential which another one calls as a module.

    Attributes:
        read: by operations in it, and produced outside.
        given: produced in it, and read outside.
    """

    read: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


CLOSED = Channels()


class RoutedGroup(NamedTuple):
    """One group of a Sequential, as routing sees it.

    Attributes:
        ops: its basic operations; empty for a module that routes its extra tensors itself.
        scopes: for each operation, what distinguishes its private channels from others so named.
        inputs, outputs: of such a module.
        fused: whether channels may stay inside.
        name: for messages.
        connected: whether channels reach into such a module.
    """

    ops: tuple[BasicOperation, ...]
    scopes: tuple[Hashable, ...]
    inputs: tuple[ExtraInput, ...] = ()
    outputs: tuple[ExtraOutput, ...] = ()
    fused: bool = True
    name: str = ""
    connected: bool = False


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
    inputs: tuple[ExtraInput, ...] = ()
    """For each of them the channel that crosses the border of the Sequential, if it does so."""
    outputs: tuple[ExtraOutput, ...] = ()
    """Those that the caller gets, with the channel that crosses the border, if one does so."""


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
    members = [
        _Member("", None, (None,) * op.num_extra_inputs, (_PUBLIC,) * op.num_extra_outputs)
        for op in ops
    ]
    group = RoutedGroup(tuple(ops), ())
    routing = _route_group(group, members, 0, _Links({}, {}, CLOSED), [], []).routing
    assert routing is not None
    return routing


def describe(index: int, op: BasicOperation) -> str:
    """The name of an operation in error texts."""
    return f"op {index} ({type(op).__name__})"


def _key(channel: str, scope: Hashable) -> Hashable:
    return (scope, channel) if isinstance(channel, PrivateChannel) else channel


class _Member(NamedTuple):
    """What has extra tensors: an operation, or a module that routes those in it."""

    text: str
    scope: Hashable
    inputs: tuple[ExtraInput, ...]
    outputs: tuple[ExtraOutput, ...]


def extra_outputs(op: BasicOperation) -> tuple[ExtraOutput, ...]:
    """The extra outputs of an operation."""
    return tuple(map(ExtraOutput, op._extra_output_channels, op._extra_output_to_caller))


def _members(groups: Sequence[RoutedGroup]) -> list[list[_Member]]:
    """Members of each group; operations are counted over all groups."""
    out: list[list[_Member]] = []
    count = 0
    for group in groups:
        own = [
            _Member(describe(n, op), scope, tuple(op._extra_input_channels), extra_outputs(op))
            for n, (op, scope) in enumerate(zip(group.ops, group.scopes), count)
        ]
        out.append(own or [_Member(group.name, None, group.inputs, group.outputs)])
        count += len(group.ops)
    return out


class _Producers:
    """Every named extra output, by channel; positions count members over all groups."""

    def __init__(self, members: Sequence[_Member], closed: Sequence[str]) -> None:
        self.members = members
        self.closed = closed
        self.slots: dict[Hashable, Slot] = {}
        for i, member in enumerate(members):
            for s, (channel, _) in enumerate(member.outputs):
                if channel is None:
                    continue
                slot = self.slots.setdefault(_key(channel, member.scope), Slot(i, s))
                if slot != (i, s):
                    raise ChannelError.explained(
                        f"Channel {str(channel)!r} has multiple producers",
                        where=f"{members[slot.op].text} and {member.text}",
                        remedy="Give each extra output a channel name of its own",
                    )

    def _hint(self) -> str:
        if not self.closed:
            return ""
        return f". Channels do not reach into {', '.join(self.closed)}, which is called as a module"

    def find(self, channel: str, reader: int) -> Slot:
        where = self.members[reader].text
        slot = self.slots.get(_key(channel, self.members[reader].scope))
        if slot is None:
            raise ChannelError.explained(
                f"Channel {str(channel)!r} has no producer",
                where=f"read by {where}",
                remedy="Bind an extra output of an earlier operation in the same Sequential "
                "to it with set_extra_output_channel" + self._hint(),
            )
        if slot.op >= reader:
            raise ChannelError.explained(
                f"Channel {str(channel)!r} has no earlier producer",
                where=f"read by {where}, produced by {self.members[slot.op].text}",
                remedy="Move the producer before the operation that reads the channel",
            )
        return slot


def route(groups: Sequence[RoutedGroup], crossing: Channels = CLOSED) -> Routes:
    """The routes of all channels and extra tensors of a Sequential.

    Args:
        groups: of its operations and modules.
        crossing: channels that cross its border: its caller, another Sequential, takes them for
            extra inputs and extra outputs.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    of_groups = _members(groups)
    members = [member for own in of_groups for member in own]
    closed = [group.name for group in groups if not (group.ops or group.connected)]
    producers = _Producers(members, closed)
    readers: dict[Slot, list[int]] = {slot: [] for slot in producers.slots.values()}
    feeds: dict[Slot, Slot] = {}
    for i, member in enumerate(members):
        for s, channel in enumerate(member.inputs):
            if channel is None or _crosses(channel, crossing.read):
                continue
            feeds[Slot(i, s)] = source = producers.find(channel, i)
            readers[source].append(i)

    links = _Links(feeds, readers, crossing)
    expects: list[tuple[str, ExtraInput]] = []
    gives: list[ExtraOutput] = []
    routes: list[Route] = []
    first = 0
    for group, own in zip(groups, of_groups):
        routes.append(_route_group(group, own, first, links, expects, gives))
        first += len(own)
    return Routes(
        tuple(routes),
        tuple(text for text, _ in expects),
        tuple(channel for _, channel in expects),
        tuple(gives),
    )


def _crosses(channel: str | None, names: frozenset[str]) -> bool:
    return channel in names and not isinstance(channel, PrivateChannel)


class _Links(NamedTuple):
    """Readers and what they read, by slots of members."""

    feeds: dict[Slot, Slot]
    readers: dict[Slot, list[int]]
    crossing: Channels


def _route_group(
    group: RoutedGroup,
    members: Sequence[_Member],
    first: int,
    links: _Links,
    expects: list[tuple[str, ExtraInput]],
    returned: list[ExtraOutput],
) -> Route:
    """The route of one group, whose members begin at ``first``.

    What the caller passes and gets is added to ``expects`` and ``returned``.
    """
    stop = first + len(members)
    takes: list[int | Slot] = []
    sources: list[list[Slot | int]] = []
    inputs: list[Slot] = []
    for i, member in enumerate(members):
        sources.append([])
        for s, channel in enumerate(member.inputs):
            feed = links.feeds.get(Slot(first + i, s))
            if feed is not None and group.fused and first <= feed.op < stop:
                sources[i].append(Slot(feed.op - first, feed.slot))
                continue
            sources[i].append(len(inputs))
            inputs.append(Slot(i, s))
            if feed is None:
                takes.append(len(expects))
                expects.append((member.text, channel))
            else:
                takes.append(feed)

    outputs: list[Slot] = []
    gives: list[tuple[Slot | None, bool]] = []
    consumers: list[list[tuple[int, ...]]] = []
    for i, member in enumerate(members):
        consumers.append([])
        for s, extra in enumerate(member.outputs):
            here = Slot(first + i, s)
            reading = links.readers.get(here, [])
            within = [r - first for r in reading if group.fused and first <= r < stop]
            consumers[i].append(tuple(within))
            outwards = _crosses(extra.channel, links.crossing.given)
            to_caller = extra.to_caller or outwards
            crossing = len(within) < len(reading)
            if to_caller:
                returned.append(extra if outwards else extra._replace(channel=None))
            if to_caller or crossing or not group.fused:
                outputs.append(Slot(i, s))
                gives.append((here if crossing else None, to_caller))

    routing = Routing(
        tuple(tuple(row) for row in sources),
        tuple(inputs),
        tuple(outputs),
        tuple(tuple(row) for row in consumers),
    )
    return Route(routing if group.ops else None, tuple(takes), tuple(gives))


def output_dtypes(
    ops: Sequence[BasicOperation],
    routing: Routing,
    counts: Sequence[int],
    dtype: torch.dtype,
    parameters: Sequence[torch.dtype],
    extra_inputs: Sequence[torch.dtype],
    autocast: torch.dtype | None,
) -> tuple[list[torch.dtype], list[Sequence[torch.dtype]]]:
    """The dtypes that operations declare: of each one's output, and of its extra outputs.

    Args:
        ops: the operations of a group.
        routing: of their extra tensors.
        counts: how many parameters each has.
        dtype: of the input.
        parameters, extra_inputs: their dtypes, in order.
        autocast: the dtype of autocast, if it is on.
    """
    left = iter(parameters)
    outputs: list[torch.dtype] = []
    of_extras: list[Sequence[torch.dtype]] = []
    for op, sources, count in zip(ops, routing.sources, counts):
        extras = tuple(
            extra_inputs[source] if isinstance(source, int) else of_extras[source.op][source.slot]
            for source in sources
        )
        own = tuple(next(left) for _ in range(count))
        dtypes = Dtypes(dtype, extras, own, autocast)
        dtype = op.output_dtype(dtypes)
        outputs.append(dtype)
        of_extras.append(op.extra_output_dtypes(dtypes))
    return outputs, of_extras


def wrong_count(asked_by: Sequence[str], received: int) -> ExtraInputCountError:
    """The error about a wrong number of extra inputs, given what asks for each."""
    text = explain(
        f"Expected {counted(len(asked_by), 'extra input')} but got {received}",
        where=f"asked for by {', '.join(asked_by)}" if asked_by else "no operation asks for any",
        remedy="Pass one tensor per extra input after the main input, in operation order",
    )
    return ExtraInputCountError(text)
