"""Many delegations under way at once, and daemons that are killed over and over: each ends once, and both agree."""

import random

import pytest

from tests.e2e.peers.faults import two

ROUNDS = 6
EACH = 6


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
def test_daemons_that_are_killed_over_and_over_lose_and_repeat_nothing(seed: int) -> None:
    chance = random.Random(seed)
    # Time enough for all of them, however long the daemons are away; nobody is given up.
    patient = {"silence_ms": 600_000, "timeout_ms": 600_000}
    with two(alice=patient, bob=patient) as pair:
        made: dict[str, str] = {}
        canceled: set[str] = set()
        lives = 1
        for _ in range(ROUNDS):
            for _ in range(EACH):
                offered, name = pair.begin()
                made[offered] = name
                # Work that dies with its daemon time and again is left to the operator: so none of it takes long.
                pair.daemons.touch(name)
            doomed = chance.choice(list(made))
            if pair.alice.call("POST", f"/delegations/{doomed}/cancel").status == 200:
                canceled.add(doomed)
            killed = chance.choice([[pair.alice], [pair.bob], [pair.alice, pair.bob]])
            for node in killed:
                node.kill()
            for node in killed:
                node.start()
            lives += pair.bob in killed
        for offered, name in made.items():
            ended = pair.alice.ended(offered)["delegation"]
            assert ended["state"] in ("completed", "cancelled"), ended
            assert ended["state"] == "completed" or offered in canceled
            if ended["delegationId"] is not None:
                task = pair.agreed(offered, ended["state"])
                assert pair.begun(name) <= len(task["leases"]) <= lives
        pair.quiet()
