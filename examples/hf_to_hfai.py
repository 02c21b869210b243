"""Trains a small Hugging Face model unchanged and after to_hfai: equal losses, fewer bytes kept.

python examples/hf_to_hfai.py
python examples/hf_to_hfai.py --model llama --steps 20
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fireflyer.nn

WORDS = 512


def model_of(name: str) -> nn.Module:
    """Makes a model with random weights; downloads nothing."""
    torch.manual_seed(0)
    if name == "llama":
        llama = LlamaConfig(
            vocab_size=WORDS, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=128,
        )  # fmt: skip
        return LlamaForCausalLM(llama)
    gpt2 = GPT2Config(
        vocab_size=WORDS, n_embd=128, n_layer=4, n_head=4, n_positions=128, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(gpt2)


class Loss(nn.Module):
    """Causal language model as a function from tokens to its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def train(model: nn.Module, steps: int) -> list[float]:
    """Trains on sequences in which each token is the previous one plus the row's step."""
    adam = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        first, step = torch.randint(WORDS, (2, 8, 1), generator=generator)
        loss = model((first + step * torch.arange(64)) % WORDS)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    eager = Loss(model_of(args.model))
    example = torch.randint(WORDS, (8, 64))
    ours = fireflyer.nn.to_hfai(copy.deepcopy(eager), verbose=True, example=(example,))
    before, after = (fireflyer.nn.saved(model, example).bytes for model in (eager, ours))
    print(f"kept for backward: {before:,} bytes, {after:,} after to_hfai ({after / before:.2f}x)")
    its, mine = train(eager, args.steps), train(ours, args.steps)
    print(f"loss {its[0]:.4f} -> {its[-1]:.4f}, after to_hfai {mine[0]:.4f} -> {mine[-1]:.4f}")
    print("the losses are equal" if its == mine else "the losses differ")


if __name__ == "__main__":
    main()
