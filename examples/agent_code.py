"""A coding agent: it writes a function, runs it in Podium's sandbox, is shown the error and tries once more.

    podium train examples/agent_code.yaml

What the model writes never runs in this process: `run_program` runs it without files and network.
"""

import json

from openai import OpenAI

from podium.data.extract import fenced
from podium.isolation.sandbox import choose, passed, run_program

ATTEMPTS = 2
SANDBOX = choose("auto")


def run(base_url, api_key, prompt, tests):
    """1 for a function that passes all tests, less for one that only runs or parses."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, tests = list(prompt), json.loads(tests)
    for _ in range(ATTEMPTS):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=40)
        text = answer.choices[0].message.content
        reward, error = judged(fenced(text), tests)
        if error is None:
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{error} Write it again."}]
    return reward


def judged(code, tests):
    """The reward of a program, and what is to be said about it."""
    if not code:
        return 0.0, "There is no code block."
    results = run_program(code, tests, backend=SANDBOX)
    share = sum(map(passed, tests, results)) / len(tests)
    if share == 1:
        return 1.0, None
    stages = {"found": 0.1, "parsed": 0.2, "ran": 0.3}
    reward = max(stages[result.stage] for result in results) + 0.6 * share
    test, result = next((test, result) for test, result in zip(tests, results, strict=True) if not passed(test, result))
    call = f"{test['call']}({', '.join(map(repr, test['args']))})"
    if result.outcome == "ok":
        return reward, f"{call} is {result.value}, not {json.dumps(test['expected'])}."
    return reward, f"{call}: {result.error or result.outcome}."
