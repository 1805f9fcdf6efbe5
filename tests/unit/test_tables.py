"""What `podium init` takes everyday tables for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import TABLES, outcome
from podium.planning.answer_columns import chosen_columns

SENTENCES = (
    ("id ticket team priority", "assign each support ticket to a team", "ticket", "team"),
    ("title abstract genre pages", "Classify the abstract by genre", "abstract", "genre"),
    ("country capital population", "Name the capital of the country", "country", "capital"),
    ("country capital population", "Given a country, answer with its capital", "country", "capital"),
    ("email spam", "Decide if an email is spam", "email", "spam"),
    ("email urgent team", "Is this email urgent?", "email", "urgent"),
    ("email urgent team", "Which team should answer the email?", "email", "team"),
    ("de en", "translate English to German", "en", "de"),
    ("de en", "Translate to English.", "de", "en"),
    ("text language", "What language is the text in?", "text", "language"),
    ("review stars product", "Predict the stars from the review", "review", "stars"),
    ("product review stars", "Guess how many stars a review gave", "review", "stars"),
    ("price_a price_b cheaper", "Say which of price_a and price_b is cheaper", "price_a", "cheaper"),
    ("sentence corrected", "Correct the grammar of the sentence", "sentence", "corrected"),
    ("wrong right", "Fix the spelling", "wrong", "right"),
    ("singular plural", "Make the plural", "singular", "plural"),
    ("plural singular", "Make the plural", "singular", "plural"),
    ("name birthday age", "How old is the person? Give the age", "name", "age"),
    ("formula name", "Name the compound with this formula", "formula", "name"),
    ("log status", "Read the log and output its status", "log", "status"),
    ("question context answer", "answer from the context", "question", "answer"),
    ("text mood author", "Tag every text with its mood", "text", "mood"),
    ("city continent year", "Put each city on its continent", "city", "continent"),
    ("utterance intent slot", "map the utterance to an intent", "utterance", "intent"),
    ("headline body", "Write a headline for the body", "body", "headline"),
    ("premise hypothesis label", "Does the premise entail the hypothesis?", "premise", "label"),
    ("premise hypothesis verdict", "Does the premise entail the hypothesis?", "premise", "verdict"),
    ("word definition", "Define the word", "word", "definition"),
    ("definition word", "Find the word for the definition", "definition", "word"),
    ("a b sum", "add a and b", "a", "sum"),
    ("recipe calories cuisine", "Estimate the calories of a recipe", "recipe", "calories"),
    ("customer message reply", "Reply to the message", "message", "reply"),
    ("code bug", "find the bug in the code", "code", "bug"),
    ("name email valid", "Check whether the email is valid", "email", "valid"),
    ("en fr", "traduire du français en anglais", "fr", "en"),
    ("deutsch englisch", "Übersetze ins Englische", "deutsch", "englisch"),
    ("stadt land", "In welchem Land liegt die Stadt?", "stadt", "land"),
    ("sql english", "Turn English into SQL", "english", "sql"),
    ("db question sql", "", "question", "sql"),
)
"""Columns, what their owner writes of the task, and the columns of question and answer that are meant."""


@pytest.mark.parametrize(("columns", "sentence", "asked", "told"), SENTENCES)
def test_a_sentence_tells_question_and_answer(columns: str, sentence: str, asked: str, told: str) -> None:
    names = columns.split()
    rows = [{name: f"{name} number {i}" for name in names} for i in range(9)]
    chosen = chosen_columns(names, rows, sentence=sentence)
    assert (chosen.answer or "{answer}") == f"{{{told}}}"
    assert f"{{{asked}}}" in (chosen.prompt or "{prompt}")
    assert f"{{{told}}}" not in (chosen.prompt or "{prompt}")


def test_everyday_tables_are_read_as_they_are_meant(tmp_path: Path) -> None:
    assert len({table.name for table in TABLES}) == len(TABLES) == 60
    found = [outcome(table, tmp_path) for table in TABLES]
    wrong = [each for each in found if each.wrong]
    assert len(wrong) <= 3, [(each.table.name, each.wrong) for each in wrong]
    assert all(each.doubts for each in wrong)
