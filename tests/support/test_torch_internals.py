"""The installed torch has the private names that Fireflyer uses, and only `torch_internals` names them."""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import fireflyer
from fireflyer.torch_internals import checkpoint, core, distributed, pipelining, sharding, tensor

SOURCE = Path(fireflyer.__file__).parent
PRIVATE = re.compile(r"_(?!_)")

NAMED_BY_TEXT = {
    "hai/forkserver/__init__.py": {"torch._dynamo"},
    "haiprof/inside/operators.py": set[str](),
    "haiprof/inside/points.py": {"torch._C._distributed_c10d", "torch._C._dynamo.eval_frame"},
    "hfreduce/registration.py": set[str](),
}
"""Modules that must not import torch: they look names up in `sys.modules`, or import them by name."""


def has_private(name: str) -> bool:
    return any(map(PRIVATE.match, name.split(".")))


def names_of_torch(tree: ast.AST) -> dict[str, str]:
    """Names by which a module has parts of torch: by imports, and by assignments of such parts."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts = [one for one in node.names if one.name.split(".")[0] == "torch"]
            names.update(
                {one.asname or "torch": one.name if one.asname else "torch" for one in parts}
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names.update(
                {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            part = part_of_torch(node.value, names)
            if part is not None and isinstance(targets[0], ast.Name) and not part[-1].isupper():
                names.setdefault(targets[0].id, part)
    return names


def part_of_torch(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name of `a.b.c`, if `a` is a part of torch."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in names:
        return ".".join([names[node.id], *attributes])
    return None


def private_names(tree: ast.AST) -> Iterator[str]:
    names = names_of_torch(tree)
    yield from filter(has_private, names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("torch._"))
        elif isinstance(node, ast.Attribute):
            part = part_of_torch(node, names)
            if part is not None and has_private(part):
                yield part
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr", "vars") and len(node.args) > 1:
                part, name = part_of_torch(node.args[0], names), node.args[1]
                if part and isinstance(name, ast.Constant) and PRIVATE.match(str(name.value)):
                    yield f"{part}.{name.value!s}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            yield from [text] if re.fullmatch(r"torch(\.\w+)*", text) and has_private(text) else ()


def test_no_other_module_names_a_private_part_of_torch() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(SOURCE).as_posix()
        if "torch" in text and not name.startswith("torch_internals/"):
            known = NAMED_BY_TEXT.get(name, set())
            found[name] = sorted(set(private_names(ast.parse(text))) - known)
    assert {name: private for name, private in found.items() if private} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch._C", "torch._C"),
        ("from torch._functorch import vmap", "torch._functorch.vmap"),
        ("import torch as t\nt._C._x()", "torch._C._x"),
        ("from torch import distributed as d\nbook = d.c10d\nbook._world", "torch.distributed.c10d._world"),
        ("import torch\nflags: object = torch.compiler\nflags._on", "torch.compiler._on"),
        ("import torch\ngetattr(torch.compiler, '_on')", "torch.compiler._on"),
        ("import sys\nsys.modules['torch._C']", "torch._C"),
    ],
)  # fmt: skip
def test_a_private_name_is_found(text: str, found: str) -> None:
    assert found in set(private_names(ast.parse(text)))


def test_names_given_as_text_exist() -> None:
    for name in set[str]().union(*NAMED_BY_TEXT.values()):
        assert inspect.ismodule(functools.reduce(getattr, name.split(".")[1:], torch)), name
    assert callable(torch.autograd._profiler_enabled)  # haiprof/inside/operators.py
    assert (
        "env" in sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    )  # hfreduce/registration.py


# What is relied on, an entry each

Loud = type("Loud", (torch.Tensor,), {"__torch_function__": classmethod(lambda *_: 1 / 0)})


def in_backward(call: Callable[[], object]) -> list[object]:
    """What `call` returns inside a backward."""
    seen: list[object] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(call()))
    leaf.sum().backward()
    return seen


def end_of_backward() -> bool:
    order: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: core.queue_callback(lambda: order.append("end")))
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    leaf.sum().backward()
    return order == ["accumulated", "end"]


def gradient_of_softmax() -> bool:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    logs, grad = torch.log_softmax(logits, -1), torch.rand(3, 4, dtype=torch.float64)
    logs.backward(grad)
    out = torch.empty_like(grad)
    core.log_softmax_backward_out(grad, logs.detach(), -1, torch.float64, out=out)
    return logits.grad is not None and torch.equal(out, logits.grad)


def aliases() -> bool:
    tensor = torch.ones(4)
    alone = core.storage_uses(tensor.untyped_storage()._cdata)
    view = tensor[1:]
    return bool(core.storage_uses(tensor.untyped_storage()._cdata) == alone + 1) and len(view) == 3


def kept_version() -> bool:
    tensor = torch.ones(2)
    with core.preserve_versions((tensor,)):
        tensor.add_(1)
    return tensor._version == 0 and bool(tensor[0] == 2)


def silent(tensor: Any) -> bool:
    with core.DisableTorchFunctionSubclass():
        return bool(tensor.data_ptr())


def innermost_hooks() -> bool:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        return bool(core.saved_tensor_hooks(False) == (pack, pack))


def profiled() -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        inside = core.profiler_enabled()
    return bool(inside and not core.profiler_enabled())


def transformed() -> bool:
    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(core.is_transformed())
        return x + 1

    seen: list[bool] = []
    torch.func.vmap(note)(torch.ones(2))
    with forward_ad.dual_level():
        note(torch.ones(2))
    torch.jit.trace(note, torch.ones(2), check_trace=False)
    note(torch.ones(2))
    return seen == [True, True, True, False]


def keys() -> tuple[object, object]:
    return core.dispatch_includes(), core.dispatch_excludes()


def guarded() -> bool:
    outside = keys()
    with torch.inference_mode():
        other = keys()
        with core.ForceDispatchKeyGuard(*outside):
            return keys() == outside != other


def no_inference() -> bool:
    with torch.inference_mode(), core.InferenceMode(False):
        return not torch.is_inference_mode_enabled()


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, *_: object) -> Any:
        raise AssertionError


def no_dispatch_modes() -> bool:
    with cast(Any, Refusing)(), core.disable_current_modes():
        return len(torch.ones(2)) == 2


def no_functorch() -> bool:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with core.temporarily_clear_interpreter_stack():
            seen.append(core.is_transformed())
        return x

    seen: list[bool] = []
    torch.func.vmap(inside)(torch.ones(2))
    return seen == [False]


def popped_mode() -> bool:
    with torch.device("meta"):
        mode = core.pop_function_mode()
        none = core.function_modes()
        core.push_function_mode(mode)
        return none == 0 and core.function_modes() == 1 and torch.ones(2).is_meta


def device_mode() -> bool:
    torch.set_default_device("meta")
    try:
        return bool(core.default_device.device_context.device == torch.device("meta"))
    finally:
        torch.set_default_device(None)


def no_tracing() -> bool:
    def body(x: torch.Tensor) -> torch.Tensor:
        state = core.tracing_state()
        core.set_tracing_state(None)
        seen.append(torch.jit.is_tracing())
        core.set_tracing_state(state)
        return x + 1

    seen: list[bool] = []
    traced = torch.jit.trace(body, torch.ones(2), check_trace=False)
    return seen == [False] and core.tracing_state() is None and traced(torch.ones(1)).item() == 2


def skipped_by_compiler() -> bool:
    def call() -> None: ...

    skip = core.FrameAction.SKIP
    strategy = core.FrameExecStrategy(skip, skip)
    core.set_code_exec_strategy(call.__code__, strategy)
    return strategy.cur_action == strategy.recursive_action == skip


def not_compiling() -> bool:
    flags: Any = torch.compiler
    flags._is_compiling_flag = True
    try:
        with core.not_compiling():
            inside = torch.compiler.is_compiling()
        return torch.compiler.is_compiling() and not inside
    finally:
        flags._is_compiling_flag = False


def takes(function: Callable[..., Any], names: str) -> bool:
    """True if the parameters begin with `names`."""
    return " ".join(inspect.signature(function).parameters).startswith(names)


def readers(places: tuple[tuple[Any, str], ...]) -> bool:
    return all(callable(getattr(owner, name)) for owner, name in places)


def backward_in_halves() -> bool:
    layer, x = nn.Linear(2, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    weights = [*layer.parameters()]
    x.requires_grad_()
    out = layer(x)
    (grad,), groups = pipelining.stage_backward_input(
        [out], [torch.ones_like(out)], [x], iter(weights)
    )
    before = [p.grad for p in weights]
    pipelining.stage_backward_weight(iter(weights), groups)
    assert grad is not None
    assert layer.weight.grad is not None
    return torch.equal(grad[0], layer.weight.sum(0)) and before == [None, None]


CHECKS: dict[Any, dict[str, Callable[[], object]]] = {
    core: {
        "DisableTorchFunctionSubclass": lambda: silent(torch.ones(1).as_subclass(Loud)),
        "storage_uses": aliases,
        "PRIVATE_READERS": lambda: readers(core.PRIVATE_READERS),
        "ScriptMethod": lambda: callable(vars(core.ScriptMethod)["__call__"]),
        "log_softmax_backward_out": gradient_of_softmax,
        "BatchNorm": lambda: issubclass(nn.BatchNorm2d, core.BatchNorm),
        "pytree": lambda: (
            core.pytree.tree_leaves([1, {"a": 2.0}]) == [1, 2.0]
            and core.pytree.tree_map_only(int, str, (1, 2.0)) == ("1", 2.0)
        ),
        "queue_callback": end_of_backward,
        "current_graph_task_id": lambda: (
            core.current_graph_task_id() == -1 not in in_backward(core.current_graph_task_id)
        ),
        "preserve_versions": kept_version,
        "saved_tensor_hooks": lambda: core.saved_tensor_hooks(False) is None and innermost_hooks(),
        "profiler_enabled": profiled,
        "is_transformed": transformed,
        "dispatch_includes": guarded,
        "dispatch_excludes": guarded,
        "ForceDispatchKeyGuard": guarded,
        "InferenceMode": no_inference,
        "disable_current_modes": no_dispatch_modes,
        "temporarily_clear_interpreter_stack": no_functorch,
        "function_modes": popped_mode,
        "pop_function_mode": popped_mode,
        "push_function_mode": popped_mode,
        "default_device": device_mode,
        "tracing_state": no_tracing,
        "set_tracing_state": no_tracing,
        "eval_frame_callback": lambda: core.eval_frame_callback() in (None, False),
        "set_code_exec_strategy": skipped_by_compiler,
        "FrameAction": skipped_by_compiler,
        "FrameExecStrategy": skipped_by_compiler,
        "not_compiling": not_compiling,
    },
    distributed: {
        "ErrorType": lambda: all(
            hasattr(distributed.ErrorType, name) for name in ("SUCCESS", "REMOTE_ERROR", "COMM_ERROR")
        ),
        "AllgatherOptions": lambda: isinstance(distributed.AllgatherOptions().timeout, timedelta),
        "world": lambda: not distributed.world.pg_map and not distributed.world.pg_group_ranks,
        "new_process_group": lambda: takes(
            distributed.new_process_group,
            "group_size group_rank global_ranks_in_group backend store group_name",
        ),
        "group_store": lambda: takes(distributed.group_store, "pg"),
        "default_store": lambda: takes(distributed.default_store, ""),
        "PRIVATE_READERS": lambda: readers(distributed.PRIVATE_READERS),
    },
    checkpoint: {
        "StorageInfo": lambda: takes(checkpoint.StorageInfo, "relative_path offset length"),
        "flatten_state_dict": lambda: (
            checkpoint.flatten_state_dict({"a": [1, {"b": 2}]})
            == ({"a.0": 1, "a.1.b": 2}, {"a.0": ("a", 0), "a.1.b": ("a", 1, "b")})
        ),
    },
    pipelining: {
        "stage_backward_input": backward_in_halves,
        "stage_backward_weight": backward_in_halves,
    },
    sharding: {
        "AllGather": lambda: takes(
            sharding.AllGather.__call__, "self output_tensor input_tensor group async_op"
        ) and takes(sharding.AllGather.allocate, "self size dtype device"),
        "ReduceScatter": lambda: takes(
            sharding.ReduceScatter.__call__, "self output_tensor input_tensor group op async_op"
        ),
        "FSDPParamGroup": lambda: (
            takes(sharding.FSDPParamGroup.unshard, "self async_op")
            and takes(sharding.FSDPParamGroup._prefetch_unshard, "target_fsdp_param_group pass_type")
            and takes(sharding.FSDPParamGroup.wait_for_unshard, "self")
            and takes(sharding.FSDPParamGroup.post_backward, "self unused")
        ),
        "TrainingState": lambda: {one.name for one in sharding.TrainingState} >= {
            "IDLE", "FORWARD", "PRE_BACKWARD",
        },
        "WrapPolicy": lambda: takes(sharding.WrapPolicy._run_policy, "self root_module ignored_modules"),
    },
    tensor: {
        "compute_local_shape_and_global_offset": lambda: takes(
            tensor.compute_local_shape_and_global_offset, "global_shape mesh placements"
        ),
    },
}  # fmt: skip

MEMBERS = {
    "group": """
        _all_gather_comm _all_gather_result _all_reduce_hook _all_reduce_state _is_hsdp
        _module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle
        _orig_dtype _partial_reduce_output _post_forward_indices _post_reduce_event
        _prefetch_unshard _backward_prefetch _reduce_scatter_comm _reduce_scatter_process_group
        _reshard_after_forward_event _to_sharded _training_state""",
    "state": "_fsdp_param_groups _post_forward_hook_handle _pre_forward_hook_handle",
    "parameter": """
        _module_info _post_load_hook_handle _setattr_on_modules _sharded_local_tensor
        _sharded_param_data _sharding_spec _unsharded_param""",
    "module": "_buffers _get_fsdp_state _parameters",
    "tensor": "_backward_hooks _local_tensor _spec _version",
    "policy": "_run_policy",
}
"""Private members of FSDP's objects that `haiscale.sharding` uses."""


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 3)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2)).sum().backward()
        yield model
    finally:
        dist.destroy_process_group()


def test_sharded_modules_are_as_expected(sharded: nn.Module) -> None:
    state: Any = sharded._get_fsdp_state()  # type: ignore[operator]
    assert cast(Any, sharding.module_states[sharded])() is state
    assert state in vars(sharded)[sharding.FSDP_STATES].values()
    assert "fully_shard" in vars(sharded)[sharding.FSDP_REGISTRY]
    assert type(sharded).__mro__[sharding.ORIGINAL_CLASS] is nn.Linear
    weight: Any = sharded.weight
    again = sharding.local_to_dtensor(weight.to_local(), weight._spec)
    assert isinstance(again, DTensor)
    assert again.placements == (Shard(0),)
    shape, offsets = tensor.compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    assert (tuple(shape), tuple(offsets)) == ((3, 2), (0, 0))
    sharding.clear_sharding_cache()
    (group,) = state._fsdp_param_groups
    objects = {
        "group": group,
        "state": state,
        "parameter": group.fsdp_params[0],
        "module": sharded,
        "tensor": weight,
        "policy": sharding.WrapPolicy,
    }
    for kind, names in MEMBERS.items():
        assert [name for name in names.split() if not hasattr(objects[kind], name)] == [], kind
    assert group._training_state == sharding.TrainingState.IDLE


def test_members_of_sharded_modules_are_listed() -> None:
    ours: set[str] = set()
    used: set[str] = set()
    for path in [*(SOURCE / "haiscale" / "sharding").glob("*.py"), SOURCE / "haiscale" / "fsdp.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
                mine = isinstance(node.value, ast.Name) and node.value.id == "self"
                (ours if mine else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                ours.add(node.name)
    assert used - ours - set(" ".join(MEMBERS.values()).split()) == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, checks in CHECKS.items() for name in checks],
    ids=lambda one: one if isinstance(one, str) else one.__name__.rpartition(".")[2],
)
def test_torch_behaves_as_relied_on(module: Any, name: str) -> None:
    assert CHECKS[module][name]()


def test_every_entry_is_checked_and_described() -> None:
    in_a_sharded_module = {
        "module_states", "FSDP_STATES", "FSDP_REGISTRY", "ORIGINAL_CLASS", "local_to_dtensor",
        "clear_sharding_cache",
    }  # fmt: skip
    for module, checks in CHECKS.items():
        body = ast.parse(inspect.getsource(module)).body
        entries: dict[str, Any] = {}
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef):
                entries[node.name] = ast.get_docstring(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                text = following.value if isinstance(following, ast.Expr) else None
                entries[ast.unparse(target)] = text and ast.literal_eval(text)
        public = {name: text for name, text in entries.items() if name not in ("_C", "c10d")}
        assert public.keys() - in_a_sharded_module == checks.keys(), module
        assert all(public.values()), module
