"""The HTTP client for peers: persistent connections, sending of one envelope, and its failures.

Peers are called at the addresses that an operator or a setting has given. The address guard checks each address right
before the connection. A peer's own address may be private or loopback; link-local addresses and a cloud's metadata are
never called. Redirects are not followed, and an answer has limits of size and time. Messages to one peer share
connections, unlike other calls: a party in between can delay an envelope, but cannot read, forge or acknowledge one.

`EnvelopeSender` seals the body again for each try, since an envelope lives for minutes and keys change. If the peer
does not know the key that was used, it is asked once for its present keys and the same message is sent again at once.
The same happens when a kept connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from covenant.model.errors import Conflict, Invalid, Refusal, Unavailable
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.rate_limits import Backoff
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.call_errors import RETRY_AFTER_S_MAX, AddressRefused, CallFailed, retry_after
from covenant.outbound.http_fetcher import TlsTrust
from covenant.outbound.urls import InvalidUrl, host_text, read_url
from covenant.peers.peer_settings import PeerContext, PeerService, relay_address
from covenant.seal.envelope import ENVELOPE_BYTES_MAX, Code
from covenant.wire.peers import (
    IDENTITY_PATH,
    RECEIVE_PATH,
    EnvelopeRefusal,
    Introduction,
    decode_introduction,
    decode_refused,
)

if TYPE_CHECKING:
    import httpcore2

    from covenant.peers.directory.peer_directory import PeerDirectory

ANSWER_BYTES_MAX: Final = ENVELOPE_BYTES_MAX + 64 * 1024
INTRODUCTION_BYTES_MAX: Final = 256 * 1024
GET_S: Final = 15.0
CONNECT_S: Final = 5.0
CONNECTIONS_MAX: Final = 16
"""The most connections to one address: for deliveries, a poll and queries."""
IDLE_S: Final = 30.0
"""How long an idle connection is kept. Our own server keeps its side for longer."""
PEERS_MAX: Final = 256
TRIES: Final = 2
UNREACHABLE: Final = frozenset({"connect_failed", "timed_out"})
JITTER: Final = 0.2
ASIDE_BYTES: Final = 64 * 1024
DELIVERY_S: Final = 30.0
FAILURE_CHARS_MAX: Final = 300
CODE_CHARS_MAX: Final = 64

NOT_RELAYED: Final = "not_relayed"
OTHER_KEYS: Final = frozenset({"unknown_prekey", "prekey_expired", "wrong_recipient", "refused", NOT_RELAYED})
"""Codes for a peer with other keys than we know, or for another instance at its address: we fetch the identity there.
"""
# A failure with one of these statuses, and with a code that is not in `PEER_CODES`, concerns one message or delegation.
# Any other failure concerns the whole peer.
MESSAGE_STATUSES: Final = frozenset({400, 403, 404, 409, 413})
PEER_CODES: Final = frozenset({"refused", "unknown_route", "host_not_allowed", *Code} - {Code.REPLAYED, Code.TOO_LARGE})

log = logging.getLogger(__name__)


class PeerResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """The names are in lower case."""
    body: bytes


class _PeerAddress(NamedTuple):
    """A peer's address, read once. `root`: the URL that all paths of the peer are appended to."""

    root: str
    authority: str
    host_and_port: str


class PeerCallFailed(Refusal):
    """A call to a peer got no answer, or was not allowed."""


class PeerUnavailable(PeerCallFailed, Unavailable):
    """The call failed, and may succeed later."""


class PeerConflict(PeerCallFailed, Conflict):
    """The call failed, and will fail again until somebody changes something."""


def call_failed(code: str, message: str, *, passing: bool) -> PeerCallFailed:
    return PeerUnavailable(code, message) if passing else PeerConflict(code, message)


class PeerConnections:
    """The connections to peers, by URL. `guard` is the daemon's own."""

    def __init__(self, guard: AddressGuard, *, user_agent: str = "covenant", trust: TlsTrust | None = None) -> None:
        self._guard = guard
        self._trust = trust or TlsTrust()
        self._user_agent = user_agent
        self._connections: OrderedDict[str, PeerConnection] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, url: str) -> PeerConnection:
        """The connection to a URL. Its first call opens it."""
        connection = self._connections.get(url)
        if connection is None:
            connection = self._connections[url] = PeerConnection(url, self._guard, self._trust, self._user_agent)
            if len(self._connections) > PEERS_MAX:
                self._drop_oldest()
        self._connections.move_to_end(url)
        return connection

    async def close(self) -> None:
        closing, self._connections = list(self._connections.values()), OrderedDict()
        await asyncio.gather(*(connection.close() for connection in closing), *self._closing, return_exceptions=True)

    def _drop_oldest(self) -> None:
        _, oldest = self._connections.popitem(last=False)
        closing = asyncio.ensure_future(oldest.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class PeerConnection:
    """The connections to one peer. Its calls raise `PeerCallFailed`, and nothing else."""

    def __init__(self, url: str, guard: AddressGuard, trust: TlsTrust, user_agent: str) -> None:
        self._url = url
        self._guard = guard
        self._trust = trust
        self._user_agent = user_agent
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._parsed: _PeerAddress | None = None
        self._used = 0
        self._closed = False

    async def get(self, path: str) -> PeerResponse:
        return await self._call("GET", path, b"", timeout_s=GET_S, bytes_max=INTRODUCTION_BYTES_MAX)

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> PeerResponse:
        return await self._call("POST", path, body, timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)

    async def close(self) -> None:
        """Closes at once, unless a call is under way: then that call closes at its end."""
        self._closed = True
        if self._pool is not None and not self._used:
            pool, self._pool = self._pool, None
            await pool.aclose()

    async def _call(self, method: str, path: str, body: bytes, *, timeout_s: float, bytes_max: int) -> PeerResponse:
        self._used += 1
        try:
            with _peer_failures():
                async with asyncio.timeout(timeout_s):
                    return await self._exchange(method, path, body, timeout_s=timeout_s, bytes_max=bytes_max)
        finally:
            self._used -= 1
            if self._closed:
                await self.close()

    async def _exchange(self, method: str, path: str, body: bytes, *, timeout_s: float, bytes_max: int) -> PeerResponse:
        address, pool = self._read_address(), await self._opened()
        import httpcore2  # noqa: PLC0415  (loaded by now; see `TlsTrust`)

        from covenant.outbound.guarded_transport import failures_named  # noqa: PLC0415

        headers: dict[bytes | str, bytes | str] = {
            "host": address.authority,
            "user-agent": self._user_agent,
            "accept": "application/json",
            "accept-encoding": "identity",
        }
        if method == "POST":
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        with failures_named():
            response = await pool.handle_async_request(
                httpcore2.Request(
                    method,
                    address.root + path,
                    headers=headers,
                    content=body or None,
                    extensions={
                        "timeout": {"connect": CONNECT_S, "pool": timeout_s, "read": timeout_s, "write": timeout_s}
                    },
                )
            )
            async with aclosing(response):
                plain = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
                if plain.get("content-encoding", "identity") != "identity":
                    raise PeerConflict("bad_response", "the answer is compressed, and compression was not asked for")
                return PeerResponse(response.status, plain, await _read(response, bytes_max))

    def _read_address(self) -> _PeerAddress:
        """The peer's address, as an operator or a setting gave it."""
        if self._parsed is None:
            try:
                location = read_url(self._url)
            except InvalidUrl as error:
                raise AddressRefused(f"this URL cannot be called: {error}") from error
            host_and_port = f"{host_text(location.host)}:{location.port}"
            self._parsed = _PeerAddress(location.url.rstrip("/"), location.authority, host_and_port)
        return self._parsed

    async def _opened(self) -> httpcore2.AsyncConnectionPool:
        if self._pool is None:
            address, context = self._read_address(), await self._trust.context()
            import httpcore2  # noqa: PLC0415  (loaded by now)

            from covenant.outbound.guarded_transport import GuardedBackend  # noqa: PLC0415  (loaded by now)

            if self._pool is None:
                self._pool = httpcore2.AsyncConnectionPool(
                    ssl_context=context,
                    max_connections=CONNECTIONS_MAX,
                    max_keepalive_connections=CONNECTIONS_MAX,
                    keepalive_expiry=IDLE_S,
                    network_backend=GuardedBackend(self._guard.allowing((address.host_and_port,))),
                )
        return self._pool


async def _read(response: httpcore2.Response, bytes_max: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async with aclosing(response.aiter_stream()) as stream:
        async for piece in stream:
            size += len(piece)
            if size > bytes_max:
                raise PeerConflict("too_large", f"the answer has more than {bytes_max} bytes")
            pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def _peer_failures() -> Iterator[None]:
    """Raises every failure of a call as `PeerCallFailed`, each with its code."""
    try:
        yield
    except PeerCallFailed:
        raise
    except AddressRefused as refused:
        raise call_failed(refused.code, refused.detail, passing=refused.transient) from refused
    except CallFailed as failed:
        # A kept connection that the peer has closed meanwhile looks like a malformed answer.
        code = "connection_lost" if failed.code == "bad_response" else failed.code
        raise PeerUnavailable(code, failed.message) from failed
    except TimeoutError as error:
        raise PeerUnavailable("timed_out", "no answer in time") from error


async def fetch_introduction(connections: PeerConnections, address: str) -> Introduction:
    """The introduction that is shown at this address. Its keys are not checked."""
    response = await connections.to(address).get(IDENTITY_PATH)
    if response.status != 200:
        code = refusal_code(response)
        if code == NOT_RELAYED:
            hint = "it must fetch there (peers.relay), and the relay must know it (peers.relay_for)"
            raise PeerUnavailable(NOT_RELAYED, f"nothing is kept at {address}: {hint}")
        suffix = f" ({code})" if code else ""
        raise call_failed(
            "not_a_peer",
            f"{address}{IDENTITY_PATH} answers {response.status}{suffix}; is that an instance?",
            passing=response.status >= 500 or response.status == 429,
        )
    try:
        return decode_introduction(response.body)
    except Invalid as wrong:
        why = f"{address}{IDENTITY_PATH} is no valid identity document: {wrong.message}"
        raise PeerConflict("not_a_peer", why) from None


def required_address(address: str | None, peer: Peer) -> str:
    if address is None:
        raise PeerConflict("no_address", f"{peer.name} has no address: it fetches its messages")
    return address


class DeliveryFailure(NamedTuple):
    """`whole`: the peer cannot be reached or accepts nothing; otherwise this message alone failed."""

    code: str
    reason: str
    whole: bool
    retry_after_ms: int = 0

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"[:FAILURE_CHARS_MAX]


class DeliveryTrouble(NamedTuple):
    """A failure that is being retried. `offer_id` is None if nothing gets through to the peer.

    `next_ms`: the next try by the wall clock, to be shown. `due_ms`: the same by the monotonic clock, to wait by.
    """

    peer: InstanceId
    offer_id: str | None
    failure: str
    code: str
    attempts: int
    next_ms: int
    due_ms: int


class DeliveryAnswer(NamedTuple):
    """The answer to an envelope. `relayed`: a relay gave it, and keeps the envelope.

    `repeated`: the connection of an earlier try was lost, so the message may have arrived before.
    """

    envelope: bytes
    body: bytes
    relayed: bool = False
    repeated: bool = False


class EnvelopeSender(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory

    async def send(
        self,
        peer: Peer,
        path: str,
        body: bytes,
        *,
        typ: str,
        seq: int | None = None,
        timeout_s: float = DELIVERY_S,
    ) -> DeliveryAnswer | DeliveryFailure:
        failed = await self._send_to(peer, self._address(peer), path, body, typ=typ, seq=seq, timeout_s=timeout_s)
        if isinstance(failed, DeliveryAnswer) or failed.code not in UNREACHABLE or path != RECEIVE_PATH:
            return failed
        if self._relay_root is None or self._is_relayed(peer) or peer.url == self._relay_root:
            return failed
        # Nobody answers at the peer's own address, but the peer may fetch from the relay.
        at_relay = relay_address(self._relay_root, peer.id)
        deposited = await self._send_to(peer, at_relay, path, body, typ=typ, seq=seq, timeout_s=timeout_s)
        return deposited if isinstance(deposited, DeliveryAnswer) else failed

    async def _send_to(
        self, peer: Peer, address: str | None, path: str, body: bytes, *, typ: str, seq: int | None, timeout_s: float
    ) -> DeliveryAnswer | DeliveryFailure:
        fresh = repeated = False
        failed = DeliveryFailure("", "", whole=True)
        relayed = address is not None and address.endswith(relay_address("", peer.id))
        for _ in range(TRIES):
            try:
                envelope = await self._seal(peer, body, typ=typ, seq=seq, fresh=fresh, relayed=relayed)
                response = await self._connections.to(required_address(address, peer)).post(
                    path, envelope, timeout_s=timeout_s
                )
            except PeerCallFailed as error:
                if fresh:
                    return failed  # the peer's own refusal says more than this failure to ask for its keys
                failed = DeliveryFailure(error.code, error.message, whole=True)
                if error.code == "connection_lost":
                    repeated = True
                    continue
                return failed
            except Refusal as refusal:
                return DeliveryFailure(refusal.code, refusal.message, whole=True)
            if response.status == 200:
                return DeliveryAnswer(envelope, response.body, relayed, repeated)
            failed = _failure_of(response)
            if failed.code == Code.KEY_VOID and await self._renew_void_keys():
                log.warning("peers.keys_renewed", extra={"peer": peer.id})
                continue
            if failed.code not in OTHER_KEYS:
                return failed
            fresh = True
        return failed

    async def post(self, peer: Peer, path: str, envelope: bytes) -> bytes | DeliveryFailure:
        try:
            address = required_address(self._address(peer), peer)
            response = await self._connections.to(address).post(path, envelope, timeout_s=DELIVERY_S)
        except PeerCallFailed as error:
            return DeliveryFailure(error.code, error.message, whole=True)
        return response.body if response.status == 200 else _failure_of(response)

    def trouble(
        self, peer: InstanceId, failed: DeliveryFailure, attempts: int, offer_id: str | None = None
    ) -> DeliveryTrouble:
        """The next try, after this many failures in a row."""
        backoff = Backoff(self._settings.retry_first_ms, self._settings.retry_max_ms, jitter=JITTER)
        pause_ms = max(1, int(backoff.pause(attempts, self._context.chance())), failed.retry_after_ms)
        next_ms, due_ms = self._now_ms() + pause_ms, self._monotonic_ms() + pause_ms
        return DeliveryTrouble(peer, offer_id, str(failed), failed.code, attempts, next_ms, due_ms)

    async def _seal(self, peer: Peer, body: bytes, *, typ: str, seq: int | None, fresh: bool, relayed: bool) -> bytes:
        prekey = await self._directory.prekey_for(peer, fresh=fresh)
        known = self._ledger.peer(peer.id) or peer
        sealing = partial(self._sealer(known, prekey, relayed=relayed), body, typ=typ, seq=seq)
        try:
            return sealing() if len(body) <= ASIDE_BYTES else await asyncio.to_thread(sealing)
        except ValueError as wrong:
            raise Invalid("cannot_seal", str(wrong)) from wrong


def refusal_code(response: PeerResponse) -> str:
    """The code of a refusal; empty if the answer has none, as that of another kind of server."""
    try:
        code = decode_refused(response.body).code
    except Invalid:
        return ""
    return code if code.isidentifier() and len(code) <= CODE_CHARS_MAX else ""


def _failure_of(response: PeerResponse) -> DeliveryFailure:
    try:
        refused = decode_refused(response.body)
    except Invalid:
        refused = EnvelopeRefusal()
    status = response.status
    code = refused.code or f"http_{status}"
    whole = status not in MESSAGE_STATUSES or not refused.code or code in PEER_CODES
    return DeliveryFailure(code, refused.error or f"HTTP {status}", whole, _retry_after_ms(response))


def _retry_after_ms(response: PeerResponse) -> int:
    asked_s = retry_after(response.headers) if response.status in (429, 503) else None
    return int(min(asked_s or 0.0, RETRY_AFTER_S_MAX) * 1_000)
