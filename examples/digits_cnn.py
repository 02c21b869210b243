"""Trains a small ResNet with BatchNorm to read scikit-learn's digits (8 x 8 pixels, 10 classes; no download).

python examples/digits_cnn.py
torchrun --nproc-per-node 2 examples/digits_cnn.py
fireflyer run --ranks 2 examples/digits_cnn.py --epochs 20
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager
from fireflyer.haiscale.ddp import DistributedDataParallel


def convolution(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside))


class Residual(nn.Module):
    """Two convolutions and a shortcut around them; the first may halve the picture."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(inside, outside, stride), convolution(outside, outside)
        self.body = nn.Sequential(first, nn.ReLU(), second)
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.short(x)).relu()


def resnet(width: int) -> nn.Module:
    """Model from pictures [batch, 1, 8, 8] to logits [batch, 10]."""
    stages = [Residual(width, width, 1), Residual(width, 2 * width, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)]
    return nn.Sequential(convolution(1, width), nn.ReLU(), *stages, *head)


def digits() -> list[TensorDataset]:
    """Returns 1,438 pictures for training, and every fifth, 359, for the test."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    pictures, tested = pixels.float().view(-1, 1, 8, 8) / 16, torch.arange(len(labels)) % 5 == 4
    return [TensorDataset(pictures[some], labels[some]) for some in (~tested, tested)]


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, rank: int, world: int) -> float:
    """Returns the accuracy of all ranks together; each rank tests a part of the data."""
    pictures, labels = (tensor[rank::world] for tensor in data.tensors)
    right = (model.eval()(pictures).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, task = parser.add_argument, hai.task()
    add("--directory", type=Path, default=task.output / "digits", help="checkpoints")
    add("--epochs", type=int, default=8, help="length of the schedule")
    add("--batch", type=int, default=64, help="pictures per step, over all ranks")
    add("--lr", type=float, default=0.1, help="peak of the learning rate")
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--seed", type=int, default=0, help="seed of weights and order")
    args, rank, world = parser.parse_args(), task.rank, task.world_size
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group("hfreduce", **alone)
    train, test = digits()
    order = DistributedSampler(train, world, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch // world, sampler=order, drop_last=True)
    torch.manual_seed(args.seed)
    net = resnet(args.width)
    sgd = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    model = DistributedDataParallel(net, optimizer=sgd)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, args.lr, args.epochs * len(loader))
    parts = {"model": net, "optimizer": sgd, "schedule": schedule}
    ckpt, first = CheckpointManager(args.directory, 1, 3, should_suspend=hai.suspend_requested), 0
    if ckpt.latest() is not None:
        found = ckpt.load()
        first = found["epoch"]
        for name, part in parts.items():
            part.load_state_dict(found[name])
    for epoch in range(first + 1, args.epochs + 1):
        order.set_epoch(epoch)
        begun = time.monotonic()
        model.train()
        for pictures, labels in loader:
            sgd.zero_grad()
            loss = cross_entropy(model(pictures), labels)
            loss.backward()
            sgd.step()
            schedule.step()
        speed = len(loader) * args.batch / (time.monotonic() - begun)
        right = accuracy(model, test, rank, world)
        if rank == 0:
            at = f"epoch {epoch} of {args.epochs}: loss {loss:.4f}, test accuracy {right:.4f}"
            print(f"{at}, {speed:,.0f} pictures/s")
        if ckpt.should_save(epoch):
            ckpt.save(epoch, {"epoch": epoch} | {k: part.state_dict() for k, part in parts.items()})
        if ckpt.suspending:
            break
    ckpt.wait()
    dist.destroy_process_group()
    if ckpt.suspending:
        hai.suspended()


if __name__ == "__main__":
    main()
