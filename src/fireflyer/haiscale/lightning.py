"""Lightning trains over HFReduce: `Trainer(strategy=HaiScaleStrategy())`."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DEFAULT_BUCKET_BYTES, DistributedDataParallel

try:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ConfigError(
        "fireflyer.haiscale.lightning needs the package lightning: pip install 'lightning>=2.6'"
    ) from error


class HaiScaleStrategy(DDPStrategy):  # type: ignore[misc]  # untyped here
    """Lightning's DDPStrategy with HaiScale's DistributedDataParallel over the backend "hfreduce".

    For modules on the CPU, with automatic optimization. Where RANK is in the environment (`fireflyer run`,
    torchrun), the processes that are there are the ranks; give the Trainer their `devices` and `num_nodes`.
    Else Lightning starts `devices` processes.

    Args:
        wire, bucket_bytes, broadcast_buffers, static_graph, check_gradients: as DistributedDataParallel has
            them.
        timeout: of the process group.
    """

    def __init__(
        self,
        *,
        wire: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        check_gradients: bool = True,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        environment = TorchElasticEnvironment() if "RANK" in os.environ else None
        super().__init__(
            cluster_environment=environment, process_group_backend="hfreduce", timeout=timeout
        )
        self._options: dict[str, Any] = {
            "wire": wire,
            "bucket_bytes": bucket_bytes,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
            "check_gradients": check_gradients,
        }

    def configure_ddp(self) -> None:
        """Wraps the module; `no_sync` of the wrapper is what Lightning accumulates gradients with.

        Raises:
            ConfigError: manual optimization, a module that is not on the CPU, or what
                DistributedDataParallel refuses.
        """
        if not self.lightning_module.automatic_optimization:
            raise ConfigError("HaiScaleStrategy: use automatic optimization, or DDPStrategy")
        if self.root_device.type != "cpu":
            raise ConfigError(
                f"HaiScaleStrategy is for modules on the CPU, not {self.root_device}: accelerator='cpu'"
            )
        self.model = DistributedDataParallel(self.lightning_module, **self._options)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """In place, as DDPStrategy's. HFReduce refuses means of whole numbers; they are cut, as over gloo."""
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or reduce_op != "mean":
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / dist.get_world_size(group))

    def teardown(self) -> None:
        """Gives the module back as it was."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.reducer.stop()
            self.model = self.lightning_module
        super().teardown()
