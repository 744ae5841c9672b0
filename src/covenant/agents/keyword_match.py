"""Ranks agents for a request without a model: by the words that the request shares with their cards.

A word's weight is log(1 + agents / agents that have it), times a factor for its place: 3 in a name, 2 in a skill, 1.5
in an example, 1 in a description. Words of three letters and more count, common ones do not; endings are cut off, so
that "translates" finds "translation". Equal scores keep the agents' order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from covenant.agents.agent_directory import CallableAgent

THRESHOLD: Final = 1.0
"""About the score of a single word in the name or a skill, of two in a description, or of a rare one there."""
WEIGHTS: Final = {"name": 3.0, "skill": 2.0, "example": 1.5, "description": 1.0}
WORDS_MAX: Final = 2_000
"""The most words of a request, and of one agent's card, that are read."""

_WORD = re.compile(r"[^\W_]{3,}").findall
_ENDINGS: Final = "ations ation ators ator ions ion ings ing ises ize izes ised ise ers er ors or ed es s e y".split()
_COMMON: Final = frozenset(
    """
    about after agent agents all also and any are ask but can could does for from get give has have how into its just
    let like make may more not now off one only our out over please shall should some tell than that the their them then
    there these they this those under use was were what when where which who will with would you your
    """.split()
)


class KeywordMatch(msgspec.Struct, frozen=True):
    """One agent's score, and the matching words, each with its place."""

    listed: CallableAgent
    score: float
    matches: dict[str, str]

    @property
    def why(self) -> str:
        found = [f"{word!r} ({where})" for word, where in self.matches.items()]
        return f"its card matches {', '.join(found)}" if found else "nothing in its card matches"


class KeywordIndex:
    """Built once for a list of agents, then used for each request."""

    def __init__(self, agents: Sequence[CallableAgent]) -> None:
        self._agents = agents
        self._places = [_places(listed) for listed in agents]
        having = Counter(stem for places in self._places for stem in places)
        # With a single agent, each of its words would be one that every agent has.
        total = max(2, len(agents))
        self._rarity = {stem: math.log(1 + total / count) for stem, count in having.items()}

    def rank(self, text: str) -> list[KeywordMatch]:
        """The agents that share a word with the text, best first."""
        stems = {stem: word for word, stem in _words(text)}
        found: list[KeywordMatch] = []
        for listed, places in zip(self._agents, self._places, strict=True):
            shared = [stem for stem in stems if stem in places]
            score = sum(self._rarity[stem] * WEIGHTS[places[stem]] for stem in shared)
            if shared:
                found.append(KeywordMatch(listed, round(score, 3), {stems[stem]: places[stem] for stem in shared}))
        return sorted(found, key=lambda ranked: -ranked.score)


def overlap(query: str, texts: Sequence[str]) -> list[int]:
    """The indexes of those `texts` that share words with the query, best first."""
    agents = [CallableAgent(name="", description=text) for text in texts]
    places = {id(agent): at for at, agent in enumerate(agents)}
    return [places[id(match.listed)] for match in KeywordIndex(agents).rank(query)]


def _places(listed: CallableAgent) -> dict[str, str]:
    fields: dict[str, list[str]] = {
        "name": [listed.name, listed.title],
        "skill": [text for skill in listed.skills for text in (skill.id, skill.name, *skill.tags)],
        "example": [text for skill in listed.skills for text in skill.examples],
        "description": [listed.role, listed.description, *(skill.description for skill in listed.skills)],
    }
    found: dict[str, str] = {}
    for place, texts in fields.items():
        for text in texts:
            for _, stem in _words(text):
                found.setdefault(stem, place)
    return found


def _words(text: str) -> Iterator[tuple[str, str]]:
    for word in _WORD(text.casefold())[:WORDS_MAX]:
        if word not in _COMMON:
            yield word, _stem(word)


def _stem(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        word = f"{word[:-3]}y"
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word[: -len(ending)]
    return word
