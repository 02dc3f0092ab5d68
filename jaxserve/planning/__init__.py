"""What fits on a card and how fast it can be, before renting one: from the engine's own programs, compiled for the card
on a machine that has none."""

from jaxserve.planning.known import known_models, read_model
from jaxserve.planning.planner import Plan, Refused, Remedy, plan, plan_all, remedies

__all__ = ["Plan", "Refused", "Remedy", "known_models", "plan", "plan_all", "read_model", "remedies"]
