"""Trains a Hugging Face causal language model, built from a config object, in a plain loop (no download).

python examples/hf_transformers.py
torchrun --nproc-per-node 2 examples/hf_transformers.py --parallel fsdp
fireflyer run --ranks 2 examples/hf_transformers.py --text book.txt
"""

import argparse
import pydoc_data
import time
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager
from fireflyer.datasets import DistributedLoader
from fireflyer.haiscale.ddp import DistributedDataParallel as DDP
from fireflyer.haiscale.fsdp import FullyShardedDataParallel as FSDP


class Text:
    """Samples [context] of bytes, with the attributes that DistributedLoader needs: `n`, `read`."""

    def __init__(self, file: Path, context: int) -> None:
        data = np.frombuffer(file.read_bytes(), np.uint8)
        self.n = len(data) // context
        self.samples = data[: self.n * context].reshape(self.n, context)

    def read(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.samples[indices]).long()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, manual = parser.add_argument, Path(*pydoc_data.__path__, "topics.py")
    add("--text", type=Path, default=manual, help="text to learn, byte by byte")
    add("--directory", type=Path, default=hai.task().output / "llama", help="checkpoints, model")
    add("--parallel", choices=["ddp", "fsdp"], default="ddp", help="replicate or shard")
    add("--steps", type=int, default=200, help="steps of training")
    add("--batch", type=int, default=32, help="samples per step, over all ranks")
    add("--context", type=int, default=128, help="bytes per sample")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--hidden", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--seed", type=int, default=0, help="seed of weights and order")
    every = {"type": lambda text: int(text) if text.isdigit() else text, "default": "1min"}
    add("--save-every", **every, help="time or steps between checkpoints, e.g. 5min or 100")
    return parser.parse_args()


def main() -> None:
    args, rank, world = options(), hai.task().rank, hai.task().world_size
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group("hfreduce", **alone)
    order = {"seed": args.seed, "batch_size": args.batch // world * world, "last": "drop"}
    loader = DistributedLoader(Text(args.text, args.context), rank, world, **order)
    torch.manual_seed(args.seed)
    width = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    depth = {"num_hidden_layers": args.layers, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, tie_word_embeddings=True, **width, **depth)
    net = LlamaForCausalLM(config)
    adamw = partial(torch.optim.AdamW, lr=args.lr, fused=True)
    if args.parallel == "ddp":
        optimizer = adamw(net.parameters())
        model = DDP(net, optimizer=optimizer, broadcast_buffers=False)
    else:
        model = FSDP(net, optimizer=adamw, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}))
        optimizer = model.optimizer

    def state(step: int) -> dict[str, object]:
        weights, moments = get_state_dict(net, optimizer)
        return {"step": step, "loader": loader.state_dict(), "model": weights, "optim": moments}

    asked, first = hai.suspend_requested, 0
    ckpt = CheckpointManager(args.directory, args.save_every, keep=3, should_suspend=asked)
    if ckpt.latest() is not None:
        found = ckpt.load(into=state(0))
        weights = {"model_state_dict": found["model"], "optim_state_dict": found["optim"]}
        set_state_dict(net, optimizer, **weights)
        loader.load_state_dict(found["loader"])
        first = found["step"]
    batches, begun = chain.from_iterable(repeat(loader)), time.monotonic()
    for step in range(first + 1, args.steps + 1):
        tokens = next(batches)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            speed = (step - first) * tokens.numel() * world / (time.monotonic() - begun)
            if rank == 0:
                print(f"step {step} of {args.steps}: loss {mean:.4f}, {speed:,.0f} tokens/s")
        if ckpt.should_save(step) or step == args.steps:
            ckpt.save(step, state(step))
        if ckpt.suspending:
            break
    ckpt.wait()
    weights = net.state_dict() if args.parallel == "ddp" else model.state_dict(full=True)
    dist.destroy_process_group()
    if ckpt.suspending:
        hai.suspended()
    if rank == 0:  # in the format of from_pretrained
        whole = LlamaForCausalLM(config)
        whole.load_state_dict(weights)
        whole.save_pretrained(args.directory / "model")


if __name__ == "__main__":
    main()
