"""Bytes on the wire and on disk stay as they are, whatever classes and modules are called.

`wire_format.json` holds an example of each struct as earlier releases write it. After a deliberate change
of a format: `python -m tests.test_wire_format` writes the file anew.
"""

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

FILE = Path(__file__).with_name("wire_format.json")
MODULES = (
    "checkpoint.directory.manifest", "checkpoint.memory.inventory", "checkpoint.memory.messages",
    "checkpoint.state.tree", "fs3.manager.admission", "fs3.manager.chains", "fs3.manager.core",
    "fs3.manager.election", "fs3.manager.routing", "fs3.manager.service", "fs3.meta.inode",
    "fs3.meta.messages", "hai.model.engine", "hai.supervisor.messages", "hai.model.observations",
    "hai.model.identity", "hai.ledger", "hai.model", "hai.rank.lease", "hai.workspaces.manifest",
    "hfreduce.reform.handles", "hfreduce.reform.membership", "hfreduce.topology",
    "rpc.messages",
)  # fmt: skip
IN_MEMORY = {"hai.model.engine.Gang"}
DEPTH = 4


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct of these modules, by "module.Class"."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"fireflyer.{name}")
        for its in vars(module).values():
            own = isinstance(its, type) and its.__module__ == module.__name__
            if own and issubclass(its, msgspec.Struct) and not its.__subclasses__():
                found[f"{name}.{its.__name__}"] = its
    return {name: its for name, its in sorted(found.items()) if name not in IN_MEMORY}


def example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """An instance whose fields all have different values."""
    its: msgspec.Struct = _value(inspect.type_info(kind), itertools.count(1), DEPTH)
    return its


def _value(kind: inspect.Type, numbers: Iterator[int], depth: int) -> Any:
    match kind:
        case inspect.Metadata():
            return _value(kind.type, numbers, depth)
        case inspect.IntType():
            return next(numbers)
        case inspect.FloatType():
            return next(numbers) + 0.5
        case inspect.StrType():
            return f"s{next(numbers)}"
        case inspect.BytesType():
            return b"b%d" % next(numbers)
        case inspect.BoolType():
            return next(numbers) % 2 == 1
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.EnumType():
            return next(iter(kind.cls))
        case inspect.UnionType():
            kinds = [its for its in kind.types if not isinstance(its, inspect.NoneType)]
            return None if not depth and kind.includes_none else _value(kinds[0], numbers, depth)
        case inspect.ListType():
            return [_value(kind.item_type, numbers, depth - 1)] if depth > 0 else []
        case inspect.VarTupleType():
            return (_value(kind.item_type, numbers, depth - 1),) if depth > 0 else ()
        case inspect.SetType() | inspect.FrozenSetType():
            return {_value(kind.item_type, numbers, depth - 1)}
        case inspect.TupleType():
            return tuple(_value(its, numbers, depth - 1) for its in kind.item_types)
        case inspect.DictType():
            key = _value(kind.key_type, numbers, depth - 1)
            return {key: _value(kind.value_type, numbers, depth - 1)} if depth > 0 else {}
        case inspect.StructType():
            fields = {f.name: _value(f.type, numbers, depth - 1) for f in kind.fields}
            return kind.cls(**fields)
        case inspect.AnyType():
            return next(numbers)
        case inspect.RawType():
            return msgspec.Raw(b"\x01")
    raise NotImplementedError(kind)


def encoded(kind: type[msgspec.Struct]) -> str:
    """The example as msgpack, which holds tags, names of fields and their order; in hexadecimal."""
    return msgspec.msgpack.encode(example(kind)).hex()


GOLDEN: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}


def test_each_struct_is_known() -> None:
    assert list(GOLDEN) == list(structs())


@pytest.mark.parametrize("module", MODULES)
def test_bytes_stay_as_they_are(module: str) -> None:
    for name, kind in structs().items():
        if name.rpartition(".")[0] == module:
            assert encoded(kind) == GOLDEN[name], name
            assert msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]), type=kind) == example(kind)


if __name__ == "__main__":
    FILE.write_text(
        json.dumps({name: encoded(its) for name, its in structs().items()}, indent=1) + "\n"
    )
