"""Keys for each purpose in running daemons: they are replaced while work goes on, and a stolen one is refused."""

import msgspec

from covenant.daemon.keystore import PURPOSES_NAME, Keystore
from covenant.model.peers.instance import InstanceId, KeyPurpose
from covenant.peers.directory.instance_keys import RENEWED_MS
from covenant.seal.envelope import seal
from covenant.seal.identity import InstanceIdentity
from covenant.seal.keys import nonce
from covenant.seal.purpose_keys import PurposeKey, PurposeKeySet, certify
from covenant.wire.peers import decode_introduction
from tests.e2e.peers.faults import two
from tests.e2e.peers.peer_daemons import API, Node, call, until
from tests.e2e.peers.scripted_peer import now_ms
from tests.e2e.peers.test_rotation import rotate
from tests.engine_under_test import ON_POSTGRES


def keys_of(node: Node) -> dict[KeyPurpose, PurposeKey]:
    kept = node.purpose_keys().keys
    return {each.certificate.purpose: each for each in kept if each.certificate is not None}


def test_keys_are_replaced_while_a_delegation_runs_and_the_audit_knows() -> None:
    with two() as pair:
        running, name = pair.begin()
        pair.alice.stands(running, "running")
        before = {node.name: keys_of(node) for node in (pair.alice, pair.bob)}
        for node in (pair.alice, pair.bob):
            said = node.cli("peers", "rotate-keys")
            after = keys_of(node)
            assert {each["purpose"]: each["key"] for each in said["keys"]} == {
                purpose.value: key.certificate.key for purpose, key in after.items() if key.certificate is not None
            }
            assert len(after) == len({*after.values(), *before[node.name].values()}) - len(after) == 3
            (row,) = node.audit("purpose_keys_rotated")
            assert (row["compromised"], set(row["keys"])) == (False, {"envelopes", "proofs", "tokens"})
        pair.daemons.touch(name)
        ended = pair.alice.ended(running)
        assert (ended["result"], ended["delegation"]["proven"]) == (f"done {name}", True)
        again, name = pair.begin()
        pair.daemons.touch(name)
        assert pair.alice.ended(again)["result"] == f"done {name}"


def test_a_stolen_key_is_refused_once_its_owner_says_so() -> None:
    with two() as pair:
        alice, bob = pair.alice, pair.bob
        stolen = keys_of(alice)[KeyPurpose.ENVELOPES]
        thief = InstanceIdentity(*stolen)

        def speak() -> tuple[int, str | None]:
            """What bob says to an envelope of the thief's."""
            shown = decode_introduction(call(bob.port, "GET", f"{API}/identity").raw)
            answer = bob.receive(
                seal(
                    msgspec.json.encode({"nonce": "n" * 32, "versions": [2]}),
                    typ="capability_query",
                    sender=thief,
                    to=InstanceId(bob.id),
                    prekey=shown.hybrid_prekey or shown.keys.prekeys[0],
                    jti=nonce(),
                    now_ms=now_ms(),
                )
            )
            return answer.status, answer.code

        assert speak() == (200, None), "who has the key speaks for alice"
        assert alice.cli("peers", "rotate-keys", "--compromised")["compromised"] is True
        assert until(speak, lambda said: said[0] != 200) == (400, "key_void")
        assert "key_void" in [row["code"] for row in bob.audit("envelope_refused")]
        for _ in range(2):
            offered, name = pair.begin()
            pair.daemons.touch(name)
            assert alice.ended(offered)["result"] == f"done {name}", "a new token comes by itself"
            bob.kill()
            bob.start()
            assert speak() == (400, "key_void"), "that is remembered"


def test_the_keys_follow_the_identity_and_its_change_is_in_the_audit() -> None:
    with two() as pair:
        before = keys_of(pair.alice)
        old, new = rotate(pair.alice, "--compromised")
        after = keys_of(pair.alice)
        issuers = {each.certificate.issuer for each in after.values() if each.certificate is not None}
        assert len(issuers) == 1
        assert not {*after.values()} & {*before.values()}
        for _ in range(2):
            (row,) = pair.alice.audit("identity_rotated")
            assert (row["before"], row["id"], row["compromised"]) == (old, new, True)
            pair.alice.stop()
            pair.alice.start()
        if not ON_POSTGRES:
            assert (pair.alice.home / PURPOSES_NAME).stat().st_mode & 0o777 == 0o600


def age_keys(node: Node) -> None:
    """Give it keys of some minutes ago: no word of a peer replaces younger ones."""
    node.stop()
    store = Keystore(node.home, None)
    identity = store.read_instance_key() or store.read_key()
    assert identity is not None
    then_ms = now_ms() - 3 * RENEWED_MS
    store.save_purpose_keys(PurposeKeySet(tuple(certify(identity, purpose, then_ms) for purpose in KeyPurpose)))
    node.start()


def test_a_home_that_was_restored_with_void_keys_makes_new_ones() -> None:
    with two() as pair:
        if not ON_POSTGRES:  # there the keys are in the database, and the daemon waits until they are old
            age_keys(pair.alice)
        backup, rotated_ms = pair.alice.back_up(), now_ms()
        pair.alice.cli("peers", "rotate-keys", "--compromised")
        offered, name = pair.begin()
        pair.daemons.touch(name)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        pair.alice.restore(backup)
        offered, name = pair.begin()
        pair.daemons.touch(name)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        said = pair.alice.purpose_keys().void_before_ms
        assert said > rotated_ms, "what was said and forgotten is said again"
