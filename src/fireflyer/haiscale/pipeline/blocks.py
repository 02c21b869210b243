"""Division of a module that calls a list of blocks, without changes to its code.

Every stage runs the module's own forward. Modules of other stages are replaced. A block before the
stage's own blocks returns the hidden states that the previous stage sent. The first block after the
stage's own blocks ends the forward. Modules that the model calls before its blocks are replaced in
later stages: the replacement returns a tensor with the shape of the hidden states. So each stage
computes masks and rotary embeddings from the model's inputs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.haiscale.validation import given

FIRST, LAST = "first", "last"
_PLAIN = (str, int, float, bool, type(None))


class BlockStage(nn.Module):
    """A stage's part of a module; it is also an instance of the module's own class.

    The first stage takes the module's inputs, the other stages take (hidden states, *inputs). A
    stage returns the input of the next stage; the last stage returns the tensors of the module's
    output.

    Attributes:
        index: number of this stage.
        sizes: number of blocks of each stage.
        tied: sets of (stage, parameter name) that share one parameter across stages.
        names: names of the module's inputs.
    """

    index: int
    sizes: tuple[int, ...]
    tied: tuple[tuple[tuple[int, str], ...], ...]
    names: tuple[str, ...]
    passing: "_Passing"

    def forward(self, *tensors: torch.Tensor) -> Any:
        inputs = tensors[1:] if self.index else tensors
        if len(inputs) != len(self.names):
            raise TypeError(
                f"expected the inputs {', '.join(self.names)}, got {len(inputs)} tensors"
            )
        self.passing.hidden = tensors[0] if self.index else None
        try:
            output = super().forward(**dict(zip(self.names, inputs, strict=True)))
        except _Cut as cut:
            return (cut.hidden, *inputs)
        finally:
            self.passing.hidden = None
        return tensors_in(output)


@dataclass
class _Passing:
    """Hidden states that a stage received, kept while the stage runs."""

    hidden: torch.Tensor | None = None


class _Cut(Exception):  # not an error: ends the forward after a stage's last block
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OtherBlock(nn.Module):
    """Replacement for a block of another stage; keeps the block's plain attributes."""

    def __init__(self, block: nn.Module, shape: "_Shape", passing: _Passing, behind: bool) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self._shape, self._passing, self._behind = shape, passing, behind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._behind:
            at = self._shape.at
            raise _Cut(args[at] if isinstance(at, int) else kwargs[at])
        width = self._shape.width
        return (self._passing.hidden, *[None] * (width - 1)) if width else self._passing.hidden


class _OtherModule(nn.Module):
    """Replacement for a module that other stages call before their blocks."""

    def __init__(self, passing: _Passing) -> None:
        super().__init__()
        self._passing = passing

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self._passing.hidden is not None
        return self._passing.hidden.detach()


@dataclass
class _Shape:
    """Form in which the module calls its blocks.

    Attributes:
        at: position or name of the hidden states among a block's arguments.
        width: length of the tuple that a block returns, with the hidden states first; 0 if a block
            returns only the hidden states.
    """

    at: int | str = 0
    width: int = 0


@dataclass
class Outline:
    """Results of one forward of a sample through a module.

    Attributes:
        names: names of the module's inputs.
        blocks: the blocks, in order.
        homes: stages (FIRST, LAST or both) that hold a module, by the module's name, for all
            modules outside the blocks that have parameters.
        seconds: time before the blocks, of each block, and after the blocks.
        output: tensors that the module returned.
    """

    module: nn.Module
    path: str
    inputs: dict[str, torch.Tensor]
    blocks: list[nn.Module]
    homes: dict[str, set[str]] = field(default_factory=dict)
    shape: _Shape = field(default_factory=_Shape)
    seconds: list[float] = field(default_factory=list)
    output: tuple[torch.Tensor, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.inputs)

    def parameters(self) -> list[float]:
        """Returns the number of parameters of each block; parameters outside the blocks count for
        the first or the last block."""
        found = [float(sum(p.numel() for p in block.parameters())) for block in self.blocks]
        for name, homes in self.homes.items():
            count = sum(p.numel() for p in self.module.get_submodule(name).parameters())
            found[0] += count * (FIRST in homes)
            found[-1] += count * (LAST in homes)
        return found

    def times(self) -> list[float]:
        """Returns the seconds of each block; time outside the blocks counts for the first or the
        last block."""
        before, *each, behind = self.seconds
        each[0] += before
        each[-1] += behind
        return each

    def stages(self, sizes: Sequence[int]) -> list[BlockStage]:
        """Returns all stages.

        Raises:
            ConfigError: the stages together do not compute the same as the module.
        """
        found = [self._stage(index, sizes) for index in range(len(sizes))]
        with _evaluating(self.module):
            try:
                value: Any = tuple(self.inputs.values())
                for stage in found:
                    value = stage(*value)
            except Exception as error:
                raise self._refusal(f"a stage without them fails: {error}") from error
        tensors = value if isinstance(value, tuple) else (value,)
        if len(tensors) != len(self.output) or not all(
            torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
            for one, other in zip(tensors, self.output, strict=True)
        ):
            raise self._refusal("its stages return something else than the whole")
        return found

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"invalid module {type(self.module).__name__} for partition: its code outside "
            f"{self.path!r} depends on modules that other stages hold: {why}"
        )

    def _stage(self, index: int, sizes: Sequence[int]) -> BlockStage:
        begin = sum(sizes[:index])
        own = range(begin, begin + sizes[index])
        homes = {FIRST} if index == 0 else set()
        if index == len(sizes) - 1:
            homes.add(LAST)
        passing = _Passing()
        others: dict[str, nn.Module] = {
            name: _OtherModule(passing) for name, at in self.homes.items() if not at & homes
        }
        names = [name for name, _ in self.module.get_submodule(self.path).named_children()]
        for number, (name, block) in enumerate(zip(names, self.blocks, strict=True)):
            if number not in own:
                others[f"{self.path}.{name}"] = _OtherBlock(
                    block, self.shape, passing, number >= own.stop
                )
        stage: Any = _twin(self.module, "", others, bool(homes))
        kind = type(self.module)
        stage.__class__ = type(f"{kind.__name__}Stage", (BlockStage, kind), {})
        stage.index, stage.sizes, stage.names = index, tuple(sizes), self.names
        object.__setattr__(stage, "passing", passing)
        found: BlockStage = stage
        return found


def _twin(module: Any, prefix: str, others: Mapping[str, nn.Module], end: bool) -> nn.Module:
    """Returns a copy whose modules in `others` are replaced; the copy shares all other objects.

    Args:
        end: True for the first and the last stage. In other stages, parameters that the copied
            modules hold directly are replaced by tensors of the same shape without memory.
    """
    twin = module.__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    for kept in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[kept] = dict(module.__dict__[kept])
    if not end:
        for name, parameter in module._parameters.items():
            del twin._parameters[name]
            twin.__dict__[name] = (
                None if parameter is None else parameter.new_zeros(()).expand(parameter.shape)
            )
    for name, child in module._modules.items():
        full = f"{prefix}{name}"
        if full in others:
            twin._modules[name] = others[full]
        elif any(other.startswith(f"{full}.") for other in others):
            twin._modules[name] = _twin(child, f"{full}.", others, end)
    found: nn.Module = twin
    return found


def outline(module: nn.Module, path: str, sample: Any, runs: int = 1) -> Outline:
    """Runs a sample through the module and watches the blocks.

    Args:
        path: name of the ModuleList or Sequential of blocks.
        sample: inputs by name; a tensor, for the first input; None: the module's `dummy_inputs`.
        runs: number of forwards; the fastest times count.

    Raises:
        ConfigError: an argument is invalid, or the module does not call its blocks one by one.
    """
    try:
        listed = module.get_submodule(path)
    except AttributeError:
        listed = module
    if not path or not isinstance(listed, nn.ModuleList | nn.Sequential):
        raise ConfigError(
            f"invalid blocks {path!r} for partition: expected the name of a ModuleList or a "
            f"Sequential in {type(module).__name__}"
        )
    found = Outline(module, path, _inputs(module, sample), [*listed])
    watch = _Watch(found)
    with _evaluating(module), watch.hooks():
        for _ in range(runs):
            watch.begin()
            try:
                output = module(**found.inputs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ConfigError(
                    f"{type(module).__name__} cannot take the sample of partition: {error}"
                ) from error
            watch.end()
    value = tensors_in(output)
    found.output = value if isinstance(value, tuple) else (value,)
    _place(module, "", path, watch.called, found.homes)
    return found


def _inputs(module: Any, sample: Any) -> dict[str, torch.Tensor]:
    if sample is None:
        sample = getattr(module, "dummy_inputs", None)
    if isinstance(sample, torch.Tensor):
        sample = {_first_argument(module): sample}
    if (
        not isinstance(sample, Mapping)
        or not sample
        or not all(isinstance(value, torch.Tensor) for value in sample.values())
    ):
        raise ConfigError(
            f"partition with blocks= needs sample=, a dict of input tensors, got {given(sample)}"
        )
    return dict(sample)


def _first_argument(module: nn.Module) -> str:
    import inspect

    return next(iter(inspect.signature(module.forward).parameters))


class _Watch:
    """Hooks that record when the module calls its blocks and other modules."""

    def __init__(self, into: Outline) -> None:
        self._into = into
        self.called: dict[str, set[str]] = {}
        self._done = 0
        self._previous: Any = None
        self._moments: list[float] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        into = self._into
        with ExitStack() as stack:
            for number, block in enumerate(into.blocks):
                enter, leave = self._enter(number), self._leave(number)
                handle = block.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(block.register_forward_hook(leave).remove)
            for name, part in into.module.named_modules():
                if not _encloses(name, into.path) and not name.startswith(f"{into.path}."):
                    handle = part.register_forward_pre_hook(self._note(name))
                    stack.callback(handle.remove)
            yield

    def begin(self) -> None:
        self._done, self._previous, self._moments = 0, None, [time.perf_counter()]

    def end(self) -> None:
        blocks = len(self._into.blocks)
        if self._done != blocks:
            raise self._refusal(f"only {self._done} of {blocks} are called")
        self._moments.append(time.perf_counter())
        edges = zip(self._moments, self._moments[1:], strict=False)
        took = [after - before for before, after in edges]
        last = self._into.seconds or took
        self._into.seconds = [min(pair) for pair in zip(last, took, strict=True)]

    def _note(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            count = len(self._into.blocks)
            if 0 < self._done < count:
                self.called.setdefault(name, set()).update((FIRST, LAST))
            else:
                self.called.setdefault(name, set()).add(LAST if self._done else FIRST)

        return note

    def _enter(self, number: int) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number != self._done:
                raise self._refusal(f"block {number} is called as number {self._done}")
            if number == 0:
                self._moments.append(time.perf_counter())
                return
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            at = next((at for at, value in places if value is self._previous), None)
            if at is None or self._into.shape.at not in (at, 0):
                raise self._refusal(
                    f"block {number} does not take the hidden states of block {number - 1} as they are"
                )
            self._into.shape.at = at

        return enter

    def _leave(self, number: int) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            is_tuple = isinstance(output, tuple)
            first = output[0] if is_tuple and output else output
            if not isinstance(first, torch.Tensor):
                raise self._refusal(
                    f"block {number} returns {type(first).__name__}, not hidden states"
                )
            self._into.shape.width = len(output) if is_tuple else 0
            self._previous = first
            self._done = number + 1
            self._moments.append(time.perf_counter())

        return leave

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"invalid blocks {self._into.path!r} for partition: expected blocks that are called once "
            f"each, in order, with the hidden states of the one before: {why}"
        )


def _encloses(name: str, path: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _place(
    module: nn.Module,
    prefix: str,
    path: str,
    called: Mapping[str, set[str]],
    homes: dict[str, set[str]],
) -> None:
    """Fills `homes` for the outermost modules that are called. Modules that are never called belong
    to the first and the last stage."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full == path or next(child.parameters(), None) is None:
            continue
        if _encloses(full, path) or (full not in called and next(child.children(), None)):
            _place(child, f"{full}.", path, called, homes)
        else:
            homes[full] = called.get(full, {FIRST, LAST})


def tensors_in(output: Any) -> Any:
    """Returns a module's output as a tensor or a tuple of tensors; other values are left out."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    found = tuple(value for value in values if isinstance(value, torch.Tensor))
    return found[0] if len(found) == 1 else found


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Runs without gradients and dropout; restores each module's mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
