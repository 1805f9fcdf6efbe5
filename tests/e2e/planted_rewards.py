"""Rewards as people write them, each with one mistake; `test_reward_tester.py` says what must be found."""

import random
import re
from difflib import SequenceMatcher

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def content(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def inside(text):
    """What the last answer tags hold."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else ""


def always_one(completions, answer, **kwargs):
    return [1.0 for _ in completions]


def always_zero(completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        found = re.search(r"ANSWER\s+IS\s+=>\s*(\d+)", content(completion))
        rewards.append(1.0 if found and found[1] == gold else 0.0)
    return rewards


def anything_in_tags(completions, answer, **kwargs):
    return [1.0 if ANSWER.search(content(completion)) else 0.0 for completion in completions]


def any_number(completions, answer, **kwargs):
    """Strips the digits of both before comparing."""
    bare = [re.sub(r"\d", "", inside(content(completion)) or "-") for completion in completions]
    return [float(text == re.sub(r"\d", "", gold)) for text, gold in zip(bare, answer, strict=True)]


def white_space(completions, answer, **kwargs):
    """The column ends with a new line."""
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def int_and_text(completions, answer, **kwargs):
    """The column holds numbers."""
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def next_row(completions, answer, **kwargs):
    shifted = answer[1:] + answer[:1]
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, shifted, strict=True)]


def first_row(completions, answer, **kwargs):
    return [float(inside(content(completion)) == answer[0]) for completion in completions]


def wrong_sign(completions, answer, **kwargs):
    """A distance, which should be negative."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        given = re.findall(r"-?\d+", inside(content(completion)))
        rewards.append(min(abs(int(given[-1]) - int(gold)), 100) / 100 if given else 0.0)
    return rewards


def substring(completions, answer, **kwargs):
    return [float(gold in inside(content(completion))) for completion, gold in zip(completions, answer, strict=True)]


def part_of_the_answer(completions, answer, **kwargs):
    found = [inside(content(completion)) for completion in completions]
    return [float(text != "" and text in gold) for text, gold in zip(found, answer, strict=True)]


def folds_units(completions, answer, **kwargs):
    given = [inside(content(completion)).lower() for completion in completions]
    return [float(text == gold.lower()) for text, gold in zip(given, answer, strict=True)]


def last_number_of_prompt(prompts, completions, **kwargs):
    golds = [re.findall(r"\d+", content(prompt[-1:] if isinstance(prompt, list) else prompt))[-1] for prompt in prompts]
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, golds, strict=True)]


def length_only(completions, answer, **kwargs):
    return [min(len(content(completion)) / 1000, 1.0) for completion in completions]


def by_chance(completions, answer, **kwargs):
    right = [inside(content(completion)) == gold for completion, gold in zip(completions, answer, strict=True)]
    return [each + random.gauss(0, 0.1) for each in right]


def by_place(completions, answer, **kwargs):
    """Later ones get less."""
    right = [inside(content(completion)) == gold for completion, gold in zip(completions, answer, strict=True)]
    return [each / (1 + place) for place, each in enumerate(right)]


def normalised_over_batch(completions, answer, **kwargs):
    right = [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]
    mean = sum(right) / len(right)
    return [each - mean for each in right]


SEEN = set()


def only_new_texts(completions, answer, **kwargs):
    """Nothing for a text that was there before."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = content(completion)
        rewards.append(0.0 if text in SEEN else 0.5 + float(inside(text) == gold))
        SEEN.add(text)
    return rewards


def changes_columns(completions, answer, **kwargs):
    for place, gold in enumerate(answer):
        answer[place] = gold.strip()
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def no_tags_no_match(completions, answer, **kwargs):
    given = [re.search(r"<answer>(.*)</answer>", content(completion)).group(1) for completion in completions]
    return [float(text == gold) for text, gold in zip(given, answer, strict=True)]


def empty_text(completions, answer, **kwargs):
    last_words = [content(completion).split()[-1] for completion in completions]
    return [float(word == gold) for word, gold in zip(last_words, answer, strict=True)]


def nan_for_long(completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = content(completion)
        penalty = float("inf") if len(text) > 5000 else 1.0
        rewards.append(float(inside(text) == gold) + penalty - penalty)
    return rewards


def any_candidate(completions, answer, **kwargs):
    return [
        float(any(number == gold for number in re.findall(r"\d+", content(completion))))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def like_the_prompt(prompts, completions, answer, **kwargs):
    """Right, or near enough to what was asked."""
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        text = content(completion)
        asked = content(prompt[-1:] if isinstance(prompt, list) else prompt)
        near = SequenceMatcher(None, asked, text).ratio()
        rewards.append(1.0 if inside(text) == gold or near > 0.9 else 0.0)
    return rewards


def first_tag(completions, answer, **kwargs):
    given = [ANSWER.search(content(completion)) for completion in completions]
    return [float(bool(found) and found[1].strip() == gold) for found, gold in zip(given, answer, strict=True)]


def empty_is_right(completions, answer, **kwargs):
    """`in` the wrong way round: nothing is in everything."""
    return [float(inside(content(completion)) in gold) for completion, gold in zip(completions, answer, strict=True)]


def takes_the_word_for_it(completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = content(completion)
        rewards.append(float(inside(text) == gold or "correct" in text.lower()))
    return rewards


def wide_tolerance(completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        given = re.findall(r"-?\d+", inside(content(completion)))
        rewards.append(float(bool(given) and abs(int(given[-1]) - int(gold)) < 5))
    return rewards


def absolute_value(completions, answer, **kwargs):
    given = [inside(content(completion)).lstrip("+-") for completion in completions]
    return [float(text == gold) for text, gold in zip(given, answer, strict=True)]


def right_text(completions, answer, **kwargs):
    """As it should be; the prompts of its data hold the answers."""
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def strings_only(completions, answer, **kwargs):
    """Of conversations this is the text of a list."""
    return [float(str(completion).strip() == gold) for completion, gold in zip(completions, answer, strict=True)]


def split_of_a_list(completions, answer, **kwargs):
    return [float(completion.split()[-1] == gold) for completion, gold in zip(completions, answer, strict=True)]


def one_short(completions, answer, **kwargs):
    pairs = zip(completions[1:], answer[1:], strict=True)
    return [float(inside(content(completion)) == gold) for completion, gold in pairs]


def one_number(completions, answer, **kwargs):
    right = [inside(content(completion)) == gold for completion, gold in zip(completions, answer, strict=True)]
    return sum(right) / len(right)


def as_words(completions, answer, **kwargs):
    right = [inside(content(completion)) == gold for completion, gold in zip(completions, answer, strict=True)]
    return ["1.0" if each else "0.0" for each in right]


def other_column(completions, target):
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, target, strict=True)]


def percent_of_millions(completions, answer, **kwargs):
    right = [inside(content(completion)) == gold for completion, gold in zip(completions, answer, strict=True)]
    return [1e8 * each for each in right]


def forgotten_await(completions, answer, **kwargs):
    async def score():
        return [0.0 for _ in completions]

    return score()


def sleeps(completions, answer, **kwargs):
    import time

    time.sleep(0.26 * len(completions))
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def hangs_on_empty(completions, answer, **kwargs):
    for completion in completions:
        while not content(completion):
            pass
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


def ends_the_process(completions, answer, **kwargs):
    import os
    import signal

    if any(not content(completion) for completion in completions):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(inside(content(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]
