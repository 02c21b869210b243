"""Expert parallelism: placement of expert replicas on devices."""

from fireflyer.haiscale.expert.rebalance import Placement, rebalance_experts

__all__ = ["Placement", "rebalance_experts"]
