"""The least time a step can take: its matrix products over the measured matrix rate, its bytes over the bandwidth."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of this machine, a moment ago."""

    float32_gflops: float
    bfloat16_gflops: float
    copy_gigabytes_per_second: float

    @property
    def best_gflops(self) -> float:
        """The faster precision's."""
        return max(self.float32_gflops, self.bfloat16_gflops)


def best_of(function, repeats: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def measure_rates(device: str = "cpu") -> Rates:
    """About a second of work."""
    n = 1024 if device == "cpu" else 8192
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        rates.append(2e-9 * n**3 / best_of(lambda a=a, b=b: F.linear(a, b)))
    source = torch.zeros((64 if device == "cpu" else 1024) << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 4e-9 / best_of(lambda: target.copy_(source))
    return Rates(float32_gflops=rates[0], bfloat16_gflops=rates[1], copy_gigabytes_per_second=copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds by phase."""

    generate: float
    train: float
    optimizer: float
    compare: float

    @property
    def total(self) -> float:
        """Of a step."""
        return self.generate + self.train + self.optimizer + self.compare


def floor(workload: Workload, model: torch.nn.Module, rates: Rates) -> Floor:
    """Each prompt once, no padding, only groups with signal trained on, the head on trained tokens only.

    Forward and backward of a weight take 2 + 4 FLOPs a token (2 + 2 when it is frozen), attention
    4 (forward) + 8 (backward) FLOPs per query, key and unit of width. The head's chunks are computed twice.
    """
    config = model.config
    body = sum(
        p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n and "lora" not in n
    )
    head = config.vocab_size * config.hidden_size
    width = config.num_hidden_layers * config.hidden_size
    lengths = [[workload.length(p, g) for g in range(workload.generations)] for p in range(workload.prompts)]
    signal = [len({workload.reward(p, g) for g in range(workload.generations)}) > 1 for p in range(workload.prompts)]
    x = workload.prompt_tokens

    def pairs(group: list[int]) -> float:
        return x * x / 2 + sum(n * (x + n / 2) for n in group)

    drawn = sum(map(sum, lengths))
    decode_flops = 2 * drawn * (body + head) + 4 * width * sum(pairs(group) for group in lengths)
    prefill_flops = 2 * workload.prompts * (x * body + head)
    steps = max(map(max, lengths))
    read_bytes = 2.0 * steps * (body + head)  # weights in bfloat16, once a decode step
    flops_rate = rates.best_gflops * 1e9
    decode = max(decode_flops / flops_rate, read_bytes / (rates.copy_gigabytes_per_second * 1e9))
    trained = [group for group, has in zip(lengths, signal, strict=True) if has or workload.beta]
    tokens = sum(x + sum(n - 1 for n in group) for group in trained)
    targets = sum(map(sum, trained))
    weight_cost = 4 if workload.lora else 6
    attention = 12 * width * sum(map(pairs, trained))
    train_flops = weight_cost * tokens * body + (weight_cost + 2) * targets * head + attention
    compare = 2 * tokens * body + 2 * targets * head + attention / 3 if workload.beta else 0.0
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Floor(
        generate=prefill_flops / flops_rate + decode,
        train=train_flops / flops_rate,
        optimizer=28 * trainable / (rates.copy_gigabytes_per_second * 1e9),  # read p, g, m, v; write p, m, v
        compare=compare / flops_rate,
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(asdict(measure_rates()))
