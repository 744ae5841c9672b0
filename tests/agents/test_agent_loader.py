"""Finding agents in files: what counts as one, what it is called, and what is refused with which words."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covenant.agents.agent_loader import CannotLoad, LoadedAgent, ServedFile, load_agents
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.agents.sdk_executor import SdkExecutorAgent
from covenant.model.errors import Invalid

OURS = """
from covenant import Agent
hello = Agent("hello", description="Says hello", skills=["greet"], timeout_ms=5000, idempotent=True, on_lost="requeue")
same = hello

@hello
async def say(turn):
    yield "hello"
"""
EXECUTOR = '''
from a2a.server.agent_execution import AgentExecutor
class Greeter(AgentExecutor):
    """Greets people."""
    async def execute(self, context, event_queue): ...
    async def cancel(self, context, event_queue): ...
greeter = Greeter()
'''
CARD = """
from a2a.types import AgentCard, AgentSkill
skill = AgentSkill(id="greet", name="Greet", tags=["x"])
card = AgentCard(name="The Greeter", description="From its card", skills=[skill])
"""
PYDANTIC = """
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel
named = Agent(TestModel(), name="poet")
thinker = Agent(TestModel())
"""


@pytest.fixture(autouse=True)
def clean_modules() -> Iterator[None]:
    before, paths = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if name.startswith("covenant_agents_"):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "agents.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def kinds(found: list[LoadedAgent]) -> dict[str, type]:
    return {each.definition.id: type(each.body) for each in found}


def test_an_agent_of_ours_is_found_once_with_all_it_declares(tmp_path: Path) -> None:
    (found,) = load_agents([ServedFile(written(tmp_path, OURS))])
    made = found.definition
    assert (made.id, made.kind, made.description, made.skills[0].id) == ("hello", "function", "Says hello", "greet")
    assert (made.timeout_ms, made.idempotent, made.on_lost) == (5000, True, "requeue")
    assert isinstance(found.body, FunctionAgent)


def test_an_executor_is_called_as_its_variable_and_described_by_its_class(tmp_path: Path) -> None:
    (found,) = load_agents([ServedFile(written(tmp_path, EXECUTOR))])
    assert (found.definition.id, found.definition.description) == ("greeter", "Greets people.")
    assert isinstance(found.body, SdkExecutorAgent)


def test_an_executor_without_words_of_its_own_is_not_described_by_those_of_the_sdk(tmp_path: Path) -> None:
    (found,) = load_agents([ServedFile(written(tmp_path, EXECUTOR.replace('    """Greets people."""\n', "")))])
    assert (found.definition.id, found.definition.description) == ("greeter", "")


def test_a_card_beside_an_executor_describes_it(tmp_path: Path) -> None:
    (found,) = load_agents([ServedFile(written(tmp_path, EXECUTOR + CARD))])
    made = found.definition
    assert (made.id, made.name, made.description) == ("greeter", "The Greeter", "From its card")
    assert [(skill.id, skill.tags) for skill in made.skills] == [("greet", ("x",))]


def test_agents_of_pydantic_ai_are_called_by_their_name_or_their_variable(tmp_path: Path) -> None:
    found = load_agents([ServedFile(written(tmp_path, PYDANTIC))])
    assert kinds(found) == {"poet": PydanticAiAgent, "thinker": PydanticAiAgent}


def test_several_files_are_served_together_and_may_import_what_lies_beside_them(tmp_path: Path) -> None:
    written(tmp_path, "GREETING = 'hi'\n", "words_beside.py")
    first = written(tmp_path, OURS, "first.py")
    second = written(tmp_path, "from words_beside import GREETING\n" + EXECUTOR, "second.py")
    assert kinds(load_agents([ServedFile(first), ServedFile(second)])) == {
        "hello": FunctionAgent,
        "greeter": SdkExecutorAgent,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "has no agents"),
        ("raise ValueError('oh no')\n", "ValueError: oh no"),
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_module_here\n", "No module named 'no_such_module_here'"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("from covenant import Agent\nlonely = Agent('lonely')\n", "lonely: agent 'lonely' has no function"),
        (OURS.replace('"hello"', '"two words"'), "/id"),
        (OURS.replace('Agent("hello"', 'Agent("index"'), "'index' is reserved"),
        (OURS.replace("idempotent=True", "idempotent=False"), "needs"),
        (OURS.replace("timeout_ms=5000", "timeout_ms=-1"), "/timeout_ms"),
    ],
)
def test_what_cannot_be_served_is_named_with_its_reason(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CannotLoad) as refused:
        load_agents([ServedFile(path)])
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


def test_two_agents_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=r"'hello' is in .*first.py and again in .*second.py"):
        load_agents([ServedFile(written(tmp_path, OURS, name)) for name in ("first.py", "second.py")])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=r"there is no file .*missing\.py"):
        load_agents([ServedFile(tmp_path / "missing.py")])


def test_the_same_file_is_each_tenants_own(tmp_path: Path) -> None:
    path = written(tmp_path, OURS)
    first, second = load_agents([ServedFile(path), ServedFile(path, "acme")])
    assert (first.key, second.key) == (("default", "hello"), ("acme", "hello"))
    assert first.body is not second.body


def test_files_of_two_tenants_do_not_import_each_others_modules(tmp_path: Path) -> None:
    for tenant in ("acme", "beta"):
        folder = tmp_path / tenant
        folder.mkdir()
        (folder / "prompts.py").write_text(f"SECRET = {tenant!r}\n")
        written(folder, f"from prompts import SECRET\n{OURS}", f"{tenant}.py")
    files = [ServedFile(tmp_path / tenant / f"{tenant}.py", tenant) for tenant in ("acme", "beta")]
    with pytest.raises(CannotLoad, match=r"'prompts' lies beside .*acme.py of the tenant 'acme'.*'beta'.*two names"):
        load_agents(files)
    # One tenant's own folders, and one folder for several tenants, are their author's matter.
    assert len(load_agents([files[0], ServedFile(files[0].path, "beta")])) == 2


def test_a_tenant_that_nobody_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not a tenant name"):
        load_agents([ServedFile(written(tmp_path, OURS), "../acme")])
