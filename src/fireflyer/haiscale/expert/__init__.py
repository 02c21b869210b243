"""Expert parallelism: mixture-of-experts layers split over ranks, and placement of replicas.

`MoE` is the layer. `average_gradients` completes a backward. `rebalance_experts` assigns experts to
devices.
"""

from fireflyer.haiscale.expert.dispatch import Dispatcher, Pairs
from fireflyer.haiscale.expert.groups import ExpertGroups
from fireflyer.haiscale.expert.moe import MoE, average_gradients
from fireflyer.haiscale.expert.rebalance import Placement, rebalance_experts

__all__ = [
    "Dispatcher",
    "ExpertGroups",
    "MoE",
    "Pairs",
    "Placement",
    "average_gradients",
    "rebalance_experts",
]
