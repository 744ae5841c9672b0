"""The relay: envelopes between two instances that can only call out, kept here until the recipient fetches them.

A relay cannot open an envelope, and changes nothing in it. It takes one from a verified peer, for a verified peer, both
of whom the setting `peers.relay_for` names, and answers once the envelope is on disk. The recipient fetches envelopes
with signed polls, and acknowledges them with the next poll. An envelope that nobody fetches expires; the sender knows
when, and still has the message. So a relay that loses everything delays messages, and loses none.

    relay/<recipient>/<number>.<until, in ms>.<sender>.<name>.envelope     the envelope, unchanged
    relay/<recipient>/introduction.json                                    the recipient's introduction, unchanged

Everything is bounded: in bytes and envelopes for each sender and each recipient, in bytes for all, and in time. Must be
used on one event loop; files are written and read in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.embedded.disk import make_owned_folder, replace_private, sync_dir
from covenant.model.errors import NotFound, OverLimit
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId, Trust, is_instance_id
from covenant.peers.peer_settings import EVERYBODY, PeerContext, PeerService, PeerSettings, is_named
from covenant.seal.envelope import RELAYED_LIFE_MS_MAX, Header, check
from covenant.seal.identity import SKEW_MS
from covenant.wire.peers import RelayedEnvelope

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of our own envelopes in the answer to a poll, and of others' envelopes: one of each may have more."""
RETRY_MS: Final = 30_000
SWEEP_S: Final = 60.0
FOLDER_NAME: Final = "relay"
INTRODUCTION: Final = "introduction.json"

_NAME: Final = re.compile(r"(\d{16})\.(\d{1,16})\.(frd1_[a-z2-7]{40})\.([0-9a-f]{32})\.envelope").fullmatch

log = logging.getLogger(__name__)


class StoredEnvelope(NamedTuple):
    number: int
    until_ms: int
    sender: InstanceId
    name: str
    bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.number:016d}.{self.until_ms}.{self.sender}.{self.name}.envelope"


class _Usage(NamedTuple):
    envelopes: int
    bytes: int


class RelayStore:
    """The files, and an index of them in memory."""

    def __init__(self, folder: Path, settings: PeerSettings, now_ms: Callable[[], int]) -> None:
        self._folder = folder
        self._settings = settings
        self._now_ms = now_ms
        self._kept: dict[InstanceId, OrderedDict[str, StoredEnvelope]] = {}
        self._number = 0
        self._usage: defaultdict[tuple[str, str], _Usage] = defaultdict(lambda: _Usage(0, 0))
        """The envelopes and bytes that are kept for each recipient, from each sender, and in all."""
        self._writing: dict[tuple[InstanceId, str], asyncio.Task[None]] = {}
        """Writes that are under way, by the envelope's recipient and name."""
        self._shown: dict[InstanceId, str] = {}
        """The hash of each recipient's last introduction."""

    def open(self) -> None:
        """Reads the envelopes that an earlier run kept. Blocks."""
        if not self._folder.is_dir():
            make_owned_folder(self._folder, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if not folder.is_dir() or not is_instance_id(folder.name):
                continue
            found = OrderedDict[str, StoredEnvelope]()
            for file in sorted(folder.iterdir()):
                if (read := _NAME(file.name)) is not None:
                    number, until_ms, sender, name = read.groups()
                    kept = StoredEnvelope(int(number), int(until_ms), InstanceId(sender), name, file.stat().st_size)
                    found[name] = kept
                    self._count(InstanceId(folder.name), kept, 1)
                    self._number = max(self._number, kept.number)
                elif file.suffix == ".tmp":
                    file.unlink()  # its sender got no acknowledgement for it
            self._kept[InstanceId(folder.name)] = found

    def reserve(self, recipient: InstanceId, sender: InstanceId, name: str, size: int, until_ms: int) -> StoredEnvelope:
        """Reserves room for an envelope, which is to be written. Raises OverLimit."""
        count_max, bytes_max = self._settings.relay_envelopes_per_peer, self._settings.relay_bytes_per_peer
        for use, what in (
            (self._usage["to", recipient], "for this recipient"),
            (self._usage["by", sender], "from you"),
        ):
            if use.envelopes >= count_max or use.bytes + size > bytes_max:
                raise OverLimit(
                    "relay_full", f"too many messages {what} wait here; try again later", retry_after_ms=RETRY_MS
                )
        if self._usage["all", ""].bytes + size > self._settings.relay_bytes_max:
            raise OverLimit("relay_full", "this relay is full; try again later", retry_after_ms=RETRY_MS)
        self._number += 1
        made = StoredEnvelope(self._number, until_ms, sender, name, size)
        self._count(recipient, made, 1)
        return made

    def _count(self, recipient: InstanceId, kept: StoredEnvelope, sign: int) -> None:
        for key in (("to", recipient), ("by", kept.sender), ("all", "")):
            count, size = self._usage[key]
            self._usage[key] = _Usage(count + sign, size + sign * kept.bytes)
            if not self._usage[key].envelopes:
                del self._usage[key]

    def _held(self, recipient: InstanceId) -> OrderedDict[str, StoredEnvelope]:
        return self._kept.get(recipient) or OrderedDict()

    async def find(self, recipient: InstanceId, name: str) -> StoredEnvelope | None:
        """The envelope of this name. Waits for one that is being written."""
        while (writing := self._writing.get((recipient, name))) is not None:
            await asyncio.wait((writing,))
        return self._held(recipient).get(name)

    async def write(self, recipient: InstanceId, kept: StoredEnvelope, data: bytes) -> None:
        """Returns when the envelope is on disk. It is written even if its sender hangs up: every file is counted."""
        writing = self._writing[recipient, kept.name] = asyncio.ensure_future(self._put(recipient, kept, data))
        await asyncio.shield(writing)

    async def _put(self, recipient: InstanceId, kept: StoredEnvelope, data: bytes) -> None:
        folder = self._folder / recipient
        try:
            await asyncio.to_thread(self._write, folder, kept.file_name, data)
        except BaseException:
            self._count(recipient, kept, -1)
            raise
        else:
            self._kept.setdefault(recipient, OrderedDict())[kept.name] = kept
        finally:
            del self._writing[recipient, kept.name]

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        if not folder.is_dir():
            make_owned_folder(folder, exist_ok=True)
            sync_dir(self._folder)
        replace_private(folder / name, data)

    async def read(self, recipient: InstanceId, most: int) -> Sequence[RelayedEnvelope]:
        """The first envelopes that wait and can be read, in the order in which they came."""
        await self.drop_stale(recipient)
        tried = set[str]()
        while True:
            chosen: list[StoredEnvelope] = []
            for kept in self._held(recipient).values():
                if kept.name in tried:
                    continue
                if len(chosen) >= most or (chosen and _size(chosen) + kept.bytes > ANSWER_BYTES_MAX):
                    break
                chosen.append(kept)
            if not chosen:
                return ()
            tried.update(kept.name for kept in chosen)
            found, lost = await asyncio.to_thread(self._read, self._folder / recipient, chosen)
            await self.drop(recipient, lost)
            if found:
                return found

    def _read(self, folder: Path, chosen: Iterable[StoredEnvelope]) -> tuple[Sequence[RelayedEnvelope], Sequence[str]]:
        """The envelopes, and the names of those whose files are gone or damaged. Their senders still have them."""
        found, lost = list[RelayedEnvelope](), list[str]()
        for kept in chosen:
            try:
                data = (folder / kept.file_name).read_bytes()
                msgspec.json.decode(data)  # a damaged envelope would spoil the whole answer
            except (OSError, ValueError, RecursionError) as error:
                log.warning("relay.unreadable", extra={"file": kept.file_name, "reason": str(error)})
                # A file that only cannot be read now stays, and holds back no envelope behind it.
                if isinstance(error, FileNotFoundError) or not isinstance(error, OSError):
                    lost.append(kept.name)
            else:
                found.append(RelayedEnvelope(id=kept.name, envelope=msgspec.Raw(data)))
        return found, lost

    async def drop(self, recipient: InstanceId, names: Iterable[str]) -> None:
        """Deletes envelopes that the recipient has."""
        held = self._held(recipient)
        gone = [kept for name in names if (kept := held.pop(name, None)) is not None]
        for kept in gone:
            self._count(recipient, kept, -1)
        if gone:
            # The index has forgotten the files, so they are deleted even if the recipient hangs up now.
            await asyncio.shield(asyncio.to_thread(_unlink, self._folder / recipient, gone))

    async def drop_stale(self, recipient: InstanceId) -> None:
        now_ms = self._now_ms()
        held = self._held(recipient)
        stale = [name for name, kept in held.items() if now_ms > kept.until_ms + SKEW_MS]
        if stale:
            log.info("relay.expired", extra={"peer": recipient, "count": len(stale)})
            await self.drop(recipient, stale)

    async def sweep(self, wanted: Callable[[InstanceId], bool]) -> None:
        """Deletes expired envelopes, and all envelopes of recipients that are not relayed to any more."""
        for recipient in tuple(self._kept):
            if wanted(recipient):
                await self.drop_stale(recipient)
                continue
            for kept in self._kept.pop(recipient).values():
                self._count(recipient, kept, -1)
            await asyncio.to_thread(shutil.rmtree, self._folder / recipient, ignore_errors=True)
            self._shown.pop(recipient, None)

    async def introduce(self, recipient: InstanceId, introduction: bytes) -> None:
        digest = hashlib.sha256(introduction).hexdigest()
        if self._shown.get(recipient) == digest:
            return
        await asyncio.to_thread(self._write, self._folder / recipient, INTRODUCTION, introduction)
        self._shown[recipient] = digest
        self._kept.setdefault(recipient, OrderedDict())

    async def introduction(self, recipient: InstanceId) -> bytes | None:
        try:
            return await asyncio.to_thread((self._folder / recipient / INTRODUCTION).read_bytes)
        except OSError:
            self._shown.pop(recipient, None)  # the recipient's next poll writes it again
            return None


class Relay(PeerService):
    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
        folder = context.relay_folder
        self._named = frozenset(self._settings.relay_for)
        self._store = RelayStore(folder, self._settings, self._now_ms) if folder is not None and self._named else None
        self.on_envelope: Callable[[InstanceId], None] = lambda _: None
        """Called with each recipient that has a new envelope."""

    async def open(self) -> None:
        if self._store is not None:
            await asyncio.to_thread(self._store.open)

    async def run(self) -> None:
        while self._store is not None:
            await self._store.sweep(lambda peer: self._relayed(peer) is not None)
            await asyncio.sleep(SWEEP_S)

    def _relayed(self, peer_id: InstanceId) -> Peer | None:
        """The peer, if envelopes are taken from it and kept for it."""
        peer = self._ledger.peer(peer_id)
        if peer is None or peer.denied or not peer.trust.covers(Trust.VERIFIED) or self._store is None:
            return None
        return peer if EVERYBODY in self._named or is_named(peer, self._named) else None

    def check(self, body: bytes, recipient: str) -> Header:
        """Checks all of an envelope that can be checked without its recipient's key. Raises EnvelopeRefused."""
        checked = check(
            body,
            us=InstanceId(recipient),
            now_ms=self._now_ms(),
            known=lambda sender: self._relayed(sender) is not None,
            void_before_ms=lambda sender: getattr(self._ledger.peer(sender), "void_before_ms", 0),
            life_ms_max=RELAYED_LIFE_MS_MAX,
        )
        return checked.header

    async def keep(self, body: bytes, header: Header) -> tuple[int, bool]:
        """Keeps an envelope. Returns until when, and whether it was here already, once it is on disk."""
        recipient, sender = InstanceId(header.to), InstanceId(header.sender)
        if self._store is None or self._relayed(recipient) is None:
            raise NotFound("not_relayed", "this relay keeps nothing for that instance")
        name = hashlib.sha256(f"{sender}\n{header.jti}".encode()).hexdigest()[:32]
        await self._store.drop_stale(recipient)
        # Nothing is awaited between this look and the write, or the envelope could be kept twice.
        known = await self._store.find(recipient, name)
        if known is not None:
            return known.until_ms, True
        until_ms = min(header.exp, self._now_ms() + self._settings.relay_keep_ms)
        kept = self._store.reserve(recipient, sender, name, len(body), until_ms)
        await self._store.write(recipient, kept, body)
        self.on_envelope(recipient)
        return until_ms, False

    async def receive_fetch(self, peer: Peer, introduction: bytes, taken: Sequence[str]) -> None:
        """Handles the part of a poll for a relay: the introduction and the acknowledgements.

        Does nothing if the relay does not serve this peer.
        """
        if self._store is None or self._relayed(peer.id) is None:
            return
        await self._store.drop(peer.id, taken)
        await self._store.introduce(peer.id, introduction)

    async def waiting(self, peer: InstanceId, most: int) -> Sequence[RelayedEnvelope]:
        if self._store is None or self._relayed(peer) is None:
            return ()
        return await self._store.read(peer, most)

    async def introduction(self, recipient: str) -> bytes:
        """The introduction of a recipient, found by its present or a former id. The proofs are in it."""
        peer = next((each for each in self._ledger.peers() if recipient in each.ids), None)
        found = None
        if self._store is not None and peer is not None and self._relayed(peer.id) is not None:
            found = await self._store.introduction(peer.id)
        if found is None:
            raise NotFound("not_relayed", "no such instance fetches its messages here")
        return found


def _size(kept: Iterable[StoredEnvelope]) -> int:
    return sum(each.bytes for each in kept)


def _unlink(folder: Path, gone: Iterable[StoredEnvelope]) -> None:
    """A file that cannot be deleted must not stop the relay. The next start finds it, and tries again."""
    for kept in gone:
        try:
            (folder / kept.file_name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("relay.not_deleted", extra={"file": kept.file_name, "reason": str(error)})
