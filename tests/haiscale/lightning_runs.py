"""HaiScaleStrategy with the real Lightning; test_lightning.py runs this: lightning_runs.py DIRECTORY"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
from lightning.pytorch import LightningModule, Trainer
from tests.conftest import Gang
from tests.ports import take_ports
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.lightning import HaiScaleStrategy

SAMPLES, GLOBAL, EPOCHS = 24, 4, 2
Weights = dict[str, Any]


class Model(LightningModule):  # type: ignore[misc]  # untyped here
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.unused = nn.Linear(2, 2).double()
        self.automatic_optimization = automatic
        self.seen: list[Any] = []  # a list: what is in it is no submodule

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.seen.append(self.trainer.strategy.model)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    both = torch.randn(SAMPLES, 5, generator=made, dtype=torch.float64)
    return TensorDataset(both[:, :4], both[:, 4:])


def fit(
    model: Model, directory: Path, batch: int, share: slice = slice(None), **options: Any
) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it shuffles
        **options,
    )
    trainer.fit(model, DataLoader(TensorDataset(*data()[share]), batch))
    return trainer


def weights(model: Model) -> Weights:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def of_a_rank(directory: Path, rank: int, world: int, accumulate: int) -> tuple[Weights, float]:
    """Two ranks that accumulate: each takes every second sample of the global batches."""
    model = Model()
    strategy = HaiScaleStrategy()
    batch = GLOBAL // world // accumulate
    trainer = fit(
        model,
        directory,
        batch,
        slice(rank, None, world),
        devices=world,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
    )
    wrapper = model.seen[0]
    assert isinstance(wrapper, DistributedDataParallel)
    steps = EPOCHS * SAMPLES // GLOBAL
    assert trainer.global_step == wrapper.reducer.times.steps == steps
    assert strategy.model is model, "the module is not wrapped any more"
    nn.functional.mse_loss(model.net(data()[:1][0]), data()[:1][1]).backward()
    with pytest.raises(ConfigError, match="automatic optimization"):
        fit(Model(automatic=False), directory, batch, devices=world, strategy=HaiScaleStrategy())
    return weights(model), float(trainer.callback_metrics["loss"])


def ranks(directory: Path, world: int, accumulate: int) -> list[Any]:
    port = str(take_ports(1)[0])

    def body(rank: int, _world: int) -> tuple[Weights, float]:
        os.environ.update(MASTER_PORT=port, LOCAL_RANK=str(rank))
        return of_a_rank(directory, rank, world, accumulate)

    gang = Gang()
    try:
        gang.start(body, world, 1)
        return gang.results()
    finally:
        gang.close()


def main() -> None:
    warnings.simplefilter("ignore")  # Lightning's own advice
    directory = Path(sys.argv[1])
    alone = Model()
    trainer = fit(alone, directory, GLOBAL, devices=1)
    wanted, loss = weights(alone), float(trainer.callback_metrics["loss"])
    assert trainer.global_step == EPOCHS * SAMPLES // GLOBAL
    for accumulate in (1, 2):
        found = ranks(directory, 2, accumulate)
        for got, got_loss in found:
            assert got.keys() == wanted.keys()
            assert abs(got_loss - loss) < 1e-6, (got_loss, loss)
            for name, array in got.items():
                assert abs(array - wanted[name]).max() < 1e-10, name
    print("strategy: ok")


if __name__ == "__main__":
    main()
