"""Lightning strategy over HFReduce: `Trainer(strategy=HaiScaleStrategy())`."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.gradients.bucket_plan import DEFAULT_BUCKET_BYTES

try:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ConfigError(
        "fireflyer.haiscale.lightning needs the package lightning: pip install 'lightning>=2.6'"
    ) from error


class HaiScaleStrategy(DDPStrategy):  # type: ignore[misc]  # untyped here
    """Lightning's DDPStrategy with HaiScale's DistributedDataParallel over the backend "hfreduce".

    The strategy is for modules on the CPU, with automatic optimization. If RANK is in the
    environment (`fireflyer run`, torchrun), the existing processes are the ranks; pass their
    `devices` and `num_nodes` to the Trainer. Otherwise Lightning starts `devices` processes.

    Args:
        wire, bucket_bytes, broadcast_buffers, static_graph, check_gradients: as for
            DistributedDataParallel.
        timeout: timeout of the process group.
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
        """Wraps the module. Lightning accumulates gradients with the wrapper's `no_sync`.

        Raises:
            ConfigError: optimization is manual, the module is not on the CPU, or
                DistributedDataParallel rejects the module.
        """
        if not self.lightning_module.automatic_optimization:
            raise ConfigError("HaiScaleStrategy: use automatic optimization, or DDPStrategy")
        if self.root_device.type != "cpu":
            raise ConfigError(
                f"HaiScaleStrategy needs modules on the CPU, not on {self.root_device}: use accelerator='cpu'"
            )
        self.model = DistributedDataParallel(self.lightning_module, **self._options)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduces in place. A mean of integers is their sum, divided by the number of ranks and
        truncated."""
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or reduce_op != "mean":
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / dist.get_world_size(group))

    def teardown(self) -> None:
        """Restores the original module."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.reducer.stop()
            self.model = self.lightning_module
        super().teardown()
