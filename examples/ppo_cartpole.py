"""Solves CartPole on a pool of environments by proximal policy optimization (arXiv 1707.06347).

python examples/ppo_cartpole.py --envs 32 --seed 1
"""

import argparse
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from fireflyer import envpool

STEPS = 64  # steps of each environment between two updates
EPOCHS, BATCHES = 4, 4
DISCOUNT, DECAY, CLIP = 0.99, 0.95, 0.2
SOLVED = 475.0  # mean return of the last 100 episodes, gymnasium's threshold


def mlp(outputs: int, scale: float) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, scale)
    return layers


class Rollout:
    """Record of STEPS steps of all environments; tensors of shape (STEPS, envs)."""

    def __init__(self, count: int) -> None:
        self.seen = torch.zeros(STEPS, count, 4)
        self.actions = torch.zeros(STEPS, count, dtype=torch.long)
        self.chances, self.values = torch.zeros(STEPS, count), torch.zeros(STEPS, count)
        self.rewards, self.ended = torch.zeros(STEPS, count), torch.zeros(STEPS, count)
        self.real = torch.zeros(STEPS, count, dtype=torch.bool)  # False for steps that only reset

    def advantages(self, last: torch.Tensor) -> torch.Tensor:
        """Computes generalized advantage estimates (arXiv 1506.02438)."""
        found, running, following = torch.zeros_like(self.rewards), 0.0, last
        for t in reversed(range(STEPS)):
            goes_on = 1 - self.ended[t]
            error = self.rewards[t] + DISCOUNT * following * goes_on - self.values[t]
            running = error + DISCOUNT * DECAY * goes_on * running
            found[t], following = running, self.values[t]
        return found


def train(count: int, seed: int, updates: int) -> tuple[float, int]:
    """Trains until CartPole is solved; returns the mean of the last returns and the steps taken."""
    torch.manual_seed(seed)
    envs = envpool.make("CartPole-v1", num_envs=count, seed=seed)
    actor, critic = mlp(2, 0.01), mlp(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    seen = torch.from_numpy(envs.reset()[0])
    returns: deque[float] = deque(maxlen=100)
    total, over, mean = np.zeros(count), np.zeros(count, bool), 0.0
    for update in range(updates):
        data = Rollout(count)
        with torch.no_grad():
            for t in range(STEPS):
                policy = Categorical(logits=actor(seen))
                data.seen[t], data.actions[t] = seen, policy.sample()
                data.chances[t] = policy.log_prob(data.actions[t])
                data.values[t] = critic(seen)[:, 0]
                data.real[t] = torch.from_numpy(~over)
                found, rewards, terminated, truncated, _ = envs.step(data.actions[t].numpy())
                seen, over = torch.from_numpy(found), terminated | truncated
                data.rewards[t], data.ended[t] = map(torch.from_numpy, (rewards, over))
                total += rewards
                returns.extend(total[over])
                total[over] = 0
            advantages = data.advantages(critic(seen)[:, 0])
        targets = advantages + data.values
        real = data.real.flatten().nonzero()[:, 0]
        kept = (data.seen, data.actions, data.chances, advantages, targets)
        flat = [one.flatten(0, 1) for one in kept]
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / updates)
        for _ in range(EPOCHS):
            for chosen in real[torch.randperm(len(real))].chunk(BATCHES):
                seen_, actions, chances, gain, target = (one[chosen] for one in flat)
                policy = Categorical(logits=actor(seen_))
                ratio = (policy.log_prob(actions) - chances).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                gained = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                missed = (critic(seen_)[:, 0] - target).square().mean()
                loss = 0.5 * missed - gained - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        mean = float(np.mean(returns or [0.0]))
        if update % 10 == 9:
            print(f"{(update + 1) * STEPS * count:8,} steps  mean return {mean:6.1f}")
        if len(returns) == 100 and mean >= SOLVED:
            break
    return mean, (update + 1) * STEPS * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=int, default=32, help="number of environments (default 32)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    parser.add_argument("--updates", type=int, default=300, help="most updates (default 300)")
    asked = parser.parse_args()
    mean, steps = train(asked.envs, asked.seed, asked.updates)
    print(
        f"{'solved' if mean >= SOLVED else 'not solved'}: mean return {mean:.1f} after {steps:,} steps"
    )


if __name__ == "__main__":
    main()
