"""The groups of completions, the words of a text, and the words that say little. Used by rewards of the library."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def group_of_each(prompts: Sequence[Any]) -> list[int]:
    """The number of the group that each completion of a round is in: those with equal prompts are one group.

    >>> group_of_each(["3+4", "3+4", "8-1", "8-1"])
    [0, 0, 1, 1]
    """
    keys = [
        prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


# ruff: noqa: RUF001  # other alphabets than the English one


_NO_SPACES = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
"""Kana, Han and Thai, in the brackets of a regular expression."""
_NUMBER = r"(?<![^\W_])-?[0-9]+(?:[.,][0-9]+)*(?![^\W_])"
_WORD = re.compile(rf"{_NUMBER}|[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+(?:['\u2019][^\W\d_]+)?")


def words_of(text: str) -> list[str]:
    """Lower-cased words in their order, compatibility forms (full-width letters, ligatures) made plain.

    A number is one word, its sign and its decimals included.

    >>> words_of("Don't panic, it is 42!"), words_of("\\u6771\\u4eac 2")
    (["don't", 'panic', 'it', 'is', '42'], ['東', '京', '2'])
    >>> words_of("from -3.5 to 1,000, in 1990-95")
    ['from', '-3.5', 'to', '1,000', 'in', '1990', '95']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").casefold())


STOP_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "cs": "a aby ale ani asi až bez bude by byl byla bylo být co do i jak jako je jeho jen ji jsem jsou k když "
        "která které který má mezi na nebo není o od po pod pro proto při s se si tak také ten to toho tom už "
        "v ve však z za že",
        "da": "af at blev da de den der deres det dette dig du efter eller en er et for fra han har havde hun hvad "
        "hvor i ikke jeg kan man med meget men mig ned når og også om op os på som så til ud var vi vil være "
        "været",
        "de": "aber als also am an auch auf aus bei das dass dem den der des die doch durch ein eine einem einen "
        "einer es für hat hatte ich ihr im ist ja kann man mit nach nicht noch nur oder sein sich sie sind so "
        "über um und uns von vor war was weil wenn wie wir wird zu zum zur",
        "en": "a about after all also an and are as at be because been but by can could did do for from had has "
        "have he her his how i if in into is it its more not of on one or our she so some than that the their "
        "them then there these they this to was we were what when which who will with would you your",
        "es": "a al algo como con cuando de del desde donde el ella ellos en entre era es esa ese esta este esto ha "
        "hay la las le lo los más me mi muy no nos o para pero por porque que qué se si sin sobre son su sus "
        "también un una y ya",
        "fi": "ei että he hän ja jos joka jotka kanssa kuin kun me minä mitä mukaan mutta myös niin nyt ole oli "
        "olla on ovat se sekä sen siitä tai tämä vain voi",
        "fr": "à au aux avec c'est ce ces cette dans de des du elle en est et été être il ils j'ai je la le les "
        "leur lui mais même ne nous on ou où par pas plus pour qu'il que qui sa se ses son sont sur tout un "
        "une vous",
        "hu": "a az azt csak de egy ez ezt én és fel hogy ha is itt kell ki le lehet már meg mert mi mint most nagy "
        "nem nincs ők ő s se si sem ti úgy van vagy volt",
        "id": "ada adalah agar akan anda apa atau bagi bahwa banyak dalam dan dapat dari dengan di hanya harus ia "
        "ini itu juga kami karena ke kita lebih mereka oleh pada saya sebagai seperti serta sudah telah tidak "
        "untuk yang",
        "it": "a al alla anche che chi ci come con cosa da dal dei del della di e è gli ha ho i il in io la le lo "
        "loro ma mi nel nella non o per perché più quando quello questo se sempre si sono su sua un una uno",
        "nb": "at av bare ble da de den der det dette du eller en er et for fra han har hun hva hvor i ikke jeg kan "
        "man med men mer når og også om opp oss på seg skal som så til ut var vi vil være",
        "nl": "aan al als bij dan dat de der deze die dit door een en er had hebben heeft het hij ik in is je kan "
        "maar me meer met mijn naar niet nog of om onder ons ook op over te tot uit van voor was wat we wel "
        "wij worden zich zijn zo",
        "pl": "a ale aby bo był była było być co czy dla do go i ich jak jako jest jego jej już ma może można na "
        "nie o od po pod przez przy są się tak także tego ten to tym w we więc z za ze że",
        "pt": "a ao aos as com como da das de do dos e é ela ele em entre era essa esse esta este foi há isso já "
        "mais mas me muito na não nas no nos o os ou para pela pelo por porque quando que se sem ser seu sua "
        "são também um uma",
        "ro": "a al ale am are au ca că care ce cu cum da dar de din dacă după el ea este eu fi fost în la mai nu o "
        "pe pentru prin sau se și sunt un una unde va",
        "sv": "att av bara de den det detta där du efter eller en ett från för ha han har hon hur i inte jag kan "
        "man med men mer mot mycket nu när och också om oss på sig sin ska som så till under ut var vi vid är "
        "över",
        "tr": "ama bir bu çok da daha de değil diye en gibi göre hem her için ile ise kadar ki mi mı ne nasıl o "
        "olan olarak olduğu sonra şey şu var ve veya ya yok",
        "vi": "bị bởi các cái cho có của cùng cũng đã đang để đến đều được hay hơn khi không là lại mà một này nên "
        "nếu như những ở rất ra sẽ tại thì trong từ và vào về vì với",
    }.items()
}
"""The commonest words of languages in Latin script: enough to tell them apart, not a dictionary."""
