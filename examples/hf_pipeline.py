"""Trains an unchanged Hugging Face causal language model with pipelines and replicas.

fireflyer run --ranks 2 examples/hf_pipeline.py --stages 2
fireflyer run --ranks 4 examples/hf_pipeline.py --stages 2 --text book.txt
"""

import argparse
import pydoc_data
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import PipeDream, make_subgroups, partition

OPTIONS = {"loss_reduction": "sum", "outputs": "none"}  # the logits are large and unused


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, manual = parser.add_argument, Path(*pydoc_data.__path__, "topics.py")
    add("--text", type=Path, default=manual, help="text to learn, byte by byte")
    add("--directory", type=Path, default=hai.task().output / "pipeline", help="checkpoints")
    add("--stages", type=int, default=2, help="stages per pipeline")
    add("--chunks", type=int, default=4, help="micro-batches per step")
    add("--steps", type=int, default=100, help="steps of training")
    add("--batch", type=int, default=32, help="samples per step, over all replicas")
    add("--context", type=int, default=64, help="bytes per sample")
    add("--hidden", type=int, default=64, help="width of the model")
    add("--layers", type=int, default=4, help="layers of the model")
    return parser.parse_args()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Returns the next byte's cross entropy; labels of all micro-batches have equal weight."""
    flat = logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") * share[0]


def main() -> None:
    args = options()
    dist.init_process_group("hfreduce")
    dp, pp = make_subgroups(pp_size=args.stages)
    torch.manual_seed(0)
    width = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    depth = {"num_hidden_layers": args.layers, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=256, tie_word_embeddings=True, use_cache=False, **width, **depth
    )
    ones = torch.ones(2, 8, dtype=torch.long)
    stage = partition(
        LlamaForCausalLM(config),
        pp.rank(),
        pp.size(),
        blocks="model.layers",
        sample={"input_ids": ones, "attention_mask": ones},
    )
    pipe = PipeDream(DistributedDataParallel(stage, dp), args.chunks, pp, **OPTIONS)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    share = args.batch // dp.size()
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
        rows = torch.stack([data[at : at + args.context] for at in starts])
        lengths = args.context - torch.randint(args.context // 2, starts.shape, generator=generator)
        mask = (torch.arange(args.context) < lengths[:, None]).long()
        mine = slice(dp.rank() * share, (dp.rank() + 1) * share)
        labels = rows.masked_fill(mask == 0, -100)
        counts = (labels[:, 1:] >= 0).sum() / dp.size()  # mean number of labels per replica
        optimizer.zero_grad()
        loss, _ = pipe.forward_backward(
            {"input_ids": rows[mine], "attention_mask": mask[mine]},
            criterion=loss_of,
            labels=(labels[mine], (1 / counts).expand(share)),
        )
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if step % 10:
            continue
        dist.all_reduce(loss, group=dp)
        if dist.get_rank() == 0:
            loss = loss / dp.size()
            rate = f"{step * args.batch / (time.perf_counter() - begin):.0f} samples/s"
            told = f"step {step} of {args.steps}: loss {loss:.4f}, {args.stages} stages, {rate}"
            print(told, flush=True)
    state = {"model": pipe.state_dict()}  # with the names of the whole model
    CheckpointManager(args.directory).save(args.steps, state).wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
