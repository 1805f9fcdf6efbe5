"""A planner and a worker: the planner says what to add, a worker with a system message of its own adds, the planner
answers. Both are the one model that is trained: `podium train examples/agent_planner.yaml`.
"""

import re

from openai import OpenAI

THINGS = ("apples", "books", "coins", "keys", "pens", "shells")
PLANNER = [
    {"role": "system", "content": "Say what to add. When the worker has answered, answer the question."},
    {"role": "user", "content": "Ann has 2 cups and finds 6 more. How many has she now?"},
    {"role": "assistant", "content": "Add 2 + 6"},
    {"role": "user", "content": "Worker: 8"},
    {"role": "assistant", "content": "8 cups"},
    {"role": "user", "content": "Ann has 5 hats and finds 4 more. How many has she now?"},
    {"role": "assistant", "content": "Add 5 + 4"},
    {"role": "user", "content": "Worker: 9"},
    {"role": "assistant", "content": "9 hats"},
]
WORKER = [
    {"role": "system", "content": "You add. Answer with the number alone."},
    {"role": "user", "content": "What is 4 + 1?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "What is 3 + 7?"},
    {"role": "assistant", "content": "10"},
    {"role": "user", "content": "What is 8 + 8?"},
    {"role": "assistant", "content": "16"},
    {"role": "user", "content": "What is 2 + 1?"},
    {"role": "assistant", "content": "3"},
]


def rows():
    """Every pair of numbers from 1 to 9 once."""
    for i in range(81):
        a, b, thing = i // 9 + 1, i % 9 + 1, THINGS[i % len(THINGS)]
        question = f"Ann has {a} {thing} and finds {b} more. How many has she now?"
        yield {"prompt": question, "sum": f"{a} + {b}", "answer": f"{a + b} {thing}"}


def run(base_url, api_key, row):
    """One question: 1 if its answer is right, and before that something for each part of the way."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(messages):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
        return answer.choices[0].message.content.strip()

    talk = [*PLANNER, {"role": "user", "content": row["prompt"]}]
    plan = ask(talk)
    asked = re.fullmatch(r"Add (\d+ \+ \d+)", plan)
    if not asked:
        return 0.0
    found = ask([*WORKER, {"role": "user", "content": f"What is {asked[1]}?"}])
    talk += [{"role": "assistant", "content": plan}, {"role": "user", "content": f"Worker: {found}"}]
    answer = ask(talk)
    added = found == str(sum(map(int, asked[1].split(" + "))))
    return 0.1 + 0.2 * (asked[1] == row["sum"]) + 0.2 * added + 0.5 * (answer == row["answer"])
