"""A planner and a worker: the planner says what to look for, a worker with a system message of its own reads a list
that the planner never sees, the planner answers. Both are the model that is trained:

    podium train examples/agent_planner.yaml

Each request with other messages is a branch of the episode, with the episode's advantage.
"""

import random
import re

from openai import OpenAI

THINGS = ("apples", "books", "coats", "keys", "lamps", "pens", "rings", "shells")
PLANNER = [
    {"role": "system", "content": "Say what the worker is to look up. When it has answered, answer the question."},
    {"role": "user", "content": "How much are the cups?"},
    {"role": "assistant", "content": "Look up cups"},
    {"role": "user", "content": "Worker: 24"},
    {"role": "assistant", "content": "24 coins"},
    {"role": "user", "content": "How much are the hats?"},
    {"role": "assistant", "content": "Look up hats"},
    {"role": "user", "content": "Worker: 71"},
    {"role": "assistant", "content": "71 coins"},
]


def rows():
    """Questions with a list of prices each: in every list they are others."""
    draw = random.Random(0)
    for i in range(160):
        prices = dict(zip(("cups", "hats", *THINGS), draw.sample(range(11, 100), 2 + len(THINGS)), strict=True))
        thing = THINGS[i % len(THINGS)]
        listed = "\n".join(f"{name} {price}" for name, price in draw.sample(list(prices.items()), len(prices)))
        yield {"prompt": f"How much are the {thing}?", "thing": thing, "list": listed, "price": str(prices[thing])}


def run(base_url, api_key, row):
    """One question: 1 if its answer is right, and before that something for each part of the way."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(messages):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
        return answer.choices[0].message.content

    talk = [*PLANNER, {"role": "user", "content": row["prompt"]}]
    plan = ask(talk)
    asked = re.fullmatch(r"Look up (\w+)", plan)
    if not asked:
        return 0.0
    work = [{"role": "system", "content": f"Answer with the price alone.\n{row['list']}"}]
    for name in ("cups", "hats"):  # worked examples, of the same list
        price = re.search(rf"{name} (\d+)", row["list"])[1]
        work += [{"role": "user", "content": name}, {"role": "assistant", "content": price}]
    found = ask([*work, {"role": "user", "content": asked[1]}])
    talk += [{"role": "assistant", "content": plan}, {"role": "user", "content": f"Worker: {found}"}]
    right = (asked[1] == row["thing"], found == row["price"], ask(talk) == f"{row['price']} coins")
    return 0.1 + 0.2 * right[0] + 0.2 * right[1] + 0.5 * right[2]
