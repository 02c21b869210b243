"""Serves prompts with many small Hugging Face models of one shape; memory holds three of them.

python examples/serve_experts.py
python examples/serve_experts.py --folder fs3:///experts --experts 12 --prompts 60
"""

import argparse
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fireflyer.experts import Store

WORDS = 512
CONFIG = LlamaConfig(
    vocab_size=WORDS, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
    num_attention_heads=4, max_position_embeddings=128,
)  # fmt: skip


def model_of(number: int) -> LlamaForCausalLM:
    """Makes an expert with random weights; downloads nothing."""
    torch.manual_seed(number)
    return LlamaForCausalLM(CONFIG).eval()


def prompts_of(count: int, experts: int) -> list[list[int]]:
    """Returns prompts in bursts of one topic each; a prompt's first token names its topic."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[int]] = []
    while len(found) < count:
        topic, length = torch.randint(experts, (2,), generator=generator).tolist()
        for _ in range(length % 4 + 1):
            rest = torch.randint(WORDS, (7,), generator=generator).tolist()
            found.append([topic, *rest])
    return found[:count]


def route(prompt: list[int]) -> str:
    """Returns the name of a prompt's expert, which here depends on the first token."""
    return f"expert-{prompt[0]}"


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    answer: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )[0].tolist()
    return answer[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", help="folder or URL of the experts; default: a temporary one")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--lookahead", type=int, default=4, help="number of prompts to look ahead")
    parser.add_argument(
        "--check", action="store_true", help="compare the answers with those of the models"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        serve(args, args.folder or temporary)


def serve(args: argparse.Namespace, folder: str) -> None:
    model = model_of(0)  # each expert's tensors replace the model's own
    size = sum(one.nbytes for one in model.state_dict().values())
    # Memory for one more expert than is in use: `model` keeps the tensors of the last expert.
    with Store(folder, warm_bytes=int(3.1 * size)) as store:
        for number in range(args.experts):
            if f"expert-{number}" not in store.names():
                store.add(f"expert-{number}", model_of(number).state_dict())
        prompts = prompts_of(args.prompts, args.experts)
        wrong, waited = 0, 0.0
        for turn, prompt in enumerate(prompts):
            begin = time.monotonic()
            with store.get(route(prompt)) as expert:
                expert.load_into(model)
                wait = time.monotonic() - begin
                store.hint(map(route, prompts[turn + 1 : turn + 1 + args.lookahead]))
                answer = generate(model, prompt, args.tokens)  # meanwhile the next experts load
            waited += wait
            print(f"{route(prompt)}: waited {wait * 1e3:.1f} ms, answers {answer}")
            if args.check:
                wrong += answer != generate(model_of(prompt[0]), prompt, args.tokens)
        stats = store.stats()
    hits = stats.hot_hits + stats.warm_hits
    print(f"{len(prompts)} prompts, {hits} found their expert in memory, {stats.late} on its way")
    print(f"{stats.loads} loads, {stats.prefetches} ahead; mean wait {waited / len(prompts):.4f} s")
    if args.check:
        print(f"{wrong} answers differ from those of the models themselves")


if __name__ == "__main__":
    main()
