"""Trains a Hugging Face causal language model with the Trainer over HFReduce (no download).

python examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py
fireflyer run --ranks 2 examples/hf_trainer.py --epochs 2
"""

import argparse
import pydoc_data
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fireflyer import hai
from fireflyer.checkpoint.integrations.transformers import FireflyerCallback


class Text(Dataset[dict[str, torch.Tensor]]):
    """Samples of `context` bytes of a file. The labels are the same bytes: the model shifts them."""

    def __init__(self, file: Path, context: int) -> None:
        data = np.frombuffer(file.read_bytes(), np.uint8)
        self.samples = torch.from_numpy(data[: len(data) // context * context].copy())
        self.samples = self.samples.view(-1, context)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.samples[index].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, task = parser.add_argument, hai.task()
    add("--text", type=Path, default=Path(*pydoc_data.__path__, "topics.py"), help="text to learn")
    add("--directory", type=Path, default=task.output / "trainer", help="checkpoints, model")
    add("--epochs", type=float, default=1.0, help="epochs of training")
    add("--batch", type=int, default=16, help="samples per step, over all ranks")
    add("--context", type=int, default=128, help="bytes per sample")
    add("--hidden", type=int, default=128, help="width of the model")
    add("--lr", type=float, default=2e-3, help="learning rate")
    args = parser.parse_args()

    # Trainer creates only backends that it knows, but uses a group that already exists.
    if task.world_size > 1:
        dist.init_process_group("hfreduce")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    checkpoints = FireflyerCallback(
        args.directory, should_suspend=hai.suspend_requested, on_suspend=hai.suspended
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(args.directory / "model"),
            use_cpu=True,
            per_device_train_batch_size=args.batch // task.world_size,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Text(args.text, args.context),
        callbacks=[checkpoints],
    )
    trainer.train(resume_from_checkpoint=checkpoints.newest())
    trainer.save_model()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
