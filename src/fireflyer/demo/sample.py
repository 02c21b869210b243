"""Generates the text that the demo shows at its end."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

PROMPTS = ("def", "class", "if")


def write_text(model: nn.Module, data: Path, context: int, length: int = 140) -> str:
    """Returns the model's continuations of PROMPTS by `length` tokens each, in the tokens of
    `data`.
    """
    bpe = data / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(bpe)) if bpe.exists() else None
    texts = []
    for seed, prompt in enumerate(PROMPTS):
        tokens = tokenizer.encode(prompt).ids if tokenizer else list(prompt.encode())
        tokens = continue_tokens(model, tokens, length, context, seed)
        texts.append(
            tokenizer.decode(tokens) if tokenizer else bytes(tokens).decode(errors="replace")
        )
    return "\n\n".join(text.strip() for text in texts) + "\n"


@torch.no_grad()
def continue_tokens(
    model: nn.Module, prompt: list[int], length: int, context: int, seed: int
) -> list[int]:
    """Returns `prompt` and up to `length` tokens, drawn from the 40 likeliest at temperature 0.7.

    Generation stops at a token 0, which separates files.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        logits, choices = model(torch.tensor([tokens[-context:]]))[0, -1].topk(40)
        drawn = torch.multinomial((logits / 0.7).softmax(0), 1, generator=rng)
        token = int(choices[drawn])
        if token == 0:
            break
        tokens.append(token)
    return tokens
