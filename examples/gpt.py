"""Pretrains the demo's GPT on the bytes of a text file; a restart continues from the checkpoint.

python examples/gpt.py
torchrun --nproc-per-node 2 examples/gpt.py --parallel fsdp --zero 3
fireflyer run --ranks 2 examples/gpt.py --text book.txt --wire bf16 --accumulate 4
"""

import argparse
import math
import pydoc_data
import time
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer import ffrecord, hai, haiscale
from fireflyer.checkpoint import CheckpointManager
from fireflyer.datasets import DistributedLoader
from fireflyer.demo.gpt import GPT, Block, loss_of
from fireflyer.haiscale.ddp import DistributedDataParallel as DDP
from fireflyer.haiscale.fsdp import FullyShardedDataParallel as FSDP


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, manual = parser.add_argument, Path(*pydoc_data.__path__, "topics.py")
    add("--text", type=Path, default=manual, help="text to learn")
    add("--directory", type=Path, default=hai.task().output / "gpt", help="records, checkpoints")
    add("--parallel", choices=["ddp", "fsdp"], default="ddp", help="replicate or shard")
    add("--zero", type=int, choices=[2, 3], default=3, help="fsdp: gather once or twice per step")
    add("--wire", choices=["bf16", "fp16", "int8"], help="format of gradients between hosts")
    add("--steps", type=int, default=300, help="length of the schedule")
    add("--batch", type=int, default=32, help="samples per step, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-batches per rank and step")
    add("--lr", type=float, default=2e-3, help="peak of the learning rate")
    add("--context", type=int, default=128, help="bytes per sample")
    add("--shape", type=int, nargs=3, default=[128, 4, 4], help="width, layers, heads")
    add("--seed", type=int, default=0, help="seed of weights and order")
    every = {"type": lambda text: int(text) if text.isdigit() else text, "default": "1min"}
    add("--save-every", **every, help="time or steps between checkpoints, e.g. 5min or 100")
    return parser.parse_args()


def main() -> None:
    args, rank, world = options(), hai.task().rank, hai.task().world_size
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group("hfreduce", **alone)
    if args.batch % (world * args.accumulate):
        raise SystemExit(f"--batch must be a multiple of {world} ranks x {args.accumulate} parts")
    asked, size, first = hai.suspend_requested, args.context, 0
    ckpt = CheckpointManager(args.directory, args.save_every, keep=3, should_suspend=asked)
    records = args.directory / f"{args.text.stem}-{size}.ffr"
    if rank == 0 and not records.exists():
        text = args.text.read_bytes()
        ffrecord.dump([text[i : i + size + 1] for i in range(0, len(text) - size, size)], records)
    dist.barrier()
    order = {"seed": args.seed, "batch_size": args.batch, "last": "drop"}
    loader = DistributedLoader(records, rank, world, **order)
    torch.manual_seed(args.seed)
    net = GPT(256, size, *args.shape)
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if args.parallel == "ddp":  # with optimizer=, communication continues into the next forward
        optimizer = adamw(net.parameters())
        model = DDP(net, optimizer=optimizer, wire=args.wire)
    else:
        how = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "wire": args.wire}
        model = FSDP(net, optimizer=adamw, reshard_after_forward=args.zero == 3, **how)
        optimizer = model.optimizer
    haiscale.record(model)

    def state(step: int) -> dict[str, object]:
        weights, moments = get_state_dict(net, optimizer)
        return {"step": step, "loader": loader.state_dict(), "model": weights, "optim": moments}

    if ckpt.latest() is not None:
        found = ckpt.load(into=state(0))
        weights = {"model_state_dict": found["model"], "optim_state_dict": found["optim"]}
        set_state_dict(net, optimizer, **weights)
        loader.load_state_dict(found["loader"])
        first = found["step"]
    batches, begun = chain.from_iterable(repeat(loader)), time.monotonic()
    for step in range(first + 1, args.steps + 1):
        done = step / args.steps
        for group in optimizer.param_groups:  # linear for a twentieth, then a cosine to a tenth
            group["lr"] = args.lr * min(20 * done, 0.55 + 0.45 * math.cos(math.pi * done))
        optimizer.zero_grad()
        parts = torch.from_numpy(np.stack(next(batches))).long().chunk(args.accumulate)
        total = torch.zeros(())
        for part in parts:
            with nullcontext() if part is parts[-1] else model.no_sync():
                loss = loss_of(model, part) / len(parts)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            dist.all_reduce(total, dist.ReduceOp.AVG)
            speed = (step - first) * args.batch * size / (time.monotonic() - begun)
            if rank == 0:
                print(f"step {step} of {args.steps}: loss {total:.4f}, {speed:,.0f} tokens/s")
        if ckpt.should_save(step) or step == args.steps:
            ckpt.save(step, state(step))
        if ckpt.suspending:
            break
    ckpt.wait()
    if first + 2 < args.steps and not ckpt.suspending:
        haiscale.show(model, tokens=args.batch * size, peak=haiscale.peak_flops())
    dist.destroy_process_group()
    if ckpt.suspending:
        hai.suspended()


if __name__ == "__main__":
    main()
