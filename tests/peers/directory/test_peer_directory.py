"""Instances that get to know each other over loopback, and what is made of those who are not who they seem."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.ledger.machine.decisions.peers import ISSUED_MAX
from covenant.ledger.machine.peer_commands import RevokeToken
from covenant.model.errors import Refusal
from covenant.model.peers.delegation import Peer, PeerLimits, ReceivedEnvelope
from covenant.model.peers.delegation_messages import CapabilityQuery, CapabilityResponse, DelegationOffer, Profile
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId, Trust
from covenant.peers.directory.handshake import capability_response
from covenant.peers.provider.offer_admission import OfferedProfiles, OfferFacts, OfferRate, judge_offer
from covenant.peers.transport.peer_client import PeerCallFailed
from covenant.seal.identity import PREKEY_PERIOD_MS, InstanceIdentity, sign_bundle, sign_change
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import assert_offer, new_challenge, sign_capabilities
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import Narrowing, narrow, token_ids
from covenant.wire import peers as wire
from tests.ledger_contract.samples import OPERATOR
from tests.peers.transport_under_test import (
    QUICK,
    Clock,
    Keys,
    TransportUnderTest,
    listening,
    offer_id,
    refused,
    transport_under_test,
)
from tests.seal.instances import open_
from tests.waits import BOUND_S

CODER = Profile(name="coder", description="writes code", max_token_budget=50_000)
OFFERING = OfferedProfiles((CODER,), 1, 4)


@asynccontextmanager
async def instance(folder: Path, keys: Keys | None = None, **more: Any) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(folder, keys, offering=OFFERING, **more) as at, listening(at):
        yield at


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[TransportUnderTest, TransportUnderTest]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(instance(tmp_path / "a"))
        yield first, await stack.enter_async_context(instance(tmp_path / "b"))


async def add(
    at: TransportUnderTest, url: str | None = None, peer_id: str | None = None, name: str | None = None
) -> Peer:
    return await at.directory.add(OPERATOR, url=url, peer_id=peer_id, name=name)


async def introduced(a: TransportUnderTest, b: TransportUnderTest) -> tuple[Peer, Peer]:
    """Each as the other knows it, once both have added each other."""
    await add(a, b.url)
    of_a = await add(b, a.url)
    return await a.directory.verify(at(a, b.id)), of_a


def at(where: TransportUnderTest, peer_id: InstanceId) -> Peer:
    peer = where.ledger.peer(peer_id)
    assert peer is not None
    return peer


async def failed(call: Any) -> str:
    with pytest.raises(PeerCallFailed) as failure:
        await call
    return failure.value.code


class TestAdding:
    async def test_whoever_is_at_an_address_is_added_under_the_id_and_keys_that_it_proves(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer = await add(a, b.url + "/")
        assert (peer.id, peer.url, peer.name, peer.trust) == (b.id, b.url, "house", Trust.PEER)
        assert peer.keys == b.keyring.bundle(b.clock())
        assert peer == at(a, b.id)

    async def test_both_are_verified_once_both_have_added_each_other(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        of_b, of_a = await introduced(a, b)
        assert (of_b.trust, of_a.trust) == (Trust.VERIFIED, Trust.VERIFIED)
        assert (of_b.challenge, of_a.challenge) == (None, None)

    async def test_the_same_again_is_the_same_peer(self, two: tuple[TransportUnderTest, TransportUnderTest]) -> None:
        a, b = two
        first = await add(a, b.url)
        again = await add(a, b.url)
        assert (again.id, again.added_at_ms, len(a.ledger.peers())) == (first.id, first.added_at_ms, 1)

    async def test_one_whose_name_is_taken_is_called_by_a_part_of_its_id_too(
        self, two: tuple[TransportUnderTest, TransportUnderTest], tmp_path: Path
    ) -> None:
        a, b = two
        async with instance(tmp_path / "c") as c:
            await add(a, b.url)
            assert (await add(a, c.url)).name == f"house-{c.id[-8:]}"
            assert a.directory.find("house").id == b.id

    async def test_the_id_that_was_given_must_be_the_one_that_is_there(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        refusal = await refused(add(a, b.url, peer_id=InstanceIdentity(new_private_key()).id))
        assert (refusal.code, b.id in refusal.message) == ("identity_changed", True)
        assert (await add(a, b.url, peer_id=b.id)).id == b.id

    async def test_nobody_adds_itself(self, two: tuple[TransportUnderTest, TransportUnderTest]) -> None:
        a, _ = two
        for call in (add(a, a.url), add(a, peer_id=a.id, name="me")):
            assert (await refused(call)).code == "self_peer"

    async def test_one_without_an_address_needs_an_id_and_a_name(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        for call in (add(a), add(a, peer_id=b.id), add(a, name="north")):
            assert (await refused(call)).code == "address_needed"
        peer = await add(a, peer_id=b.id, name="north")
        assert (peer.url, peer.trust, peer.challenge is not None) == (None, Trust.PEER, True)

    async def test_where_nobody_answers_nobody_is_added_unless_the_id_is_known(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        nowhere = "http://127.0.0.1:1"
        refusal = await refused(add(a, nowhere))
        assert (refusal.status, "give its id too" in refusal.message) == (503, True)
        peer = await add(a, nowhere, peer_id=b.id)
        assert (peer.id, peer.keys, peer.trust) == (b.id, None, Trust.PEER)

    async def test_an_address_that_may_never_be_called_is_refused_whatever_id_is_given(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        for url in ("http://169.254.169.254", f"{b.url}/elsewhere"):
            assert (await refused(add(a, url, peer_id=b.id))).status == 409
        assert a.ledger.peers() == ()

    @pytest.mark.parametrize(
        ("given", "code"),
        [
            ({"url": "https://u:p@host"}, "invalid_url"),
            ({"peer_id": "frd1_short", "name": "x"}, "invalid_peer_id"),
            ({"url": "http://127.0.0.1:1", "name": "a/b"}, "invalid_name"),
        ],
    )
    async def test_what_cannot_be_a_peer_is_refused_by_its_own_word(
        self, two: tuple[TransportUnderTest, TransportUnderTest], given: dict[str, str], code: str
    ) -> None:
        assert (await refused(add(two[0], **given))).code == code

    async def test_keys_that_do_not_hold_are_not_believed(self, tmp_path: Path) -> None:
        """Its clock is days behind: its keys are over before they begin."""
        late = Clock()
        late.ahead_ms = -9 * PREKEY_PERIOD_MS
        async with instance(tmp_path / "a") as a, instance(tmp_path / "b", clock=late) as b:
            assert (await refused(add(a, b.url))).code == "unverified_keys"
            assert a.ledger.peers() == ()


class TestFinding:
    async def test_a_peer_is_found_by_id_by_name_and_by_a_beginning_that_is_its_own(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await add(a, b.url, name="north")
        for named in (b.id, "north", "nor", b.id[:12], b.id[:7], "frd1_"):
            assert a.directory.find(named).id == b.id
        for named in ("south", "zz", b.id + "x", ""):
            with pytest.raises(Refusal) as refusal:
                a.directory.find(named)
            assert refusal.value.code == "unknown_peer"
        await a.directory.add(OPERATOR, url=None, peer_id="frd1_" + "a" * 40, name="norway")
        with pytest.raises(Refusal, match="frd1_aaaa") as refusal:
            a.directory.find("nor")
        assert refusal.value.code == "ambiguous_peer"
        assert a.directory.find("north").id == b.id


class TestChanging:
    async def test_an_operator_changes_and_removes_by_any_name(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await add(a, b.url, name="north")
        limits = PeerLimits(offers_per_min=3)
        changed = await a.directory.change(OPERATOR, "north", name="south", trust=Trust.TRUSTED, limits=limits)
        assert (changed.name, changed.trust, changed.limits) == ("south", Trust.TRUSTED, limits)
        assert (await a.directory.change(OPERATOR, "south", denied=True)).denied
        assert (await a.directory.change(OPERATOR, "south", url="")).url is None
        assert (await a.directory.remove(OPERATOR, b.id[:14])).id == b.id
        assert a.ledger.peers() == ()

    async def test_verified_is_earned_and_not_given(self, two: tuple[TransportUnderTest, TransportUnderTest]) -> None:
        a, b = two
        await add(a, b.url, name="north")
        refusal = await refused(a.directory.change(OPERATOR, "north", trust=Trust.VERIFIED))
        assert (refusal.code, a.id in refusal.message) == ("not_verified", True)
        await add(b, a.url)
        assert (await a.directory.change(OPERATOR, "north", trust=Trust.VERIFIED)).trust is Trust.VERIFIED

    async def test_what_an_operator_has_lowered_stays_lowered_though_it_answers(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        await a.directory.change(OPERATOR, b.id, trust=Trust.PEER)
        assert (await a.directory.verify(at(a, b.id))).trust is Trust.PEER
        raised = await a.directory.change(OPERATOR, b.id, trust=Trust.VERIFIED)
        assert raised.trust is Trust.VERIFIED

    async def test_a_new_address_is_looked_at_and_a_stranger_there_is_shown(
        self, two: tuple[TransportUnderTest, TransportUnderTest], tmp_path: Path
    ) -> None:
        a, b = two
        await introduced(a, b)
        async with instance(tmp_path / "c") as c:
            changed = await a.directory.change(OPERATOR, b.id, url=c.url)
            assert (changed.url, changed.conflict, changed.trust) == (c.url, "identity_changed", Trust.VERIFIED)
            back = await a.directory.change(OPERATOR, b.id, url=b.url)
            assert back.conflict is None


class TestKeys:
    async def test_new_keys_are_fetched_when_those_we_have_are_over(self, tmp_path: Path) -> None:
        clock = Clock()
        async with instance(tmp_path / "a", clock=clock) as a, instance(tmp_path / "b", clock=clock) as b:
            peer = await add(a, b.url)
            first = await a.directory.prekey_for(peer)
            assert await a.directory.prekey_for(peer) == first
            clock.ahead_ms += 2 * PREKEY_PERIOD_MS
            second = await a.directory.prekey_for(peer)
            assert second.kid != first.kid
            assert second == b.prekey()

    async def test_a_question_sealed_to_keys_that_are_gone_is_asked_again_with_those_that_there_are(
        self, tmp_path: Path
    ) -> None:
        keys = Keys()
        async with instance(tmp_path / "a") as a:
            async with instance(tmp_path / "b", keys) as b:
                await introduced(a, b)
            keys.prekeys.clear()  # as after a restore from a backup without them
            async with instance(tmp_path / "b", keys) as b:
                peer = await a.directory.verify(at(a, b.id))
                assert (peer.challenge, peer.keys) == (None, b.keyring.bundle(b.clock()))

    async def test_older_keys_than_we_have_are_not_taken_back(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await add(a, b.url)
        b.clock.ahead_ms += 3_600_000
        newer = b.keyring.bundle(b.clock())
        a.clock.ahead_ms += 3_600_000
        assert (await a.directory.refresh(at(a, b.id))).keys == newer
        b.clock.ahead_ms -= 3_600_000
        older = b.keyring.bundle(b.clock())
        assert older.issued_at_ms < newer.issued_at_ms
        assert (await a.directory.refresh(at(a, b.id))).keys == newer

    async def test_one_without_an_address_that_has_shown_no_keys_cannot_be_sealed_to(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer = await add(a, peer_id=b.id, name="north")
        assert (await refused(a.directory.prekey_for(peer))).code == "no_keys"

    async def test_many_who_want_fresh_keys_at_once_ask_once(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer = await add(a, b.url)
        seen = await asyncio.gather(*(a.directory.prekey_for(peer, fresh=True) for _ in range(20)))
        assert len({each.kid for each in seen}) == 1


class TestStrangers:
    async def test_another_at_a_peers_address_gets_nothing_and_the_peer_keeps_its_trust(self, tmp_path: Path) -> None:
        async with transport_under_test(tmp_path / "b", offering=OFFERING) as b, instance(tmp_path / "a") as a:
            async with listening(b):
                await introduced(a, b)
            before = at(a, b.id)
            async with instance(tmp_path / "c", Keys(port=b.keys.port)) as c:
                await add(c, a.url)
                after = await a.directory.refresh(before)
                assert (after.conflict, after.trust, after.keys) == ("identity_changed", Trust.VERIFIED, before.keys)
                assert a.ledger.peer(c.id) is None
                with pytest.raises((PeerCallFailed, Refusal)):
                    await a.directory.capabilities(after, fresh=True)
                assert [each for each in await c.ledger.message_log() if each.direction == "received"] == []
            async with listening(b):
                assert (await a.directory.refresh(after)).conflict is None

    async def test_a_successor_that_the_old_key_names_keeps_the_trust(self, tmp_path: Path) -> None:
        old, new = Keys(), Keys()
        async with instance(tmp_path / "a") as a:
            async with instance(tmp_path / "b", old) as b:
                await introduced(a, b)
                await a.directory.change(OPERATOR, b.id, trust=Trust.TRUSTED)
            before = at(a, b.id)
            new.port, new.change = old.port, sign_change(old.private_key, new.private_key, a.clock())
            async with instance(tmp_path / "b2", new) as b2:
                after = await a.directory.refresh(before)
                assert (after.id, after.trust, after.name) == (b2.id, Trust.TRUSTED, before.name)
                assert (a.ledger.peer(b.id), len(a.ledger.peers())) == (None, 1)
                assert (await refused(a.directory.prekey_for(before, fresh=True))).code == "unknown_peer"

    @pytest.mark.parametrize("forged", ["another's old key", "for another successor"])
    async def test_a_change_that_is_not_this_peers_and_this_successors_changes_nothing(
        self, tmp_path: Path, forged: str
    ) -> None:
        old, new, third = Keys(), Keys(), new_private_key()
        async with instance(tmp_path / "a") as a:
            async with instance(tmp_path / "b", old) as b:
                await introduced(a, b)
            new.port = old.port
            pair = (third, new.private_key) if forged == "another's old key" else (old.private_key, third)
            new.change = sign_change(*pair, a.clock())
            async with instance(tmp_path / "c", new):
                after = await a.directory.refresh(at(a, b.id))
                assert (after.id, after.conflict, after.trust) == (b.id, "identity_changed", Trust.VERIFIED)

    async def test_a_successor_that_is_a_peer_already_is_left_to_the_operator(self, tmp_path: Path) -> None:
        old, new = Keys(), Keys()
        async with instance(tmp_path / "a") as a:
            async with instance(tmp_path / "b", old) as b:
                await introduced(a, b)
            new.port, new.change = old.port, sign_change(old.private_key, new.private_key, a.clock())
            async with instance(tmp_path / "b2", new) as b2:
                await add(a, peer_id=b2.id, name="other")
                after = await a.directory.refresh(at(a, b.id))
                assert (after.id, after.conflict) == (b.id, "identity_changed")

    async def test_the_operator_may_vouch_for_a_successor_and_then_it_must_prove_itself_anew(
        self, tmp_path: Path
    ) -> None:
        old, new = Keys(), Keys()
        async with instance(tmp_path / "a") as a:
            async with instance(tmp_path / "b", old) as b:
                await introduced(a, b)
                await a.directory.change(OPERATOR, b.id, trust=Trust.TRUSTED)
            new.port = old.port
            async with instance(tmp_path / "b2", new) as b2:
                wrong = InstanceIdentity(new_private_key()).id
                assert (await refused(a.directory.succeed(OPERATOR, b.id, wrong))).code == "identity_changed"
                after = await a.directory.succeed(OPERATOR, b.id, b2.id)
                assert (after.id, after.trust) == (b2.id, Trust.PEER)
                await add(b2, a.url)
                assert (await a.directory.verify(at(a, b2.id))).trust is Trust.VERIFIED

    async def test_our_own_keys_at_a_peers_address_are_nobodys(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        changed = await a.directory.change(OPERATOR, b.id, url=a.url)
        assert changed.conflict == "identity_changed"


class TestCapabilities:
    async def test_a_verified_peer_hears_what_there_is_and_gets_a_token(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        said = await a.directory.capabilities(at(a, b.id))
        assert (said.profiles, said.active_delegations, said.free_slots) == ((CODER,), 1, 4)
        assert (said.trust_level, said.token is not None) == (Trust.VERIFIED, True)
        assert said.expires_at_ms == said.issued_at_ms + QUICK.capabilities_life_ms

    async def test_a_mere_peer_hears_what_there_is_and_gets_no_token(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await add(a, b.url)
        await b.knows(a, trust=Trust.PEER, url=None)
        said = await a.directory.capabilities(at(a, b.id))
        assert (said.profiles, said.trust_level, said.token) == ((CODER,), Trust.PEER, None)

    async def test_what_was_said_is_believed_until_it_is_over(self, tmp_path: Path) -> None:
        clock = Clock()
        async with instance(tmp_path / "a", clock=clock) as a, instance(tmp_path / "b", clock=clock) as b:
            await introduced(a, b)
            first = await a.directory.capabilities(at(a, b.id))
            clock.ahead_ms += QUICK.capabilities_life_ms // 2
            assert await a.directory.capabilities(at(a, b.id)) == first
            assert (await a.directory.capabilities(at(a, b.id), fresh=True)).issued_at_ms > first.issued_at_ms
            clock.ahead_ms += QUICK.capabilities_life_ms + 1
            assert (await a.directory.capabilities(at(a, b.id))).issued_at_ms > first.expires_at_ms

    async def test_many_who_ask_at_once_ask_once(self, two: tuple[TransportUnderTest, TransportUnderTest]) -> None:
        a, b = two
        await introduced(a, b)
        before = len(await b.ledger.message_log())
        said = await asyncio.gather(*(a.directory.capabilities(at(a, b.id), fresh=True) for _ in range(20)))
        assert len({each.issued_at_ms for each in said}) == 1
        assert len(await b.ledger.message_log()) == before + 2, "the question, and what was answered"

    async def test_one_that_does_not_answer_is_not_asked_again_at_once(self, tmp_path: Path) -> None:
        clock = Clock()
        async with (
            instance(tmp_path / "a", clock=clock) as a,
            transport_under_test(tmp_path / "b", clock=clock, offering=OFFERING) as b,
        ):
            async with listening(b):
                await introduced(a, b)
            clock.ahead_ms += QUICK.capabilities_life_ms + 1
            first = await failed(a.directory.capabilities(at(a, b.id)))
            async with listening(b):
                assert await failed(a.directory.capabilities(at(a, b.id))) == first
                clock.ahead_ms += 5_001
                assert (await a.directory.capabilities(at(a, b.id))).token is not None

    async def test_one_that_does_not_know_us_says_no_more_than_to_any_stranger(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await add(a, b.url)
        assert await failed(a.directory.verify(at(a, b.id))) == "refused"
        assert at(a, b.id).trust is Trust.PEER

    async def test_clocks_that_are_apart_are_told_as_such(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        a.clock.ahead_ms = 120_000
        with pytest.raises(PeerCallFailed, match="clock") as failure:
            await a.directory.verify(at(a, b.id))
        assert failure.value.code == "from_future"
        a.clock.ahead_ms = -PREKEY_PERIOD_MS
        with pytest.raises(Refusal, match="clock") as refusal:
            await a.directory.verify(at(a, b.id))
        assert refusal.value.code == "no_keys"

    async def test_one_that_is_denied_is_told_nothing(self, two: tuple[TransportUnderTest, TransportUnderTest]) -> None:
        a, b = two
        await introduced(a, b)
        await b.directory.change(OPERATOR, a.id, denied=True)
        assert await failed(a.directory.verify(at(a, b.id))) == "refused"

    async def test_a_token_is_narrowed_to_an_offer_and_bounds_what_is_agreed(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        of_b, of_a = await introduced(a, b)
        said = await a.directory.capabilities(of_b)
        assert said.token is not None
        narrowed = narrow(said.token, b.keyring.key, Narrowing(budget=500, offer_id=offer_id(1), depth=1))
        made = DelegationOffer(
            offer_id=offer_id(1),
            profile="coder",
            task="x",
            max_token_budget=9_000,
            timeout=1_000,
            depth_remaining=3,
            token=narrowed,
        )
        facts = OfferFacts(0, 0, CODER, b.keyring, b.clock())
        terms = judge_offer(
            assert_offer(PurposeKey(a.keyring.private_key), made, provider=b.id),
            of_a,
            facts,
            QUICK,
            rate=OfferRate(QUICK, b.clock),
            revoked=b.ledger.token_revoked,
        )
        assert (terms.budget, terms.depth_remaining, terms.timeout_ms) == (500, 1, 1_000)

    async def test_the_keys_in_a_question_are_learned_and_the_answer_is_sealed_to_them(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await b.knows(a, trust=Trust.PEER, url=None, keys=False)
        query = CapabilityQuery(nonce=new_challenge(), versions=SUPPORTED_VERSIONS, keys=a.keyring.bundle(a.clock()))
        answer = await b.inbox.receive(a.sealed(query, b), None)
        assert isinstance(answer.envelope, msgspec.Raw)
        opened = open_(
            bytes(answer.envelope),
            us=a.id,
            now_ms=a.clock(),
            known=lambda who: who == b.id,
            seen=lambda _sender, _jti: False,
            prekey=a.keyring.prekey,
        )
        said = wire.decode(opened.header.typ, opened.body)
        assert isinstance(said, CapabilityResponse)
        assert (said.nonce, said.audience, at(b, a.id).keys) == (query.nonce, a.id, query.keys)

    async def test_keys_that_are_shown_at_each_word_are_not_written_down_at_each_word(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await b.knows(a)
        before = at(b, a.id).keys
        assert before is not None
        for later_ms in (1_000, 59_000, 60_000):
            shown = sign_bundle(a.keyring.private_key, before.prekeys, before.issued_at_ms + later_ms)
            query = CapabilityQuery(nonce=new_challenge(), versions=SUPPORTED_VERSIONS, keys=shown)
            await b.inbox.receive(a.sealed(query, b), None)
            assert at(b, a.id).keys == (shown if later_ms == 60_000 else before)

    async def test_keys_of_somebody_else_in_a_question_are_refused(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await b.knows(a)
        before = at(b, a.id).keys
        query = CapabilityQuery(nonce=new_challenge(), versions=SUPPORTED_VERSIONS, keys=b.keyring.bundle(b.clock()))
        assert (await refused(b.inbox.receive(a.sealed(query, b), None))).code == "unverified_keys"
        assert at(b, a.id).keys == before


class TestTokens:
    async def asked(self, a: TransportUnderTest, b: TransportUnderTest) -> str:
        token = (await a.directory.capabilities(at(a, b.id), fresh=True)).token
        assert token is not None
        return token

    async def test_one_that_asks_often_gets_the_same_token_for_half_of_its_life(self, tmp_path: Path) -> None:
        clock = Clock()
        async with instance(tmp_path / "a", clock=clock) as a, instance(tmp_path / "b", clock=clock) as b:
            await introduced(a, b)
            first = await self.asked(a, b)
            assert [await self.asked(a, b) for _ in range(3)] == [first] * 3
            clock.ahead_ms += QUICK.token_life_ms // 2 + 1
            second = await self.asked(a, b)
            assert second != first
            ids = [token_ids(token, b.keyring.key)[0] for token in (first, second)]
            assert [each.id for each in at(b, a.id).issued] == ids

    async def test_one_that_was_revoked_or_allows_what_is_not_allowed_any_more_is_not_given_again(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        first = await self.asked(a, b)
        (given,) = at(b, a.id).issued
        await b.ledger.commit(RevokeToken(by=OPERATOR, token_id=given.id, until_ms=given.until_ms))
        second = await self.asked(a, b)
        await b.directory.change(OPERATOR, a.id, limits=PeerLimits(budget_max=7))
        third = await self.asked(a, b)
        assert len({first, second, third}) == 3
        await b.directory.change(OPERATOR, a.id, trust=Trust.PEER)
        assert (await a.directory.capabilities(at(a, b.id), fresh=True)).token is None

    async def test_of_too_many_the_oldest_is_revoked_before_it_is_forgotten(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        await introduced(a, b)
        first = token_ids(await self.asked(a, b), b.keyring.key)[0]
        for most in range(1, ISSUED_MAX + 1):
            await b.directory.change(OPERATOR, a.id, limits=PeerLimits(budget_max=most))
            await self.asked(a, b)
        issued = [each.id for each in at(b, a.id).issued]
        assert (len(issued), first in issued, b.ledger.token_revoked(first)) == (ISSUED_MAX, False, True)
        assert not any(map(b.ledger.token_revoked, issued))


class TestAnswers:
    async def answer(
        self, a: TransportUnderTest, b: TransportUnderTest, asked: str, /, **changes: Any
    ) -> CapabilityResponse:
        """B's answer to A, as B's own code makes it."""
        query = CapabilityQuery(nonce=asked, versions=SUPPORTED_VERSIONS)
        of_a = Peer(id=a.id, name="a", trust=Trust.VERIFIED)
        made = capability_response(query, of_a, OFFERING, b.keyring, token=None, life_ms=60_000, now_ms=b.clock())
        changed = msgspec.structs.replace(made, **changes)
        return sign_capabilities(PurposeKey(b.keyring.private_key), changed) if changes else made

    def envelope(self, b: TransportUnderTest, jti: str = "j") -> ReceivedEnvelope:
        return ReceivedEnvelope(sender=b.id, jti=jti, typ="capability_response", until_ms=b.clock() + 60_000)

    async def waiting(self, a: TransportUnderTest, b: TransportUnderTest) -> tuple[Peer, str]:
        """A has asked B, which has no address; B has not fetched the question yet."""
        peer = await add(a, peer_id=b.id, name="north")
        assert peer.challenge is not None
        return peer, peer.challenge.nonce

    async def test_a_peer_without_an_address_is_asked_when_it_fetches_and_verified_when_it_answers(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer, nonce = await self.waiting(a, b)
        query = a.directory.pending_query(peer)
        assert query is not None
        assert (query.nonce, query.keys) == (nonce, a.keyring.bundle(a.clock()))
        assert a.directory.pending_query(peer) is None, "it has time to answer"
        a.clock.ahead_ms += 10_000
        assert a.directory.pending_query(peer) == query
        await a.directory.receive_response(peer, self.envelope(b), await self.answer(a, b, nonce))
        assert (at(a, b.id).trust, a.directory.pending_query(peer)) == (Trust.VERIFIED, None)

    async def test_whoever_wants_to_know_waits_for_one_that_fetches(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer, nonce = await self.waiting(a, b)
        wanting = asyncio.ensure_future(a.directory.capabilities(peer))
        await a.until(lambda: at(a, b.id).challenge is not None)
        await a.directory.receive_response(peer, self.envelope(b), await self.answer(a, b, nonce))
        async with asyncio.timeout(BOUND_S):
            assert (await wanting).profiles == (CODER,)

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"nonce": "another-question"}, "challenge_over"),
            ({"audience": "frd1_" + "a" * 40}, "unproven"),
            ({"provider": "frd1_" + "a" * 40}, "unproven"),
            ({"expires_at_ms": 1}, "unproven"),
            ({"issued_at_ms": 1 << 50}, "unproven"),
            ({"versions": (99,)}, "version"),
        ],
    )
    async def test_what_is_not_the_answer_to_our_question_verifies_nobody(
        self, two: tuple[TransportUnderTest, TransportUnderTest], changes: dict[str, Any], code: str
    ) -> None:
        a, b = two
        peer, nonce = await self.waiting(a, b)
        response = await self.answer(a, b, nonce, **changes)
        assert (await refused(a.directory.receive_response(peer, self.envelope(b), response))).code == code
        assert at(a, b.id).trust is Trust.PEER

    async def test_more_profiles_than_anybody_needs_are_not_kept(
        self, two: tuple[TransportUnderTest, TransportUnderTest]
    ) -> None:
        a, b = two
        peer, nonce = await self.waiting(a, b)
        many = tuple(Profile(name=f"p{number}", description="ä" * 500, max_token_budget=1) for number in range(500))
        response = await self.answer(a, b, nonce, profiles=many)
        await a.directory.receive_response(peer, self.envelope(b), response)
        kept = await a.directory.capabilities(at(a, b.id))
        assert 0 < len(kept.profiles) < 100
        assert kept.profiles == many[: len(kept.profiles)]

    async def test_an_answer_that_another_signed_or_that_comes_twice_verifies_nobody(
        self, two: tuple[TransportUnderTest, TransportUnderTest], tmp_path: Path
    ) -> None:
        a, b = two
        peer, nonce = await self.waiting(a, b)
        async with transport_under_test(tmp_path / "c") as c:
            forged = msgspec.structs.replace(await self.answer(a, c, nonce), provider=b.id)
            assert (await refused(a.directory.receive_response(peer, self.envelope(b), forged))).code == "unproven"
        good = await self.answer(a, b, nonce)
        await a.directory.receive_response(peer, self.envelope(b, "j2"), good)
        again = a.directory.receive_response(peer, self.envelope(b, "j2"), good)
        assert (await refused(again)).code == "replayed"
        later = a.directory.receive_response(peer, self.envelope(b, "j3"), good)
        assert (await refused(later)).code == "challenge_over"


async def test_all_that_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = Keys()
    async with instance(tmp_path / "b") as b:
        async with instance(tmp_path / "a", keys) as a:
            await introduced(a, b)
            before = at(a, b.id)
        async with instance(tmp_path / "a", keys) as a:
            assert at(a, b.id) == before
            assert before.agent.display == "house@peer"
            assert (await a.directory.verify(before)).challenge is None
