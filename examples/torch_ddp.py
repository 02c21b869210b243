"""An ordinary PyTorch DDP script; only the name of the backend is specific to Fireflyer.

fireflyer run --ranks 2 examples/torch_ddp.py
torchrun --nproc-per-node 2 examples/torch_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 50


def main() -> None:
    dist.init_process_group("hfreduce")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(64, 16, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} of {STEPS}, {world} ranks: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
