"""Another implementation of the protocol between instances, from the pages in `docs/formats` alone.

Nothing of ours is imported: what is not on those pages is not known here. It is a requester and a provider, listens on
loopback, keeps nothing, and can give itself another identity key.
"""

import base64
import hashlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

Document = dict[str, Any]

SUITE: Final = "X25519-HKDF-SHA256-AES256GCM-Ed25519"
HPKE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
DAY_MS: Final = 86_400_000
ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
BOUND_S: Final = 60.0
OFFER_FIELDS: Final = (
    "offerId",
    "profile",
    "task",
    "maxTokenBudget",
    "timeout",
    "depthRemaining",
    "context",
    "parts",
    "deadlineMs",
    "traceparent",
    "parentId",
    "correlationId",
    "via",
    "token",
    "assertion",
)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def canonical(document: Any) -> bytes:
    """RFC 8785, for documents of texts and whole numbers whose names are ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def b58(data: bytes) -> str:
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def from_b58(text: str) -> bytes:
    number = 0
    for character in text:
        number = number * 58 + ALPHABET.index(character)
    return number.to_bytes(32)


def id_of(key: str) -> str:
    digest = hashlib.sha256(from_b58(key)).digest()
    return "frd1_" + base64.b32encode(digest[:25]).decode().lower()


class Key:
    """An identity key, one that a block of a token names, or one that an identity key has certified."""

    def __init__(self, private: Ed25519PrivateKey | None = None) -> None:
        self.private = private or Ed25519PrivateKey.generate()
        self.public = b58(self.private.public_key().public_bytes_raw())
        self.certificate: Document | None = None

    def certify(self, purpose: str) -> "Key":
        """A new key for one purpose."""
        made = Key()
        said: Document = {"issuer": self.public, "key": made.public, "purpose": purpose}
        said |= {"notBeforeMs": now_ms(), "notAfterMs": now_ms() + DAY_MS}
        made.certificate = {**said, "signature": self.sign("key-certificate", said)}
        return made

    def sign(self, kind: str, document: Document) -> str:
        """A detached JWS."""
        certified = {"cert": self.certificate} if self.certificate is not None else {}
        header = b64(canonical({"alg": "Ed25519", **certified, "kid": self.public, "typ": f"covenant-{kind}"}))
        value = self.private.sign(f"{header}.{b64(canonical(document))}".encode())
        return f"{header}..{b64(value)}"


PURPOSES: Final = {"offer": "proofs", "capabilities": "proofs", "proof": "proofs", "token-block": "tokens"}


def speaks_for(identity: str, certificate: Document, purpose: str, key: str, at_ms: int) -> bool:
    said = without(certificate, "signature")
    return (
        (said["issuer"], said["purpose"], said["key"]) == (identity, purpose, key)
        and said["notBeforeMs"] - 60_000 <= at_ms <= said["notAfterMs"] + 60_000
        and holds(identity, "key-certificate", said, certificate["signature"])
    )


def holds(key: str, kind: str, document: Document, signature: str) -> bool:
    """By this key, or by one that it has certified for the purpose."""
    header, _, value = signature.partition("..")
    named = json.loads(from_b64(header))
    if canonical(named) != from_b64(header) or (named["alg"], named["typ"]) != ("Ed25519", f"covenant-{kind}"):
        return False
    if "cert" in named:
        # An offer and a block of a token do not say when they were signed.
        at_ms = document.get("issuedAtMs", named["cert"]["notBeforeMs"])
        if not speaks_for(key, named["cert"], PURPOSES.get(kind, ""), named["kid"], at_ms):
            return False
        key = named["kid"]
    if named["kid"] != key:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(from_b58(key)).verify(
            from_b64(value), f"{header}.{b64(canonical(document))}".encode()
        )
    except InvalidSignature:
        return False
    return True


def without(document: Document, *names: str) -> Document:
    return {name: value for name, value in document.items() if name not in names}


def merkle(lines: list[Document]) -> str:
    """RFC 6962."""
    leaves = [hashlib.sha256(b"\0" + canonical(line)).digest() for line in lines]

    def root(part: list[bytes]) -> bytes:
        if len(part) <= 1:
            return part[0] if part else hashlib.sha256(b"").digest()
        split = 1 << (len(part) - 1).bit_length() - 1
        return hashlib.sha256(b"\1" + root(part[:split]) + root(part[split:])).digest()

    return root(leaves).hex()


class IndependentPeer:
    def __init__(self, name: str, *, certified: bool = False) -> None:
        """`certified`: it has a key for each purpose; otherwise it speaks as instances did before there were any."""
        self.name = name
        self.versions = [2, 7] if certified else [2]
        self.signers: set[str] = set()
        """Which keys signed the envelopes that came here."""
        self.changes: list[Document] = []
        self.revocations: list[Document] = []
        self.answers: dict[str, Document] = {}
        """By offer: its result."""
        self.heard: list[tuple[str, Document]] = []
        self._seqs: dict[str, int] = {}
        self._arrived = threading.Condition()
        self._become(Key())
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _listening(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # Who it is

    def _become(self, key: Key) -> None:
        self.key = key
        self.id = id_of(key.public)
        certified = 7 in self.versions
        self.envelope_key, self.proof_key = (
            (key.certify("envelopes"), key.certify("proofs")) if certified else (key, key)
        )
        self._prekey = X25519PrivateKey.generate()
        public = self._prekey.public_key().public_bytes_raw()
        prekey: Document = {
            "kid": "pk_" + base64.b32encode(hashlib.sha256(public).digest()[:10]).decode().lower(),
            "suite": SUITE,
            "publicKey": b58(public),
            "notBeforeMs": now_ms(),
            "notAfterMs": now_ms() + DAY_MS,
        }
        self.prekey = {**prekey, "signature": key.sign("prekey", {**prekey, "owner": self.id})}

    def bundle(self) -> Document:
        bundle: Document = {
            "id": self.id,
            "identityKey": self.key.public,
            "prekeys": [self.prekey],
            "versions": self.versions,
            "issuedAtMs": now_ms(),
            "expiresAtMs": self.prekey["notAfterMs"],
            "change": self.changes[-1] if self.changes else None,
        }
        return {**bundle, "signature": self.key.sign("bundle", bundle)}

    def introduction(self) -> Document:
        return {
            "name": self.name,
            "keys": self.bundle(),
            "changes": self.changes,
            "revocations": self.revocations,
        }

    def rotate(self, *, dead: bool = False) -> None:
        old, new = self.key, Key()
        change: Document = {
            "oldId": id_of(old.public),
            "oldKey": old.public,
            "newId": id_of(new.public),
            "newKey": new.public,
            "issuedAtMs": now_ms(),
        }
        signatures = {
            "oldSignature": old.sign("identity-change", change),
            "newSignature": new.sign("identity-change", change),
        }
        if dead:
            revocation: Document = {"id": id_of(old.public), "key": old.public, "issuedAtMs": now_ms()}
            self.revocations.append({**revocation, "signature": old.sign("identity-revocation", revocation)})
        self.changes.append({**change, **signatures})
        self._become(new)

    @staticmethod
    def follow(known: str, shown: Document) -> str:
        """Who an instance that we know by this id is now, by what it shows; the same id if nothing proves another."""
        keys = shown["keys"]
        chain = shown.get("changes") or ([keys["change"]] if keys["change"] else [])
        ids = [each["oldId"] for each in chain] + [keys["id"]]
        linked = all(before["newId"] == after["oldId"] for before, after in itertools.pairwise(chain))
        if known not in ids or len(set(ids)) != len(ids) or not linked or chain[-1]["newId"] != keys["id"]:
            return known
        for each in chain:
            said = without(each, "oldSignature", "newSignature")
            signed = holds(each["oldKey"], "identity-change", said, each["oldSignature"]) and holds(
                each["newKey"], "identity-change", said, each["newSignature"]
            )
            if not signed or (id_of(each["oldKey"]), id_of(each["newKey"])) != (each["oldId"], each["newId"]):
                return known
        valid = id_of(keys["identityKey"]) == keys["id"] and holds(
            keys["identityKey"], "bundle", without(keys, "signature"), keys["signature"]
        )
        return str(keys["id"]) if valid else known

    # Envelopes

    def seal(self, keys: Document, typ: str, body: Document, seq: int | None = None) -> bytes:
        prekey = keys["prekeys"][0]
        header: Document = {
            "v": 2,
            "typ": typ,
            "from": self.id,
            "to": keys["id"],
            "kid": prekey["kid"],
            "skid": self.envelope_key.public,
            "jti": uuid.uuid4().hex,
            "iat": now_ms(),
            "exp": now_ms() + 60_000,
            "suite": SUITE,
            **({"seq": seq} if seq is not None else {}),
            **({"cert": self.envelope_key.certificate} if self.envelope_key.certificate else {}),
        }
        protected = canonical(header)
        recipient = X25519PublicKey.from_public_bytes(from_b58(prekey["publicKey"]))
        sealed = HPKE.encrypt(json.dumps(body).encode(), recipient, info=b"covenant.envelope.seal.v2\n" + protected)
        return canonical(
            {
                "protected": b64(protected),
                "ciphertext": b64(sealed),
                "signature": b64(self.envelope_key.private.sign(_signed(protected, sealed))),
            }
        )

    def open(self, envelope: bytes | str) -> tuple[Document, Document]:
        parts = json.loads(envelope)
        protected, sealed = from_b64(parts["protected"]), from_b64(parts["ciphertext"])
        header = json.loads(protected)
        assert header["to"] == self.id
        self.signers.add(header["skid"])
        if "cert" in header:
            issuer = header["cert"]["issuer"]
            assert id_of(issuer) == header["from"]
            assert speaks_for(issuer, header["cert"], "envelopes", header["skid"], header["iat"])
        else:
            assert id_of(header["skid"]) == header["from"]
        signer = Ed25519PublicKey.from_public_bytes(from_b58(header["skid"]))
        signer.verify(from_b64(parts["signature"]), _signed(protected, sealed))
        body = HPKE.decrypt(sealed, self._prekey, info=b"covenant.envelope.seal.v2\n" + protected)
        return header, json.loads(body)

    # Talking

    def ask(self, port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Document]:
        connection = HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
        try:
            connection.request(method, f"/api/v1/a2a/{path}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def identity(self, port: int) -> Document:
        return self.ask(port, "GET", "identity")[1]

    def introduce(self, port: int) -> int:
        """Show who it is now, and who it was."""
        return self.ask(port, "POST", "identity", canonical(self.introduction()))[0]

    def say(self, port: int, typ: str, body: Document) -> tuple[int, Document]:
        offer_id = body.get("offerId")
        seq = None
        if offer_id is not None:
            seq = self._seqs[offer_id] = self._seqs.get(offer_id, 0) + 1
        envelope = self.seal(self.identity(port)["keys"], typ, body, seq)
        status, answer = self.ask(port, "POST", "receive", envelope)
        if status == 200:
            key = self.identity(port)["keys"]["identityKey"]
            if "certificate" in answer:
                certificate = answer["certificate"]
                assert speaks_for(key, certificate, "envelopes", certificate["key"], now_ms())
                key = certificate["key"]
            signer = Ed25519PublicKey.from_public_bytes(from_b58(key))
            signed = b"covenant.envelope.receipt.v2\n" + hashlib.sha256(envelope).digest()
            signer.verify(from_b64(answer["receipt"]), signed)
        return status, answer

    def capabilities(self, port: int) -> Document:
        nonce = uuid.uuid4().hex
        status, answer = self.say(
            port, "capability_query", {"nonce": nonce, "versions": self.versions, "keys": self.bundle()}
        )
        assert status == 200, answer
        header, said = self.open(json.dumps(answer["envelope"]))
        assert (said["nonce"], said["audience"], said["provider"]) == (nonce, self.id, header["from"])
        key = said["keys"]["identityKey"]
        assert id_of(key) == header["from"]
        assert holds(key, "capabilities", without(said, "signature"), said["signature"])
        return said

    def offer(self, port: int, profile: str, task: str) -> Document:
        """Made and sent, with the provider's token narrowed to it."""
        keys, offer_id = self.identity(port)["keys"], str(uuid.uuid4())
        offer: Document = dict.fromkeys(OFFER_FIELDS)
        offer |= {
            "offerId": offer_id,
            "profile": profile,
            "task": task,
            "maxTokenBudget": 500,
            "timeout": 30_000,
            "depthRemaining": 0,
            "parts": [],
            "via": [self.id],
            "token": narrowed(self.capabilities(port)["token"], offer_id),
        }
        asserted = {**without(offer, "assertion"), "provider": keys["id"]}
        offer["assertion"] = self.proof_key.sign("offer", asserted)
        status, answer = self.say(port, "delegation_offer", offer)
        assert status == 200, answer
        return offer

    def until(self, typ: str, met: Callable[[Document], bool] = lambda _: True) -> Document:
        def find() -> Document | None:
            return next((body for kind, body in self.heard if kind == typ and met(body)), None)

        with self._arrived:
            assert self._arrived.wait_for(lambda: find() is not None, BOUND_S), (typ, [kind for kind, _ in self.heard])
            found = find()
        assert found is not None
        return found

    def take(self, envelope: bytes) -> Document:
        """What is answered to an envelope."""
        header, body = self.open(envelope)
        with self._arrived:
            self.heard.append((header["typ"], body))
            self._arrived.notify_all()
        digest = hashlib.sha256(envelope).digest()
        answer: Document = {
            "status": "accepted",
            "receipt": b64(self.envelope_key.private.sign(b"covenant.envelope.receipt.v2\n" + digest)),
            **({"certificate": self.envelope_key.certificate} if self.envelope_key.certificate else {}),
        }
        if header["typ"] == "capability_query":
            said = self._described(header["from"], body["nonce"])
            answer["envelope"] = json.loads(self.seal(body["keys"], "capability_response", said))
        return answer

    def _described(self, asker: str, nonce: str) -> Document:
        said: Document = {
            "provider": self.id,
            "audience": asker,
            "nonce": nonce,
            "versions": self.versions,
            "profiles": [{"name": "scribe", "description": "Writes", "maxTokenBudget": 1_000}],
            "activeDelegations": 0,
            "freeSlots": 5,
            "trustLevel": "verified",
            "keys": self.bundle(),
            "issuedAtMs": now_ms(),
            "expiresAtMs": now_ms() + 60_000,
            "token": None,
        }
        return {**said, "signature": self.proof_key.sign("capabilities", said)}

    def result(self, offer: Document, requester: str, text: str) -> Document:
        """The answer to an offer, proven."""
        usage = {"prompt": 0, "completion": 3, "total": 3}
        result: Document = {
            "offerId": offer["offerId"],
            "delegationId": offer["offerId"],
            "profile": offer["profile"],
            "status": "completed",
            "result": text,
            "parts": [],
            "error": None,
            "errorCode": None,
            "tokenUsage": usage,
            "durationMs": 5,
            "subDelegations": [],
        }
        line: Document = {"seq": 1, "role": "assistant", "content": text, "atMs": now_ms()}
        line |= {"toolCalls": None, "toolResult": None, "tokenCount": 3, "salt": "c2FsdA"}
        proof: Document = {
            "delegationId": offer["offerId"],
            "offerHash": hashlib.sha256(canonical({name: offer.get(name) for name in OFFER_FIELDS})).hexdigest(),
            "resultHash": hashlib.sha256(canonical(result)).hexdigest(),
            "transcriptRoot": merkle([line]),
            "entries": 1,
            "tokenUsage": usage,
            "provider": self.id,
            "requester": requester,
            "providerKey": self.key.public,
            "issuedAtMs": now_ms(),
        }
        return {**result, "transcript": [line], "proof": {**proof, "signature": self.proof_key.sign("proof", proof)}}


def proof_holds(offer: Document, result: Document) -> bool:
    proof = result["proof"]
    said = {name: result[name] for name in result if name not in ("transcript", "proof")}
    return (
        id_of(proof["providerKey"]) == proof["provider"]
        and holds(proof["providerKey"], "proof", without(proof, "signature"), proof["signature"])
        and proof["offerHash"] == hashlib.sha256(canonical(offer)).hexdigest()
        and proof["resultHash"] == hashlib.sha256(canonical(said)).hexdigest()
        and proof["transcriptRoot"] == merkle(result["transcript"])
    )


def narrowed(token: str, offer_id: str) -> str:
    """The provider's token for one offer, sealed so that nobody can narrow it on."""
    chain = json.loads(from_b64(token.removeprefix("cvt1.")))
    secret = Key(Ed25519PrivateKey.from_private_bytes(from_b64(chain["secret"])))
    last = Key()
    block: Document = {"nextKey": last.public, "offerId": offer_id}
    signature = secret.sign("token-block", {**block, "after": chain["blocks"][-1]["signature"]})
    seal = last.sign("token-seal", {"after": signature})
    blocks = [*chain["blocks"], {**block, "signature": signature}]
    return "cvt1." + b64(canonical({"blocks": blocks, "seal": seal}))


def _signed(protected: bytes, sealed: bytes) -> bytes:
    length = len(protected).to_bytes(4)
    return b"covenant.envelope.signature.v2\n" + length + protected + hashlib.sha256(sealed).digest()


def _listening(peer: IndependentPeer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(200, peer.introduction())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/identity"):
                self._reply(200, {"status": "accepted", "duplicate": False})
                return
            try:
                self._reply(200, peer.take(body))
            except AssertionError:
                self._reply(400, {"code": "wrong_recipient", "error": "it is for another"})

        def _reply(self, status: int, answer: Document) -> None:
            data = json.dumps(answer).encode()
            with suppress(OSError):  # whoever asked has left
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler
