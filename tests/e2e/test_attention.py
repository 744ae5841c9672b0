"""`covenant attention`: what needs a person after a kill, and that its command mends it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.linked_daemons import LinkedDaemons, open_linked_daemons


@pytest.fixture
def daemons(short_path: Path) -> Iterator[LinkedDaemons]:
    with open_linked_daemons(short_path) as made:
        yield made


def test_a_lost_holder_is_told_with_the_command_that_mends_it(daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    calm = one.daemon.run("attention")
    assert (calm.out, "nothing needs you" in calm.err) == ("", True)
    task = one.send("held", "it", wait=False)
    daemons.begun("a held it")
    one.kill()
    one.again()
    (need,) = one.daemon.json("attention")["items"]
    assert (need["what"], need["severity"], need["task_id"]) == ("holder_lost", "bad", task["id"])
    assert need["act"]["href"].startswith(f"/ui/act/repair?task={task['id']}&lease=")
    assert need["command"] in one.daemon.run("attention").out.replace("\n", " ")
    program, *words = need["command"].split()
    assert program == "covenant"
    one.daemon.json("capabilities", "grant", "a2a.repair.requeue")
    one.daemon.json(*words, "--reason", "its host went down", "--duplicate-risk", "operator-accepted")
    daemons.begun("a held it", 2)
    assert one.daemon.json("attention")["items"] == []
    daemons.open()
    one.ended("held", task["id"])
