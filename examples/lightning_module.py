"""Trains a Lightning module over HFReduce: only the strategy and one callback are Fireflyer's.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py
fireflyer run --ranks 2 examples/lightning_module.py --epochs 20
"""

import argparse
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from fireflyer import hai
from fireflyer.checkpoint.integrations.lightning import FireflyerCheckpoint
from fireflyer.haiscale.lightning import HaiScaleStrategy


class Classifier(LightningModule):
    """Model from pictures [batch, 64] to logits [batch, 10]."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = (nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        pictures, labels = batch
        loss = cross_entropy(self.net(pictures), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        pictures, labels = batch
        right = (self.net(pictures).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Progress(Callback):
    """Prints one line per epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.begun = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            speed = len(trainer.train_dataloader.dataset) / (time.monotonic() - self.begun)
            epoch, found = trainer.current_epoch + 1, trainer.callback_metrics
            print(
                f"epoch {epoch} of {trainer.max_epochs}: loss {found['loss']:.4f}, "
                f"validation accuracy {found['accuracy']:.4f}, {speed:,.0f} pictures/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, task = parser.add_argument, hai.task()
    add("--directory", type=Path, default=task.output / "lightning", help="checkpoints")
    add("--epochs", type=int, default=10, help="epochs of training")
    add("--batch", type=int, default=32, help="pictures per step, over all ranks")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--width", type=int, default=128, help="width of the model")
    add("--wire", choices=["bf16", "fp16", "int8"], help="format of gradients between hosts")
    add("--seed", type=int, default=0, help="seed of weights and order")
    args = parser.parse_args()
    seed_everything(args.seed, verbose=False)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = TensorDataset(pixels.float() / 16, labels)
    train, held_out = random_split(digits, [1600, 197])
    batch = args.batch // task.world_size
    loaders = (
        DataLoader(train, batch, shuffle=True, drop_last=True),
        DataLoader(held_out, len(held_out)),
    )
    checkpoints = FireflyerCheckpoint(
        args.directory,
        every=len(train) // (batch * task.world_size),  # number of steps in an epoch
        should_suspend=hai.suspend_requested,
        on_suspend=hai.suspended,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=task.local_world_size,
        num_nodes=task.world_size // task.local_world_size,
        strategy=HaiScaleStrategy(wire=args.wire),
        max_epochs=args.epochs,
        callbacks=[checkpoints, Progress()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args.width, args.lr), *loaders, ckpt_path=checkpoints.newest)


if __name__ == "__main__":
    main()
