"""Somebody with real keys who plays a peer by hand: says what no daemon would say, and hears what daemons say to it.

Envelopes are made here from the page on envelopes, not by the code under test, so that every part of one can be wrong.
"""

import hashlib
import json
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast
from uuid import uuid4

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from covenant.model.ids import PublicKey, from_base58
from covenant.model.peers.delegation_messages import (
    CapabilityQuery,
    CapabilityResponse,
    DelegationAccept,
    DelegationMessage,
    DelegationOffer,
    DelegationResult,
    Profile,
    TokenUsage,
    TranscriptEntry,
)
from covenant.model.peers.instance import IdentityChange, InstanceId, KeyBundle, Prekey, Trust
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.envelope import Header
from covenant.seal.identity import InstanceIdentity
from covenant.seal.keys import base64url, canonical, from_base64url, new_private_key
from covenant.seal.proofs import assert_offer, new_challenge, sign_capabilities, sign_proof
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import Narrowing, narrow
from covenant.wire import peers as wire
from covenant.wire.peers import Introduction, decode_introduction, decode_received
from tests.e2e.peers.peer_daemons import API, Answer, Node, call
from tests.seal.instances import Opened, open_
from tests.waits import BOUND_S

M = TypeVar("M")

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def sealed(header: dict[str, Any], body: bytes, prekey: Prekey, signer: InstanceIdentity) -> bytes:
    """As the page says, whatever the header says."""
    protected = canonical(header)
    recipient = X25519PublicKey.from_public_bytes(from_base58(prekey.public_key))
    ciphertext = _SUITE.encrypt(body, recipient, info=b"covenant.envelope.seal.v2\n" + protected)
    return packed(protected, ciphertext, _signature(signer, protected, ciphertext))


def packed(protected: bytes, ciphertext: bytes, signature: bytes) -> bytes:
    parts = {"protected": protected, "ciphertext": ciphertext, "signature": signature}
    return json.dumps({name: base64url(part) for name, part in parts.items()}).encode()


def unpacked(envelope: bytes) -> dict[str, bytes]:
    return {name: from_base64url(part) for name, part in json.loads(envelope).items()}


def header_of(envelope: bytes) -> dict[str, Any]:
    header = json.loads(unpacked(envelope)["protected"])
    assert isinstance(header, dict)
    return header


def rewritten(envelope: bytes, signer: InstanceIdentity | None = None, **changes: Any) -> bytes:
    """With another header; signed anew by `signer`, or with the signature that it had. None takes a field out."""
    parts = unpacked(envelope)
    header = {**json.loads(parts["protected"]), **changes}
    protected = canonical({name: value for name, value in header.items() if value is not None})
    signature = parts["signature"] if signer is None else _signature(signer, protected, parts["ciphertext"])
    return packed(protected, parts["ciphertext"], signature)


def envelopes_in(recorded: bytes) -> list[bytes]:
    """The envelopes in what a line has recorded, in their order."""
    found, at = [], 0
    while (at := recorded.find(b'{"protected":', at)) >= 0:
        envelope, length = json.JSONDecoder().raw_decode(recorded[at:].decode("latin-1"))
        if isinstance(envelope, dict):
            found.append(recorded[at : at + length])
        at += length
    return found


def _signature(signer: InstanceIdentity, protected: bytes, ciphertext: bytes) -> bytes:
    digest = hashlib.sha256(ciphertext).digest()
    return signer.sign(b"covenant.envelope.signature.v2\n" + struct.pack(">I", len(protected)) + protected + digest)


class Heard(NamedTuple):
    header: Header
    message: DelegationMessage


class ScriptedPeer:
    """Listens on loopback until it is closed. What it says of itself can be changed at any time."""

    def __init__(self, name: str, private_key: bytes | None = None, *, change: IdentityChange | None = None) -> None:
        self.name = name
        self.private_key = private_key or new_private_key()
        self.keyring = InstanceKeys(self.private_key, (), lambda _: None, changes=(change,) if change else ())
        self.keyring.rotate(now_ms())
        self.shows: KeyBundle | None = None
        """What it shows as its keys, if not its own."""
        self.signs_for = True
        """Whether it signs for what it takes in."""
        self.deaf = False
        """It answers nobody's letters."""
        self.profiles = (Profile(name="researcher", max_token_budget=100_000),)
        self.versions: tuple[int, ...] = (2,)
        self.token: Callable[[InstanceId], str | None] = lambda _: None
        self.heard: list[Heard] = []
        self.raw: list[bytes] = []
        """All envelopes that came, as they came."""
        self._seqs: dict[str, int] = {}
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _listening(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def id(self) -> InstanceId:
        return self.keyring.id

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def identity(self) -> InstanceIdentity:
        return self.keyring.identity

    def become(self, private_key: bytes, change: IdentityChange | None = None) -> None:
        """From now on it is somebody else, at the same address."""
        self.private_key = private_key
        self.keyring = InstanceKeys(private_key, (), lambda _: None, changes=(change,) if change else ())
        self.keyring.rotate(now_ms())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def known_to(self, node: Node) -> None:
        """The node adds it, challenges it and finds it verified."""
        added = node.add(self.url, self.name)
        assert (added["id"], added["trustLevel"]) == (self.id, "verified"), added

    # Hearing

    def until(self, kind: type[M], met: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind of which this is so, once it has come."""

        def find() -> M | None:
            return next(
                (each.message for each in self.heard if isinstance(each.message, kind) and met(each.message)), None
            )

        with self._changed:
            types = [each.header.typ for each in self.heard[-20:]]
            assert self._changed.wait_for(lambda: find() is not None, BOUND_S), (kind, types)
            return cast("M", find())

    def take(self, body: bytes) -> bytes | None:
        """An envelope that came; what is answered in the same breath."""
        opened = self.open(body)
        message = wire.decode(opened.header.typ, opened.body)
        with self._changed:
            self.raw.append(body)
            self.heard.append(Heard(opened.header, message))
            self._changed.notify_all()
        if isinstance(message, CapabilityQuery):
            return self._answer(InstanceId(opened.header.sender), message)
        return None

    def receipt(self, envelope: bytes) -> str:
        """That it has taken this in."""
        digest = hashlib.sha256(envelope if self.signs_for else b"").digest()
        return base64url(self.identity.sign(b"covenant.envelope.receipt.v2\n" + digest))

    def open(self, envelope: bytes) -> Opened:
        return open_(
            envelope,
            us=self.id,
            now_ms=now_ms(),
            known=lambda _: True,
            seen=lambda _sender, _jti: False,
            prekey=self.keyring.prekey,
        )

    def introduction(self) -> Introduction:
        return Introduction(name=self.name, keys=self.shows or self.keyring.bundle(now_ms()))

    def capabilities(self, asker: InstanceId, nonce: str) -> CapabilityResponse:
        """What it says that it can do, to whoever asked with this challenge."""
        response = CapabilityResponse(
            provider=self.id,
            audience=asker,
            nonce=nonce,
            versions=self.versions,
            profiles=self.profiles,
            active_delegations=0,
            free_slots=9,
            trust_level=Trust.VERIFIED,
            keys=self.keyring.bundle(now_ms()),
            issued_at_ms=now_ms(),
            expires_at_ms=now_ms() + 60_000,
            token=self.token(asker),
        )
        return sign_capabilities(PurposeKey(self.private_key), response)

    def _answer(self, asker: InstanceId, query: CapabilityQuery) -> bytes:
        assert query.keys is not None
        signed = self.capabilities(asker, query.nonce)
        return self.keyring.seal(
            wire.encode(signed), typ=wire.type_of(signed), to=asker, prekey=query.keys.prekeys[0], now_ms=now_ms()
        )

    # Saying

    def keys_of(self, node: Node) -> KeyBundle:
        return decode_introduction(call(node.port, "GET", f"{API}/identity").raw).keys

    def envelope(
        self, node: Node, message: DelegationMessage | None = None, *, seq: int | None = None, **changes: Any
    ) -> bytes:
        """For this node, with these fields of its header changed; `prekey`, `body` and `signer` can be others too."""
        keys = self.keys_of(node)
        prekey = changes.pop("prekey", keys.prekeys[0])
        signer = changes.pop("signer", self.identity)
        message = message or CapabilityQuery(nonce=new_challenge(), versions=(2,), keys=self.keyring.bundle(now_ms()))
        body = changes.pop("body", wire.encode(message))
        header = {
            "v": 2,
            "typ": wire.type_of(message),
            "from": self.id,
            "to": keys.id,
            "kid": prekey.kid,
            "skid": self.identity.key,
            "jti": uuid4().hex,
            "iat": now_ms(),
            "exp": now_ms() + 60_000,
            "suite": prekey.suite,
            "seq": seq,
            **changes,
        }
        return sealed({name: value for name, value in header.items() if value is not None}, body, prekey, signer)

    def say(self, node: Node, message: DelegationMessage, **changes: Any) -> Answer:
        """Of a delegation, under the next number."""
        offer_id = getattr(message, "offer_id", None)
        if offer_id is not None and "seq" not in changes:
            changes["seq"] = self._seqs[offer_id] = self._seqs.get(offer_id, 0) + 1
        return node.receive(self.envelope(node, message, **changes))

    def ask(self, node: Node, **changes: Any) -> CapabilityResponse:
        """What the node says that it can do, and the token that it gives."""
        answer = node.receive(self.envelope(node, **changes))
        assert answer.status == 200, answer
        envelope = decode_received(answer.raw).envelope
        assert envelope is not msgspec.UNSET
        opened = self.open(bytes(envelope))
        response = wire.decode(opened.header.typ, opened.body)
        assert isinstance(response, CapabilityResponse)
        return response

    def offer(self, node: Node, profile: str = "echo", **changes: Any) -> DelegationOffer:
        """One that holds, with a token of the node's own, narrowed as it should be; but for what is changed."""
        keys = self.keys_of(node)
        offer_id = changes.setdefault("offer_id", str(uuid4()))
        if "token" not in changes:
            given = self.ask(node).token
            assert given is not None
            changes["token"] = narrow(given, PublicKey(keys.identity_key), Narrowing(offer_id=offer_id))
        fields: dict[str, Any] = {"profile": profile, "task": "do it", "max_token_budget": 100, "timeout": 20_000}
        return assert_offer(
            PurposeKey(self.private_key), DelegationOffer(**{**fields, **changes}), provider=InstanceId(keys.id)
        )

    # Playing the provider

    def accept(self, node: Node, offer: DelegationOffer, **changes: Any) -> Answer:
        fields: dict[str, Any] = {
            "offer_id": offer.offer_id,
            "delegation_id": offer.offer_id,
            "max_token_budget": offer.max_token_budget,
            "timeout": offer.timeout,
        }
        return self.say(node, DelegationAccept(**{**fields, **changes}))

    def result(self, offer: DelegationOffer, requester: str, *, used: int = 1, **changes: Any) -> DelegationResult:
        """With a proof over what it says."""
        fields: dict[str, Any] = {
            "offer_id": offer.offer_id,
            "delegation_id": offer.offer_id,
            "profile": offer.profile,
            "status": "completed",
            "result": "done",
            "token_usage": TokenUsage(prompt=0, completion=used, total=used),
        }
        lines = (TranscriptEntry(seq=1, role="user", content=offer.task, at_ms=now_ms()),)
        result = DelegationResult(**{**fields, **changes})
        proof = sign_proof(
            PurposeKey(self.private_key),
            requester=InstanceId(requester),
            offer=offer,
            result=result,
            transcript=lines,
            now_ms=now_ms(),
        )
        return msgspec.structs.replace(result, transcript=lines, proof=proof)


def _listening(actor: ScriptedPeer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(200, msgspec.json.encode(actor.introduction()))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if actor.deaf or header_of(body)["to"] != actor.id:
                self._reply(400, b'{"code": "refused"}')
                return
            answer = actor.take(body)
            envelope = b"" if answer is None else b', "envelope": ' + answer
            receipt = b', "receipt": "' + actor.receipt(body).encode() + b'"'
            self._reply(200, b'{"status": "accepted"' + receipt + envelope + b"}")

        def _reply(self, status: int, body: bytes) -> None:
            with suppress(OSError):  # whoever asked was killed meanwhile
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler
