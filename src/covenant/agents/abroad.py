"""The cards of agents elsewhere: fetched beside the work, a few at a time, and kept, as are failures.

A turn reads what is there and never waits for anybody. `listing` and `about` are how an agent is told of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Final, Protocol

import msgspec

from covenant.agents.framing import plain
from covenant.model.errors import CovenantError
from covenant.model.agent_card import RemoteCard

LOOK_S: Final = 1.0
"""Pause between two looks at the file of remote agents."""
CARD_S: Final = 300.0
"""How long a card is good for."""
FAILURE_S: Final = 60.0
"""How long a failure is: asking the dead again and again helps nobody."""
FETCH_S: Final = 15.0
FETCHES_MAX: Final = 16
SPACING_S: Final = 0.02
"""Between the beginnings of two fetches: a crowd of them at once would hold up the loop that turns are on."""
REMOTES_MAX: Final = 1_000

log = logging.getLogger(__name__)


class Directory(Protocol):
    """The remote agents that are configured, by name."""

    def __iter__(self) -> Iterator[str]: ...
    def entry(self, name: str) -> object:
        """Equal for as long as nothing about it has changed. Raises where it cannot be used."""


FindCard = Callable[[str], Awaitable[RemoteCard | None]]
"""The card of a configured agent, by its name; None if it has none."""


class Kept(msgspec.Struct, frozen=True):
    """What came of looking for a card, for which entry, and until when that is good."""

    entry: object
    until: float
    card: RemoteCard | None = None
    trouble: str = ""


class Abroad:
    """The cards of remote agents: fetched in the background, read at once."""

    def __init__(
        self,
        directory: Directory,
        find_card: FindCard,
        clock: Callable[[], float],
        *,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """`clock` counts seconds and is never set back. `told` hears of every change."""
        self._directory = directory
        self._find_card = find_card
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        self._names: tuple[str, ...] = ()
        self._ordered: dict[str, Kept] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(FETCHES_MAX)
        self._told = told
        self.changes = 0
        """Grows with every change of what is known."""

    def __bool__(self) -> bool:
        """Whether any remote agent is configured, as far as is known."""
        return bool(self._names)

    @property
    def known(self) -> dict[str, Kept]:
        """By name, in the order of the file; those that were never answered for are not there yet."""
        return self._ordered

    def card(self, name: str) -> RemoteCard | None:
        kept = self._kept.get(name)
        return kept.card if kept is not None else None

    def look(self) -> None:
        """Begin to fetch what is due. Does not wait."""
        entries: dict[str, object] = {}
        for name in self._directory:
            if len(entries) >= REMOTES_MAX:
                log.warning("roster.full", extra={"kept": REMOTES_MAX})
                break
            try:
                entries[name] = self._directory.entry(name)
            except CovenantError:
                continue
        before, self._names = self._names, tuple(entries)
        for name in self._kept.keys() - entries.keys():
            del self._kept[name]
        if self._names != before:
            self._changed()
        now, begun = self._clock(), 0
        for name, entry in entries.items():
            kept = self._kept.get(name)
            due = kept is None or kept.entry != entry or now >= kept.until
            if due and name not in self._fetching:
                fetching = asyncio.create_task(self._fetch(name, entry, SPACING_S * begun))
                begun += 1
                self._fetching[name] = fetching
                fetching.add_done_callback(partial(self._fetched, name))

    def _fetched(self, name: str, fetching: asyncio.Task[None]) -> None:
        if self._fetching.get(name) is fetching:
            del self._fetching[name]

    async def settled(self) -> None:
        """Return when nothing is being fetched."""
        while self._fetching:
            await asyncio.wait(tuple(self._fetching.values()))

    async def run(self) -> None:
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for fetching in self._fetching.values():
                fetching.cancel()

    async def _fetch(self, name: str, entry: object, after_s: float) -> None:
        card, trouble = None, "it has no card"
        try:
            if after_s:
                await asyncio.sleep(after_s)
            async with self._places, asyncio.timeout(FETCH_S):
                card = await self._find_card(name)
        except TimeoutError:
            trouble = f"no card within {FETCH_S:g} s"
        except CovenantError as error:
            trouble = str(error)
        except Exception:
            log.exception("roster.failed", extra={"agent": name})
            trouble = "its card cannot be fetched"
        before = self._kept.get(name)
        until = self._clock() + (FAILURE_S if card is None else CARD_S)
        self._kept[name] = Kept(entry, until, card, "" if card is not None else trouble)
        if before is None or (before.card, before.trouble) != (card, self._kept[name].trouble):
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._ordered = {name: self._kept[name] for name in self._names if name in self._kept}
        self._told()


def listing(known: Mapping[str, Kept]) -> str:
    """`/a2a list`."""
    if not known:
        return "no remote agents configured"
    lines = [f"configured remote agents ({len(known)}):"]
    for name, kept in known.items():
        if kept.card is None:
            lines.append(f"  {name} (card unavailable: {plain(kept.trouble)})")
            continue
        lines.append(f"  {name} — {plain(kept.card.description)}")
        if kept.card.skills:
            lines.append(f"    skills: {', '.join(plain(skill.id) for skill in kept.card.skills)}")
    return "\n".join(lines)


def about(card: RemoteCard) -> str:
    """`/a2a card`."""
    ways = [f"{way.binding} {way.version}" for way in card.ways]
    lines = [
        f"name: {plain(card.name)}",
        f"url: {card.ways[0].url if card.ways else card.url}",
        f"protocol: {', '.join(ways) or 'unknown'}; version: {plain(card.version)}",
        f"description: {plain(card.description)}",
        *(f"- {plain(skill.id)}: {plain(skill.description or skill.name)}" for skill in card.skills),
    ]
    return "\n".join(lines)
