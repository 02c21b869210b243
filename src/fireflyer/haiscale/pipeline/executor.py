"""Execution of a schedule by the ranks of a pipeline over HFReduce's point-to-point messages."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError, FireflyerError
from fireflyer.haiscale.consistency import tell_all
from fireflyer.haiscale.copies import Uncopied
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.pipeline.blocks import BlockStage
from fireflyer.haiscale.pipeline.gradients import clip, reduce_over_replicas, sum_tied
from fireflyer.haiscale.pipeline.passes import Pass
from fireflyer.haiscale.pipeline.schedules import Action, Kind
from fireflyer.haiscale.pipeline.stages import Stage
from fireflyer.haiscale.pipeline.transfers import Incoming, Layout, Mail, layout_of
from fireflyer.haiscale.validation import check_count, given
from fireflyer.torch_internals.distributed import world

CHECKPOINTS = ("always", "except_last", "never")
REDUCTIONS = ("mean", "sum")
OUTPUTS = ("all", "last", "none")
_REFUSED, _RAISED = "pipeline-refused", "pipeline-raised"


class Pipeline(Uncopied):
    """Base of the pipelines; use GPipe, PipeDream, Interleaved1F1B or ZeroBubble.

    Args:
        module: this rank's stage from `partition`, alone or in a DistributedDataParallel without
            `optimizer=`; for Interleaved1F1B a list of stages.
        chunks: number of micro-batches per step.
        process_group: ranks of the pipeline, in the order of the stages; backend "hfreduce". None
            means the default group.
        checkpoint: "always" keeps only the inputs of stages and repeats forwards in backward;
            "except_last" does so for all micro-batches except the last; "never" keeps everything.
        loss_reduction: "mean" averages the losses and gradients of micro-batches; "sum" adds them,
            for criterions that themselves divide by `chunks`.
        autocast: dtype of `torch.autocast` in forwards, or None.
        outputs: ranks that receive the outputs of the last stage. "all": every rank, after the
            step; "last": only the last stage's rank, while the others get None; "none": no rank.

    Attributes:
        watch: function called after each computation of a step, with its action, and its start and
            end by `time.monotonic()`; None: no call.

    Raises:
        ConfigError: an argument is invalid on some rank, or the ranks disagree; raised on every
            rank of the pipeline.
    """

    kind = ""

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        chunks: int,
        process_group: ProcessGroup | None = None,
        *,
        checkpoint: str = "never",
        loss_reduction: str = "mean",
        autocast: torch.dtype | None = None,
        outputs: str = "all",
    ) -> None:
        super().__init__()
        group = process_group or dist.group.WORLD
        if not isinstance(group, hfreduce.ProcessGroupHFReduce):
            raise ConfigError(
                f"{type(self).__name__} needs a process group of backend 'hfreduce': "
                "make_subgroups or new_group(backend='hfreduce')"
            )
        self._group, self.rank, self.size = group, group.rank(), group.size()
        given_modules: list[Any] = [*module] if isinstance(module, list | tuple) else [module]
        options = (chunks, checkpoint, loss_reduction, str(autocast), outputs)
        self._agree(lambda: self._checked(given_modules, *options))
        self.parts = nn.ModuleList(given_modules)
        stages = [_stage(part) for part in given_modules]
        self.stages = {stage.index: stage for stage in stages}
        self.chunks, self._checkpoint, self._loss_reduction = chunks, checkpoint, loss_reduction
        self._autocast, self.outputs = autocast, outputs
        self.schedule = schedules.schedule(self.kind, self.size, chunks, len(stages))
        self.last = self.schedule.stages - 1
        self.mail = Mail(group)
        self.watch: Callable[[Action, float, float], None] | None = None

    # Validation

    def _checked(
        self,
        modules: list[nn.Module],
        chunks: int,
        checkpoint: str,
        reduction: str,
        autocast: str,
        outputs: str,
    ) -> list[Any]:
        check_count("chunks", chunks, 1)
        for name, value, known in (
            ("checkpoint", checkpoint, CHECKPOINTS),
            ("loss_reduction", reduction, REDUCTIONS),
            ("outputs", outputs, OUTPUTS),
        ):
            if value not in known:
                raise ConfigError(f"invalid {name} {given(value)}: expected one of {known}")
        if self.kind == schedules.ZERO_BUBBLE and checkpoint != "never":
            raise ConfigError(
                f"invalid checkpoint {checkpoint!r}: ZeroBubble divides backwards and takes 'never'"
            )
        stages = [_stage(module) for module in modules]
        plan = schedules.schedule(self.kind, self.size, chunks, len(modules))
        expected = [*range(self.rank, plan.stages, self.size)]
        if [stage.index for stage in stages] != expected:
            raise ConfigError(
                f"invalid module: rank {self.rank} of {self.size} needs the stages {expected}, not "
                f"{[stage.index for stage in stages]}"
            )
        if any(len(stage.sizes) != plan.stages for stage in stages):
            raise ConfigError(
                f"invalid module of stage {stages[0].index}: it was cut for {len(stages[0].sizes)} "
                f"stages, the pipeline has {plan.stages}"
            )
        for part in modules:
            if isinstance(part, DistributedDataParallel) and part._deferred:
                raise ConfigError(
                    f"invalid module of stage {_stage(part).index}: a pipeline takes "
                    "DistributedDataParallel without optimizer="
                )
        options = {
            "schedule": self.kind,
            "chunks": chunks,
            "checkpoint": checkpoint,
            "loss_reduction": reduction,
            "autocast": autocast,
            "outputs": outputs,
            "balance": list(stages[0].sizes),
            "training": stages[0].training,
        }
        return [*options.items()]

    def _agree(self, check: Callable[[], list[Any]]) -> dict[str, Any]:
        """Runs a check on all ranks. Collective.

        Returns:
            The values by name that the checks of all ranks returned. A check returns (name, value)
            pairs; a value that its rank does not know is None.

        Raises:
            ConfigError: the check failed on some rank, or the ranks' results differ.
        """
        mine: list[Any] = ["", []]
        try:
            mine[1] = [list(item) for item in check()]
        except (ConfigError, TypeError) as error:
            mine[0] = str(error)
        answers = tell_all(mine, self._group)
        for rank, (refusal, _) in enumerate(answers):
            if refusal:
                raise ConfigError(f"pipeline rank {rank}: {refusal}")
        known: dict[str, tuple[int, Any]] = {}
        for rank, (_, found) in enumerate(answers):
            for name, theirs in found:
                if theirs is None:
                    continue
                first, ours = known.setdefault(name, (rank, theirs))
                if ours != theirs:
                    raise ConfigError(
                        f"the ranks of a pipeline disagree: {name} is {ours} on rank {first}, "
                        f"{theirs} on rank {rank}"
                    )
        return {name: value for name, (_, value) in known.items()}

    # Steps

    def forward_backward(
        self,
        x: Any = None,
        *,
        criterion: Callable[..., torch.Tensor] | None = None,
        labels: Any = (),
    ) -> tuple[torch.Tensor, Any]:
        """Runs one step: forward and backward of all micro-batches. Collective.

        Gradients are added to `.grad`, averaged over the replicas of a DistributedDataParallel.

        Args:
            x: input, or tuple of inputs, of the first stage, cut along dimension 0; other stages
                ignore it. If `partition` had `blocks=`, a dict of inputs by name.
            criterion: function from the last stage's output and the labels to a scalar.
            labels: tensor, or tuple of tensors, cut like `x`; only the last stage uses them.

        Returns:
            (loss, outputs): the loss on every rank, and the outputs of the last stage for the whole
            batch on the ranks that `outputs=` of the class selects.

        Raises:
            ConfigError: an argument is invalid; raised on every rank; the error names the stage. If
                the error arose inside a stage, the group is unusable afterwards.
            RankFailed, CollectiveError: a rank of the pipeline died, or code of its stage raised
                another error, which the message quotes.
        """
        return self._step(x, criterion, labels, trains=True)

    def evaluate(
        self, x: Any = None, *, criterion: Callable[..., Any] | None = None, labels: Any = ()
    ) -> tuple[torch.Tensor | None, Any]:
        """Runs only forwards, without gradients. Collective.

        Returns:
            (loss, outputs) as for `forward_backward`; the loss is None without a criterion.
        """
        with torch.no_grad():
            return self._step(x, criterion, labels, trains=False)

    def _step(self, x: Any, criterion: Any, labels: Any, trains: bool) -> tuple[Any, Any]:
        batches: list[list[Any]] = []
        known = self._agree(lambda: self._divided(x, criterion, labels, trains, batches))
        rows, targets = known["rows of x"], known.get("rows of labels", 0)
        if targets % rows:  # otherwise torch would broadcast x and labels
            raise ConfigError(
                f"invalid labels of stage {self.last}: {targets} rows do not match the {rows} rows "
                "of x"
            )
        try:
            return self._run(batches[0], batches[1], criterion, trains)
        except BaseException as error:
            self._fail(error)
            raise

    def _divided(
        self, x: Any, criterion: Any, labels: Any, trains: bool, found: list[list[Any]]
    ) -> list[Any]:
        """Cuts the arguments that this rank needs into micro-batches."""
        rows = targets = None
        found.append([()] * self.chunks)
        if 0 in self.stages:
            found[0] = self._cut("x", x, 0)
            rows = self.chunks * len(found[0][0][0])
        if self.last not in self.stages:
            found.append([()] * self.chunks)
        elif (criterion is None and trains) or (criterion is not None and not callable(criterion)):
            raise ConfigError(
                f"invalid criterion {given(criterion)} on stage {self.last}: expected a function"
            )
        else:
            found.append(self._cut("labels", labels, self.last))
            targets = self.chunks * len(found[1][0][0]) if found[1][0] else None
        return [
            ("criterion", criterion is not None),
            ("rows of x", rows),
            ("rows of labels", targets),
        ]

    def _cut(self, name: str, value: Any, stage: int) -> list[tuple[Any, ...]]:
        if name == "x" and isinstance(value, Mapping):
            value = self._ordered(value)
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        if name == "x" and not values:
            values = (None,)
        for one in values:
            if not isinstance(one, torch.Tensor) or not one.dim():
                raise ConfigError(
                    f"invalid {name} of stage {stage}: expected tensors with a batch dimension, got "
                    f"{given(one) if not isinstance(one, torch.Tensor) else 'a scalar'}"
                )
            if len(one) % self.chunks or not len(one):
                raise ConfigError(
                    f"invalid {name} of stage {stage}: {len(one)} rows do not divide into "
                    f"{self.chunks} micro-batches"
                )
        if not values:
            return [()] * self.chunks
        return [*zip(*(one.chunk(self.chunks) for one in values), strict=True)]

    def _ordered(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        names = getattr(self.stages[0], "names", ())
        if set(inputs) != set(names):
            wanted = f"the inputs {', '.join(names)}" if names else "tensors, not a dict"
            raise ConfigError(
                f"invalid x of stage 0: expected {wanted}, got {', '.join(map(str, inputs))}"
            )
        return tuple(inputs[name] for name in names)

    def _run(
        self, inputs: list[Any], labels: list[Any], criterion: Any, trains: bool
    ) -> tuple[Any, Any]:
        step = Step(self, inputs, labels, criterion, trains)
        wrapped = [part for part in self.parts if isinstance(part, DistributedDataParallel)]
        with contextlib.ExitStack() as stack:
            for part in wrapped:
                part._before_forward(False)
                stack.enter_context(part.no_sync())
            for action in self.schedule.programs[self.rank]:
                if trains or action.kind in FORWARDS:
                    begin = time.monotonic()
                    step.act(action)
                    if self.watch is not None and action.kind in schedules.COMPUTES:
                        self.watch(action, begin, time.monotonic())
        self.mail.finish()
        if trains:
            beyond_activations = 2 * self.schedule.stages * (self.chunks + 1)
            sum_tied(self.stages, self.size, self.mail, beyond_activations)
            reduce_over_replicas(wrapped)
        loss = self._loss_for_all(step, criterion is not None)
        outputs = step.outputs()
        if self.outputs == "all":
            outputs = self.mail.share(outputs, self.last % self.size)
        return loss, outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def _loss_for_all(self, step: "Step", wanted: bool) -> torch.Tensor | None:
        if not wanted:
            return None
        loss = torch.zeros((), dtype=torch.float64)
        if self.last in self.stages:
            for one in step.losses:
                loss += one.reshape(()).double()
            if self._loss_reduction == "mean":
                loss /= self.chunks
        dist.broadcast(loss, dist.get_global_rank(self._group, self.last % self.size), self._group)
        return loss

    def _fail(self, error: BaseException) -> None:
        """Ends the step on all ranks, and passes this rank's error to them."""
        group: Any = self._group
        store = world.pg_map[group][1]
        told: FireflyerError | None = None
        lost_store = contextlib.suppress(RuntimeError)  # the store's process may have died
        if isinstance(error, CollectiveError):
            group.abort()
            with lost_store:
                if store.check([_REFUSED]):
                    told = ConfigError(store.get(_REFUSED).decode())
                elif store.check([_RAISED]):
                    told = CollectiveError(store.get(_RAISED).decode())
            if told is not None:
                raise told from error
            return
        with lost_store:
            if isinstance(error, ConfigError):
                store.set(_REFUSED, str(error))
            else:
                text = f"pipeline rank {self.rank} raised {type(error).__name__}: {error}"
                store.set(_RAISED, text)
        group.abort()

    # State

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients of the pipeline like `torch.nn.utils.clip_grad_norm_`. Collective.

        Returns:
            The norm before scaling, over all stages; a tied parameter counts once.

        Raises:
            ConfigError: `max_norm` is not a number of at least 0.
        """
        return clip(self.stages, self._group, max_norm)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of this rank's stages, with the names of the unpartitioned module."""
        found: dict[str, Any] = {}
        for stage in self.stages.values():
            found.update(stage.state_dict())
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Loads this rank's part of the unpartitioned module's state."""
        for stage in self.stages.values():
            own = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            stage.load_state_dict(own, strict, assign)


FORWARDS = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)


class Step:
    """One step of one rank; performs the actions of the rank's schedule."""

    def __init__(
        self, pipe: Pipeline, inputs: list[Any], labels: list[Any], criterion: Any, trains: bool
    ) -> None:
        self._pipe, self._inputs, self._labels = pipe, inputs, labels
        self._criterion, self._trains = criterion, trains
        self._activations: dict[int, Incoming] = {}
        self._gradients: dict[int, Incoming] = {}
        self._layouts: dict[int, Layout] = {}
        self._passes: dict[tuple[int, int], Pass] = {}
        self._received: list[torch.Tensor] = []
        self._computed: list[torch.Tensor] = []
        self._links: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self._outputs: dict[int, list[torch.Tensor]] = {}

    def act(self, action: Action) -> None:
        kind, stage, batch = action
        if kind is Kind.RECEIVE_ACTIVATION:
            if stage not in self._activations:
                self._layouts[stage] = self._pipe.mail.receive_layout(
                    self._rank(stage - 1), self._tag(kind, stage, self._pipe.chunks)
                )
                self._activations[stage] = self._incoming(
                    kind, stage, stage - 1, self._layouts[stage]
                )
            self._received = self._activations[stage].take()
        elif kind is Kind.RECEIVE_GRADIENT:
            self._received = self._gradients[stage].take()
        elif kind is Kind.SEND_ACTIVATION:
            self._send_activation(stage, batch)
        elif kind is Kind.SEND_GRADIENT:
            self._pipe.mail.send(self._computed, self._rank(stage), self._tag(kind, stage, batch))
        elif kind is Kind.FORWARD:
            self._forward(stage, batch)
        else:
            self._backward(kind, stage, batch)

    def _rank(self, stage: int) -> int:
        return stage % self._pipe.size

    def _tag(self, kind: Kind, stage: int, batch: int) -> int:
        """Returns the tag of a message to `stage`; batch number `chunks` is for the layout."""
        gradient = kind in (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        return (stage * (self._pipe.chunks + 1) + batch) * 2 + gradient

    def _incoming(self, kind: Kind, stage: int, source: int, layout: Layout) -> Incoming:
        program = self._pipe.schedule.programs[self._pipe.rank]
        tags: Iterator[int] = (
            self._tag(kind, stage, action.microbatch)
            for action in program
            if action.kind is kind and action.stage == stage
        )
        rank = self._rank(source)
        return Incoming(lambda tensor, tag: self._pipe.mail.post(tensor, rank, tag), tags, layout)

    def _send_activation(self, stage: int, batch: int) -> None:
        mail, kind = self._pipe.mail, Kind.SEND_ACTIVATION
        outputs = self._computed
        layout = layout_of(outputs)
        sender = stage - 1
        if sender not in self._gradients:
            self._layouts[sender] = layout
            tag = self._tag(kind, stage, self._pipe.chunks)
            mail.send_layout(layout, self._rank(stage), tag)
            needs = [one for one in layout if one[2]] if self._trains else []
            self._gradients[sender] = self._incoming(Kind.RECEIVE_GRADIENT, sender, stage, needs)
        elif layout != self._layouts[sender]:
            raise ConfigError(
                f"invalid module of stage {sender}: its output is {layout} for micro-batch {batch}, "
                f"{self._layouts[sender]} for the first"
            )
        mail.send(outputs, self._rank(stage), self._tag(kind, stage, batch))

    def _forward(self, stage: int, batch: int) -> None:
        pipe = self._pipe
        if stage == 0:
            inputs = list(self._inputs[batch])
        elif pipe.size == 1:
            inputs = [
                out.detach().requires_grad_(self._trains and out.requires_grad)
                for out in self._links.pop((stage, batch))
            ]
        else:
            wants = (one[2] for one in self._layouts[stage])
            inputs = [
                tensor.requires_grad_(self._trains and want)
                for tensor, want in zip(self._received, wants, strict=True)
            ]
        done = Pass(stage, pipe.stages[stage], inputs)
        recomputes = self._trains and (
            pipe._checkpoint == "always"
            or (pipe._checkpoint == "except_last" and batch < pipe.chunks - 1)
        )
        with torch.autocast("cpu", pipe._autocast, enabled=pipe._autocast is not None):
            outputs = done.forward(recomputes)
            if stage == pipe.last:
                if pipe.outputs != "none":
                    self._outputs[batch] = [out.detach() for out in outputs]
                if self._criterion is not None:
                    divisor = pipe.chunks if pipe._loss_reduction == "mean" else 1
                    self.losses.append(done.lose(self._criterion, self._labels[batch], divisor))
        if self._trains:
            if pipe.kind == schedules.ZERO_BUBBLE:
                done.divisible()
            self._passes[stage, batch] = done
        self._computed = done.outputs
        if pipe.size == 1 and stage < pipe.last:
            self._links[stage + 1, batch] = done.outputs

    def _backward(self, kind: Kind, stage: int, batch: int) -> None:
        done = self._passes[stage, batch]
        if kind is Kind.BACKWARD_WEIGHT:
            done.backward_weight()
            del self._passes[stage, batch]
            return
        if stage == self._pipe.last:
            gradients: list[torch.Tensor] = []
        elif self._pipe.size == 1:
            gradients = self._links.pop((stage, batch))
        else:
            gradients = self._received
        if kind is Kind.BACKWARD:
            self._computed = done.backward(gradients)
            del self._passes[stage, batch]
        else:
            self._computed = done.backward_input(gradients)
        if self._pipe.size == 1 and stage > 0:
            self._links[stage - 1, batch] = self._computed

    def outputs(self) -> list[torch.Tensor]:
        """Returns the last stage's outputs for the whole batch, if they are kept on this rank."""
        rows = [self._outputs[batch] for batch in sorted(self._outputs)]
        return [
            torch.cat(parts) if parts[0].dim() else torch.stack(parts)
            for parts in zip(*rows, strict=True)
        ]


def _stage(module: object) -> Stage | BlockStage:
    found = module.module if isinstance(module, DistributedDataParallel) else module
    if not isinstance(found, nn.Module) or not hasattr(found, "sizes"):
        raise ConfigError(
            f"invalid module {type(found).__name__}: expected a stage from partition, or "
            "a DistributedDataParallel around one"
        )
    return found  # type: ignore[return-value]


class GPipe(Pipeline):
    """Pipeline that runs all forwards, then all backwards."""

    kind = schedules.GPIPE


class PipeDream(Pipeline):
    """One forward, one backward (1F1B): a stage keeps at most one live activation for itself and
    for each later stage."""

    kind = schedules.PIPEDREAM


class Interleaved1F1B(Pipeline):
    """1F1B with several stages per rank: a smaller bubble, but more messages."""

    kind = schedules.INTERLEAVED


class ZeroBubble(Pipeline):
    """ZB-H1: 1F1B in which weight gradients fill the bubble."""

    kind = schedules.ZERO_BUBBLE
