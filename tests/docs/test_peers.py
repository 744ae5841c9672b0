"""The pages on envelopes and messages say what the code does."""

import json
import re
from pathlib import Path
from typing import get_args

import msgspec

from covenant.model.ids import base58
from covenant.model.peers.delegation import DELEGATION_TRANSITIONS, DelegationRole, DelegationState
from covenant.model.peers.delegation_messages import RejectCode
from covenant.model.peers.instance import SUITE, Prekey
from covenant.seal.envelope import Code, Header
from covenant.seal.identity import PREKEY_LIFE_MS, InstanceIdentity, PrivatePrekey
from covenant.wire.peers import TYPES
from tests.seal.instances import open_

FORMATS = Path(__file__).parents[2] / "docs" / "formats"
ENVELOPE = (FORMATS / "envelope.md").read_text(encoding="utf-8")
PEERS = (FORMATS / "peers.md").read_text(encoding="utf-8")
NOW = 1_800_000_000_000


def test_the_example_opens_with_the_keys_it_names() -> None:
    given, envelope = re.findall(r"```json\n(.*?)\n```", ENVELOPE, re.DOTALL)
    named = json.loads(given)
    sender, recipient = (InstanceIdentity(bytes.fromhex(named[f"{who}_seed"])) for who in ("sender", "recipient"))
    prekey = Prekey(
        kid=named["kid"],
        suite=SUITE,
        public_key=base58(bytes(32)),
        not_before_ms=NOW,
        not_after_ms=NOW + PREKEY_LIFE_MS,
    )
    private = PrivatePrekey(prekey, bytes.fromhex(named["prekey"]))
    opened = open_(
        envelope.encode(),
        us=recipient.id,
        now_ms=NOW,
        known=lambda _: True,
        seen=lambda _sender, _jti: False,
        prekey=lambda _: private,
    )
    assert opened.body.decode() == named["body"]
    assert (opened.header.sender, opened.header.to) == (sender.id, recipient.id) == (named["from"], named["to"])


def test_every_code_stands_in_the_order_in_which_it_is_looked_for() -> None:
    listed = [
        code for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", ENVELOPE, re.MULTILINE) for code in row.split(", ")
    ]
    assert [code.strip("`") for code in listed if code.strip("`") in set(Code)] == [code.value for code in Code]


def test_every_field_of_a_header_is_described() -> None:
    for field in msgspec.structs.fields(Header):
        assert f"`{field.encode_name}`" in ENVELOPE


def test_every_message_is_listed_with_all_its_fields() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [RP] → [RP] \| (.*) \|$", PEERS, re.MULTILINE))
    assert rows.keys() == TYPES.keys()
    for name, kind in TYPES.items():
        for field in msgspec.structs.fields(kind):
            assert re.search(rf"`{field.encode_name}\??`", rows[name]), f"{name}: {field.encode_name}"


def test_every_reason_to_reject_is_listed() -> None:
    assert all(f"`{code}`" in PEERS for code in get_args(RejectCode))


def test_the_table_of_states_is_the_table() -> None:
    rows = re.findall(r"^\| (requester|provider) \| (\S+) \| (.*) \| (\S+) \|$", PEERS, re.MULTILINE)
    listed = {
        (
            DelegationRole(role),
            None if before == "–" else DelegationState(before),
            transition.strip("`"),
        ): DelegationState(after)
        for role, before, transitions, after in rows
        for transition in transitions.split(", ")
    }
    assert listed == {
        (role, before, transition): after
        for role, table in DELEGATION_TRANSITIONS.items()
        for (before, transition), after in table.items()
    }
