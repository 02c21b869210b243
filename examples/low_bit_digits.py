"""Trains a convolutional net with 1-bit weights, 2-bit activations and 6-bit gradients (DoReFa) on digits.

python examples/low_bit_digits.py
python examples/low_bit_digits.py --weights 32 --activations 32 --gradients 32
python examples/low_bit_digits.py --weights 2 --balanced median
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fireflyer.nn.quant import Bits, Conv2d


def net(bits: Bits) -> nn.Module:
    """Maps pictures [batch, 1, 8, 8] to logits [batch, 10]; the first and last layer keep all bits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)),
        *(Conv2d(32, 64, 3, bits, padding=1, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(2)),
        *(Conv2d(64, 64, 3, bits, padding=1, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Returns pictures, labels, and a mask of the test pictures, every fourth one."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    return pixels.float().view(-1, 1, 8, 8) / 16, labels, torch.arange(len(labels)) % 4 == 3


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--weights", type=int, default=1, help="bits of weights")
    parser.add_argument("--activations", type=int, default=2, help="bits of activations")
    parser.add_argument("--gradients", type=int, default=6, help="bits of gradients")
    parser.add_argument(
        "--balanced", choices=["median", "mean"], help="statistic that balances the weights"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    pictures, labels, tested = digits()
    train_x, train_y = pictures[~tested], labels[~tested]
    model = net(Bits(args.weights, args.activations, args.gradients, args.balanced))
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    steps = len(train_y) // args.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, args.epochs * steps)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for some in torch.randperm(len(train_y))[: steps * args.batch].split(args.batch):
            adam.zero_grad()
            loss = cross_entropy(model(train_x[some]), train_y[some])
            loss.backward()
            adam.step()
            schedule.step()
        with torch.no_grad():
            right = (model.eval()(pictures[tested]).argmax(1) == labels[tested]).float().mean()
        print(f"epoch {epoch} of {args.epochs}: loss {loss:.4f}, test accuracy {right:.4f}")


if __name__ == "__main__":
    main()
