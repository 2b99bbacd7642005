"""What can go wrong around the agent, by who failed. `trials.outcome` maps these to outcomes.

harbor records an exception by its class name, so names here are part of the trial format.
"""

from __future__ import annotations


class AgentConfigError(ValueError):
    """The agent's own settings are wrong."""


class ContextOverflowError(Exception):
    """The engine refused a prompt as longer than the model's context."""


class EngineUnavailableError(Exception):
    """The inference engine could not be reached, or kept failing, for the whole retry time."""


class EngineProtocolError(Exception):
    """The engine answered with something token-exact training cannot use (lengths, missing logprobs)."""


class WorldNotReadyError(Exception):
    """The world did not come up with every declared tool server."""


class WorldLostError(Exception):
    """The world's gateway went away in the middle of a trial."""
