"""What a real result proves, checked offline by the command that anybody has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.model.peers.delegation_messages import DelegationOffer, DelegationResult
from tests.cli.daemons import Ran, covenant
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

CHANGES: dict[str, Any] = {
    "transcript": lambda it: it["transcript"][1].update(content=it["transcript"][1]["content"] + " "),
    "a line missing": lambda it: it["transcript"].pop(),
    "lines moved": lambda it: it["transcript"].reverse(),
    "salt": lambda it: it["transcript"][0].update(salt="AAAA"),
    "result": lambda it: it["result"].update(result="another"),
    "status": lambda it: it["result"].update(status="failed"),
    "offer": lambda it: it["offer"].update(task="another"),
    "budget": lambda it: it["offer"].update(maxTokenBudget=1),
    "usage": lambda it: it["proof"]["tokenUsage"].update(total=1, completion=1),
    "root": lambda it: it["proof"].update(transcriptRoot="0" * 64),
    "provider": lambda it: it["proof"].update(provider=it["proof"]["requester"]),
    "signature": lambda it: it["proof"].update(signature=it["proof"]["signature"][:-4] + "AAAA"),
}


@pytest.fixture(scope="module")
def proof(pair: Pair) -> dict[str, Any]:
    offered = pair.alice.delegate("prove it", "echo", "bob")
    pair.alice.ended(offered)
    answer = pair.alice.get(f"/delegations/{offered}/proof")
    assert answer["proof"]["provider"] == pair.bob.id
    return answer


def checked(path: Path, proof: dict[str, Any], *words: str) -> Ran:
    """Offline: no daemon, no home."""
    file = path / "proof.json"
    file.write_text(json.dumps(proof))
    return covenant("peers", "verify-proof", str(file), *words, env={"COVENANT_HOME": str(path / "none")})


def test_a_proof_written_by_one_command_is_verified_by_another_offline(pair: Pair, tmp_path: Path) -> None:
    offered = pair.alice.delegate("prove it by hand", "echo", "bob")
    pair.alice.ended(offered)
    written = pair.alice.run("peers", "proof", offered)
    assert written.code == 0
    ran = checked(tmp_path, json.loads(written.out), "--provider", pair.bob.id)
    assert (ran.code, "BROKEN" in ran.out) == (0, False), ran
    assert f"signed by {pair.bob.id}" in ran.out
    unnamed = checked(tmp_path, json.loads(written.out))
    assert (unnamed.code, f"signed by {pair.bob.id}; give --provider" in unnamed.err) == (4, True)
    report = checked(
        tmp_path, json.loads(written.out), "--json", "--provider", pair.bob.id, "--requester", pair.alice.id
    ).json
    assert (report["holds"], report["unchecked"]) == (True, [])
    names = {
        "provider_key",
        "signature",
        "usage",
        "transcript",
        "offer",
        "result",
        "assertion",
        "provider",
        "requester",
    }
    assert names <= {check["name"] for check in report["checks"]}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("what", CHANGES)
def test_one_changed_thing_breaks_the_proof(proof: dict[str, Any], tmp_path: Path, what: str) -> None:
    changed = json.loads(json.dumps(proof))
    CHANGES[what](changed)
    ran = checked(tmp_path, changed, "--json")
    assert (ran.code, ran.json["holds"]) == (1, False)


@pytest.mark.parametrize("missing", [("offer",), ("result",), ("offer", "result", "transcript")])
def test_a_proof_of_nothing_is_told_from_one_that_holds(
    proof: dict[str, Any], tmp_path: Path, missing: tuple[str, ...]
) -> None:
    left = {name: value for name, value in proof.items() if name not in missing}
    ran = checked(tmp_path, left, "--json")
    assert (ran.code, ran.json["holds"]) == (4, True)
    assert set(missing) <= set(ran.json["unchecked"])
    assert "nothing that was asked or answered is proven" in ran.err


def test_a_conversation_that_stayed_with_the_provider_takes_nothing_from_the_proof(
    proof: dict[str, Any], tmp_path: Path
) -> None:
    kept = {**proof, "transcript": None, "result": {**proof["result"], "transcript": None}}
    ran = checked(tmp_path, kept, "--json", "--provider", proof["proof"]["provider"])
    assert (ran.code, ran.json["unchecked"]) == (0, ["transcript"])


def test_a_proof_is_held_against_whom_and_what_it_should_be(pair: Pair, proof: dict[str, Any], tmp_path: Path) -> None:
    bob = ("--provider", pair.bob.id)
    assert checked(tmp_path, proof, *bob, "--budget", "7").code == 0
    assert checked(tmp_path, proof, "--budget", "6").code == 1
    assert checked(tmp_path, proof, "--provider", pair.alice.id).code == 1
    assert checked(tmp_path, proof, "--requester", pair.bob.id).code == 1
    nothing = checked(tmp_path, {"offer": None})
    assert nothing.code == 1
    assert "this is no proof" in nothing.err


def test_a_strangers_signature_and_an_offer_that_nobody_made_do_not_hold(
    pair: Pair, proof: dict[str, Any], tmp_path: Path
) -> None:
    """All of it is made up, and consistent: who signed is what tells."""
    with ScriptedPeer("stranger") as stranger:
        offer = msgspec.convert(proof["offer"], DelegationOffer)
        result = stranger.result(offer, pair.alice.id, result="made up")
        made_up = msgspec.to_builtins({"offer": offer, "result": result, "proof": result.proof})
        named = checked(tmp_path, made_up, "--provider", pair.bob.id, "--json")
        assert named.code == 1
        broken = {check["name"] for check in named.json["checks"] if not check["holds"]}
        # The offer was for bob, and says so.
        assert broken == {"provider", "assertion"}
        assert checked(tmp_path, made_up).code == 1
        unsigned = msgspec.structs.replace(offer, assertion=None)
        result = stranger.result(unsigned, pair.alice.id)
        made_up = msgspec.to_builtins({"offer": unsigned, "result": result, "proof": result.proof})
        assert checked(tmp_path, made_up, "--provider", stranger.id).code == 1


def test_large_evidence_is_kept_whole(pair: Pair, tmp_path: Path) -> None:
    offered = pair.alice.delegate(str(5 * 1024 * 1024), "bulky", "bob")
    assert len(pair.alice.ended(offered)["result"]) > 1024
    whole = pair.alice.get(f"/delegations/{offered}/proof")
    assert len(json.dumps(whole)) > 3 * 1024 * 1024
    assert checked(tmp_path, whole, "--provider", pair.bob.id).code == 0


def test_both_sides_keep_a_proof_and_what_was_done_here_has_none(pair: Pair) -> None:
    here = pair.alice.post("/delegate", {"task": "at home", "profile": "echo"})
    assert (here["remote"], here["peerId"]) == (False, None)
    refused = pair.alice.call("GET", f"/delegations/{here['delegationId']}/proof")
    assert (refused.status, refused.code) == (404, "no_proof")


@pytest.fixture(scope="module")
def discreet() -> Iterator[Node]:
    """One whose conversations stay at home."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("discreet", AGENTS, transcripts="root")


def test_where_conversations_stay_at_home_their_root_is_proven_all_the_same(discreet: Node, tmp_path: Path) -> None:
    with ScriptedPeer("asker") as asker:
        asker.known_to(discreet)
        offer = asker.offer(discreet, task="say nothing of this")
        asker.say(discreet, offer)
        result = asker.until(DelegationResult)
    assert result.transcript is None
    assert result.proof is not None
    assert (result.proof.entries, result.proof.transcript_root != "0" * 64) == (2, True)
    evidence = msgspec.to_builtins(
        {
            "offer": offer,
            "result": msgspec.structs.replace(result, proof=None),
            "transcript": None,
            "proof": result.proof,
        }
    )
    report = checked(tmp_path, evidence, "--json", "--provider", discreet.id).json
    assert (report["holds"], report["unchecked"]) == (True, ["transcript"])
    evidence["result"]["result"] = "another"
    assert checked(tmp_path, evidence, "--json").code == 1
