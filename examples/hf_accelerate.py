"""Trains a classifier of scikit-learn's digits with Hugging Face Accelerate over HFReduce.

python examples/hf_accelerate.py
torchrun --nproc-per-node 2 examples/hf_accelerate.py
fireflyer run --ranks 2 examples/hf_accelerate.py --epochs 20
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, task = parser.add_argument, hai.task()
    add("--directory", type=Path, default=task.output / "accelerate", help="checkpoints")
    add("--epochs", type=int, default=10, help="epochs of training")
    add("--batch", type=int, default=32, help="pictures per step, over all ranks")
    add("--lr", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()

    # Accelerate creates only backends that it knows, but uses a group that already exists.
    if task.world_size > 1:
        dist.init_process_group("hfreduce")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = TensorDataset(pixels.float() / 16, labels)
    train, held_out = random_split(digits, [1600, 197])
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    batch = args.batch // accelerator.num_processes
    model, optimizer, loader, held_out_loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=args.lr),
        DataLoader(train, batch, shuffle=True, drop_last=True),
        DataLoader(held_out, len(held_out)),
    )

    def state(epoch: int) -> dict[str, object]:
        return {"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict()}

    checkpoints = CheckpointManager(args.directory, 1, should_suspend=hai.suspend_requested)
    first = 0
    if checkpoints.latest() is not None:
        found = checkpoints.load()
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["epoch"]
    for epoch in range(first + 1, args.epochs + 1):
        loader.set_epoch(epoch)
        for pictures, wanted in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(pictures), wanted)
            accelerator.backward(loss)
            optimizer.step()
        right = torch.cat(
            [
                accelerator.gather_for_metrics((model(pictures).argmax(1) == wanted).float())
                for pictures, wanted in held_out_loader
            ]
        )
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(
            f"epoch {epoch} of {args.epochs}: loss {mean:.4f}, accuracy {right.mean():.4f}"
        )
        if checkpoints.should_save(epoch):
            checkpoints.save(epoch, state(epoch))
        if checkpoints.suspending:
            break
    checkpoints.wait()
    accelerator.end_training()
    if checkpoints.suspending:
        hai.suspended()


if __name__ == "__main__":
    main()
