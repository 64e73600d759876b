"""Sequential: the container of operations and plain modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .basic import AddExtraInput, MakeExtraOutput
from .errors import ArgumentTypeError, ExtraInputCountError, OpKwargsError, explain
from .execute import Kwargs
from .fuser import OperationFuser, count_message
from .fusion import Env, Fusion, Refusal, registry
from .op import BasicOperation, FusedOperation, FusibleOperation, Tracked, clock, has_hooks
from .plan import FusionRecord, Plan, Step, expand
from .wiring import Member, PrivateChannel, Route, Routes, Slot, route

__all__ = ["Residual", "Sequential"]


class _Member(NamedTuple):
    """One stretch of a Sequential: a run of operations, or one module that is called as it is."""

    run: OperationFuser | nn.Module
    ops: tuple[BasicOperation, ...]
    split: str
    """Why it is not fused with its neighbours: "", "HOOK" or "GROUP_SPLIT"."""


class Sequential(Tracked):
    """A sequence of operations and modules, run in order, with runs of operations fused.

    A drop-in for ``torch.nn.Sequential`` with the list interface of a Python list. Neighbouring
    operations form a run that is planned, fused and differentiated as one; a plain module stands
    between runs. A nested Sequential is part of its parent's runs unless it is of a subclass or
    carries hooks.

    Args:
        *args: operations and modules, or one dict from names to them.

    Call:
        ``seq(input, *extra_inputs, op_kwargs=None)``. Extra inputs are taken in operation order;
        extra outputs are returned after the output, in operation order. ``op_kwargs`` maps a basic
        operation, or its index in this Sequential (negative ones too), to keyword arguments of its
        forward.

    Raises:
        ExtraInputCountError: a call brought another number of extra inputs than the operations need.
        OpKwargsError: a key of ``op_kwargs`` is no basic operation of this Sequential.
        ChannelError: a channel lacks a producer, has a late one, or several.
    """

    def __init__(self, *args: nn.Module | Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._forget()
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(cast("tuple[nn.Module, ...]", args))

    # ------------------------------------------------------------------ list interface

    def _keys(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        if not isinstance(index, int):
            raise ArgumentTypeError(
                explain("A Sequential is indexed by int or slice", received=type(index).__name__)
            )
        if not -len(keys) <= index < len(keys):
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {len(keys)}")
            )
        return [keys[index]]

    def _next_key(self) -> str:
        return str(max((int(key) + 1 for key in self._modules if key.isdecimal()), default=0))

    def _check_module(self, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                explain(
                    "A Sequential holds operations and modules",
                    received=type(module).__name__,
                    remedy="Wrap a function in a torch.nn.Module, or write it as an operation",
                )
            )
        return module

    def __getitem__(self, index: int | slice) -> Any:
        keys = self._keys(index)
        if isinstance(index, slice):
            return Sequential(*(cast(nn.Module, self._modules[key]) for key in keys))
        return self._modules[keys[0]]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self._modules[self._keys(index)[0]] = self._check_module(module)
        self._touch()

    def __delitem__(self, index: int | slice) -> None:
        numbered = list(self._modules) == [str(n) for n in range(len(self._modules))]
        for key in self._keys(index):
            del self._modules[key]
        if numbered:
            # As in torch.nn.Sequential, so that names of parameters have no gaps.
            self._modules = {str(n): m for n, m in enumerate(self._modules.values())}
        self._touch()

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("Iterable[nn.Module]", self._modules.values()))

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        self.add_module(self._next_key(), self._check_module(module))
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Add a module before the one at ``index``."""
        self._check_module(module)
        size = len(self._modules)
        if not -size <= index <= size:
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {size}")
            )
        modules = list(self._modules.values())
        modules.insert(index, module)
        keys = [*self._modules, self._next_key()]
        self._modules = dict(zip(keys, modules))
        return self

    def pop(self, index: int | slice = -1) -> Any:
        """Remove and return the module at ``index``."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[nn.Module]) -> Sequential:
        return Sequential(*self, *modules)

    # ------------------------------------------------------------------ structure

    def _forget(self) -> None:
        """Drops everything derived from the modules."""
        own = self.__dict__
        own["_members"], own["_routes"], own["_structure"] = [], Routes((), ()), None
        own["_seen"], own["_single"] = -1, None

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_members", "_routes", "_structure", "_seen", "_single")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _resolve(self) -> bool:
        """Groups the modules and routes extra tensors, if anything has changed."""
        own = self.__dict__
        now = clock()
        stretches = _stretches(_flatten(self))
        structure = [(split, [(id(m), scope) for m, scope in run]) for split, run in stretches]
        if structure != self._structure:
            members, wired = [], []
            for split, run in stretches:
                member, wire = _member(split, run)
                members.append(member)
                wired.append(wire)
            routes = route(wired)
            for n, (member, path) in enumerate(zip(members, routes.members)):
                if isinstance(member.run, _Unwired):
                    assert path.wiring is not None
                    fuser = OperationFuser(member.run.modules, wiring=path.wiring)
                    members[n] = member._replace(run=fuser)
                for op in member.ops:
                    op.__dict__["_routing_captured"] = True
            own["_members"], own["_routes"], own["_structure"] = members, routes, structure
            only = members[0].run if len(members) == 1 else None
            own["_single"] = only if isinstance(only, OperationFuser) else None
        own["_seen"] = now
        return True

    # What torch.compiler.assume_constant_result sets; calling it would import the compiler.
    _resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that the caller brings."""
        self._resolve()
        return len(self._routes.expects)

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that the caller gets."""
        self._resolve()
        return sum(to_caller for path in self._routes.members for _, to_caller in path.gives)

    @property
    def _module_groups(self) -> list[OperationFuser | nn.Module] | None:
        if self._structure is None:
            return None
        return [member.run for member in self._members]

    # ------------------------------------------------------------------ calls

    def forward(
        self,
        input: Any,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling() or self._seen != clock():
            self._resolve()
        if op_kwargs is None and self._single is not None:
            return self._single(input, *extra_inputs)
        expects = self._routes.expects
        if len(extra_inputs) != len(expects):
            raise ExtraInputCountError(count_message(expects, len(extra_inputs)))
        kwargs = None if not op_kwargs else self._resolve_op_kwargs(op_kwargs)
        x = input
        to_caller: list[Tensor] = []
        stored: dict[Slot, Tensor] = {}
        for n, (member, path) in enumerate(zip(self._members, self._routes.members)):
            extras = [
                extra_inputs[take] if isinstance(take, int) else stored[take] for take in path.takes
            ]
            y = _call(member, x, extras, None if kwargs is None else kwargs[n])
            if path.gives:
                x, *ys = y
                _keep(path, ys, stored, to_caller)
            else:
                x = y
        return (x, *to_caller) if to_caller else x

    def _resolve_op_kwargs(
        self, op_kwargs: Mapping[nn.Module | int, dict[str, Any]]
    ) -> list[Kwargs]:
        given: dict[int, dict[str, Any]] = {}
        for key, kwargs in op_kwargs.items():
            module = self[key] if isinstance(key, int) else key
            if isinstance(module, FusedOperation) and len(module.basic_ops) == 1:
                module = module.basic_ops[0]
            if not isinstance(module, BasicOperation):
                raise OpKwargsError(
                    explain(
                        "op_kwargs reach basic operations",
                        received=f"key {key!r}, which is {type(module).__name__}"
                        if isinstance(key, int)
                        else f"a key of type {type(module).__name__}",
                        remedy="Use the basic operation itself as the key",
                    )
                )
            _check_keywords(module, kwargs)
            given[id(module)] = kwargs
        out: list[Kwargs] = []
        for member in self._members:
            here = [given.get(id(op), {}) for op in member.ops]
            out.append(here if any(here) else None)
        known = {id(op) for member in self._members for op in member.ops}
        for key in op_kwargs:
            module = self[key] if isinstance(key, int) else key
            if not ({id(op) for op in expand(cast(FusibleOperation, module))} & known):
                raise OpKwargsError(
                    explain(
                        "op_kwargs contains keys that are not in this Sequential",
                        received=f"an operation of type {type(module).__name__}",
                        remedy="Use an operation, or an index, of this Sequential as the key",
                    )
                )
        return out

    # ------------------------------------------------------------------ plans

    def plan(self, input: Tensor, *extra_inputs: Tensor) -> Plan:
        """The plan that a call with these tensors would follow, as data.

        Where plain modules stand between runs of operations, what reaches each run is found by
        passing tensors without data through the sequence; nothing is computed.
        """
        self._resolve()
        if len(extra_inputs) != len(self._routes.expects):
            raise ExtraInputCountError(count_message(self._routes.expects, len(extra_inputs)))
        if self._single is not None:
            return self._named(self._single.plan(input, *extra_inputs))
        if not self._members:
            raise ArgumentTypeError(explain("An empty Sequential has no plan"))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t) for t in (input, *extra_inputs)]
            self.forward(*fakes)
        return self._named(_join(self._members, torch.is_grad_enabled()))

    def _named(self, plan: Plan) -> Plan:
        paths = {id(module): path for path, module in self.named_modules()}
        for path, module in list(self.named_modules()):
            if isinstance(module, FusedOperation):
                paths.update({id(op): path for op in module.basic_ops if id(op) not in paths})
        return replace(plan, names=tuple(paths.get(id(op), "") for op in plan.basic_ops))


class _Unwired(NamedTuple):
    """A run of operations whose fuser is made once channels are routed."""

    modules: tuple[FusibleOperation, ...]


def _flatten(seq: Sequential) -> Iterator[tuple[nn.Module, int]]:
    """The modules of a Sequential and of nested ones, each with the Sequential that holds it."""
    for module in seq:
        if type(module) is Sequential and not has_hooks(module):
            yield from _flatten(module)
        else:
            yield module, id(seq)


def _stretches(
    modules: Iterable[tuple[nn.Module, int]],
) -> list[tuple[str, list[tuple[nn.Module, int]]]]:
    """Runs of operations, and between them what must be called as a module."""
    out: list[tuple[str, list[tuple[nn.Module, int]]]] = []
    for module, scope in modules:
        split = ""
        if not isinstance(module, FusibleOperation):
            split = "GROUP_SPLIT"
        elif has_hooks(module) or any(map(has_hooks, expand(module))):
            split = "HOOK"
        if split or not out or out[-1][0]:
            out.append((split, []))
        out[-1][1].append((module, scope))
    return out


def _member(split: str, run: list[tuple[nn.Module, int]]) -> tuple[_Member, Member]:
    module = run[0][0]
    if split == "GROUP_SPLIT":
        nested = isinstance(module, Sequential)
        wire = Member(
            (),
            (),
            module.num_extra_inputs if nested else 0,
            module.num_extra_outputs if nested else 0,
            False,
            type(module).__name__,
        )
        return _Member(module, (), split), wire
    pairs = [(op, scope) for unit, scope in run for op in expand(cast(FusibleOperation, unit))]
    ops = tuple(op for op, _ in pairs)
    wire = Member(ops, tuple(scope for _, scope in pairs), fused=not split)
    if split:
        return _Member(module, ops, split), wire
    modules = tuple(cast(FusibleOperation, unit) for unit, _ in run)
    return _Member(cast(nn.Module, _Unwired(modules)), ops, split), wire


def _call(member: _Member, x: Any, extras: list[Tensor], kwargs: Kwargs) -> Any:
    if isinstance(member.run, OperationFuser):
        return member.run(x, *extras, basic_op_kwargs=kwargs)
    if kwargs is None:
        return member.run(x, *extras)
    if isinstance(member.run, BasicOperation):
        return member.run(x, *extras, **kwargs[0])
    return member.run(x, *extras, basic_op_kwargs=kwargs)


def _keep(
    path: Route, ys: list[Tensor], stored: dict[Slot, Tensor], to_caller: list[Tensor]
) -> None:
    for (key, public), y in zip(path.gives, ys):
        if key is not None:
            stored[key] = y
        if public:
            to_caller.append(y)


def _check_keywords(op: BasicOperation, kwargs: dict[str, Any]) -> None:
    own = type(op).fuser_forward is BasicOperation.fuser_forward
    if not own:
        return  # it receives the dict and checks the keywords itself
    parameters = inspect.signature(op.op_forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(kwargs) - set(parameters))
    if unknown:
        raise OpKwargsError(
            explain(
                "op_kwargs may only hold keywords that the operation's forward takes",
                where=type(op).__name__,
                received=", ".join(unknown),
            )
        )


def _join(members: list[_Member], grad_enabled: bool) -> Plan:
    """One plan over all members, with the fusions that their boundaries prevented."""
    plans: list[tuple[_Member, Plan | None]] = []
    for member in members:
        run = member.run
        if isinstance(run, FusibleOperation):
            run = run.__dict__.get("_alone", run)
        plans.append((member, run.last_plan if isinstance(run, OperationFuser) else None))
    ops = tuple(op for member in members for op in member.ops)
    forward: list[Step] = []
    backward: list[Step] = []
    needs: list[Any] = []
    first = 0
    records: dict[tuple[str, str], FusionRecord] = {}
    for member, plan in plans:
        if plan is None:
            step = Step(cast(nn.Module, member.run), ())
            forward.append(step)
            backward += [step] if grad_enabled else []
            continue
        forward += [_shift(step, first) for step in plan.forward]
        backward += [_shift(step, first) for step in plan.backward]
        needs += plan.needs
        for record in plan.history:
            _merge(records, record, first)
        first += len(member.ops)
    env = next((plan.env for _, plan in plans if plan is not None), None)
    if env is None:
        raise ArgumentTypeError(explain("This Sequential holds no operations, so it has no plan"))
    _note_boundaries(records, members, env)
    return Plan(ops, tuple(forward), tuple(backward), tuple(needs), tuple(records.values()), env)


def _shift(step: Step, first: int) -> Step:
    return replace(step, indices=tuple(i + first for i in step.indices))


def _merge(records: dict[tuple[str, str], FusionRecord], new: FusionRecord, first: int) -> None:
    near = new.near_miss._replace(start=new.near_miss.start + first) if new.near_miss else None
    new = replace(
        new,
        matches=tuple(tuple(i + first for i in match) for match in new.matches),
        refusals=tuple((at + first, why) for at, why in new.refusals),
        near_miss=near,
    )
    key = (new.stage, new.name)
    old = records.get(key)
    if old is not None:
        near = max(
            filter(None, (old.near_miss, new.near_miss)), key=lambda m: m.matched, default=None
        )
        ranks = ("disabled", "skipped", "unmatched", "refused", "matched")
        new = replace(
            new,
            status=max(old.status, new.status, key=ranks.index),
            matches=old.matches + new.matches,
            refusals=old.refusals + new.refusals,
            near_miss=near,
            elapsed=old.elapsed + new.elapsed,
        )
    records[key] = new


def _note_boundaries(
    records: dict[tuple[str, str], FusionRecord], members: list[_Member], env: Env
) -> None:
    """Adds a refusal wherever a pattern would fit if it were not for a hook or a plain module."""
    ops: list[FusibleOperation] = []
    cuts: dict[int, Refusal] = {}
    for before, member in zip([None, *members], members):
        at = member if member.split or before is None else before
        if before is not None and at.split and member.ops:
            what = type(at.run).__name__
            text = f"{what} carries hooks" if at.split == "HOOK" else f"{what} stands between"
            cuts[len(ops)] = Refusal(at.split, text)
        ops.extend(member.ops)
    for handle in registry:
        rule = handle.function
        key = (handle.stage, handle.name)
        if not isinstance(rule, Fusion) or key not in records or handle.disabled_by():
            continue
        found: list[tuple[int, Refusal]] = []

        def note(start: int, stop: int, found: list[tuple[int, Refusal]] = found) -> Refusal:
            why = next((cuts[c] for c in range(start + 1, stop) if c in cuts), None)
            if why is not None:
                found.append((start, why))
            return Refusal("GROUP_SPLIT", "not built here")

        rule.scan(ops, env, note)
        if found:
            old = records[key]
            status = "refused" if old.status == "unmatched" else old.status
            records[key] = replace(old, status=status, refusals=old.refusals + tuple(found))


def Residual(*ops: nn.Module) -> Sequential:  # noqa: N802 - reads as the module that it makes
    """``y = x + ops(x)`` as operations: MakeExtraOutput, ``ops``, AddExtraInput.

    The skip connection is a channel that only this residual sees, so that copies of it, nested
    ones and neighbours do not interfere.
    """
    channel = PrivateChannel("residual")
    make, add = MakeExtraOutput(), AddExtraInput()
    make.set_extra_output_channel(0, channel, output_to_caller=False)
    add.set_extra_input_channel(0, channel)
    return Sequential(make, *ops, add)
