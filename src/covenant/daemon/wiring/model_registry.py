"""Models in a daemon: which one plays whom, what those it plays can use, and the cards of agents elsewhere.

The library is loaded only if a model is configured. One that cannot be used is as good as none, and the log says why.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from covenant.agents.model.toolbox import ToolServices
from covenant.agents.router import IndexAgent, NoModelAgent
from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.daemon.environment import environment
from covenant.daemon.settings import ModelSettings
from covenant.model.agent_definition import INDEX, AgentDefinition

if TYPE_CHECKING:
    from pydantic_ai.models import Model

MEMORY_FOLDER: Final = "memory"
LIBRARY: Final = "pydantic_ai"


class Models:
    """By `provider:name`. `trouble` says why there is none."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._made: dict[str, Model] = {}
        self.trouble = ""
        self.default = self._open(settings.name) if settings.name else None

    def of(self, definition: AgentDefinition) -> Model | None:
        """The daemon's, unless the definition names another one that the operator allows."""
        return (self.named(definition.model) if definition.model else None) or self.default

    def named(self, name: str) -> Model | None:
        """This one, if the operator allows it and it can be used."""
        name = name.replace("/", ":", 1)
        if self.default is None or name == self._settings.name:
            return self.default
        if name not in self._settings.others:
            return None
        if name not in self._made:
            other = self._open(name)
            if other is None:
                return None
            self._made[name] = other
        return self._made[name]

    async def close(self) -> None:
        """Close the connections that models hold open: they do so when they are left."""
        for model in filter(None, (self.default, *self._made.values())):
            async with model:
                pass

    def _open(self, name: str) -> Model | None:
        if find_spec(LIBRARY) is None:
            self.trouble = 'the extra is not installed: pip install "covenant[model]"'
            return None
        try:
            return self._infer(name)
        except Exception as error:  # noqa: BLE001  (whatever a provider raises when a key or a package is missing)
            self.trouble = f"the model {name} cannot be used: {error}"
            return None

    def _infer(self, name: str) -> Model:
        from pydantic_ai.models import infer_model  # noqa: PLC0415  (see the module's contract)

        if not self._settings.base_url or _provider(name) != _provider(self._settings.name):
            return infer_model(name)
        from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
        from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

        variable = self._settings.api_key_env
        key = environment().get(variable) if variable else None
        provider = OpenAIProvider(base_url=self._settings.base_url, api_key=key or "none")
        return OpenAIChatModel(name.partition(":")[2] or name, provider=provider)


def _provider(name: str) -> str:
    """`base_url`, and the key for it, are one provider's: that of the daemon's own model."""
    return name.partition(":")[0]


class ModelAgents:
    """Makes the bodies of the agents of kind `model`."""

    def __init__(self, settings: ModelSettings, models: Models, services: ToolServices) -> None:
        self._settings = settings
        self._models = models
        self._services = services
        self._index = IndexAgent(self, services.directory)

    def repeatable(self, definition: AgentDefinition) -> bool:
        """Whether what was cut short may be begun again by itself, whatever the definition says."""
        return definition.id == INDEX and self._index.repeatable

    def body(self, definition: AgentDefinition) -> RunnableAgent:
        if definition.id == INDEX:
            return self._index
        return self.model(definition) or NoModelAgent()

    def model(self, definition: AgentDefinition, *, remembers: bool = True) -> RunnableAgent | None:
        model = self._models.of(definition)
        if model is None:
            return None
        from covenant.agents.model.model_agent import ModelAdvisor, ModelAgent  # noqa: PLC0415  (needs an extra)

        request_s, advisor, adviser = self._settings.request_ms / 1000, definition.advisor, None
        if advisor is not None and advisor.mode != "off":
            second = self._models.named(advisor.model)
            if second is not None:
                adviser = ModelAdvisor(second, advisor, request_s=request_s)
            elif advisor.mode == "gate":
                return Unguarded(advisor.model)
        return ModelAgent(
            model,
            definition,
            self._services,
            tokens_max=self._settings.task_tokens_max,
            request_s=request_s,
            remembers=remembers,
            adviser=adviser,
        )


class Unguarded:
    """In place of an agent whose answers an advisor is to let pass, where that advisor cannot be had."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def run(self, job: Job) -> None:
        job.fail(f"the model of this agent's advisor, {self._model}, cannot be used: name it in model.others")


def can_work(definition: AgentDefinition, models: Models) -> bool:
    """Whether somebody does the work of this agent, as far as we can know."""
    rules = definition.kind_rules
    return models.default is not None if rules.needs_model else rules.routed
