"""Which language model each agent uses, by the operator's settings and the agents' definitions.

pydantic-ai, an extra, is imported when the first model is opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from covenant.agents.model.toolbox import ToolServices
from covenant.agents.router import IndexAgent, UnavailableAgent
from covenant.agents.runtime.job import RunnableAgent
from covenant.daemon.environment import environment
from covenant.daemon.settings import ModelSettings
from covenant.model.agent_definition import INDEX, Advisor, AgentDefinition
from covenant.model.extras import install_command

if TYPE_CHECKING:
    from pydantic_ai.models import Model

LIBRARY: Final = "pydantic_ai"


class Models:
    """The language models of a daemon. `problem` says why the last one that was tried cannot be used."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._opened: dict[str, Model] = {}
        self.problem = ""
        self.default = self._open(settings.name) if settings.name else None

    def model_of(self, definition: AgentDefinition) -> Model | None:
        """The daemon's model, unless the definition names another one that the operator allows."""
        return (self.allowed_model(definition.model) if definition.model else None) or self.default

    def fallbacks(self, definition: AgentDefinition) -> tuple[Model, ...]:
        """The models that its definition names, or else the operator's own, each once."""
        found = self._usable(definition.fallback_models or self._settings.fallbacks)
        return tuple(model for model in found if model is not self.model_of(definition))

    def advisor_models(self, advisor: Advisor) -> tuple[Model, ...]:
        """The models of an advisor, in the order in which they are asked."""
        return self._usable((advisor.model, *advisor.fallback_models))

    def _usable(self, names: Iterable[str]) -> tuple[Model, ...]:
        """The models that the operator allows, each once."""
        return tuple({id(model): model for name in names if (model := self.allowed_model(name)) is not None}.values())

    def allowed_model(self, name: str) -> Model | None:
        """This model, if the operator allows it and it can be used."""
        name = name.replace("/", ":", 1)
        if self.default is None or name == self._settings.name:
            return self.default
        if name not in (*self._settings.others, *self._settings.fallbacks):
            return None
        if name not in self._opened:
            other = self._open(name)
            if other is None:
                return None
            self._opened[name] = other
        return self._opened[name]

    def can_work(self, definition: AgentDefinition) -> bool:
        """Whether a model for this agent can be used, as far as is known."""
        rules = definition.kind_rules
        return self.default is not None if rules.needs_model else rules.routed

    async def close(self) -> None:
        """Models close their connections when their context is left."""
        for model in filter(None, (self.default, *self._opened.values())):
            async with model:
                pass

    def _open(self, name: str) -> Model | None:
        if find_spec(LIBRARY) is None:
            self.problem = f"the extra is not installed: {install_command('model')}"
            return None
        try:
            return self._infer(name)
        except Exception as error:  # noqa: BLE001  (whatever a provider raises when a key or a package is missing)
            self.problem = f"the model {name} cannot be used: {error}"
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
    """`base_url` and its key belong to one provider, the one of the daemon's own model."""
    return name.partition(":")[0]


class ModelAgents:
    def __init__(self, settings: ModelSettings, models: Models, services: ToolServices) -> None:
        self._settings = settings
        self._models = models
        self._services = services
        self._index = IndexAgent(self, services.directory)

    def repeatable(self, definition: AgentDefinition) -> bool:
        """Whether an interrupted turn may start again without an operator, even if the definition does not say so."""
        return definition.id == INDEX and self._index.repeatable

    def body(self, definition: AgentDefinition) -> RunnableAgent:
        if definition.id == INDEX:
            return self._index
        return self.model(definition) or UnavailableAgent()

    def model(self, definition: AgentDefinition, *, remembers: bool = True) -> RunnableAgent | None:
        model = self._models.model_of(definition)
        if model is None:
            return None
        from covenant.agents.model.model_agent import ModelAdvisor, ModelAgent  # noqa: PLC0415  (needs an extra)

        request_s, advisor, model_advisor = self._settings.request_ms / 1000, definition.advisor, None
        if advisor is not None and advisor.mode != "off":
            models = self._models.advisor_models(advisor)
            if models:
                model_advisor = ModelAdvisor(models[0], advisor, request_s=request_s, fallbacks=models[1:])
            elif advisor.mode == "gate":
                return UnavailableAgent(
                    f"the model of this agent's advisor, {advisor.model}, cannot be used: name it in model.others"
                )
        return ModelAgent(
            model,
            definition,
            self._services,
            request_s=request_s,
            remembers=remembers,
            model_advisor=model_advisor,
            fallbacks=self._models.fallbacks(definition),
        )
