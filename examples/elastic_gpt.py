"""Pretrains the demo's GPT; lost ranks are replaced while the other ranks continue.

fireflyer run --elastic --nodes 2 --ranks 2 examples/elastic_gpt.py
fireflyer show t1    # kill -9 one of the ranks that it lists, then run it again
"""

import argparse
import contextlib
import hashlib
import math
import pydoc_data
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fireflyer import ffrecord, hai
from fireflyer.checkpoint import CheckpointManager
from fireflyer.datasets import DistributedLoader
from fireflyer.demo.gpt import GPT, loss_of
from fireflyer.errors import CheckpointError
from fireflyer.haiscale.ddp import DistributedDataParallel as DDP


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, manual = parser.add_argument, Path(*pydoc_data.__path__, "topics.py")
    add("--text", type=Path, default=manual, help="text to learn")
    add("--directory", type=Path, default=hai.task().output / "gpt", help="records, checkpoints")
    add("--steps", type=int, default=300, help="length of the schedule")
    add("--batch", type=int, default=32, help="samples per step, over all ranks")
    add("--lr", type=float, default=2e-3, help="peak of the learning rate")
    add("--context", type=int, default=128, help="bytes per sample")
    add("--shape", type=int, nargs=3, default=[128, 4, 4], help="width, layers, heads")
    add("--save-every", default="1min", help="time between checkpoints, e.g. 5min")
    return parser.parse_args()


class Done:
    """Steps done by the job, over all attempts; an undone step is subtracted again."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def digest(net: torch.nn.Module) -> str:
    """Returns a digest of every bit of all parameters."""
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    args, newcomer = options(), hai.task().incarnation > 0
    dist.init_process_group("hfreduce")  # a newcomer waits here until the others admit it
    records = args.directory / f"{args.text.stem}-{args.context}.ffr"
    if not newcomer:  # a newcomer finds the records, and the other ranks in mid-training
        if dist.get_rank() == 0 and not records.exists():
            text, size = args.text.read_bytes(), args.context
            args.directory.mkdir(parents=True, exist_ok=True)
            pieces = [text[i : i + size + 1] for i in range(0, len(text) - size, size)]
            ffrecord.dump(pieces, records)
        dist.barrier()
    order: dict[str, Any] = {"seed": 0, "batch_size": args.batch, "last": "drop"}
    loader = DistributedLoader(records, dist.get_rank(), dist.get_world_size(), **order)
    torch.manual_seed(0)
    net, done = GPT(256, args.context, *args.shape), Done()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.1, fused=True)
    ckpt = CheckpointManager(args.directory, args.save_every, keep=3)

    def state() -> dict[str, Any]:
        trained = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        return {**trained, "loader": loader.state_dict(), "done": done.state_dict()}

    if not newcomer and ckpt.latest() is not None:
        found = ckpt.load()
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])
        done.load_state_dict(found["done"])
    how: dict[str, Any] = {"elastic": True, "should_suspend": hai.suspend_requested}
    model = DDP(net, optimizer=optimizer, redivide=loader.redivide, **how)
    elastic = model.elastic
    elastic.carry(loader, done)  # after the load; a newcomer receives both from the other ranks
    hai.elastic(elastic)
    elastic.fenced.append(ckpt.fence)
    batches = chain.from_iterable(repeat(loader))
    while done.step < args.steps and not model.suspending:
        with elastic.step() as step:  # ends early if a rank is lost; the loop then repeats it
            batch = torch.from_numpy(np.stack(next(batches))).long()
            step.weight = len(batch)
            done.step += 1
            part = done.step / args.steps
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(20 * part, 0.55 + 0.45 * math.cos(math.pi * part))
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and done.step % 10 == 0:
                ranks = dist.get_world_size()
                print(f"step {done.step} of {args.steps}: loss {loss.item():.4f}, {ranks} ranks")
            with contextlib.suppress(CheckpointError):  # a rank is lost: the next step handles it
                if done.step == args.steps or ckpt.should_save(done.step, leave=model.suspending):
                    ckpt.save(done.step, state())
    ckpt.wait()
    print(f"{done.step} steps, sample {loader.samples} of {loader.n}, parameters {digest(net)}")
    dist.destroy_process_group()
    if ckpt.suspending:
        hai.suspended()


if __name__ == "__main__":
    main()
